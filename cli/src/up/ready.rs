//! When everything is up: every worker registered, and the router listing the model.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::outcome::Outcome;

/// Time for workers to read their model: 10 GB at 100 MB/s, and some.
const DEADLINE: Duration = Duration::from_secs(180);
/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// Waits until `workers` files are in the discovery directory and the router lists the model.
pub async fn wait(discovery: &Path, workers: u16, router: SocketAddr, model: &str) -> Outcome {
    let deadline = Instant::now() + DEADLINE;
    while registered(discovery)? < usize::from(workers) {
        if Instant::now() > deadline {
            return Err(anyhow::anyhow!("workers were not ready after {} s", DEADLINE.as_secs()).into());
        }
        sleep(INTERVAL).await;
    }
    let wanted = format!("{:?}", model);
    loop {
        match timeout(Duration::from_secs(5), get(router, "/v1/models")).await {
            Ok(Ok(body)) if body.contains(&wanted) => return Ok(()),
            _ if Instant::now() > deadline => {
                return Err(anyhow::anyhow!("the router does not list {model} after {} s", DEADLINE.as_secs()).into());
            }
            _ => sleep(INTERVAL).await,
        }
    }
}

fn registered(discovery: &Path) -> anyhow::Result<usize> {
    let entries = std::fs::read_dir(discovery).context("the discovery directory is gone")?;
    Ok(entries.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "json")).count())
}

/// The answer to a GET, headers included: enough to look for a word in it.
pub(super) async fn get(mut address: SocketAddr, path: &str) -> anyhow::Result<String> {
    if address.ip().is_unspecified() {
        let loopback = if address.is_ipv4() { "127.0.0.1" } else { "::1" };
        address.set_ip(loopback.parse()?);
    }
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.take(1 << 20).read_to_string(&mut answer).await?;
    if !answer.starts_with("HTTP/1.1 200") {
        bail!("{path}: {}", answer.lines().next().unwrap_or("no answer"));
    }
    Ok(answer)
}
