//! A record as an HTTP request: its blocks become token ids, the same ones wherever the block appears.

use std::io::Write;
use std::net::SocketAddr;

use super::record::{BLOCK_TOKENS, Record};
use crate::prompts::Numbers;

/// Token ids are drawn from here: plain tokens in any vocabulary of usual size, four digits each.
const TOKENS: std::ops::Range<u64> = 1000..10_000;

/// The prompt.
pub fn tokens(record: &Record) -> impl Iterator<Item = u32> {
    let blocks = record.blocks.iter().enumerate();
    blocks.flat_map(|(index, &block)| {
        let mut numbers = Numbers(block);
        let count = BLOCK_TOKENS.min(record.prompt_tokens - index * BLOCK_TOKENS);
        (0..count).map(move |_| (TOKENS.start + numbers.next() % (TOKENS.end - TOKENS.start)) as u32)
    })
}

/// The request, head and body. HTTP/1.0: its answer ends with the connection and comes without the framing of chunks,
/// which spares the client, who shares the machine with what it measures.
pub fn bytes(record: &Record, model: &str, address: SocketAddr) -> Vec<u8> {
    let mut body = Vec::with_capacity(record.prompt_tokens * 5 + 256);
    body.extend_from_slice(br#"{"prompt":["#);
    for (position, token) in tokens(record).enumerate() {
        if position > 0 {
            body.push(b',');
        }
        body.extend_from_slice(&[1000, 100, 10, 1].map(|digit| b'0' + (token / digit % 10) as u8));
    }
    let (model, max_tokens) = (serde_json::Value::from(model), record.answer_tokens);
    let rest = format!(
        r#"],"model":{model},"max_tokens":{max_tokens},"ignore_eos":true,"stream":true,"stream_options":{{"include_usage":true}}}}"#
    );
    body.extend_from_slice(rest.as_bytes());
    let mut request = Vec::with_capacity(body.len() + 160);
    write!(
        request,
        "POST /v1/completions HTTP/1.0\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .expect("a vector takes everything");
    request.extend_from_slice(&body);
    request
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn prompt(blocks: &[u64], prompt_tokens: usize) -> Vec<u64> {
        let record = Record { at: Duration::ZERO, prompt_tokens, answer_tokens: 9, blocks: blocks.to_vec() };
        let request = bytes(&record, "tiny", ([127, 0, 0, 1], 80).into());
        let text = String::from_utf8(request).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!((&body["max_tokens"], &body["model"], &body["stream"]), (&9.into(), &"tiny".into(), &true.into()));
        body["prompt"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id")).collect()
    }

    #[test]
    fn equal_blocks_are_equal_tokens_and_others_are_not() {
        let (a, b) = (prompt(&[0, 5, 6], 1300), prompt(&[0, 5, 7], 1400));
        assert_eq!((a.len(), b.len()), (1300, 1400));
        assert_eq!(a[..1024], b[..1024]);
        assert_ne!(a[1024..1100], b[1024..1100]);
        assert_ne!(a[..512], a[512..1024]);
        assert!(a.iter().all(|id| TOKENS.contains(id)));
    }
}
