//! Worker processes: started, watched, started again when they die, ended when asked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
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
/// Time for the lines of workers that have registered to arrive: they wrote them before.
const LINES: Duration = Duration::from_secs(5);

/// All workers.
pub struct Workers {
    tasks: JoinSet<()>,
    failures: mpsc::Receiver<Failure>,
    metrics: Metrics,
}

/// Where each worker's metrics are, by its number; a restart changes it.
type Addresses = BTreeMap<u16, String>;

/// Where the metrics of all workers are.
#[derive(Clone)]
pub struct Metrics {
    addresses: watch::Receiver<Addresses>,
    workers: usize,
}

impl Metrics {
    /// A line for each worker that has said where.
    pub async fn all(mut self) -> Vec<String> {
        let all = self.addresses.wait_for(|addresses| addresses.len() == self.workers);
        // Metrics are not worth an error.
        let _ = tokio::time::timeout(LINES, all).await;
        self.addresses.borrow().iter().map(|(number, url)| format!("worker-{number} metrics {url}")).collect()
    }
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
        let (found, addresses) = watch::channel(Addresses::new());
        let mut tasks = JoinSet::new();
        for number in 1..=args.workers {
            let worker = Worker {
                number,
                executable: executable.clone(),
                arguments: arguments(args, model, name, discovery, number),
                discovery: discovery.to_path_buf(),
                found: found.clone(),
            };
            let first = worker.spawn()?;
            tasks.spawn(worker.keep_running(first, stop.clone(), report.clone()));
        }
        Ok(Self { tasks, failures, metrics: Metrics { addresses, workers: args.workers.into() } })
    }

    /// Where their metrics are.
    pub fn metrics(&self) -> Metrics {
        self.metrics.clone()
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

fn worker_name(number: u16) -> String {
    format!("worker-{number}")
}

/// What each worker runs: the first ones prompts, where some do.
fn role(args: &Up, number: u16) -> &'static str {
    match args.prefill_workers {
        0 => "aggregated",
        prefill if number <= prefill => "prefill",
        _ => "decode",
    }
}

fn arguments(args: &Up, model: &Path, name: &str, discovery: &Path, number: u16) -> Vec<String> {
    let pairs = [
        ("--name", worker_name(number)),
        ("--model", format!("file://{}", std::path::absolute(model).unwrap_or_else(|_| model.to_path_buf()).display())),
        ("--model-name", name.to_owned()),
        ("--role", role(args, number).to_owned()),
        ("--discovery-backend", "file".into()),
        ("--discovery-dir", discovery.display().to_string()),
        ("--host", "127.0.0.1".into()),
        ("--port", "0".into()),
        ("--event-port", "0".into()),
        ("--admin-port", "0".into()),
        ("--threads", threads(args).to_string()),
        ("--kv-blocks", args.kv_blocks.to_string()),
        ("--block-size", args.block_size.to_string()),
        ("--kv-transfer", args.kv_transfer.as_str().to_owned()),
    ];
    let mut arguments = vec!["worker".to_owned(), "--with-parent".to_owned(), std::process::id().to_string()];
    arguments.extend(pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]));
    arguments
}

/// One worker over all its lives.
struct Worker {
    number: u16,
    executable: PathBuf,
    arguments: Vec<String>,
    discovery: PathBuf,
    found: watch::Sender<Addresses>,
}

impl Worker {
    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.executable);
        // A group of its own: Ctrl-C in the terminal reaches only us, and we end the workers after the router.
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        // Pods' variables must not leak into a local worker.
        for variable in ["POD_NAME", "POD_IP", "POD_UID", "POD_NAMESPACE"] {
            command.env_remove(variable);
        }
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "warn,zeromq=error");
        }
        let mut child = command.spawn()?;
        if let Some(stdout) = child.stdout.take() {
            let (found, number) = (self.found.clone(), self.number);
            // Ends with the process, which writes one line: where its metrics are.
            tokio::spawn(async move {
                let mut lines = BufReader::new(stdout).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    let before = found.send_if_modified(|addresses| addresses.insert(number, line.clone()).is_none());
                    if !before {
                        eprintln!("worker   worker-{number} metrics {line}");
                    }
                }
            });
        }
        Ok(child)
    }

    async fn keep_running(self, first: Child, stop: CancellationToken, report: mpsc::Sender<Failure>) {
        let (mut child, mut backoff, mut lives) = (first, BACKOFF, 1);
        loop {
            let started = Instant::now();
            let status = tokio::select! {
                status = child.wait() => status,
                () = stop.cancelled() => return self.end(child).await,
            };
            self.deregister();
            // Settings that have worked are not to blame later on: memory may be short for a moment.
            if let Some(failure) = hopeless(&status).filter(|_| lives == 1) {
                // The receiver is gone only while everything ends.
                return report.send(failure).await.unwrap_or_default();
            }
            if started.elapsed() > STABLE {
                backoff = BACKOFF;
            }
            let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            let (number, pause_s) = (self.number, backoff.as_secs_f64());
            eprintln!("worker   worker-{number} ended ({how}), starting it again in {pause_s:.1} s");
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = stop.cancelled() => return,
            }
            backoff = (backoff * 2).min(BACKOFF_MAX);
            lives += 1;
            child = match self.spawn() {
                Ok(child) => child,
                Err(error) => return report.send(error.into()).await.unwrap_or_default(),
            };
        }
    }

    /// A process that was killed left its entry: without it the router need not find out by silence, and nobody counts it.
    fn deregister(&self) {
        let prefix = format!("{}.", worker_name(self.number));
        for entry in std::fs::read_dir(&self.discovery).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
                // It may have removed it itself.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// SIGTERM, a bounded wait, SIGKILL.
    async fn end(&self, mut child: Child) {
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            // It may have ended by itself just now.
            let _ = kill_process(pid, Signal::TERM);
        }
        if tokio::time::timeout(TERMINATION, child.wait()).await.is_err() {
            eprintln!("worker   worker-{} did not end within {} s, killing it", self.number, TERMINATION.as_secs());
            if let Err(error) = child.kill().await {
                eprintln!("worker   worker-{}: {error}", self.number);
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
