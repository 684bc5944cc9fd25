//! The processes under load: workers that answer at once, and a router in front of them.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

/// What clients put into "model".
pub const MODEL: &str = "tiny";
/// Longest wait for a process to be ready.
const READY: Duration = Duration::from_secs(30);

/// Workers; killed when dropped.
pub struct Workers {
    _processes: Vec<Child>,
    discovery: tempfile::TempDir,
}

impl Workers {
    /// Starts `count` of them and waits until all have registered.
    pub async fn start(count: usize) -> anyhow::Result<Self> {
        let discovery = tempfile::tempdir()?;
        let executable = std::env::current_exe()?;
        let start = |number: usize| {
            let mut worker = Command::new(&executable);
            worker.args([
                "worker",
                "--model-name",
                MODEL,
                "--name",
                &format!("worker-{number}"),
                "--discovery-backend",
                "file",
            ]);
            worker
                .args(["--port", "0", "--event-port", "0", "--admin-port", "0", "--discovery-dir"])
                .arg(discovery.path());
            worker.kill_on_drop(true).stdin(Stdio::null()).spawn()
        };
        let processes = (0..count).map(start).collect::<Result<_, _>>()?;
        Self { _processes: processes, discovery }.registered(count).await
    }

    /// Starts one process with `count` mockers and these flags, and waits until all have registered.
    pub async fn mockers(count: usize, flags: &[String]) -> anyhow::Result<Self> {
        let discovery = tempfile::tempdir()?;
        let model = std::env::var_os("ARMATURE_MODEL").context("ARMATURE_MODEL is not set; use `cargo xtask bench`")?;
        let mut worker = armature()?;
        worker.args(["worker", "--engine", "mocker", "--name", "worker", "--model-name", MODEL, "--model"]).arg(model);
        worker.args(["--mocker-workers", &count.to_string(), "--port", "0", "--event-port", "0", "--admin-port", "0"]);
        worker.args(["--discovery-backend", "file", "--discovery-dir"]).arg(discovery.path());
        let processes = vec![worker.args(flags).env("RUST_LOG", "error").spawn()?];
        Self { _processes: processes, discovery }.registered(count).await
    }

    async fn registered(self, count: usize) -> anyhow::Result<Self> {
        let deadline = Instant::now() + READY;
        while std::fs::read_dir(self.discovery.path())?
            .flatten()
            .filter(|e| e.path().extension().is_some_and(|e| e == "json"))
            .count()
            < count
        {
            if Instant::now() > deadline {
                bail!("workers did not register within {} s", READY.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(self)
    }
}

/// The binary under test; killed when dropped.
pub fn armature() -> anyhow::Result<Command> {
    let binary = std::env::var_os("ARMATURE_BIN").context("ARMATURE_BIN is not set; use `cargo xtask bench`")?;
    let mut command = Command::new(binary);
    command.kill_on_drop(true).stdin(Stdio::null());
    Ok(command)
}

/// Waits until the router could send requests to `count` workers.
pub async fn routable(router: SocketAddr, count: usize) -> anyhow::Result<()> {
    shows(router, &format!("armature_router_workers_routable {count}")).await
}

/// Waits until the router's metrics have this line.
pub async fn shows(router: SocketAddr, line: &str) -> anyhow::Result<()> {
    reached(router, "/metrics", &format!("{line}\n"), Instant::now()).await.map(drop)
}

/// A router; killed when dropped.
pub struct Router {
    process: Child,
    /// Where it listens.
    pub address: SocketAddr,
    /// From its start to the first 200 on `/ready`.
    pub ready: Duration,
    /// From its start to the first list with the model.
    pub model: Duration,
}

impl Router {
    /// Starts one in this mode, and waits until it serves the model.
    pub async fn start(workers: &Workers, mode: &str) -> anyhow::Result<Self> {
        Self::start_with(workers, mode, &[]).await
    }

    /// The same, with more flags.
    pub async fn start_with(workers: &Workers, mode: &str, flags: &[&str]) -> anyhow::Result<Self> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let started = Instant::now();
        let process = Self::spawn(address, mode, workers.discovery.path(), flags)?;
        let ready = reached(address, "/ready", "", started).await?;
        let model = reached(address, "/v1/models", MODEL, started).await?;
        Ok(Self { process, address, ready, model })
    }

    fn spawn(address: SocketAddr, mode: &str, discovery: &Path, flags: &[&str]) -> anyhow::Result<Child> {
        let mut router = armature()?;
        router.args([
            "router",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            &address.port().to_string(),
            "--router-mode",
            mode,
        ]);
        router.args(["--discovery-backend", "file", "--discovery-dir"]).arg(discovery).args(flags);
        router.env("RUST_LOG", "error").spawn().context("cannot start the router")
    }

    /// CPU time used so far, user and system, in steps of 10 ms.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let stat = self.read("stat")?;
        // Fields 14 and 15; the second one, the name, may contain blanks and ends with the last parenthesis.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks: u64 =
            fields.get(11..13).context("short stat")?.iter().filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        // USER_HZ is 100 on every Linux that Rust runs on.
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Resident memory, in MB.
    pub fn rss_mb(&self) -> anyhow::Result<f64> {
        let status = self.read("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib * 1024.0 / 1e6)
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        let pid = self.process.id().context("the router has ended")?;
        Ok(std::fs::read_to_string(format!("/proc/{pid}/{file}"))?)
    }
}

/// Time since `started` at which a GET answers 200 with `word` in it.
async fn reached(address: SocketAddr, path: &str, word: &str, started: Instant) -> anyhow::Result<Duration> {
    while started.elapsed() < READY {
        match get(address, path).await {
            Ok(answer) if answer.starts_with("HTTP/1.1 200") && answer.contains(word) => return Ok(started.elapsed()),
            _ => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
    bail!("{path} did not answer within {} s", READY.as_secs())
}

async fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.take(1 << 20).read_to_string(&mut answer).await?;
    Ok(answer)
}
