//! The vocabulary of KV events: who, where, what.

use kv_hashing::BlockHash;

/// A worker instance; below 2^53, so that JSON readers keep it exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

/// One data-parallel rank of a worker: the owner of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerRank {
    /// The worker.
    pub worker: WorkerId,
    /// Its rank, from 0.
    pub dp_rank: u32,
}

/// Storage tier of a block, fastest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Device memory (the arena of a CPU engine counts as it).
    #[default]
    Device,
    /// Host memory.
    Host,
    /// Local disk.
    Disk,
    /// A pool that several workers share.
    Shared,
}

/// The engine's own id of a block: opaque, unique on its (worker, rank, tier). It keys removals and parents; requests are
/// never matched by it. Our own engine uses the sequence hash, which makes it deterministic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

/// One stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoredBlock {
    /// The engine's id of the block.
    pub engine: EngineHash,
    /// Hash of its tokens.
    pub local: BlockHash,
}

/// What happened to blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEventData {
    /// A run of blocks, each the child of the one before, became reusable.
    Stored {
        /// The block before the first; `None` at the start of a sequence.
        parent: Option<EngineHash>,
        /// The run; not empty.
        blocks: Vec<StoredBlock>,
    },
    /// Blocks are gone.
    Removed {
        /// Their engine ids.
        blocks: Vec<EngineHash>,
    },
    /// Every block of the rank is gone, in every tier.
    Cleared,
}

/// A numbered event of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// Rises by exactly one with each event of the rank, from 0.
    pub id: u64,
    /// Rank.
    pub dp_rank: u32,
    /// Where the blocks live.
    pub tier: Tier,
    /// What happened.
    pub data: KvEventData,
}
