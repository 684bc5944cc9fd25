//! A closed loop: each connection has one request in flight, kept alive, and measures it as a client sees it.
//!
//! HTTP by hand: the load generator shares the cores with what it measures and must cost little.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::prompts::{Prompts, Set, shared};

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// What is asked.
    pub set: Set,
    /// Connections.
    pub concurrency: usize,
    /// Whether answers are streamed.
    pub stream: bool,
    /// How long.
    pub time: Duration,
    /// Of the prompts.
    pub seed: u64,
}

/// What was seen.
#[derive(Default)]
pub struct Seen {
    /// Times to the first event with text, in ms; for whole answers to their end.
    pub first_ms: Vec<f64>,
    /// Requests that failed, and how the first of them did.
    pub errors: usize,
    /// The first error.
    pub first_error: Option<String>,
    /// From the first request to the last answer.
    pub wall: Duration,
}

/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Tokens of an answer.
const TOKENS: u32 = 16;

/// Loads the router at `address`.
pub async fn run(address: SocketAddr, model: &str, run: Run) -> Seen {
    let shared = shared(run.set, run.seed);
    let start = Instant::now();
    let connections: Vec<_> = (0..run.concurrency as u64)
        .map(|number| {
            let prompts = Prompts::new(run.set, Arc::clone(&shared), run.seed, number);
            tokio::spawn(connection(address, model.to_owned(), prompts, run.stream, start + run.time))
        })
        .collect();
    let mut seen = Seen::default();
    for connection in connections {
        let one = connection.await.expect("a connection does not panic");
        seen.first_ms.extend(one.first_ms);
        seen.errors += one.errors;
        seen.first_error = seen.first_error.or(one.first_error);
    }
    seen.wall = start.elapsed();
    seen
}

async fn connection(address: SocketAddr, model: String, mut prompts: Prompts, stream: bool, end: Instant) -> Seen {
    let mut seen = Seen::default();
    let mut socket = None;
    while Instant::now() < end {
        let body =
            format!(r#"{{"model":"{model}","messages":[{}],"max_tokens":{TOKENS},"stream":{stream}}}"#, prompts.next());
        match tokio::time::timeout(ANSWER, request(address, &mut socket, &body)).await.unwrap_or_else(|e| Err(e.into()))
        {
            Ok((first, said)) => {
                seen.first_ms.push(first.as_secs_f64() * 1e3);
                prompts.answered(&said);
            }
            Err(error) => {
                seen.errors += 1;
                seen.first_error.get_or_insert(format!("{error:#}"));
                socket = None;
            }
        }
    }
    seen
}

/// Sends one request; returns the time to the first text, and all text as it stands in the JSON.
async fn request(address: SocketAddr, kept: &mut Option<TcpStream>, body: &str) -> anyhow::Result<(Duration, String)> {
    let socket = match kept {
        Some(socket) => socket,
        None => {
            let socket = TcpStream::connect(address).await?;
            socket.set_nodelay(true)?;
            kept.insert(socket)
        }
    };
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let start = Instant::now();
    socket.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
    let (mut answer, mut first) = (Vec::with_capacity(8192), None);
    loop {
        if socket.read_buf(&mut answer).await? == 0 {
            bail!("the connection was closed");
        }
        if first.is_none() && has_text(&answer) {
            first = Some(start.elapsed());
        }
        if complete(&answer)? {
            break;
        }
    }
    let text = std::str::from_utf8(&answer).context("not UTF-8")?;
    if !text.starts_with("HTTP/1.1 200") {
        bail!("{}", text.lines().next().unwrap_or_default());
    }
    let first = first.with_context(|| format!("no text in the answer: {}", &text[text.len().saturating_sub(300)..]))?;
    Ok((first, said(text)))
}

/// Starts every piece of text in an answer, streamed or whole.
const TEXT: &str = "\"content\":\"";

fn has_text(answer: &[u8]) -> bool {
    let text = TEXT.as_bytes();
    answer.windows(text.len() + 1).any(|window| window.starts_with(text) && window[text.len()] != b'"')
}

/// Whether the answer has ended: by its length, or by the last chunk.
fn complete(answer: &[u8]) -> anyhow::Result<bool> {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(false) };
    let head = std::str::from_utf8(&answer[..end])?.to_ascii_lowercase();
    match head.lines().find_map(|line| line.strip_prefix("content-length:")) {
        Some(length) => Ok(answer.len() >= end + 4 + length.trim().parse::<usize>()?),
        None => Ok(answer.ends_with(b"\r\n0\r\n\r\n")),
    }
}

/// All text of the answer, escaped as it came.
fn said(answer: &str) -> String {
    let mut said = String::new();
    for part in answer.split(TEXT).skip(1) {
        let mut escaped = false;
        let end = part.find(|c| match c {
            _ if escaped => {
                escaped = false;
                false
            }
            '\\' => {
                escaped = true;
                false
            }
            c => c == '"',
        });
        said.push_str(&part[..end.unwrap_or(0)]);
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_and_text_are_found() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcd";
        assert!(!complete(whole).expect("valid") && complete(&[&whole[..], b"e"].concat()).expect("valid"));
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
        assert!(!complete(chunked).expect("valid") && complete(&[&chunked[..], b"0\r\n\r\n"].concat()).expect("valid"));
        assert!(!has_text(br#"{"content":""}"#) && has_text(br#"{"content":"a"}"#));
        assert_eq!(said(r#"{"content":"a\"b"} {"content":" c"}"#), r#"a\"b c"#);
    }
}
