//! KV blocks below the arena: host memory and disk, for blocks that the arena has no room for and requests may want again.
//!
//! What is where, what goes and what comes back is decided by [`catalog`], which is pure: it leaves [`Move`]s for others to
//! make. [`mover`] makes them: copies between arena and [`slab`] on the engine's thread between two steps, and reads and
//! writes of files on a thread of their own ([`disk`]). The arena's own books stay with the pool.
//!
//! Tiers are a cache: whatever goes wrong in them, the tokens are computed instead.

use std::path::PathBuf;

use kv_hashing::{BlockHash, SequenceHash};
use kv_index::{EngineHash, StoredBlock};

use super::BlockId;

pub mod catalog;
pub mod disk;
pub mod metrics;
pub mod mover;
pub mod ranking;
pub mod slab;

pub use ranking::Policy;

/// What is kept below the arena. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierOptions {
    /// Bytes of host memory for blocks; 0: none.
    pub host_bytes: u64,
    /// Blocks on disk.
    pub disk: Option<DiskOptions>,
    /// Which block goes first where there is no more room.
    pub policy: Policy,
}

impl TierOptions {
    /// Whether there is any tier.
    pub fn any(&self) -> bool {
        self.host_bytes > 0 || self.disk.is_some()
    }
}

/// Where blocks are kept on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// A directory of this engine alone; made when it is missing.
    pub dir: PathBuf,
    /// Most bytes of its files.
    pub bytes: u64,
    /// Blocks of another revision are not used.
    pub revision: String,
}

/// The identity of a full block whose KV is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedBlock {
    /// Names it in its context.
    pub hash: SequenceHash,
    /// The block before it.
    pub parent: Option<SequenceHash>,
    /// Names its tokens.
    pub local: BlockHash,
}

impl CachedBlock {
    /// As events have it: our engine hashes are sequence hashes.
    pub fn stored(&self) -> StoredBlock {
        StoredBlock { engine: EngineHash(self.hash.0), local: self.local }
    }
}

/// Index of a block's room in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// Index of a block's room on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskSlot(pub u32);

/// Something to be done with a block's bytes. Moves are made in order, before anything else writes to the arena; those of the
/// disk are begun in order, and their end is told as [`Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// From the arena to the slab.
    Offload {
        /// From.
        from: BlockId,
        /// To.
        to: Slot,
    },
    /// From the slab to the arena.
    Onboard {
        /// From.
        from: Slot,
        /// To.
        to: BlockId,
    },
    /// From the slab to disk. Nothing else happens to the slot before the end is told.
    Write {
        /// From.
        from: Slot,
        /// To.
        to: DiskSlot,
        /// What it is.
        block: CachedBlock,
    },
    /// From disk to the slab. Nothing else happens to the slot before the end is told.
    Read {
        /// From.
        from: DiskSlot,
        /// To.
        to: Slot,
        /// What it must be.
        hash: SequenceHash,
    },
    /// What is there on disk is no block any more.
    Erase(DiskSlot),
}

/// How a move of the disk has ended, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// A [`Move::Write`].
    Written {
        /// The block.
        hash: SequenceHash,
        /// Whether it is there now.
        outcome: Result<(), WriteFault>,
    },
    /// A [`Move::Read`].
    Read {
        /// The block.
        hash: SequenceHash,
        /// Whether the slot has it now.
        outcome: Result<(), ReadFault>,
    },
    /// Nobody makes the disk's moves any more; those that have not ended never will.
    Stopped,
}

/// Why a block is not on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// The disk is full.
    Full,
    /// Anything else.
    Failed,
}

/// Why a block on disk is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// It is not what was written.
    Damaged,
    /// It cannot be read.
    Failed,
}
