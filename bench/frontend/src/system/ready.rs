//! Waiting for a server: until a GET answers what is wanted.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::bail;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::READY;

/// Time between two tries: start times are measured to it.
const PAUSE: Duration = Duration::from_millis(1);
/// Longest answer that is looked at.
const ANSWER_MAX: u64 = 1 << 20;

/// Waits until the router could send requests to `count` workers.
pub async fn routable(router: SocketAddr, count: usize) -> anyhow::Result<()> {
    shows(router, &format!("armature_router_workers_routable {count}")).await
}

/// Waits until the router's metrics have this line.
pub async fn shows(router: SocketAddr, line: &str) -> anyhow::Result<()> {
    let line = format!("{line}\n");
    reached(router, "/metrics", |answer| answer.contains(&line)).await
}

/// Waits until a GET answers 200 with what is wanted.
pub async fn reached(address: SocketAddr, path: &str, wanted: impl Fn(&str) -> bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + READY;
    while Instant::now() < deadline {
        match tokio::time::timeout_at(deadline.into(), get(address, path)).await {
            Ok(Ok(answer)) if answer.starts_with("HTTP/1.1 200") && wanted(&answer) => return Ok(()),
            _ => tokio::time::sleep(PAUSE).await,
        }
    }
    bail!("{path} of {address} did not answer as it should within {} s", READY.as_secs())
}

/// The answer to a GET, head and body.
pub async fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut answer).await?;
    Ok(answer)
}
