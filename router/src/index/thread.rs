//! An event thread: a runtime of its own that takes jobs in order and applies them.

use std::sync::Arc;
use std::time::Duration;

use kv_hashing::BlockHash;
use kv_index::{KvEvent, WorkerId, WorkerRank};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{Block, Look, Outcome, Writers};

/// Work for an event thread.
pub(super) enum Job {
    /// Events of one rank; a batch bounds how long the others wait.
    Apply { rank: WorkerRank, events: Vec<KvEvent>, life: CancellationToken, done: oneshot::Sender<Outcome> },
    /// What a rank may hold, and what it probably will.
    Expect { rank: WorkerRank, expected: Option<usize>, limit: usize, life: CancellationToken },
    /// A request went to a rank.
    Guess { rank: WorkerRank, blocks: Box<[BlockHash]> },
    /// What a rank holds of these blocks, and some others that it holds.
    Look { rank: WorkerRank, blocks: Vec<Block>, draw: usize, life: CancellationToken, done: oneshot::Sender<Look> },
    /// A worker is gone.
    Remove { worker: WorkerId, done: oneshot::Sender<()> },
}

/// How often the first thread ends guesses whose time has passed, and shows how large the index is.
const TICK: Duration = Duration::from_secs(1);

/// Starts one; it ends when nobody can send to it any more.
pub(super) fn start(number: usize, writers: Arc<Writers>, mut queue: mpsc::Receiver<Job>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let run = async move {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                job = queue.recv() => match job {
                    Some(job) => writers.take(job),
                    None => break,
                },
                _ = ticks.tick(), if number == 0 => writers.tick(),
            }
        }
    };
    std::thread::Builder::new().name(format!("kv-events-{number}")).spawn(move || runtime.block_on(run))?;
    Ok(())
}

impl Writers {
    fn take(&self, job: Job) {
        match job {
            Job::Apply { rank, events, life, done } => {
                let outcome = self.apply(rank, &events, &life);
                // The feed may have ended while it waited.
                let _ = done.send(outcome);
            }
            Job::Expect { rank, expected, limit, life } => {
                if !life.is_cancelled() {
                    let mut told = self.told.lock();
                    told.set_limit(rank, limit);
                    if let Some(expected) = expected {
                        told.expect_blocks(rank, expected);
                    }
                    drop(told);
                    if let (Some(guessed), Some(expected)) = (&self.guessed, expected) {
                        guessed.lock().set_capacity(rank, expected);
                    }
                }
            }
            Job::Guess { rank, blocks } => {
                if let Some(guessed) = &self.guessed {
                    guessed.lock().predict(rank, &blocks, self.origin.elapsed());
                }
            }
            Job::Look { rank, blocks, draw, life, done } => {
                if !life.is_cancelled() {
                    let told = self.told.lock();
                    let held = blocks.iter().map(|(tier, engine)| told.contains(rank, *tier, *engine)).collect();
                    let drawn = told.draw(rank, rand::random(), draw);
                    // The feed may have ended while it waited.
                    let _ = done.send(Look { held, drawn, evicted: told.has_evicted(rank) });
                }
            }
            Job::Remove { worker, done } => {
                self.told.lock().remove_worker(worker);
                if let Some(guessed) = &self.guessed {
                    guessed.lock().remove_worker(worker);
                }
                self.tick();
                // Whoever asked may have ended.
                let _ = done.send(());
            }
        }
    }

    fn apply(&self, rank: WorkerRank, events: &[KvEvent], life: &CancellationToken) -> Outcome {
        let mut outcome = Outcome::default();
        if life.is_cancelled() {
            return outcome;
        }
        {
            let mut told = self.told.lock();
            for event in events {
                let applied = told.apply(rank, event.tier, &event.data);
                outcome.orphans += applied.orphans;
                outcome.refused += u64::from(applied.refused > 0);
            }
        }
        outcome
    }

    /// Ends guesses whose time has passed, and shows the size. Cost: a look at each rank.
    fn tick(&self) {
        let metrics = &self.metrics;
        if let Some(guessed) = &self.guessed {
            let mut guessed = guessed.lock();
            guessed.expire(self.origin.elapsed());
            metrics.index_guessed_blocks.set(guessed.stats().distinct_blocks as i64);
            metrics.index_guessed_bytes.set(guessed.bytes() as i64);
        }
        let stats = self.told.lock().stats();
        metrics.index_blocks.set(stats.distinct_blocks as i64);
        metrics.index_bytes.set(stats.bytes as i64);
        metrics.index_evicted_blocks.set(stats.evicted_blocks as i64);
    }
}
