//! A closed loop: each connection has one request in flight, kept alive, and measures it as a client sees it.
//!
//! HTTP by hand: the load generator shares the cores with what it measures and must cost little.

mod answer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::prompts::{Prompts, Set, shared};
use answer::Answer;

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
    /// Which of the seed's prompts: no own words of one series come again in another, for they might be remembered.
    pub series: u64,
}

/// What was seen.
#[derive(Default)]
pub struct Seen {
    /// Times to the first text, in ms; for whole answers to their end.
    pub first_ms: Vec<f64>,
    /// Requests that failed.
    pub errors: usize,
    /// How the first of them did.
    pub first_error: Option<String>,
    /// From the first request to the last answer.
    pub wall: Duration,
}

/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Rest after a failure: a server that refuses at once would be asked for nothing else.
const AFTER_ERROR: Duration = Duration::from_millis(5);
/// Tokens of an answer.
const TOKENS: u32 = 16;

/// Loads the server at `address`.
pub async fn run(address: SocketAddr, model: &str, run: Run) -> Seen {
    let shared = shared(run.set, run.seed);
    let start = Instant::now();
    let connections: Vec<_> = (0..run.concurrency as u64)
        .map(|number| {
            let prompts = Prompts::new(run.set, Arc::clone(&shared), run.seed, run.series << 32 | number);
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

/// Sends one small request; fails unless it is answered.
pub async fn probe(address: SocketAddr, model: &str) -> anyhow::Result<()> {
    let mut prompts = Prompts::new(Set::Short, shared(Set::Short, 0), 0, 0);
    request(address, &mut None, &body(model, &mut prompts, false)).await.map(drop)
}

async fn connection(address: SocketAddr, model: String, mut prompts: Prompts, stream: bool, end: Instant) -> Seen {
    let mut seen = Seen::default();
    let mut socket = None;
    while Instant::now() < end {
        let body = body(&model, &mut prompts, stream);
        match request(address, &mut socket, &body).await {
            Ok((first, answer)) => {
                seen.first_ms.push(first.as_secs_f64() * 1e3);
                prompts.answered(|| answer.said());
            }
            Err(error) => {
                seen.errors += 1;
                seen.first_error.get_or_insert(format!("{error:#}"));
                prompts.failed();
                socket = None;
                tokio::time::sleep(AFTER_ERROR).await;
            }
        }
    }
    seen
}

fn body(model: &str, prompts: &mut Prompts, stream: bool) -> String {
    format!(r#"{{"model":"{model}","messages":[{}],"max_tokens":{TOKENS},"stream":{stream}}}"#, prompts.next())
}

/// Sends one request on the connection that is kept; returns the time to the first text, and the answer.
async fn request(address: SocketAddr, kept: &mut Option<TcpStream>, body: &str) -> anyhow::Result<(Duration, Answer)> {
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
    tokio::time::timeout(ANSWER, exchange(socket, &[head.as_bytes(), body.as_bytes()].concat())).await?
}

async fn exchange(socket: &mut TcpStream, request: &[u8]) -> anyhow::Result<(Duration, Answer)> {
    let start = Instant::now();
    socket.write_all(request).await?;
    let (mut answer, mut first, mut buffer) = (Answer::default(), None, Vec::with_capacity(16 << 10));
    while !answer.is_complete() {
        buffer.clear();
        if socket.read_buf(&mut buffer).await? == 0 {
            bail!("the connection was closed");
        }
        answer.take(&buffer)?;
        if answer.has_text() {
            first.get_or_insert_with(|| start.elapsed());
        }
    }
    answer.check()?;
    Ok((first.unwrap_or_else(|| start.elapsed()), answer))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::openai_worker;

    const SHORT: Run =
        Run { set: Set::Short, concurrency: 3, stream: true, time: Duration::from_millis(100), seed: 1, series: 0 };

    async fn bound() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        (listener, address)
    }

    #[tokio::test]
    async fn every_kind_of_request_is_answered() {
        let (listener, address) = bound().await;
        let server = tokio::spawn(openai_worker::accept(listener, "tiny".into()));
        probe(address, "tiny").await.expect("an answer");
        for set in [Set::Short, Set::Long, Set::MultiTurn] {
            for stream in [true, false] {
                let seen = run(address, "tiny", Run { set, stream, ..SHORT }).await;
                assert_eq!((seen.errors, seen.first_error), (0, None), "{set:?}");
                assert!(seen.first_ms.len() >= SHORT.concurrency && seen.wall >= SHORT.time);
            }
        }
        server.abort();
    }

    #[tokio::test]
    async fn connections_that_are_closed_count_as_errors() {
        let (listener, address) = bound().await;
        let server = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let _ = socket.read(&mut [0; 16]).await;
            }
        });
        let seen = run(address, "tiny", SHORT).await;
        assert!(seen.errors >= SHORT.concurrency && seen.first_ms.is_empty());
        assert!(seen.first_error.is_some());
        assert!(probe(address, "tiny").await.is_err());
        server.abort();
    }
}
