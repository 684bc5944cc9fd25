//! The router's KV index: which worker holds which prefix, from the workers' events and, where asked for, from guesses.
//!
//! Requests read it inline and take no lock. Writes go to event threads over bounded queues; those of one worker always to
//! the same thread, so that they stay in order: what is sent for a worker after it was removed is void. One thread owns the
//! writing side alone; several take turns at it, batch by batch. `config` has the flags.

pub mod config;
mod hits;
mod thread;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_hashing::BlockHash;
use kv_index::predicted::{self, Predictor};
use kv_index::tree::{self, Reader, Writer};
use kv_index::{EngineHash, KvEvent, Overlaps, Tier, TierBlocks, WorkerId, WorkerRank};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::metrics::{CoreMetrics, ReasonLabels};
use config::IndexSettings;
use hits::HitWatch;
use thread::Job;

/// Jobs that wait for one event thread. A worker has one batch of events under way at most, so this is room for guesses.
const QUEUE: usize = 4096;

/// What a batch of events did to the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Blocks that continue blocks which are not known: an event was lost.
    pub(crate) orphans: usize,
    /// Events of which blocks were refused, because their rank is full.
    pub(crate) refused: u64,
}

/// One block of a rank, as its engine names it.
pub(crate) type Block = (Tier, EngineHash);

/// A look at what one rank holds, to be compared with its worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Look {
    /// For each block that was asked for: whether it is held.
    pub(crate) held: Vec<bool>,
    /// Blocks that are held, at random.
    pub(crate) drawn: Vec<Block>,
    /// Blocks of the rank were dropped for want of memory: what is missing is no mistake.
    pub(crate) evicted: bool,
}

/// The index. Its threads end with it.
pub(crate) struct Indexer {
    told: Reader,
    /// Present where guesses count.
    guessed: Option<Reader>,
    events: bool,
    threads: Vec<mpsc::Sender<Job>>,
    hits: HitWatch,
    check_every: Duration,
    metrics: Arc<CoreMetrics>,
}

/// The writing sides, shared by the event threads.
struct Writers {
    told: Mutex<Writer>,
    guessed: Option<Mutex<Predictor>>,
    /// Where the time of guesses begins.
    origin: Instant,
    metrics: Arc<CoreMetrics>,
}

impl Indexer {
    /// Starts the event threads.
    pub(crate) fn start(settings: &IndexSettings, metrics: Arc<CoreMetrics>) -> Self {
        let (told, reader) = tree::new(settings.limits);
        let (predictor, guesses) = settings.guesses.map(|policy| predicted::new(policy, settings.limits)).unzip();
        let guessed = predictor.map(Mutex::new);
        let writers = Writers { told: Mutex::new(told), guessed, origin: Instant::now(), metrics: metrics.clone() };
        let writers = Arc::new(writers);
        let threads = (0..settings.threads.get()).map(|number| {
            let (jobs, queue) = mpsc::channel(QUEUE);
            thread::start(number, writers.clone(), queue).expect("at its start a process may have a few threads");
            jobs
        });
        let (threads, hits) = (threads.collect(), HitWatch::new());
        let IndexSettings { events, check_every, .. } = *settings;
        Self { told: reader, guessed: guesses, events, threads, hits, check_every, metrics }
    }

    /// Leading blocks of a prompt on each rank; of what is told and what is guessed, the larger counts. Shapes: `blocks` are
    /// the local hashes of the prompt's full blocks. Cost: about 1 µs for a hundred blocks.
    pub(crate) fn overlaps(&self, blocks: &[BlockHash]) -> Overlaps {
        match (&self.guessed, self.events) {
            (None, _) => self.told.find_matches(blocks),
            (Some(guessed), false) => guessed.find_matches(blocks),
            (Some(guessed), true) => larger(&self.told.find_matches(blocks), &guessed.find_matches(blocks)),
        }
    }

    /// Whether a rank holds this prefix, as its events say.
    pub(crate) fn holds(&self, rank: WorkerRank, prefix: &[BlockHash]) -> bool {
        self.told.holds(rank, prefix)
    }

    /// Blocks of one rank, as its events say.
    pub(crate) fn blocks(&self, rank: WorkerRank) -> TierBlocks {
        self.told.blocks(rank)
    }

    /// How often each worker is asked whether the index is right about it.
    pub(crate) fn check_every(&self) -> Duration {
        self.check_every
    }

    /// A request with these blocks was decided, of which the index knew `held`. When prompts begin like earlier ones for long, and
    /// events never tell of any, somebody is told. It must go to a worker that publishes some.
    pub(crate) fn matched(&self, blocks: &[BlockHash], held: &Overlaps) {
        self.matched_at(self.metrics.started.elapsed(), blocks, held);
    }

    fn matched_at(&self, now: Duration, blocks: &[BlockHash], held: &Overlaps) {
        let Some(first) = blocks.first().filter(|_| self.events) else { return };
        // What is guessed must not hide that nothing is told.
        let told = || self.guessed.is_none() || self.told.find_matches(&blocks[..1]).iter().len() > 0;
        let found = held.iter().len() > 0 && told();
        match self.hits.matched(*first, found, now) {
            Some(true) => {
                self.metrics.index_no_hits.set(1);
                tracing::warn!(
                    "prompts begin like earlier ones, but KV events of no worker tell of any of their blocks"
                );
            }
            Some(false) => {
                self.metrics.index_no_hits.set(0);
                tracing::info!("KV events tell of the prompts' blocks again");
            }
            None => {}
        }
    }

    /// Whether prompts share prefixes and nothing is ever found.
    pub(crate) fn finds_nothing(&self) -> bool {
        self.hits.none()
    }

    /// Looks at what a rank holds, after everything that was applied before: which of `blocks`, and `draw` others at random.
    /// Nothing once `life` has ended.
    pub(crate) async fn look(
        &self,
        rank: WorkerRank,
        blocks: Vec<Block>,
        draw: usize,
        life: &CancellationToken,
    ) -> Option<Look> {
        let (done, look) = oneshot::channel();
        self.send(rank.worker, Job::Look { rank, blocks, draw, life: life.clone(), done }).await;
        look.await.ok()
    }

    /// A request with these blocks goes to `rank`: where guesses count, it is taken to hold them from now on. Never waits: a
    /// guess that finds its thread's queue full is dropped and counted.
    pub(crate) fn routed(&self, rank: WorkerRank, blocks: &[BlockHash]) {
        if self.guessed.is_none() || blocks.is_empty() {
            return;
        }
        let guess = Job::Guess { rank, blocks: blocks.into() };
        if self.thread(rank.worker).try_send(guess).is_err() {
            self.metrics.events_refused.get_or_create(&ReasonLabels { reason: "guesses wait" }).inc();
        }
    }

    /// What a worker says of its capacity: `expected` blocks on each rank size its tables, `limit` bounds what it may store.
    pub(crate) async fn expect(
        &self,
        rank: WorkerRank,
        expected: Option<usize>,
        limit: usize,
        life: &CancellationToken,
    ) {
        self.send(rank.worker, Job::Expect { rank, expected, limit, life: life.clone() }).await;
    }

    /// Announces how many blocks each of a worker's ranks has room for, if it says: its tables get that size, and no more is guessed of
    /// it. What events may store is bounded by [`kv_index::MAX_RANK_BLOCKS`] alone. To be said again after the worker was forgotten.
    pub(crate) async fn expect_worker(
        &self,
        worker: WorkerId,
        ranks: u32,
        blocks: Option<u64>,
        life: &CancellationToken,
    ) {
        let Some(blocks) = blocks else { return };
        let expected = usize::try_from(blocks).unwrap_or(usize::MAX);
        for dp_rank in 0..ranks {
            self.expect(WorkerRank { worker, dp_rank }, Some(expected), kv_index::MAX_RANK_BLOCKS, life).await;
        }
    }

    /// Applies events of one rank, unless `life` has ended by then.
    pub(crate) async fn apply(&self, rank: WorkerRank, events: Vec<KvEvent>, life: &CancellationToken) -> Outcome {
        let (done, outcome) = oneshot::channel();
        self.send(rank.worker, Job::Apply { rank, events, life: life.clone(), done }).await;
        // A thread that is gone has been reported by `send`.
        outcome.await.unwrap_or_default()
    }

    /// Forgets a worker. What its feeds send afterwards is void once their lives were ended before this call.
    pub(crate) async fn remove_worker(&self, worker: WorkerId) {
        let (done, removed) = oneshot::channel();
        self.send(worker, Job::Remove { worker, done }).await;
        // As above.
        let _ = removed.await;
    }

    fn thread(&self, worker: WorkerId) -> &mpsc::Sender<Job> {
        &self.threads[(worker.0 % self.threads.len() as u64) as usize]
    }

    async fn send(&self, worker: WorkerId, job: Job) {
        let jobs = self.thread(worker);
        self.metrics.index_queue.set((jobs.max_capacity() - jobs.capacity()) as i64);
        if jobs.send(job).await.is_err() {
            tracing::error!(
                worker = worker.0,
                "an event thread has ended: the index does not follow this worker any more"
            );
        }
    }
}

/// For each rank the better of two answers; nothing is guessed of pools.
fn larger(a: &Overlaps, b: &Overlaps) -> Overlaps {
    let mut best: std::collections::BTreeMap<WorkerRank, TierBlocks> = a.iter().collect();
    for (rank, blocks) in b.iter() {
        let kept = best.entry(rank).or_default();
        if blocks.total() > kept.total() {
            *kept = blocks;
        }
    }
    Overlaps::new(best, a.pooled().to_vec())
}

#[cfg(test)]
mod tests;
