//! What any index of KV blocks can do; the obvious one of the tests and the fast one of the product are held to it alike.

use kv_hashing::{BlockHash, BlockSize, HashSpace};

use crate::event::{KvEventData, Tier, WorkerId, WorkerRank};
use crate::overlap::{Applied, Overlaps, TierBlocks};

/// Which rank holds which prefix, from the events of all ranks. Numbering, gaps and recovery are the caller's business.
pub trait KvIndex {
    /// Applies one event of `rank` to `tier`.
    ///
    /// A stored run whose parent is unknown to the rank (in every tier) is refused whole, unless its hashes themselves name the
    /// prefix. Duplicates have no effect; an engine hash stored again elsewhere moves there. `Cleared` empties every tier.
    fn apply(&mut self, rank: WorkerRank, tier: Tier, data: &KvEventData) -> Applied;

    /// Bounds the blocks of a rank, over all tiers, until its worker is removed. What it holds already stays.
    fn set_limit(&mut self, rank: WorkerRank, blocks: usize);

    /// Forgets every rank of a worker; returns how many blocks it held, over all tiers.
    fn remove_worker(&mut self, worker: WorkerId) -> usize;

    /// Forgets what one rank holds; returns how many blocks that was, over all tiers.
    fn remove_rank(&mut self, rank: WorkerRank) -> usize;

    /// How many leading blocks of a prompt each rank holds. `blocks`: the local hashes of the prompt's full blocks.
    fn find_matches(&self, blocks: &[BlockHash]) -> Overlaps;

    /// Like [`Self::find_matches`], from the tokens of a prompt.
    fn find_matches_for_request(&self, tokens: &[u32], size: BlockSize, space: HashSpace) -> Overlaps {
        self.find_matches(&space.blocks(tokens, size))
    }

    /// Whether a rank holds the last block of `prefix`, in any tier, whatever it holds before it.
    fn holds(&self, rank: WorkerRank, prefix: &[BlockHash]) -> bool;

    /// Blocks that a rank holds; a block in two tiers counts in both.
    fn blocks(&self, rank: WorkerRank) -> TierBlocks;

    /// Different prefixes in the index.
    fn len(&self) -> usize;

    /// Whether no rank holds anything.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
