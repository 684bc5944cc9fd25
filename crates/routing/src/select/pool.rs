//! What a pool has of a prompt that all workers of a model read.

use kv_index::{Overlaps, TierBlocks};

use crate::worker::WorkerSet;

/// Blocks of a prompt in the pool, as ranges (start, end) in order that do not touch.
#[derive(Debug, Default)]
pub(super) struct Pool {
    ranges: Vec<(u32, u32)>,
}

impl Pool {
    /// Fills it with what workers of `model` say that the pool has: they read each other's blocks, and those of other models
    /// mean something else.
    pub(super) fn fill(&mut self, overlaps: &Overlaps, workers: &WorkerSet, model: &str) {
        self.ranges.clear();
        let ours = overlaps.pooled().iter().filter(|run| workers.serves(run.rank.worker, model));
        self.ranges.extend(ours.map(|run| (run.start, run.start + run.len)));
        self.ranges.sort_unstable();
        self.ranges.dedup_by(|next, last| {
            let touches = next.0 <= last.1;
            if touches {
                last.1 = last.1.max(next.1);
            }
            touches
        });
    }

    /// Blocks that a worker would find in the pool: those of its own prefix that it holds nowhere else, and those right after it.
    #[inline]
    pub(super) fn beyond(&self, overlap: TierBlocks) -> u32 {
        let end = overlap.total();
        let after = self.ranges.iter().find(|(_, last)| *last > end).filter(|(first, _)| *first <= end);
        overlap.shared + after.map_or(0, |(_, last)| last - end)
    }
}

#[cfg(test)]
mod tests {
    use kv_index::{PooledRun, WorkerId, WorkerRank};

    use super::*;
    use crate::worker::Worker;

    fn rank(worker: u64, dp_rank: u32) -> WorkerRank {
        WorkerRank { worker: WorkerId(worker), dp_rank }
    }

    /// Workers 1 and 2 serve `m`, worker 3 another model. `runs`: worker, first block, blocks.
    fn pool(runs: &[(u64, u32, u32)]) -> Pool {
        let models = [(1, "m"), (2, "m"), (3, "other")];
        let workers: WorkerSet = models.into_iter().map(|(id, model)| Worker::new(rank(id, 0), "w", model)).collect();
        // Blocks of a rank that is not chosen among count, too.
        let runs = runs.iter().map(|&(worker, start, len)| PooledRun { rank: rank(worker, 1), start, len });
        let held = TierBlocks { device: 20, ..TierBlocks::default() };
        let mut pool = Pool::default();
        pool.fill(&Overlaps::new([(rank(9, 0), held)], runs.collect()), &workers, "m");
        pool
    }

    #[test]
    fn a_pool_counts_only_beyond_what_the_worker_holds() {
        let own = TierBlocks { device: 3, host: 2, disk: 1, shared: 0 };
        assert_eq!(pool(&[(1, 0, 10)]).beyond(own), 4);
        assert_eq!(pool(&[(1, 0, 6)]).beyond(own), 0);
        assert_eq!(pool(&[]).beyond(own), 0);
        assert_eq!(pool(&[(1, 0, 10)]).beyond(TierBlocks::default()), 10);
        assert_eq!(pool(&[(1, 6, 4)]).beyond(own), 4, "the pool need not have what the worker holds");
        assert_eq!(pool(&[(1, 7, 4)]).beyond(own), 0, "between them a block is missing");
        assert_eq!(pool(&[]).beyond(TierBlocks { shared: 4, ..own }), 4, "what its own events announced");
    }

    #[test]
    fn workers_of_a_model_share_and_others_do_not() {
        assert_eq!(pool(&[(2, 4, 5), (1, 0, 6)]).beyond(TierBlocks::default()), 9, "each put in a part");
        assert_eq!(pool(&[(3, 0, 6), (4, 0, 6)]).beyond(TierBlocks::default()), 0);
    }
}
