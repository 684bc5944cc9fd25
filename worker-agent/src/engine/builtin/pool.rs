//! The pool of KV blocks: who holds which block, which blocks can be reused, and which goes when memory is short.
//!
//! Owns reference counts, the cache of full blocks by sequence hash, the order of eviction and the events that say what
//! happened. It never sees KV data or a request.
//!
//! *Invariant:* a cached block's parent is cached too. A sequence holds every block before the ones it computes, equal
//! blocks are shared as soon as they are full, and a table is released from its tail, so children are evicted first.

use std::collections::{BTreeMap, HashMap};

use kv_hashing::{BlockHash, SequenceHash};
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier};

use super::BlockId;
use crate::engine::ArenaEvent;

#[cfg(test)]
mod tests;

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
    cached: Option<SequenceHash>,
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
    events: Vec<ArenaEvent>,
}

impl BlockPool {
    /// A pool of `total` free blocks, numbered from 0.
    ///
    /// # Panics
    /// When `total` does not fit a [`BlockId`].
    pub fn new(total: usize) -> Self {
        let total = u32::try_from(total).expect("block ids are 32 bits wide");
        Self {
            blocks: vec![Block::default(); total as usize],
            free: (0..total).rev().map(BlockId).collect(),
            cached: HashMap::new(),
            idle: BTreeMap::new(),
            now: 0,
            events: Vec::new(),
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
    /// blocks when no free ones are left.
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
        self.blocks[block.0 as usize].cached = Some(hash);
        self.record_stored(parent, StoredBlock { engine: EngineHash(hash.0), local });
        block
    }

    /// Gives back one table. Cached blocks stay reusable, the tail of the table being the first to be evicted.
    pub fn release(&mut self, table: &[BlockId]) {
        for &block in table.iter().rev() {
            self.release_one(block);
        }
    }

    /// Forgets all cached content, for an arena that cannot be trusted any more. Blocks that are held stay so, and are free
    /// once they are released.
    pub fn clear(&mut self) {
        for (_, id) in self.cached.drain() {
            self.blocks[id.0 as usize].cached = None;
        }
        self.free.extend(std::mem::take(&mut self.idle).into_values());
        self.events.push(ArenaEvent { tier: Tier::Device, data: KvEventData::Cleared });
    }

    /// What happened since the last call, in order.
    pub fn take_events(&mut self) -> Vec<ArenaEvent> {
        std::mem::take(&mut self.events)
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
        let hash = self.blocks[id.0 as usize].cached.take().expect("idle blocks are cached");
        self.cached.remove(&hash);
        let gone = EngineHash(hash.0);
        match self.events.last_mut() {
            Some(ArenaEvent { data: KvEventData::Removed { blocks }, .. }) => blocks.push(gone),
            _ => self.events.push(ArenaEvent { tier: Tier::Device, data: KvEventData::Removed { blocks: vec![gone] } }),
        }
        Some(id)
    }

    /// Extends the last event when `block` continues its run.
    fn record_stored(&mut self, parent: Option<SequenceHash>, block: StoredBlock) {
        let parent = parent.map(|hash| EngineHash(hash.0));
        if let Some(ArenaEvent { data: KvEventData::Stored { blocks, .. }, .. }) = self.events.last_mut()
            && parent.is_some()
            && blocks.last().map(|last| last.engine) == parent
        {
            blocks.push(block);
            return;
        }
        let data = KvEventData::Stored { parent, blocks: vec![block] };
        self.events.push(ArenaEvent { tier: Tier::Device, data });
    }
}
