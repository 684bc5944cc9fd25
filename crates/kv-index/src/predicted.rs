//! What a router guesses without events: a worker that was sent a prompt holds its blocks, for a while.
//!
//! A tree of its own, fed with sequence hashes as engine hashes. What is predicted again lives on; the rest ends by age, or,
//! when a rank would hold more than it can or memory is short, with the least recently predicted. The caller brings the time.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kv_hashing::{BlockHash, sequence_hashes};

use crate::event::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use crate::overlap::Applied;
use crate::runs::{RunId, Runs};
use crate::tree::{self, Limits, Reader, Stats, Writer};

/// When a predicted block ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// This long after the last prediction that named it, or when its rank is full.
    Ttl(Duration),
    /// When its rank is full and all others were predicted later.
    Lru,
}

/// Share of the memory that is for what lies beside the tree, as a divisor: a block takes about 25 bytes there and 8 here, and a short
/// prompt as much here as there.
const BESIDE: usize = 3;

/// Predictions queued for each block held, at most, before stale ones are sorted out.
const STALE: usize = 4;

/// Queue lengths below this are not worth sorting out.
const SHORT: usize = 1024;

/// Room for so many predictions is not worth giving back.
const FEW: usize = 16;

/// One request that was predicted to leave its blocks.
#[derive(Debug)]
struct Prediction {
    number: u64,
    at: Duration,
    /// Where its blocks end.
    last: RunId,
}

/// The predictions of one rank.
#[derive(Debug, Default)]
struct Lane {
    capacity: usize,
    /// Oldest first.
    queue: VecDeque<Prediction>,
    /// The blocks held, with the number, from 1, of the newest prediction that names them. Whatever names a block names those before it, so
    /// numbers never rise along a sequence.
    newest: Runs<u64>,
    /// The most that all of it takes, as it was last counted.
    weight: usize,
}

/// Predicts; matches are found through the [`Reader`] that came with it.
#[derive(Debug)]
pub struct Predictor {
    tree: Writer,
    ttl: Option<Duration>,
    capacity: usize,
    lanes: BTreeMap<WorkerRank, Lane>,
    /// The most that all lanes may take, in bytes,
    budget: usize,
    /// and do.
    weight: usize,
    predictions: u64,
}

/// An empty index of predictions, which takes `limits.bytes` at most, and for a moment what one more prompt takes.
pub fn new(policy: Policy, limits: Limits) -> (Predictor, Reader) {
    let budget = limits.bytes / BESIDE;
    let (tree, reader) = tree::new(Limits { bytes: limits.bytes - budget, ..limits });
    let ttl = match policy {
        Policy::Ttl(ttl) => Some(ttl),
        Policy::Lru => None,
    };
    let capacity = limits.rank_blocks;
    (Predictor { tree, ttl, capacity, lanes: BTreeMap::new(), budget, weight: 0, predictions: 0 }, reader)
}

impl Predictor {
    /// Bounds the blocks of a rank: to what its worker has room for.
    pub fn set_capacity(&mut self, rank: WorkerRank, blocks: usize) {
        self.lane(rank).capacity = blocks;
        self.tree.set_limit(rank, blocks);
        self.shrink(rank);
        self.weigh(rank);
    }

    /// A prompt with these local hashes goes to `rank`, which will hold its blocks; of more than its capacity, the first. Where memory
    /// is short, what was predicted first is dropped, of whatever rank. Cost: that of storing them in the tree, and
    /// [`Runs::insert`]; for each prediction that is dropped a look at each rank.
    pub fn predict(&mut self, rank: WorkerRank, blocks: &[BlockHash], now: Duration) -> Applied {
        self.predictions += 1;
        let number = self.predictions;
        let lane = self.lane(rank);
        let blocks = &blocks[..blocks.len().min(lane.capacity)];
        let sequences = sequence_hashes(blocks);
        // They are the newest now, so that making room does not take them.
        let last = lane.newest.insert(&sequences, |newest, _| *newest = number);
        lane.queue.extend(last.map(|last| Prediction { number, at: now, last }));
        self.shrink(rank);
        let run = sequences.iter().zip(blocks);
        let blocks = run.map(|(sequence, local)| StoredBlock { engine: EngineHash(sequence.0), local: *local });
        let data = KvEventData::Stored { parent: None, blocks: blocks.collect() };
        let applied = self.tree.apply(rank, Tier::Device, &data);
        self.weigh(rank);
        self.keep_budget();
        applied
    }

    /// Ends what is too old; returns how many blocks.
    pub fn expire(&mut self, now: Duration) -> usize {
        let Some(ttl) = self.ttl else { return 0 };
        let mut removed = 0;
        let Self { tree, lanes, weight, .. } = self;
        for (&rank, lane) in lanes {
            let had = lane.queue.len();
            while lane.queue.front().is_some_and(|oldest| oldest.at + ttl <= now) {
                removed += drop_oldest(tree, rank, lane, usize::MAX);
            }
            if lane.queue.len() < had {
                lane.weigh(weight);
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
        for (_, lane) in self.lanes.extract_if(.., |rank, _| rank.worker == worker) {
            self.weight -= lane.weight;
        }
        self.tree.remove_worker(worker)
    }

    /// Forgets what one rank was predicted to hold.
    pub fn remove_rank(&mut self, rank: WorkerRank) -> usize {
        if let Some(lane) = self.lanes.get_mut(&rank) {
            (lane.queue, lane.newest) = Default::default();
        }
        self.weigh(rank);
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
        self.lanes.entry(rank).or_insert_with(|| Lane { capacity, ..Lane::default() })
    }

    /// Counts a rank anew.
    fn weigh(&mut self, rank: WorkerRank) {
        if let Some(lane) = self.lanes.get_mut(&rank) {
            lane.weigh(&mut self.weight);
        }
    }

    /// Drops what was predicted first while lanes take more than they may; the tree keeps to its own share.
    fn keep_budget(&mut self) {
        while self.weight > self.budget {
            let fronts = self.lanes.iter_mut().filter(|(_, lane)| !lane.queue.is_empty());
            let Some((&rank, lane)) = fronts.min_by_key(|(_, lane)| lane.queue.front().map(|oldest| oldest.number))
            else {
                return;
            };
            drop_oldest(&mut self.tree, rank, lane, usize::MAX);
            lane.weigh(&mut self.weight);
        }
    }

    /// Makes a rank hold no more than it may.
    fn shrink(&mut self, rank: WorkerRank) {
        let Some(lane) = self.lanes.get_mut(&rank) else { return };
        while lane.newest.blocks() > lane.capacity && !lane.queue.is_empty() {
            let excess = lane.newest.blocks() - lane.capacity;
            drop_oldest(&mut self.tree, rank, lane, excess);
        }
        if lane.queue.len() > STALE * lane.newest.blocks().max(SHORT) {
            lane.sort_out();
        }
    }
}

impl Lane {
    fn bytes(&self) -> usize {
        self.newest.bytes() + self.queue.capacity() * size_of::<Prediction>()
    }

    /// Counts it anew, in `total` too, and gives back what it has much more than it uses, so that it never takes more than that.
    fn weigh(&mut self, total: &mut usize) {
        let Self { queue, newest, .. } = self;
        if queue.is_empty() && newest.blocks() == 0 {
            (*queue, *newest) = Default::default();
        } else if queue.capacity() > 2 * queue.len() + FEW {
            queue.shrink_to_fit();
        }
        if newest.bytes() > newest.weight() {
            let name = newest.compact();
            queue.retain_mut(|prediction| {
                // The blocks of one whose run has ended were all named since.
                name(prediction.last).inspect(|last| prediction.last = *last).is_some()
            });
        }
        let weight = match queue.is_empty() {
            true => 0,
            false => newest.weight() + (2 * queue.len() + FEW) * size_of::<Prediction>(),
        };
        *total = *total + weight - self.weight;
        self.weight = weight;
    }

    /// Keeps the predictions that some block was not named after.
    fn sort_out(&mut self) {
        let Self { queue, newest, .. } = self;
        queue.retain(|prediction| *newest.get(prediction.last).0 == prediction.number);
    }
}

/// Drops the end of the oldest prediction, at most `most` blocks that no later one names; returns how many.
fn drop_oldest(tree: &mut Writer, rank: WorkerRank, lane: &mut Lane, most: usize) -> usize {
    let Some(oldest) = lane.queue.front_mut() else { return 0 };
    let mut gone = Vec::new();
    let ended = loop {
        let (newest, blocks) = lane.newest.get(oldest.last);
        if *newest != oldest.number {
            break true;
        }
        if gone.len() == most {
            break false;
        }
        // Nothing follows the run: it would be of an older prediction, and those have been dropped.
        let keep = blocks.len().saturating_sub(most - gone.len());
        let (dropped, before) = lane.newest.shorten(oldest.last, keep);
        gone.extend(dropped.iter().rev().map(|sequence| EngineHash(sequence.0)));
        match before {
            Some(before) => oldest.last = before,
            None if keep == 0 => break true,
            None => {}
        }
    };
    if ended {
        lane.queue.pop_front();
    }
    let dropped = gone.len();
    if dropped > 0 {
        tree.apply(rank, Tier::Device, &KvEventData::Removed { blocks: gone });
    }
    dropped
}
