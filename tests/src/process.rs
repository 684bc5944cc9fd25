//! The product's binary as a process of a test.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// `$ARMATURE_BIN`, or the binary that was built beside this test.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ARMATURE_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("a test has a path");
    let path = test.ancestors().nth(2).expect("target/PROFILE/deps/test").join("armature");
    assert!(path.exists(), "{} is missing: run `cargo xtask test --stage integration`", path.display());
    path
}

/// The GGUF file that tests serve: `$ARMATURE_MODEL`, which `cargo xtask test` sets.
pub fn model() -> PathBuf {
    required("ARMATURE_MODEL")
}

/// A path that `cargo xtask test` sets.
pub fn required(variable: &str) -> PathBuf {
    let value = std::env::var_os(variable);
    value.unwrap_or_else(|| panic!("{variable} is not set: run `cargo xtask test`")).into()
}

/// Kills a process that leads a group, with all that it has started, and waits for it.
pub fn kill_group(leader: &mut std::process::Child) {
    if let Some(pid) = Pid::from_raw(leader.id().cast_signed()) {
        // One that has ended by itself is as good.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let _ = leader.wait();
}

/// A running `armature`; killed when dropped.
pub struct Armature {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    /// Its status.
    pub status: ExitStatus,
    /// All of its standard error.
    pub stderr: String,
}

impl Armature {
    /// Starts it with these arguments.
    pub fn start(arguments: &[&str]) -> anyhow::Result<Self> {
        Self::start_with(arguments, &[])
    }

    /// Starts it with these arguments and variables.
    pub fn start_with(arguments: &[&str], variables: &[(&str, &Path)]) -> anyhow::Result<Self> {
        let mut command = Command::new(binary());
        command.envs(variables.iter().copied());
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot start armature")?;
        let stdout = child.stdout.take().context("piped")?;
        Ok(Self { child, lines: BufReader::new(stdout).lines() })
    }

    /// The next line of its standard output that begins so.
    pub async fn line(&mut self, start: &str, limit: Duration) -> anyhow::Result<String> {
        let found = tokio::time::timeout(limit, async {
            while let Some(line) = self.lines.next_line().await? {
                if line.starts_with(start) {
                    return Ok(line);
                }
            }
            bail!("armature ended without a line {start:?}: {}", self.stderr().await)
        });
        found.await.with_context(|| format!("no line {start:?} within {} s", limit.as_secs()))?
    }

    async fn stderr(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut text).await;
        }
        text
    }

    /// Its resident memory, in MB.
    pub fn resident_mb(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id().context("it has ended")?))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib * 1024.0 / 1e6)
    }

    /// Process ids of its children.
    pub fn children(&self) -> anyhow::Result<Vec<u32>> {
        let pid = self.child.id().context("it has ended")?;
        children_of(pid)
    }

    /// Sends a signal to it alone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        signal_process(self.child.id().context("it has ended")?, signal)
    }

    /// Waits for its end.
    pub async fn ended(mut self, limit: Duration) -> anyhow::Result<Ended> {
        let status = tokio::time::timeout(limit, self.child.wait()).await;
        let status = status.with_context(|| format!("still running after {} s", limit.as_secs()))??;
        Ok(Ended { status, stderr: self.stderr().await })
    }
}

/// Sends a signal to any process.
pub fn signal_process(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).context("no process has id 0")?;
    Ok(kill_process(pid, signal)?)
}

/// Whether the process runs; one that has ended and was not waited for does not.
pub fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next()).is_some_and(|state| state != 'Z')
}

/// Process ids of a process's children.
pub fn children_of(parent: u32) -> anyhow::Result<Vec<u32>> {
    let mut children = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{parent}/task"))? {
        let list = std::fs::read_to_string(task?.path().join("children"))?;
        children.extend(list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    children.sort_unstable();
    Ok(children)
}
