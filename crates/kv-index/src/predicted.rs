//! What a router guesses without events: a worker that was sent a prompt holds its blocks, for a while.
//!
//! A tree of its own, fed with sequence hashes as engine hashes. What is predicted again lives on; the rest ends by age, or,
//! when a rank would hold more than it can, with the least recently predicted. The caller brings the time.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use kv_hashing::{BlockHash, SequenceHash, sequence_hashes};

use crate::event::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use crate::hash::HashBuilder;
use crate::overlap::Applied;
use crate::tree::{self, Limits, Reader, Stats, Writer};

/// When a predicted block ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// This long after the last prediction that named it, or when its rank is full.
    Ttl(Duration),
    /// When its rank is full and all others were predicted later.
    Lru,
}

/// Hashes queued for each block held, at most, before stale ones are sorted out.
const STALE: usize = 4;

/// Queue lengths below this are not worth sorting out.
const SHORT: usize = 1024;

/// Blocks that one request was predicted to leave.
#[derive(Debug)]
struct Prediction {
    number: u64,
    at: Duration,
    /// In order of the prompt.
    blocks: Vec<SequenceHash>,
}

/// The predictions of one rank.
#[derive(Debug)]
struct Lane {
    capacity: usize,
    /// Oldest first.
    queue: VecDeque<Prediction>,
    /// Hashes in `queue`.
    queued: usize,
    /// The newest prediction that names a block; its keys are the blocks held.
    newest: HashMap<SequenceHash, u64, HashBuilder>,
}

/// Predicts; matches are found through the [`Reader`] that came with it.
#[derive(Debug)]
pub struct Predictor {
    tree: Writer,
    ttl: Option<Duration>,
    capacity: usize,
    lanes: BTreeMap<WorkerRank, Lane>,
    predictions: u64,
}

/// An empty index of predictions.
pub fn new(policy: Policy, limits: Limits) -> (Predictor, Reader) {
    let (tree, reader) = tree::new(limits);
    let ttl = match policy {
        Policy::Ttl(ttl) => Some(ttl),
        Policy::Lru => None,
    };
    (Predictor { tree, ttl, capacity: limits.rank_blocks, lanes: BTreeMap::new(), predictions: 0 }, reader)
}

impl Predictor {
    /// Bounds the blocks of a rank: to what its worker has room for.
    pub fn set_capacity(&mut self, rank: WorkerRank, blocks: usize) {
        self.lane(rank).capacity = blocks;
        self.tree.set_limit(rank, blocks);
        self.shrink(rank);
    }

    /// A prompt with these local hashes goes to `rank`, which will hold its blocks; of more than its capacity, the first. Cost: two
    /// table operations a block.
    pub fn predict(&mut self, rank: WorkerRank, blocks: &[BlockHash], now: Duration) -> Applied {
        let number = self.predictions;
        self.predictions += 1;
        let lane = self.lane(rank);
        let blocks = &blocks[..blocks.len().min(lane.capacity)];
        let sequences = sequence_hashes(blocks);
        // They are the newest now, so that making room does not take them.
        lane.newest.extend(sequences.iter().map(|sequence| (*sequence, number)));
        lane.queued += sequences.len();
        lane.queue.push_back(Prediction { number, at: now, blocks: sequences.clone() });
        self.shrink(rank);
        let run = sequences.iter().zip(blocks);
        let blocks = run.map(|(sequence, local)| StoredBlock { engine: EngineHash(sequence.0), local: *local });
        let data = KvEventData::Stored { parent: None, blocks: blocks.collect() };
        self.tree.apply(rank, Tier::Device, &data)
    }

    /// Ends what is too old; returns how many blocks.
    pub fn expire(&mut self, now: Duration) -> usize {
        let Some(ttl) = self.ttl else { return 0 };
        let mut removed = 0;
        for (&rank, lane) in &mut self.lanes {
            while lane.queue.front().is_some_and(|oldest| oldest.at + ttl <= now) {
                removed += drop_oldest(&mut self.tree, rank, lane, usize::MAX);
            }
        }
        removed
    }

    /// When [`Self::expire`] has something to do next.
    pub fn next_expiry(&self) -> Option<Duration> {
        let ttl = self.ttl?;
        self.lanes.values().filter_map(|lane| lane.queue.front()).map(|oldest| oldest.at + ttl).min()
    }

    /// Forgets every rank of a worker; returns how many blocks it was predicted to hold.
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        self.lanes.retain(|rank, _| rank.worker != worker);
        self.tree.remove_worker(worker)
    }

    /// Forgets what one rank was predicted to hold.
    pub fn remove_rank(&mut self, rank: WorkerRank) -> usize {
        if let Some(lane) = self.lanes.get_mut(&rank) {
            (lane.queue, lane.queued, lane.newest) = Default::default();
        }
        self.tree.remove_rank(rank)
    }

    /// What the tree has; [`Self::bytes`] counts what is beside it, too.
    pub fn stats(&self) -> Stats {
        self.tree.stats()
    }

    /// Memory of all of it: the tree, and what says when each block ends. Cost: a look at each rank.
    pub fn bytes(&self) -> usize {
        self.tree.bytes() + self.lanes.values().map(Lane::bytes).sum::<usize>()
    }

    fn lane(&mut self, rank: WorkerRank) -> &mut Lane {
        let capacity = self.capacity;
        self.lanes.entry(rank).or_insert_with(|| Lane {
            capacity,
            queue: VecDeque::new(),
            queued: 0,
            newest: HashMap::default(),
        })
    }

    /// Makes a rank hold no more than it may.
    fn shrink(&mut self, rank: WorkerRank) {
        let Some(lane) = self.lanes.get_mut(&rank) else { return };
        while lane.newest.len() > lane.capacity {
            let excess = lane.newest.len() - lane.capacity;
            if drop_oldest(&mut self.tree, rank, lane, excess) == 0 && lane.queue.is_empty() {
                break;
            }
        }
        if lane.queued > STALE * lane.newest.len().max(SHORT) {
            lane.sort_out();
        }
    }
}

impl Lane {
    /// A table of hashes and numbers, of which an eighth is always free, with a byte for each place; and the queue.
    fn bytes(&self) -> usize {
        let places = self.newest.capacity() / 7 * 8;
        places * (size_of::<(SequenceHash, u64)>() + 1)
            + self.queue.capacity() * size_of::<Prediction>()
            + self.queued * size_of::<SequenceHash>()
    }

    /// Keeps of each prediction what no later one names.
    fn sort_out(&mut self) {
        let Self { queue, newest, .. } = self;
        for prediction in queue.iter_mut() {
            let number = prediction.number;
            prediction.blocks.retain(|sequence| newest.get(sequence) == Some(&number));
            prediction.blocks.shrink_to_fit();
        }
        queue.retain(|prediction| !prediction.blocks.is_empty());
        self.queued = queue.iter().map(|prediction| prediction.blocks.len()).sum();
    }
}

/// Drops the end of the oldest prediction, at most `most` blocks that no later one names; returns how many.
fn drop_oldest(tree: &mut Writer, rank: WorkerRank, lane: &mut Lane, most: usize) -> usize {
    let Some(mut oldest) = lane.queue.pop_front() else { return 0 };
    let mut gone = Vec::new();
    while gone.len() < most
        && let Some(sequence) = oldest.blocks.pop()
    {
        lane.queued -= 1;
        if lane.newest.get(&sequence) == Some(&oldest.number) {
            lane.newest.remove(&sequence);
            gone.push(EngineHash(sequence.0));
        }
    }
    if !oldest.blocks.is_empty() {
        lane.queue.push_front(oldest);
    }
    let dropped = gone.len();
    if dropped > 0 {
        tree.apply(rank, Tier::Device, &KvEventData::Removed { blocks: gone });
    }
    dropped
}
