//! The processes under load: workers that answer at once, and our router in front of them.

pub mod model;
mod ready;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::process::{Child, Command};

use crate::process::{Process, Usage};
pub use ready::{get, reached, routable, shows};

/// What clients put into "model".
pub const MODEL: &str = "tiny";
/// Longest wait for a process to be ready.
pub const READY: Duration = Duration::from_secs(60);

/// Workers with an agent; killed when dropped.
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
        let mut worker = armature()?;
        worker.args(["worker", "--engine", "mocker", "--name", "worker", "--model-name", MODEL, "--model"]);
        worker.arg(model::file()?);
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

/// OpenAI servers, which any router can stand in front of; killed when dropped.
pub struct OpenAiServers {
    _processes: Vec<Process>,
    /// Where they listen.
    pub addresses: Vec<SocketAddr>,
}

impl OpenAiServers {
    /// Starts `count` of them and waits until all answer.
    pub async fn start(count: usize) -> anyhow::Result<Self> {
        let (mut processes, mut addresses) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let address = free_address()?;
            let mut server = Command::new(std::env::current_exe()?);
            server.args(["openai-worker", "--model-name", MODEL, "--address", &address.to_string()]);
            // They share the cores with what is measured.
            let mut process = Process::start("a worker", server.env("TOKIO_WORKER_THREADS", "1"))?;
            process.until(reached(address, "/health", |_| true)).await?;
            processes.push(process);
            addresses.push(address);
        }
        Ok(Self { _processes: processes, addresses })
    }

    /// Their URLs.
    pub fn urls(&self) -> Vec<String> {
        self.addresses.iter().map(|address| format!("http://{address}")).collect()
    }
}

/// The binary under test; killed when dropped.
pub fn armature() -> anyhow::Result<Command> {
    let binary = std::env::var_os("ARMATURE_BIN").context("ARMATURE_BIN is not set; use `cargo xtask bench`")?;
    Ok(command(binary))
}

fn command(binary: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(binary);
    command.kill_on_drop(true).stdin(Stdio::null());
    command
}

/// A router, ours or a peer's; killed when dropped.
pub struct Router {
    process: Process,
    /// Where it listens.
    pub address: SocketAddr,
    /// From its start to the first 200 on `/ready`, which only ours has.
    pub ready: Option<Duration>,
    /// From its start to the first list with the model.
    pub model: Duration,
}

impl Router {
    /// Starts ours in this mode in front of agents, and waits until it serves the model.
    pub async fn start(workers: &Workers, mode: &str) -> anyhow::Result<Self> {
        Self::start_with(workers, mode, None, &[]).await
    }

    /// The same, of another build and with more flags.
    pub async fn start_with(
        workers: &Workers,
        mode: &str,
        build: Option<&Path>,
        flags: &[&str],
    ) -> anyhow::Result<Self> {
        let (address, mut command) = ours(mode, build)?;
        command.args(["--discovery-backend", "file", "--discovery-dir"]).arg(workers.discovery.path()).args(flags);
        Self::launch("armature router", &mut command, address, Some("/ready")).await
    }

    /// Starts ours in front of OpenAI servers, with the tokenizer of this folder.
    pub async fn in_front_of(
        servers: &OpenAiServers,
        mode: &str,
        build: Option<&Path>,
        model: &Path,
    ) -> anyhow::Result<Self> {
        let (address, mut command) = ours(mode, build)?;
        command.args(["--workers", &servers.urls().join(","), "--model-path"]).arg(model);
        Self::launch("armature router", &mut command, address, Some("/ready")).await
    }

    /// Starts this command, which listens on `address`, and waits until it serves the model.
    pub async fn launch(
        name: &str,
        command: &mut Command,
        address: SocketAddr,
        ready_path: Option<&str>,
    ) -> anyhow::Result<Self> {
        let started = Instant::now();
        let mut process = Process::start(name, command)?;
        let mut ready = None;
        if let Some(path) = ready_path {
            process.until(reached(address, path, |_| true)).await?;
            ready = Some(started.elapsed());
        }
        process.until(reached(address, "/v1/models", |answer| answer.contains(MODEL))).await?;
        Ok(Self { process, address, ready, model: started.elapsed() })
    }

    /// What it has used so far.
    pub fn usage(&self) -> anyhow::Result<Usage> {
        self.process.usage()
    }

    /// CPU time used so far.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        Ok(self.usage()?.cpu)
    }
}

/// Our router in this mode, of the build under test or another one, and where it will listen.
fn ours(mode: &str, build: Option<&Path>) -> anyhow::Result<(SocketAddr, Command)> {
    let (address, mut router) = (free_address()?, build.map_or_else(armature, |build| Ok(command(build)))?);
    router.args([
        "router",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        &address.port().to_string(),
        "--router-mode",
        mode,
    ]);
    router.env("RUST_LOG", "error");
    Ok((address, router))
}

/// An address on loopback that nobody listens on.
pub fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
