//! Room in the arena for blocks that are on their way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kv_hashing::{BlockHash, SequenceHash};

use crate::engine::builtin::BlockId;
use crate::engine::builtin::arena::KvArena;
use crate::engine::builtin::service::inbox::{Errand, Shared};

/// A prefix of a sequence: its first blocks are here and held, so that they stay; for the others there is room, which nobody
/// else sees or takes. Dropping it frees the room at once, whatever has been written to it.
pub struct Reservation {
    shared: Arc<Shared>,
    arena: Arc<KvArena>,
    share: Share,
    blocks: Vec<(BlockHash, SequenceHash)>,
    /// Parallel to `blocks`.
    table: Vec<BlockId>,
    /// Leading blocks that were cached.
    here: usize,
    /// Leading blocks with their content; ≥ `here`.
    complete: usize,
}

/// What a reservation has become: blocks for the scheduler to cache.
pub struct Import {
    pub(in crate::engine::builtin) blocks: Vec<(BlockHash, SequenceHash)>,
    pub(in crate::engine::builtin) table: Vec<BlockId>,
    /// Which of the blocks have come.
    pub(in crate::engine::builtin) new: std::ops::Range<usize>,
    /// Ends with it: cached blocks that nobody holds can be had by all.
    pub(in crate::engine::builtin) share: Share,
}

/// Counts blocks as reserved while it lives.
#[derive(Default)]
pub(in crate::engine::builtin) struct Share {
    reserved: Arc<AtomicUsize>,
    blocks: usize,
}

impl Share {
    pub(super) fn new(reserved: Arc<AtomicUsize>, blocks: usize) -> Self {
        reserved.fetch_add(blocks, Relaxed);
        Self { reserved, blocks }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.blocks, Relaxed);
    }
}

impl Import {
    /// Blocks that have come.
    pub fn received(&self) -> usize {
        self.new.len()
    }
}

impl Reservation {
    pub(super) fn new(
        shared: Arc<Shared>,
        arena: Arc<KvArena>,
        share: Share,
        blocks: Vec<(BlockHash, SequenceHash)>,
        table: Vec<BlockId>,
        here: usize,
    ) -> Self {
        debug_assert!(blocks.len() == table.len() && here <= table.len());
        Self { shared, arena, share, blocks, table, here, complete: here }
    }

    /// Leading blocks that need not come: they were here.
    pub fn here(&self) -> usize {
        self.here
    }

    /// The blocks that are still to come, in order.
    pub fn missing(&self) -> impl ExactSizeIterator<Item = SequenceHash> {
        self.blocks[self.complete..].iter().map(|block| block.1)
    }

    /// Blocks that have come.
    pub fn received(&self) -> usize {
        self.complete - self.here
    }

    /// Whether sequences run beside it.
    pub fn is_beside_others(&self) -> bool {
        self.shared.is_running()
    }

    /// Bytes of each block.
    pub fn block_bytes(&self) -> usize {
        self.arena.shape().block_bytes()
    }

    /// Where the bytes of the next missing block go.
    pub fn next_bytes(&mut self) -> Option<&mut [u8]> {
        let id = *self.table.get(self.complete)?;
        // SAFETY: the pool has given this block to the reservation alone: it is neither free nor cached, and no sequence
        // lists it. The slice borrows the reservation, which gives the block away only when it ends.
        Some(unsafe { self.arena.block_mut(id) })
    }

    /// The bytes at [`Self::next_bytes`] are the block's, whole and verified.
    ///
    /// # Panics
    /// When no block is missing.
    pub fn complete_next(&mut self) {
        assert!(self.complete < self.table.len(), "no block is missing");
        self.complete += 1;
    }

    /// Hands over what has come, for [`super::Place::enter`]. Room for blocks that have not come is given back with it.
    pub fn finish(mut self) -> Import {
        let (blocks, table) = (std::mem::take(&mut self.blocks), std::mem::take(&mut self.table));
        let share = std::mem::take(&mut self.share);
        Import { blocks, table, new: self.here..self.complete, share }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.table.is_empty() {
            self.shared.send(Errand::Release(std::mem::take(&mut self.table)));
        }
    }
}
