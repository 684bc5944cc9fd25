//! How busy the machine is: a replay that it cannot keep up with measures the machine and not the router.

use anyhow::Context;

/// Time of all processors since the machine started, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    working: u64,
    idle: u64,
}

impl Busy {
    /// Until now.
    pub fn now() -> anyhow::Result<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat")?).context("/proc/stat has another form")
    }

    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        // user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in these.
        let ticks: Vec<u64> = line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let idle = ticks.get(3)? + ticks.get(4)?;
        Some(Self { working: ticks.iter().sum::<u64>() - idle, idle })
    }

    /// Share of the time since `start` that processors worked, from 0 to 1.
    pub fn since(self, start: Self) -> f64 {
        let (working, idle) = (self.working - start.working, self.idle - start.idle);
        working as f64 / (working + idle).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_and_waiting_for_disks_are_not_work() {
        let start = Busy::parse("cpu  10 0 10 70 10 0 0 0 5 0\ncpu0 1 2 3 4\n").expect("the usual form");
        let end = Busy::parse("cpu  40 0 40 90 30 0 0 0 5 0\n").expect("the usual form");
        assert_eq!(end.since(start), 0.6);
        assert_eq!(Busy::parse("intr 5\n"), None);
    }
}
