//! Worker processes: started, watched, started again when they die, ended when asked.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Up;
use crate::outcome::Failure;

/// First pause before a restart; doubles up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A worker that has lived so long begins again with the first pause.
const STABLE: Duration = Duration::from_secs(60);
/// Time between SIGTERM and SIGKILL: a drain, and some.
const TERMINATION: Duration = Duration::from_secs(10);
/// Exit code of a worker whose settings cannot work: no use in starting it again.
const SETTINGS: i32 = 2;

/// All workers.
pub struct Workers {
    tasks: JoinSet<()>,
    failures: mpsc::Receiver<Failure>,
}

impl Workers {
    /// Starts them. They run until `stop`, which each follows with SIGTERM.
    pub fn start(
        args: &Up,
        model: &Path,
        name: &str,
        discovery: &Path,
        stop: CancellationToken,
    ) -> Result<Self, Failure> {
        let executable = std::env::current_exe()?;
        // One slot each: a worker fails at most once, and then no longer runs.
        let (report, failures) = mpsc::channel(usize::from(args.workers));
        let mut tasks = JoinSet::new();
        for number in 1..=args.workers {
            let worker = Worker {
                name: format!("worker-{number}"),
                executable: executable.clone(),
                arguments: arguments(args, model, name, discovery, number),
            };
            let first = worker.spawn()?;
            tasks.spawn(worker.keep_running(first, stop.clone(), report.clone()));
        }
        Ok(Self { tasks, failures })
    }

    /// Waits for a worker that cannot be helped by a restart.
    pub async fn failed(&mut self) -> Failure {
        match self.failures.recv().await {
            Some(failure) => failure,
            None => anyhow::anyhow!("all workers have ended").into(),
        }
    }

    /// Waits until every process is gone.
    pub async fn ended(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Threads of each worker.
pub fn threads(args: &Up) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    args.threads.unwrap_or((cores / usize::from(args.workers)).max(1))
}

fn arguments(args: &Up, model: &Path, name: &str, discovery: &Path, number: u16) -> Vec<String> {
    let pairs = [
        ("--name", format!("worker-{number}")),
        ("--model", format!("file://{}", std::path::absolute(model).unwrap_or_else(|_| model.to_path_buf()).display())),
        ("--model-name", name.to_owned()),
        ("--discovery-backend", "file".into()),
        ("--discovery-dir", discovery.display().to_string()),
        ("--host", "127.0.0.1".into()),
        ("--port", "0".into()),
        ("--event-port", "0".into()),
        ("--admin-port", "0".into()),
        ("--threads", threads(args).to_string()),
        ("--kv-blocks", args.kv_blocks.to_string()),
        ("--block-size", args.block_size.to_string()),
    ];
    let mut arguments = vec!["worker".to_owned(), "--with-parent".to_owned(), std::process::id().to_string()];
    arguments.extend(pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]));
    arguments
}

/// One worker over all its lives.
struct Worker {
    name: String,
    executable: PathBuf,
    arguments: Vec<String>,
}

impl Worker {
    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.executable);
        // A group of its own: Ctrl-C in the terminal reaches only us, and we end the workers after the router.
        command.args(&self.arguments).stdin(Stdio::null()).process_group(0).kill_on_drop(true);
        // Pods' variables must not leak into a local worker.
        for variable in ["POD_NAME", "POD_IP", "POD_UID", "POD_NAMESPACE"] {
            command.env_remove(variable);
        }
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "warn,zeromq=error");
        }
        command.spawn()
    }

    async fn keep_running(self, first: Child, stop: CancellationToken, report: mpsc::Sender<Failure>) {
        let (mut child, mut backoff) = (first, BACKOFF);
        loop {
            let started = Instant::now();
            let status = tokio::select! {
                status = child.wait() => status,
                () = stop.cancelled() => return self.end(child).await,
            };
            if let Some(failure) = hopeless(&status) {
                // The receiver is gone only while everything ends.
                return report.send(failure).await.unwrap_or_default();
            }
            if started.elapsed() > STABLE {
                backoff = BACKOFF;
            }
            let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            eprintln!("worker   {} ended ({how}), starting it again in {:.1} s", self.name, backoff.as_secs_f64());
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = stop.cancelled() => return,
            }
            backoff = (backoff * 2).min(BACKOFF_MAX);
            child = match self.spawn() {
                Ok(child) => child,
                Err(error) => return report.send(error.into()).await.unwrap_or_default(),
            };
        }
    }

    /// SIGTERM, a bounded wait, SIGKILL.
    async fn end(&self, mut child: Child) {
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            // It may have ended by itself just now.
            let _ = kill_process(pid, Signal::TERM);
        }
        if tokio::time::timeout(TERMINATION, child.wait()).await.is_err() {
            eprintln!("worker   {} did not end within {} s, killing it", self.name, TERMINATION.as_secs());
            if let Err(error) = child.kill().await {
                eprintln!("worker   {}: {error}", self.name);
            }
        }
    }
}

/// A worker that refuses its settings will do so again.
fn hopeless(status: &std::io::Result<ExitStatus>) -> Option<Failure> {
    match status {
        Ok(status) if status.code() == Some(SETTINGS) => Some(Failure::Said(2)),
        _ => None,
    }
}
