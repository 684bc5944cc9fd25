//! The answers of an index: what an event did, and how much of a prompt each rank holds.

use crate::event::{Tier, WorkerRank};

/// Prefix blocks of one rank, by tier. Each block counts once, in the fastest tier that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierBlocks {
    /// In device memory.
    pub device: u32,
    /// In host memory and not in device memory.
    pub host: u32,
    /// On local disk only.
    pub disk: u32,
    /// In a shared pool only.
    pub shared: u32,
}

impl TierBlocks {
    /// Blocks in any tier.
    pub fn total(self) -> u32 {
        self.device + self.host + self.disk + self.shared
    }

    pub(crate) fn of(&mut self, tier: Tier) -> &mut u32 {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
            Tier::Disk => &mut self.disk,
            Tier::Shared => &mut self.shared,
        }
    }
}

/// How much of a prompt each rank holds: the answer to a match. Ranks that hold nothing of it are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overlaps {
    /// Sorted by rank.
    ranks: Vec<(WorkerRank, TierBlocks)>,
}

impl Overlaps {
    /// Leading blocks of the prompt that `rank` holds.
    pub fn get(&self, rank: WorkerRank) -> TierBlocks {
        self.ranks.binary_search_by_key(&rank, |(r, _)| *r).map_or_else(|_| TierBlocks::default(), |i| self.ranks[i].1)
    }

    /// Every rank with at least one block, in order of rank.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (WorkerRank, TierBlocks)> + '_ {
        self.ranks.iter().copied()
    }
}

impl FromIterator<(WorkerRank, TierBlocks)> for Overlaps {
    fn from_iter<I: IntoIterator<Item = (WorkerRank, TierBlocks)>>(ranks: I) -> Self {
        let mut ranks: Vec<_> = ranks.into_iter().filter(|(_, blocks)| blocks.total() > 0).collect();
        ranks.sort_unstable_by_key(|(rank, _)| *rank);
        Self { ranks }
    }
}

/// What an event did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks that are new in their tier.
    pub added: usize,
    /// Blocks that are gone from their tier.
    pub removed: usize,
    /// Blocks refused because their parent is unknown: an event was lost, the rank needs recovery.
    pub orphans: usize,
    /// Removals of blocks that were not known.
    pub unknown: usize,
    /// Blocks refused because the rank holds as many as it may.
    pub refused: usize,
}

impl std::ops::AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.added += other.added;
        self.removed += other.removed;
        self.orphans += other.orphans;
        self.unknown += other.unknown;
        self.refused += other.refused;
    }
}
