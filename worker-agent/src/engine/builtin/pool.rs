//! The pool of KV blocks: who holds which block, which blocks can be reused, and which goes when memory is short.
//!
//! Owns reference counts, the cache of full blocks by sequence hash, the order of eviction and the events that say what
//! happened. What it evicts goes to the tiers below ([`Catalog`]), and comes back from there. It never sees KV data or a
//! request.
//!
//! *Invariant:* a cached block's parent is cached too. A sequence holds every block before the ones it computes, equal
//! blocks are shared as soon as they are full, and a table is released from its tail, so children are evicted first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use kv_hashing::{BlockHash, SequenceHash};
use kv_index::Tier;

use super::BlockId;
use super::tiers::catalog::{Catalog, Found, TierUsage};
use super::tiers::{CachedBlock, Done, Move};
use crate::engine::ArenaEvent;

mod log;
#[cfg(test)]
mod tests;

pub use log::EventLog;

/// Fewer blocks can be had than were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no free KV block, and every cached one is in use")]
pub struct Exhausted;

/// How much of a prompt is cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// Leading blocks that are cached.
    pub blocks: usize,
    /// Those of them that nobody holds: reusing them takes them from [`BlockPool::available`].
    pub idle: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// Tables that list the block.
    refs: u32,
    /// The content it can be reused for.
    cached: Option<CachedBlock>,
    /// Its key in `idle`, while it is there.
    idle_since: u64,
}

/// The blocks of one arena. Every operation is O(log blocks) or better.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Neither held nor cached.
    free: Vec<BlockId>,
    cached: HashMap<SequenceHash, BlockId>,
    /// Cached and held by nobody, least recently used first.
    idle: BTreeMap<u64, BlockId>,
    /// Counts releases; the clock of `idle`.
    now: u64,
    /// Evicted by the allocation under way.
    evicted: Vec<(BlockId, CachedBlock)>,
    tiers: Catalog,
    log: EventLog,
}

impl BlockPool {
    /// A pool of `total` free blocks, numbered from 0.
    ///
    /// # Panics
    /// When `total` does not fit a [`BlockId`].
    pub fn new(total: usize) -> Self {
        Self::with_tiers(total, Catalog::none())
    }

    /// As [`Self::new`], with tiers below the arena.
    ///
    /// # Panics
    /// When `total` does not fit a [`BlockId`].
    pub fn with_tiers(total: usize, mut tiers: Catalog) -> Self {
        let mut log = EventLog::default();
        tiers.tell_disk(&mut log);
        let total = u32::try_from(total).expect("block ids are 32 bits wide");
        Self {
            blocks: vec![Block::default(); total as usize],
            free: (0..total).rev().map(BlockId).collect(),
            cached: HashMap::new(),
            idle: BTreeMap::new(),
            now: 0,
            evicted: Vec::new(),
            tiers,
            log,
        }
    }

    /// Blocks in the arena.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that [`Self::allocate`] can give now: free ones and cached ones that nobody holds.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that somebody holds.
    pub fn active(&self) -> usize {
        self.total() - self.available()
    }

    /// Blocks that are held or cached.
    pub fn used(&self) -> usize {
        self.total() - self.free.len()
    }

    /// The longest cached prefix of a sequence with these hashes.
    pub fn prefix(&self, hashes: impl Iterator<Item = SequenceHash>) -> Prefix {
        let mut prefix = Prefix::default();
        for block in hashes.map_while(|hash| self.cached.get(&hash)) {
            prefix.blocks += 1;
            prefix.idle += usize::from(self.block(*block).refs == 0);
        }
        prefix
    }

    /// Holds the block cached under `hash`. A caller that takes a child holds its parents.
    pub fn acquire(&mut self, hash: SequenceHash) -> Option<BlockId> {
        let id = *self.cached.get(&hash)?;
        let block = &mut self.blocks[id.0 as usize];
        if block.refs == 0 {
            self.idle.remove(&block.idle_since);
        }
        block.refs += 1;
        Some(id)
    }

    /// Appends `count` blocks of unspecified content to `table`, or none of them. Evicts the least recently used cached
    /// blocks when no free ones are left; these go to the tiers below, by moves that are made before anything is written.
    pub fn allocate(&mut self, count: usize, table: &mut Vec<BlockId>) -> Result<(), Exhausted> {
        if self.available() < count {
            return Err(Exhausted);
        }
        for _ in 0..count {
            let id = match self.free.pop() {
                Some(id) => id,
                None => self.evict().ok_or(Exhausted)?,
            };
            self.blocks[id.0 as usize].refs = 1;
            table.push(id);
        }
        self.tiers.offload(&self.evicted, &mut self.log);
        for (_, block) in self.evicted.drain(..) {
            self.log.removed(Tier::Device, block.hash);
        }
        Ok(())
    }

    /// Makes a full, computed block reusable, and returns the block that the caller's table shall list in its place: the
    /// block itself, or the one that holds the same content already (then `block` is free again).
    ///
    /// The caller holds `block` and the cached block of `parent`.
    pub fn commit(
        &mut self,
        block: BlockId,
        parent: Option<SequenceHash>,
        hash: SequenceHash,
        local: BlockHash,
    ) -> BlockId {
        if let Some(twin) = self.acquire(hash) {
            self.release_one(block);
            return twin;
        }
        debug_assert!(parent.is_none_or(|p| self.cached.contains_key(&p)), "the parent of a cached block is cached");
        self.cached.insert(hash, block);
        let cached = CachedBlock { hash, parent, local };
        self.blocks[block.0 as usize].cached = Some(cached);
        self.log.stored(Tier::Device, parent, cached.stored());
        block
    }

    /// Gives back one table. Cached blocks stay reusable, the tail of the table being the first to be evicted.
    pub fn release(&mut self, table: &[BlockId]) {
        for &block in table.iter().rev() {
            self.release_one(block);
        }
    }

    /// Forgets all cached content, in every tier, for an arena that cannot be trusted any more. Blocks that are held stay so, and
    /// are free once they are released.
    pub fn clear(&mut self) {
        for (_, id) in self.cached.drain() {
            self.blocks[id.0 as usize].cached = None;
        }
        self.free.extend(std::mem::take(&mut self.idle).into_values());
        self.tiers.clear();
        self.log.cleared();
    }

    /// What happened since the last call, in order.
    pub fn take_events(&mut self) -> Vec<ArenaEvent> {
        self.log.take()
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }

    fn release_one(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        debug_assert!(block.refs > 0, "block {id:?} is released more often than it is held");
        block.refs -= 1;
        if block.refs > 0 {
            return;
        }
        if block.cached.is_none() {
            self.free.push(id);
            return;
        }
        self.now += 1;
        block.idle_since = self.now;
        self.idle.insert(self.now, id);
    }

    fn evict(&mut self) -> Option<BlockId> {
        let (_, id) = self.idle.pop_first()?;
        let block = self.blocks[id.0 as usize].cached.take().expect("idle blocks are cached");
        self.cached.remove(&block.hash);
        self.evicted.push((id, block));
        Some(id)
    }
}

/// The tiers below the arena.
impl BlockPool {
    /// Whether there are any.
    pub fn has_tiers(&self) -> bool {
        self.tiers.any()
    }

    /// What is there.
    pub fn tiers(&self) -> TierUsage {
        self.tiers.usage()
    }

    /// The tiers, for sequences that ask for blocks.
    pub fn tiers_mut(&mut self) -> &mut Catalog {
        &mut self.tiers
    }

    /// Whether a block that is not in the arena can be had from below.
    pub fn has_below(&self, hash: SequenceHash) -> bool {
        self.tiers.has(hash)
    }

    /// Whether all these blocks are below, and some of them on disk only.
    pub fn on_disk_here(&self, blocks: impl Iterator<Item = SequenceHash>) -> bool {
        self.tiers.all_below_and_some_on_disk(blocks)
    }

    /// Brings a block that is not cached into `to`, which the caller holds alone and then commits.
    pub fn fetch(&mut self, hash: SequenceHash, to: BlockId) -> Found {
        debug_assert!(!self.cached.contains_key(&hash), "it is in the arena");
        self.tiers.fetch(hash, to)
    }

    /// Time since a fixed moment.
    pub fn tick(&mut self, now: Duration) {
        self.tiers.tick(now);
    }

    /// What has to be done with blocks' bytes before the next step, in order.
    pub fn take_moves(&mut self) -> Vec<Move> {
        self.tiers.take_moves()
    }

    /// A move of the disk has ended.
    pub fn done(&mut self, done: Done) {
        self.tiers.done(done, &mut self.log);
    }
}

#[cfg(test)]
impl BlockPool {
    pub(crate) fn cached_hashes(&self) -> impl Iterator<Item = SequenceHash> {
        self.cached.keys().copied()
    }

    /// Takes a block out of host memory, as if its tier had had no room for it.
    pub(crate) fn lose_from_host(&mut self, hash: SequenceHash) -> bool {
        self.tiers.lose_from_host(hash, &mut self.log)
    }
}
