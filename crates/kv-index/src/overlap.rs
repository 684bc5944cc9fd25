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

/// Consecutive blocks of a prompt that a rank says are in a pool which other workers read, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PooledRun {
    /// The rank.
    pub rank: WorkerRank,
    /// The first of them, counted from the prompt's first block.
    pub start: u32,
    /// How many; not 0.
    pub len: u32,
}

impl PooledRun {
    fn end(self) -> u32 {
        self.start + self.len
    }
}

/// How much of a prompt each rank holds: the answer to a match. Ranks that hold nothing of it are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overlaps {
    /// Sorted by rank.
    ranks: Vec<(WorkerRank, TierBlocks)>,
    /// Sorted by rank and start; those of a rank do not touch.
    pooled: Vec<PooledRun>,
}

impl Overlaps {
    /// From what each rank holds, and what each has in a pool: of that only what a worker can reach, from what some rank holds or
    /// the pools have from the beginning on.
    pub fn new(ranks: impl IntoIterator<Item = (WorkerRank, TierBlocks)>, mut pooled: Vec<PooledRun>) -> Self {
        let mut ranks: Vec<_> = ranks.into_iter().filter(|(_, blocks)| blocks.total() > 0).collect();
        ranks.sort_unstable_by_key(|(rank, _)| *rank);
        if !pooled.is_empty() {
            let held = ranks.iter().map(|(_, blocks)| blocks.total()).max().unwrap_or(0);
            pooled.sort_unstable_by_key(|run| run.start);
            let reach = pooled.iter().fold(held, |end, run| if run.start <= end { end.max(run.end()) } else { end });
            pooled.retain_mut(|run| {
                run.len = run.end().min(reach).saturating_sub(run.start);
                run.len > 0
            });
            pooled.sort_unstable();
            pooled.dedup_by(|next, run| {
                let touches = next.rank == run.rank && next.start <= run.end();
                if touches {
                    run.len = run.end().max(next.end()) - run.start;
                }
                touches
            });
        }
        Self { ranks, pooled }
    }

    /// What ranks have in pools that other workers read, too, each for itself: who shares with whom, the caller knows.
    pub fn pooled(&self) -> &[PooledRun] {
        &self.pooled
    }

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
        Self::new(ranks, Vec::new())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::WorkerId;

    fn rank(worker: u64) -> WorkerRank {
        WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
    }

    fn pooled(device: u32, runs: &[(u64, u32, u32)]) -> Vec<(u64, u32, u32)> {
        let held = TierBlocks { device, ..TierBlocks::default() };
        let runs = runs.iter().map(|&(worker, start, len)| PooledRun { rank: rank(worker), start, len });
        let overlaps = Overlaps::new([(rank(1), held)], runs.collect());
        overlaps.pooled().iter().map(|run| (run.rank.worker.0, run.start, run.len)).collect()
    }

    #[test]
    fn of_pools_only_what_a_worker_can_reach_is_told() {
        assert_eq!(pooled(0, &[(2, 1, 4)]), [], "nobody has the first block");
        assert_eq!(pooled(1, &[(2, 1, 4)]), [(2, 1, 4)]);
        assert_eq!(pooled(3, &[(2, 5, 4), (3, 2, 1)]), [(3, 2, 1)], "nobody has block 3");
        assert_eq!(pooled(0, &[(3, 4, 4), (2, 0, 4)]), [(2, 0, 4), (3, 4, 4)], "one pool after the other");
        assert_eq!(pooled(6, &[(2, 0, 2), (2, 2, 3), (2, 8, 1)]), [(2, 0, 5)], "runs of a rank are joined");
        assert_eq!(pooled(6, &[(2, 4, 9), (2, 4, 2)]), [(2, 4, 9)]);
    }
}
