//! The peers: what starts each of them, on loopback only, with its output kept to warnings.
//!
//! Each is in a Python environment named after it; `cargo xtask bench frontend` makes them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::bail;
use tempfile::TempDir;
use tokio::process::Command;

use crate::process::Process;
use crate::system::{MODEL, OpenAiServers, Router, free_address, reached};

/// A worker of Dynamo's that answers at once.
const DYNAMO_WORKER: &str = include_str!("../dynamo_worker.py");

/// Folder of the peers' environments.
#[derive(Clone, Debug)]
pub struct Peers(pub PathBuf);

impl Peers {
    /// vLLM's router in front of these servers, by its default policy.
    pub async fn vllm_router(&self, servers: &OpenAiServers) -> anyhow::Result<Router> {
        let mut router = self.python("vllm-router", &["-m", "vllm_router.launch_router"])?;
        let address = proxy_flags(&mut router, servers, "warning")?;
        Router::launch("vllm-router", &mut router, address, None).await
    }

    /// SGLang's router in front of these servers, by its default policy.
    pub async fn sglang_router(&self, servers: &OpenAiServers) -> anyhow::Result<Router> {
        let mut router = self.python("sglang-router", &["-m", "sglang_router.launch_router"])?;
        let address = proxy_flags(&mut router, servers, "warn")?;
        Router::launch("sglang-router", &mut router, address, None).await
    }

    /// Dynamo's frontend with `count` workers of its own kind. They publish no KV events, so its KV mode predicts.
    pub async fn dynamo(&self, mode: &str, model: &Path, count: usize) -> anyhow::Result<Dynamo> {
        let folder = tempfile::tempdir()?;
        let script = folder.path().join("worker.py");
        std::fs::write(&script, DYNAMO_WORKER)?;
        let mut workers = Vec::new();
        for _ in 0..count {
            let mut worker = self.dynamo_python(&folder)?;
            workers.push(Process::start("dynamo worker", worker.arg(&script).arg(model).arg(MODEL))?);
        }
        let (address, mut frontend) = (free_address()?, self.dynamo_python(&folder)?);
        frontend.args([
            "-m",
            "dynamo.frontend",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            &address.port().to_string(),
        ]);
        frontend.args(["--router-mode", mode, "--no-router-kv-events"]);
        let frontend = Router::launch("dynamo frontend", &mut frontend, address, None).await?;
        reached(address, "/health", |answer| answer.matches("\"instance_id\"").count() >= count).await?;
        Ok(Dynamo { frontend, _workers: workers, _folder: folder })
    }

    /// Dynamo's Python, with workers and frontend finding each other through this folder.
    fn dynamo_python(&self, folder: &TempDir) -> anyhow::Result<Command> {
        let mut python = self.python("dynamo", &[])?;
        let hosts = ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST"];
        python.envs(hosts.map(|name| (name, "127.0.0.1")));
        python.envs([("DYN_DISCOVERY_BACKEND", "file"), ("DYN_REQUEST_PLANE", "tcp"), ("DYN_LOG", "warn")]);
        python.env("DYN_FILE_KV", folder.path().join("discovery"));
        // It keeps copies of models in the home folder.
        python.env("HOME", folder.path()).env("HF_HUB_OFFLINE", "1");
        Ok(python)
    }

    fn python(&self, peer: &str, arguments: &[&str]) -> anyhow::Result<Command> {
        let program = self.0.join(peer).join("bin/python");
        if !program.exists() {
            bail!(
                "{peer} is not in {}: run `cargo xtask bench frontend` without --peers to install it",
                self.0.display()
            );
        }
        let mut python = Command::new(program);
        python.args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(python)
    }
}

/// Dynamo's frontend and its workers; killed when dropped.
pub struct Dynamo {
    /// What clients talk to.
    pub frontend: Router,
    _workers: Vec<Process>,
    _folder: TempDir,
}

/// Flags that the two routers in front of OpenAI servers have in common; returns where the router will listen.
fn proxy_flags(router: &mut Command, servers: &OpenAiServers, log_level: &str) -> anyhow::Result<SocketAddr> {
    let (address, metrics) = (free_address()?, free_address()?);
    router.args(["--host", "127.0.0.1", "--port", &address.port().to_string(), "--policy", POLICY]);
    router.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.port().to_string()]);
    router.args(["--worker-startup-check-interval", "1", "--log-level", log_level, "--worker-urls"]);
    router.args(servers.urls());
    Ok(address)
}

/// The default policy of both: by cached prefix, guessed from the text, and load.
pub const POLICY: &str = "cache_aware";
