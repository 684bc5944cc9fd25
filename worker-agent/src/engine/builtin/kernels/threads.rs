//! A small pool that splits the loops of a step over threads.
//!
//! A job is a number of tasks and a function of the task's number. The caller works, too, and never waits for a thread to
//! wake up, only for tasks that have begun. Threads spin for a moment between jobs, because the next one usually follows
//! within microseconds, and then sleep.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, Thread};

/// Turns of the waiting loop before a thread sleeps: some tens of microseconds.
const SPINS_BEFORE_SLEEP: u32 = 2_000;

/// Turns of the waiting loop before the caller, waiting for the last tasks, lets others run.
const SPINS_BEFORE_YIELD: u32 = 2_000;

struct Job<'a> {
    run: &'a (dyn Fn(usize) + Sync),
    tasks: u32,
}

#[derive(Default)]
struct Shared {
    /// Number of the job in the upper half, tasks not yet taken in the lower. A thread takes a task by counting down; if
    /// that succeeds, the job is the one it has read, because a job ends only when all its tasks are done.
    ticket: AtomicU64,
    job: AtomicPtr<Job<'static>>,
    done: AtomicU32,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Vec<AtomicBool>,
}

impl Shared {
    /// Runs tasks of job `number` until none is left.
    fn work(&self, number: u32) {
        loop {
            let ticket = self.ticket.load(Ordering::Acquire);
            if (ticket >> 32) as u32 != number || ticket as u32 == 0 {
                return;
            }
            let job = self.job.load(Ordering::Relaxed);
            if self.ticket.compare_exchange(ticket, ticket - 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            // SAFETY: a task of this job was taken and is not yet done, so `ThreadPool::run` has not returned.
            let job = unsafe { &*job };
            let task = job.tasks - ticket as u32;
            if catch_unwind(AssertUnwindSafe(|| (job.run)(task as usize))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits for a job other than `seen`; `None` when the pool ends.
    fn next(&self, seen: u32, me: usize) -> Option<u32> {
        let mut spins = 0;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            let number = (self.ticket.load(Ordering::SeqCst) >> 32) as u32;
            if number != seen {
                return Some(number);
            }
            if spins < SPINS_BEFORE_SLEEP {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            // Announce the sleep, then look again: whoever starts a job afterwards sees the announcement.
            self.sleepers[me].store(true, Ordering::SeqCst);
            if (self.ticket.load(Ordering::SeqCst) >> 32) as u32 == seen && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            self.sleepers[me].store(false, Ordering::SeqCst);
        }
    }
}

/// The pool. Dropping it ends its threads.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
    jobs: u32,
}

impl ThreadPool {
    /// A pool in which `threads` threads work, the caller being one of them.
    pub(crate) fn new(threads: usize) -> std::io::Result<ThreadPool> {
        let others = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            sleepers: std::iter::repeat_with(AtomicBool::default).take(others).collect(),
            ..Shared::default()
        });
        let mut pool = ThreadPool { shared: shared.clone(), threads: Vec::new(), handles: Vec::new(), jobs: 0 };
        for me in 0..others {
            let shared = shared.clone();
            let body = move || {
                let mut seen = 0;
                while let Some(number) = shared.next(seen, me) {
                    seen = number;
                    shared.work(number);
                }
            };
            let thread = thread::Builder::new().name(format!("forward-{}", me + 1)).spawn(body)?;
            pool.handles.push(thread.thread().clone());
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Threads that work, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `run` once with each number below `tasks`, in any order and on any thread; returns when all have returned.
    /// Panics if one of them does.
    pub(crate) fn run(&mut self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() || tasks <= 1 {
            return (0..tasks).for_each(run);
        }
        let tasks = u32::try_from(tasks).expect("a step has fewer than 2^32 tasks");
        let shared = &*self.shared;
        self.jobs = self.jobs.wrapping_add(1);
        let job = Job { run, tasks };
        shared.done.store(0, Ordering::Relaxed);
        shared.job.store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        shared.ticket.store(u64::from(self.jobs) << 32 | u64::from(tasks), Ordering::SeqCst);
        for (sleeper, handle) in shared.sleepers.iter().zip(&self.handles) {
            if sleeper.load(Ordering::SeqCst) {
                handle.unpark();
            }
        }
        shared.work(self.jobs);
        let mut spins = 0u32;
        while shared.done.load(Ordering::Acquire) != tasks {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { thread::yield_now() }
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a task of a forward step panicked");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A task's panic was reported by `run` already.
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let mut pool = ThreadPool::new(threads).unwrap();
            for tasks in (0..40).chain([1000]) {
                let counts: Vec<AtomicU32> = std::iter::repeat_with(AtomicU32::default).take(tasks).collect();
                pool.run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let mut pool = ThreadPool::new(3).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(100, &|i| assert_ne!(i, 57, "on purpose"))));
        assert!(result.is_err());
        let count = AtomicU32::new(0);
        pool.run(100, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 100);
    }
}
