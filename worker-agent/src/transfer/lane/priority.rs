//! A thread's claim to a processor beside the engine's threads.

use std::io;
use std::time::Duration;

/// The weakest claim that a thread can have beside others: 15 parts beside 1024 of one of priority 0.
const NICE: i32 = 19;
/// The kernel gives a thread its share in slices; of a length of its own since Linux 6.12. In slices of the usual 3 ms a share
/// this small would come once in 200 ms, and each question between workers would wait for that; so it comes every 7 ms.
const SLICE: Duration = Duration::from_micros(100);

/// The first version of the kernel's `struct sched_attr`.
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Lowers the calling thread.
pub(in crate::transfer) fn lower() -> io::Result<()> {
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: libc::SCHED_OTHER as u32,
        flags: 0,
        nice: NICE,
        priority: 0,
        runtime_ns: SLICE.as_nanos() as u64,
        deadline_ns: 0,
        period_ns: 0,
    };
    // SAFETY: thread 0 is the calling one; the kernel reads `size` bytes of `attributes`, which outlives the call.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done == 0 {
        return Ok(());
    }
    // Some sandboxes know the older call only.
    Ok(rustix::process::setpriority_process(None, NICE)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_is_lowered() {
        let of = |who| rustix::process::getpriority_process(who).expect("readable");
        let before = of(None);
        let inside = std::thread::spawn(move || {
            lower().expect("a thread may lower itself");
            of(None)
        });
        assert_eq!((inside.join().expect("no panic"), of(None)), (NICE, before));
    }
}
