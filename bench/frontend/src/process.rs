//! A process of the benchmark: it ends with us, what it says is kept for the error, and what it costs is read from /proc.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::process::{Child, Command};

/// Most that an error shows of what a process said, in bytes.
const SAID_MAX: usize = 2000;

/// A process; killed when dropped.
pub struct Process {
    name: String,
    child: Child,
    said: File,
}

/// What a process and its descendants have used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// User and system time, in steps of 10 ms.
    pub cpu: Duration,
    /// Resident memory, in MB.
    pub rss_mb: f64,
}

impl Process {
    /// Starts it; nothing that it prints is shown.
    pub fn start(name: &str, command: &mut Command) -> anyhow::Result<Self> {
        let said = tempfile::tempfile()?;
        command.kill_on_drop(true).stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said.try_clone()?);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), child, said })
    }

    /// Waits for what makes it ready; an error, the process's end among them, comes with the last that it said.
    pub async fn until<T>(&mut self, ready: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let result = tokio::select! {
            result = ready => result,
            status = self.child.wait() => status.map_err(Into::into).and_then(|status| bail!("ended, {status}")),
        };
        result.with_context(|| format!("{}, which said: {}", self.name, self.said().unwrap_or_default()))
    }

    /// The last that it said.
    pub fn said(&self) -> anyhow::Result<String> {
        let start = self.said.metadata()?.len().saturating_sub(SAID_MAX as u64);
        let mut text = vec![0; SAID_MAX];
        // The process writes on where the file's one position is: it must not move.
        let length = self.said.read_at(&mut text, start)?;
        text.truncate(length);
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// What it and its descendants have used so far.
    pub fn usage(&self) -> anyhow::Result<Usage> {
        let root = self.child.id().with_context(|| format!("{} has ended", self.name))?;
        let mut all = HashMap::new();
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // One that has ended meanwhile is left out.
            if let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) {
                all.insert(id, Stat::parse(&stat).context("/proc/PID/stat has another form")?);
            }
        }
        let mut usage = Usage::default();
        for id in family(&all, root) {
            // USER_HZ is 100 on every Linux that Rust runs on.
            usage.cpu += Duration::from_millis(all[&id].ticks * 10);
            usage.rss_mb += std::fs::read_to_string(format!("/proc/{id}/status")).map_or(0.0, |text| rss_mb(&text));
        }
        Ok(usage)
    }
}

/// Of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// Of the process and of its children that have ended.
    ticks: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The second field, the name, may contain anything and ends with the last parenthesis: here the third is at 0.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks: Vec<u64> = fields.get(11..15)?.iter().map(|ticks| ticks.parse()).collect::<Result<_, _>>().ok()?;
        Some(Self { parent: fields[1].parse().ok()?, ticks: ticks.iter().sum() })
    }
}

/// The process and its descendants, as far as they are listed.
fn family(all: &HashMap<u32, Stat>, root: u32) -> Vec<u32> {
    let mut family: Vec<u32> = all.contains_key(&root).then_some(root).into_iter().collect();
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(all.iter().filter(|(_, stat)| stat.parent == parent).map(|(id, _)| *id));
        next += 1;
    }
    family
}

/// Of `/proc/PID/status`; a process that is ending has none.
fn rss_mb(status: &str) -> f64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        let stat = "42 (a) b (c) S 7 42 42 0 -1 4194304 100 0 0 0 11 12 3 4 20 0 5 0 999 1000 200 18446744073709551615";
        assert_eq!(Stat::parse(stat), Some(Stat { parent: 7, ticks: 30 }));
        assert_eq!(Stat::parse("42 (a"), None);
        assert_eq!(rss_mb("Name:\ta\nVmRSS:\t    1000 kB\n"), 1.024);
    }

    #[test]
    fn a_family_is_all_descendants_and_nobody_else() {
        let all = [(1, 0), (10, 1), (11, 10), (12, 11), (13, 10), (20, 1)];
        let all = all.into_iter().map(|(id, parent)| (id, Stat { parent, ticks: 0 })).collect();
        let mut found = family(&all, 10);
        found.sort_unstable();
        assert_eq!(found, [10, 11, 12, 13]);
        assert!(family(&all, 99).is_empty());
    }

    #[tokio::test]
    async fn what_a_process_said_is_in_the_error() {
        let mut process =
            Process::start("sh", Command::new("sh").args(["-c", "echo too bad >&2; exit 3"])).expect("sh");
        let never = std::future::pending::<anyhow::Result<()>>();
        let error = format!("{:#}", process.until(never).await.expect_err("it ends"));
        assert!(error.contains("said: too bad") && error.contains("exit status: 3"), "{error}");
    }

    #[tokio::test]
    async fn the_time_of_children_counts() {
        let busy = "i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done";
        let script = format!("({busy}); echo done; exec tail -f /dev/null");
        let process = Process::start("sh", Command::new("sh").args(["-c", &script])).expect("sh");
        let done = async {
            while !process.said().expect("readable").contains("done") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), done).await.expect("the loop ends");
        // The shell itself did next to nothing.
        assert!(process.usage().expect("it runs").cpu >= Duration::from_millis(10));
    }
}
