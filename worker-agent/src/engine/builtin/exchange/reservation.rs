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
    /// Blocks after those whose room was taken, and is not back.
    taken: usize,
}

/// The room for some blocks of a [`Reservation`], in the hands of something that writes to it: a read that the network or a
/// device makes goes on when whoever began it has lost interest. It outlives the reservation, and is given back when it is
/// dropped.
pub struct Room {
    shared: Arc<Shared>,
    arena: Arc<KvArena>,
    table: Vec<BlockId>,
    share: Share,
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

    /// Some of the blocks, counted apart.
    fn split(&mut self, blocks: usize) -> Self {
        let blocks = blocks.min(self.blocks);
        self.blocks -= blocks;
        Self { reserved: self.reserved.clone(), blocks }
    }

    fn join(&mut self, mut other: Self) {
        self.blocks += std::mem::take(&mut other.blocks);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.blocks, Relaxed);
    }
}

impl Room {
    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.table.len()
    }

    /// Where the block at `index` goes.
    ///
    /// # Panics
    /// When there are not so many blocks.
    pub fn place(&self, index: usize) -> *mut u8 {
        self.arena.place(self.table[index])
    }

    /// Bytes of the block at `index`.
    ///
    /// # Safety
    /// Nothing writes to the room while the slice lives.
    ///
    /// # Panics
    /// When there are not so many blocks.
    pub unsafe fn bytes(&self, index: usize) -> &[u8] {
        // SAFETY: the pool has given the block to the reservation that this comes from, and that to us; the rest is the
        // caller's promise.
        unsafe { self.arena.block(self.table[index]) }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if !self.table.is_empty() {
            self.shared.send(Errand::Release(std::mem::take(&mut self.table)));
        }
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
        Self { shared, arena, share, blocks, table, here, complete: here, taken: 0 }
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

    /// Takes away the room for the next missing blocks, `most` at most. Until it is back, the reservation goes no further; if it
    /// never comes back, the blocks after it do not come either. `None` where nothing is missing, or some room is away.
    pub fn take_room(&mut self, most: usize) -> Option<Room> {
        let taken = most.min(self.table.len() - self.complete);
        if taken == 0 || self.taken > 0 {
            return None;
        }
        self.taken = taken;
        let table = self.table.drain(self.complete..self.complete + taken).collect();
        Some(Room { shared: self.shared.clone(), arena: self.arena.clone(), table, share: self.share.split(taken) })
    }

    /// Takes back what [`Self::take_room`] has given away. Its first `filled` blocks have come, whole and verified.
    ///
    /// # Panics
    /// When it is not from here, or has fewer blocks.
    pub fn put_back(&mut self, mut room: Room, filled: usize) {
        assert!(room.table.len() == std::mem::take(&mut self.taken) && filled <= room.table.len(), "another's room");
        self.table.splice(self.complete..self.complete, std::mem::take(&mut room.table));
        self.share.join(std::mem::take(&mut room.share));
        self.complete += filled;
    }

    /// Where the bytes of the next missing block go.
    pub fn next_bytes(&mut self) -> Option<&mut [u8]> {
        if self.taken > 0 {
            return None;
        }
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
        assert!(self.taken == 0 && self.complete < self.table.len(), "no block is missing");
        self.complete += 1;
    }

    /// Hands over what has come, for [`super::Place::enter`]. Room for blocks that have not come is given back with it, unless
    /// it was taken.
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
