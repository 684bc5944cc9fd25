//! One streamed completion, as its client sees it.

use std::net::SocketAddr;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Arrival of the first text, and of the last.
    pub first: Instant,
    /// See `first`.
    pub last: Instant,
    /// Tokens of the prompt, of the answer, and of the prompt those that were cached.
    pub prompt_tokens: u64,
    /// See `prompt_tokens`.
    pub answer_tokens: u64,
    /// See `prompt_tokens`.
    pub cached_tokens: u64,
    /// Who answered.
    pub worker: String,
    /// What the router calls it.
    pub id: String,
}

/// How a request ended.
pub enum Ended {
    /// With an answer.
    Answered(Answer),
    /// With 429 or 503.
    Rejected,
}

/// Sends a request and reads its answer to the end.
pub async fn ask(address: SocketAddr, request: &[u8]) -> anyhow::Result<Ended> {
    let mut socket = TcpStream::connect(address).await.context("cannot connect")?;
    socket.set_nodelay(true)?;
    // Refused before it is read to its end, a request may meet a closed connection; the answer says why.
    let sent = socket.write_all(request).await;
    let mut stream = Stream::default();
    let mut buffer = Vec::with_capacity(8192);
    loop {
        match socket.read_buf(&mut buffer).await {
            Ok(0) => break,
            Ok(_) => buffer.drain(..stream.take(&buffer, Instant::now())?),
            Err(_) if stream.status.is_some_and(|status| status != 200) => break,
            Err(error) => return Err(error.into()),
        };
    }
    match stream.status {
        None => {
            sent?;
            bail!("the connection was closed")
        }
        Some(200) => Ok(Ended::Answered(stream.answer()?)),
        Some(429 | 503) => Ok(Ended::Rejected),
        Some(status) => bail!("status {status}: {}", String::from_utf8_lossy(&buffer)),
    }
}

/// What has been read.
#[derive(Default)]
struct Stream {
    status: Option<u16>,
    in_body: bool,
    worker: String,
    id: String,
    first: Option<Instant>,
    last: Option<Instant>,
    usage: Option<Value>,
    done: bool,
}

impl Stream {
    /// Takes all whole lines of `bytes`; returns their length.
    fn take(&mut self, bytes: &[u8], now: Instant) -> anyhow::Result<usize> {
        let mut used = 0;
        while let Some(end) = bytes[used..].iter().position(|&byte| byte == b'\n') {
            let line = bytes[used..used + end].trim_ascii_end();
            used += end + 1;
            if self.in_body { self.event(line, now)? } else { self.header(std::str::from_utf8(line)?)? }
        }
        Ok(used)
    }

    fn header(&mut self, line: &str) -> anyhow::Result<()> {
        if self.status.is_none() {
            self.status = Some(line.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP")?);
        } else if line.is_empty() {
            self.in_body = true;
        } else if let Some((name, value)) = line.split_once(": ")
            && name.eq_ignore_ascii_case("x-armature-worker")
        {
            self.worker = value.to_owned();
        }
        Ok(())
    }

    fn event(&mut self, line: &[u8], now: Instant) -> anyhow::Result<()> {
        let Some(data) = line.strip_prefix(b"data: ") else { return Ok(()) };
        if data == b"[DONE]" {
            self.done = true;
        } else if find(data, b"\"error\":") {
            bail!("{}", String::from_utf8_lossy(data));
        } else if find(data, b"\"usage\":{") {
            self.usage = serde_json::from_slice::<Value>(data)?.get("usage").cloned();
        } else if !find(data, b"\"text\":\"\"") {
            if self.first.is_none() {
                self.first = Some(now);
                self.id = id(data).context("an answer without id")?.to_owned();
            }
            self.last = Some(now);
        }
        Ok(())
    }

    fn answer(self) -> anyhow::Result<Answer> {
        let (true, Some(usage)) = (self.done, self.usage) else { bail!("the stream ended before its end") };
        let count = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64).context("a usage without counts");
        Ok(Answer {
            first: self.first.context("an answer without text")?,
            last: self.last.context("an answer without text")?,
            prompt_tokens: count("/prompt_tokens")?,
            answer_tokens: count("/completion_tokens")?,
            cached_tokens: count("/prompt_tokens_details/cached_tokens")?,
            worker: self.worker,
            id: self.id,
        })
    }
}

/// The value of a chunk's `id`; ids have no escapes.
fn id(data: &[u8]) -> Option<&str> {
    let (_, rest) = std::str::from_utf8(data).ok()?.split_once("\"id\":\"")?;
    Some(rest.split_once('"')?.0)
}

fn find(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|window| window == word)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ANSWER: &str = "HTTP/1.0 200 OK\r\nX-Armature-Worker: m-1\r\n\r\n\
        data: {\"id\":\"cmpl-1\",\"choices\":[{\"index\":0,\"text\":\" a\",\"finish_reason\":null}],\"usage\":null}\n\n: keep-alive\n\n\
        data: {\"choices\":[{\"index\":0,\"text\":\" b\",\"finish_reason\":null}],\"usage\":null}\n\n\
        data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}],\"usage\":null}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n\
        data: [DONE]\n\n";

    /// Reads the text byte by byte, one of them each millisecond.
    fn read(text: &str) -> anyhow::Result<(Stream, Instant)> {
        let (mut stream, start, mut buffer) = (Stream::default(), Instant::now(), Vec::new());
        for (number, byte) in text.bytes().enumerate() {
            buffer.push(byte);
            let used = stream.take(&buffer, start + Duration::from_millis(number as u64))?;
            buffer.drain(..used);
        }
        Ok((stream, start))
    }

    #[test]
    fn an_answer_is_timed_by_its_texts() {
        let (stream, start) = read(ANSWER).expect("good");
        let answer = stream.answer().expect("whole");
        assert_eq!((answer.prompt_tokens, answer.answer_tokens, answer.cached_tokens), (9, 2, 4));
        assert_eq!((&*answer.worker, &*answer.id), ("m-1", "cmpl-1"));
        let line_end = |text: &str| {
            let at = ANSWER.find(text).expect("there");
            Duration::from_millis((at + ANSWER[at..].find('\n').expect("a line")) as u64)
        };
        assert_eq!((answer.first - start, answer.last - start), (line_end("\" a\""), line_end("\" b\"")));
    }

    #[test]
    fn a_stream_that_breaks_off_or_fails_is_no_answer() {
        let broken = ANSWER.replace("data: [DONE]\n\n", "");
        assert!(read(&broken).expect("lines").0.answer().is_err());
        let failed = format!("{}data: {{\"error\":{{\"message\":\"gone\"}}}}\n", &ANSWER[..200]);
        assert!(read(&failed).err().expect("an error").to_string().contains("gone"));
        assert_eq!(read("HTTP/1.0 429 Too Many Requests\r\n\r\n{}").expect("lines").0.status, Some(429));
        assert!(read("SSH-2.0\r\n").is_err());
    }
}
