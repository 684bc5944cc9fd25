//! What one worker knows of itself: its own blocks, and its recent events by number.
//!
//! A [`LocalIndexer`] numbers the events of one rank and answers a reader that missed some: with the events themselves
//! while its ring still holds them, else with the whole state. It never matches a request and never forgets a block that
//! the engine still holds.

mod snapshot;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kv_hashing::BlockHash;

use crate::event::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier};
pub use snapshot::Snapshot;

/// Most blocks in one event; longer ones are split before they are numbered, so that any event fits one message and one
/// frame: 4,096 blocks are about 172 KB of msgpack (42 bytes each).
pub const MAX_EVENT_BLOCKS: usize = 4096;

const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared];

/// How much history a ring keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    /// Most events; about 100 bytes each.
    pub events: usize,
    /// Most blocks over all its events; at most 16 bytes each.
    pub blocks: usize,
}

impl Default for RingLimits {
    /// At most 32,768 × 100 B + 262,144 × 16 B = 7.5 MB, and less than that in an engine whose events are short.
    fn default() -> Self {
        Self { events: 32_768, blocks: 262_144 }
    }
}

/// The answer to a reader that missed events.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The events asked for.
    Events {
        /// In order, without a gap.
        events: Vec<Arc<KvEvent>>,
        /// The reader's cursor after them; `None` when it has seen nothing and there is nothing.
        last_id: Option<u64>,
    },
    /// The whole state: the reader drops what it knows of this rank first.
    Dump(Snapshot),
}

/// What is known of a held block beside its engine hash.
#[derive(Clone, Copy, Debug)]
struct Held {
    parent: Option<EngineHash>,
    local: BlockHash,
}

/// The blocks and recent events of one rank.
///
/// Memory: the ring by its [`RingLimits`]; the state 32 bytes of entry for each block that the engine holds (48 to 75 with
/// the table's slack), which the engine's own arena bounds. An engine that stores the same block twice holds it once.
#[derive(Debug)]
pub struct LocalIndexer {
    dp_rank: u32,
    next_id: u64,
    ring: VecDeque<Arc<KvEvent>>,
    ring_blocks: usize,
    limits: RingLimits,
    /// By tier, in the order of [`Tier`].
    tiers: [HashMap<EngineHash, Held>; 4],
}

impl LocalIndexer {
    /// An empty index of one rank; its first event will be number 0.
    pub fn new(dp_rank: u32, limits: RingLimits) -> Self {
        let (ring, tiers) = (VecDeque::new(), Default::default());
        Self { dp_rank, next_id: 0, ring, ring_blocks: 0, limits, tiers }
    }

    /// The rank whose events these are.
    pub fn dp_rank(&self) -> u32 {
        self.dp_rank
    }

    /// Number of the newest event; `None` before the first.
    pub fn last_id(&self) -> Option<u64> {
        self.next_id.checked_sub(1)
    }

    /// Blocks held, over all tiers.
    pub fn blocks(&self) -> usize {
        self.tiers.iter().map(HashMap::len).sum()
    }

    /// Takes in what happened in the arena; returns it as numbered events: none for an event without blocks, several for
    /// one of more than [`MAX_EVENT_BLOCKS`]. Cost: one table operation a block.
    pub fn apply(&mut self, tier: Tier, data: KvEventData) -> Vec<Arc<KvEvent>> {
        match data {
            KvEventData::Stored { parent, blocks } if blocks.len() > MAX_EVENT_BLOCKS => {
                let mut parent = parent;
                let mut runs = Vec::new();
                for run in blocks.chunks(MAX_EVENT_BLOCKS) {
                    runs.push(self.record(tier, KvEventData::Stored { parent, blocks: run.to_vec() }));
                    parent = run.last().map(|block| block.engine);
                }
                runs
            }
            KvEventData::Removed { blocks } if blocks.len() > MAX_EVENT_BLOCKS => {
                let parts = blocks.chunks(MAX_EVENT_BLOCKS);
                parts.map(|part| self.record(tier, KvEventData::Removed { blocks: part.to_vec() })).collect()
            }
            data if data != KvEventData::Cleared && blocks_of(&data) == 0 => Vec::new(),
            data => vec![self.record(tier, data)],
        }
    }

    /// Whether this very block is held.
    pub fn holds(&self, tier: Tier, engine: EngineHash) -> bool {
        self.tiers[tier as usize].contains_key(&engine)
    }

    /// Blocks that are held, from a place on that `seed` chooses: at most `most`, all different. The tables' order is random, so
    /// neighbours have nothing to do with each other. Cost: a walk of about 1 ns for each block that is held.
    pub fn draw(&self, seed: u64, most: usize) -> Vec<(Tier, EngineHash)> {
        let all =
            || TIERS.into_iter().zip(&self.tiers).flat_map(|(tier, held)| held.keys().map(move |key| (tier, *key)));
        let blocks = self.blocks();
        let start = ((u128::from(seed) * blocks as u128) >> 64) as usize;
        all().skip(start).chain(all()).take(most.min(blocks)).collect()
    }

    /// What a reader needs that wants the events from `start` to `end`, inclusive, or up to now without `end`.
    ///
    /// A `start` beyond the next event is the cursor of another life of this worker, and is answered with a dump, too.
    /// Cost: one reference count an event; a copy of the state for a dump.
    pub fn range(&self, start: u64, end: Option<u64>) -> Answer {
        let oldest = self.next_id - self.ring.len() as u64;
        if start < oldest || start > self.next_id {
            return Answer::Dump(self.dump());
        }
        let end = end.map_or(self.next_id, |end| end.saturating_add(1).clamp(start, self.next_id));
        let events: Vec<_> = self.ring.range((start - oldest) as usize..(end - oldest) as usize).cloned().collect();
        Answer::Events { events, last_id: end.checked_sub(1) }
    }

    /// The whole state. Cost: a copy of 40 bytes a block; the rest of the work is [`Snapshot::into_events`].
    pub fn dump(&self) -> Snapshot {
        let mut blocks = Vec::with_capacity(self.blocks());
        for (tier, held) in TIERS.into_iter().zip(&self.tiers) {
            blocks.extend(held.iter().map(|(&engine, held)| snapshot::Entry {
                tier,
                block: StoredBlock { engine, local: held.local },
                parent: held.parent,
            }));
        }
        Snapshot::new(self.dp_rank, self.last_id(), blocks)
    }

    fn record(&mut self, tier: Tier, data: KvEventData) -> Arc<KvEvent> {
        self.update_state(tier, &data);
        self.ring_blocks += blocks_of(&data);
        let event = Arc::new(KvEvent { id: self.next_id, dp_rank: self.dp_rank, tier, data });
        self.next_id += 1;
        self.ring.push_back(event.clone());
        while self.ring.len() > self.limits.events || self.ring_blocks > self.limits.blocks {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.ring_blocks -= blocks_of(&oldest.data);
        }
        event
    }

    fn update_state(&mut self, tier: Tier, data: &KvEventData) {
        let held = &mut self.tiers[tier as usize];
        match data {
            KvEventData::Stored { parent, blocks } => {
                let mut parent = *parent;
                for block in blocks {
                    held.insert(block.engine, Held { parent, local: block.local });
                    parent = Some(block.engine);
                }
            }
            KvEventData::Removed { blocks } => {
                for engine in blocks {
                    held.remove(engine);
                }
            }
            KvEventData::Cleared => self.tiers = Default::default(),
        }
    }
}

fn blocks_of(data: &KvEventData) -> usize {
    match data {
        KvEventData::Stored { blocks, .. } => blocks.len(),
        KvEventData::Removed { blocks } => blocks.len(),
        KvEventData::Cleared => 0,
    }
}
