//! The thread that reads and writes the files, so that nobody waits for a disk who computes.
//!
//! Reads go before writes: somebody waits for them. The queues' bound is the catalog's, which gives each of its slots away once.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_hashing::SequenceHash;
use parking_lot::{Condvar, Mutex};

use super::heartbeat::BEAT;
use super::{Disk, write_fault};
use crate::engine::builtin::tiers::slab::Slab;
use crate::engine::builtin::tiers::{CachedBlock, DiskSlot, Done, Slot, WriteFault};

/// Longest wait for the end of the operation under way when the engine stops.
const STOP: Duration = Duration::from_secs(5);
/// Failures of one kind are logged so often.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Something to do with the files.
#[derive(Clone, Copy, Debug)]
enum Job {
    Read {
        from: DiskSlot,
        to: Slot,
        hash: SequenceHash,
    },
    Write {
        from: Slot,
        to: DiskSlot,
        block: CachedBlock,
    },
    Erase(DiskSlot),
    /// Says that the worker lives.
    Beat,
}

/// The directory is another worker's now.
struct Taken;

#[derive(Default)]
struct Queue {
    reads: VecDeque<Job>,
    /// In order: a place is erased before it is written again.
    others: VecDeque<Job>,
    closed: bool,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// A job has come, or the queue is closed.
    wake: Condvar,
    /// The thread has ended.
    ended: Condvar,
}

/// The running thread. Dropping it gives up the jobs that have not begun.
pub struct DiskThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl DiskThread {
    /// Starts it; `done` is called on it at the end of each read and write, and when the thread fails, after which nothing follows.
    pub fn start(disk: Disk, slab: Arc<Slab>, done: impl Fn(Done) + Send + 'static) -> std::io::Result<Self> {
        Self::beating(BEAT, disk, slab, done)
    }

    /// As [`Self::start`], with a heartbeat every so often.
    pub(super) fn beating(
        every: Duration,
        disk: Disk,
        slab: Arc<Slab>,
        done: impl Fn(Done) + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let beat = Beats { every, next: Instant::now() + every };
        let worker = Worker { shared: shared.clone(), disk, slab, done, quiet: [None; 2], beat };
        let thread = std::thread::Builder::new().name("kv-disk".into()).spawn(move || run(worker))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Reads a block into a slot that nobody else touches before the end.
    pub fn read(&self, from: DiskSlot, to: Slot, hash: SequenceHash) {
        self.shared.queue.lock().reads.push_back(Job::Read { from, to, hash });
        self.shared.wake.notify_one();
    }

    /// Writes a block from a slot that nobody changes before the end.
    pub fn write(&self, from: Slot, to: DiskSlot, block: CachedBlock) {
        self.push(Job::Write { from, to, block });
    }

    /// Forgets what is at a place.
    pub fn erase(&self, slot: DiskSlot) {
        self.push(Job::Erase(slot));
    }

    fn push(&self, job: Job) {
        self.shared.queue.lock().others.push_back(job);
        self.shared.wake.notify_one();
    }
}

impl Drop for DiskThread {
    fn drop(&mut self) {
        let until = Instant::now() + STOP;
        let mut queue = self.shared.queue.lock();
        queue.closed = true;
        self.shared.wake.notify_one();
        while !queue.ended {
            if self.shared.ended.wait_until(&mut queue, until).timed_out() {
                tracing::warn!(limit_s = STOP.as_secs(), "the disk does not answer; its thread is left behind");
                return;
            }
        }
        drop(queue);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the disk's thread panicked while it ended");
        }
    }
}

struct Worker<F> {
    shared: Arc<Shared>,
    disk: Disk,
    slab: Arc<Slab>,
    done: F,
    /// Until when failures are not logged: of writes, of reads.
    quiet: [Option<Instant>; 2],
    beat: Beats,
}

/// When the heart beats.
struct Beats {
    every: Duration,
    next: Instant,
}

/// Tells that the thread has ended, however it does, after the files are closed.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.queue.lock().ended = true;
        self.0.ended.notify_all();
    }
}

/// The thread.
fn run<F: Fn(Done)>(mut worker: Worker<F>) {
    // Dropped last: the files are closed, and the directory is free, before anybody is told.
    let _end = End(worker.shared.clone());
    let worked = catch_unwind(AssertUnwindSafe(|| {
        while let Some(job) = worker.next() {
            worker.work(job)?;
        }
        Ok(())
    }));
    let why = match worked {
        Ok(Ok(())) => None,
        Ok(Err(Taken)) => Some("another worker has taken the directory of the disk cache"),
        Err(_) => Some("the disk's thread failed"),
    };
    if let Some(why) = why {
        tracing::error!(why, "KV blocks are neither written to disk nor read from it any more");
        (worker.done)(Done::Stopped);
    }
    drop(worker);
}

impl<F: Fn(Done)> Worker<F> {
    fn next(&mut self) -> Option<Job> {
        let mut queue = self.shared.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            // Not behind others: a disk with much to do is nobody's sign of death.
            if Instant::now() >= self.beat.next {
                self.beat.next = Instant::now() + self.beat.every;
                return Some(Job::Beat);
            }
            if let Some(job) = queue.reads.pop_front() {
                return Some(job);
            }
            if let Some(job) = queue.others.pop_front() {
                return Some(job);
            }
            self.shared.wake.wait_until(&mut queue, self.beat.next);
        }
    }

    fn work(&mut self, job: Job) -> Result<(), Taken> {
        match job {
            Job::Beat => match self.disk.beat() {
                Ok(true) => {}
                Ok(false) => return Err(Taken),
                Err(error) => drop(self.write_failed(&error)),
            },
            Job::Read { from, to, hash } => {
                // SAFETY: the catalog gave this slot to this read alone, and uses it again only after `done`.
                let outcome = self.disk.read(from, hash, unsafe { self.slab.slot_mut(to) });
                if let Err(fault) = outcome
                    && self.speaks(1)
                {
                    tracing::warn!(
                        ?fault,
                        place = from.0,
                        "a KV block on disk cannot be used; its tokens are computed"
                    );
                }
                (self.done)(Done::Read { hash, outcome });
            }
            Job::Write { from, to, block } => {
                // SAFETY: the catalog leaves the slot as it is until `done`.
                let written = self.disk.write(to, block, unsafe { self.slab.slot(from) });
                let outcome = written.map_err(|error| self.write_failed(&error));
                (self.done)(Done::Written { hash: block.hash, outcome });
            }
            Job::Erase(slot) => {
                if let Err(error) = self.disk.erase(slot) {
                    self.write_failed(&error);
                }
            }
        }
        Ok(())
    }

    fn write_failed(&mut self, error: &std::io::Error) -> WriteFault {
        let fault = write_fault(error);
        if self.speaks(0) {
            match fault {
                WriteFault::Full => {
                    tracing::warn!(%error, "the disk tier is full; it goes on with the room that it has")
                }
                WriteFault::Failed => tracing::warn!(%error, "a KV block was not written to disk"),
            }
        }
        fault
    }

    /// Whether a failure of this kind is logged.
    fn speaks(&mut self, kind: usize) -> bool {
        let now = Instant::now();
        let speaks = self.quiet[kind].is_none_or(|until| until <= now);
        if speaks {
            self.quiet[kind] = Some(now + LOG_EVERY);
        }
        speaks
    }
}
