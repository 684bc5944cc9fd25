//! Which core a thread runs on. Two threads that wake each other are often put on one core, and then each waits for the other:
//! what two workers on two hosts never do.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Runs `what` on a core, and what threads it starts; where no core is named, on any.
pub(super) fn on<T>(core: Option<usize>, what: impl FnOnce() -> T) -> io::Result<T> {
    let Some(core) = core else { return Ok(what()) };
    let before = sched_getaffinity(None)?;
    sched_setaffinity(None, &only(&before, core))?;
    let done = what();
    sched_setaffinity(None, &before)?;
    Ok(done)
}

/// The one with this number among the cores that we may use, which is counted round them.
fn only(usable: &CpuSet, number: usize) -> CpuSet {
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| usable.is_set(*core)).collect();
    let mut one = CpuSet::new();
    one.set(cores[number % cores.len()]);
    one
}
