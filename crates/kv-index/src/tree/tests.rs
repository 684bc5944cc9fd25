//! The tree against the reference, on random histories: every answer, every count, and nothing left at the end.

mod long;
mod races;

use proptest::prelude::*;

use super::*;
use crate::event::StoredBlock;
use crate::histories::*;
use crate::reference::PrefixIndex;

/// A small tree, checked.
struct Pair {
    tree: Writer,
    reader: Reader,
    reference: PrefixIndex,
    matches: Matches,
}

impl Pair {
    fn new() -> Self {
        let (tree, reader) = new(Limits::default());
        Self { tree, reader, reference: PrefixIndex::new(), matches: Matches::default() }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Apply(rank, tier, data) => {
                let strays = self.tree.stats().stray_blocks;
                let applied = self.tree.apply(*rank, *tier, data);
                let expected = self.reference.apply(*rank, *tier, data);
                // Content that is in the tree and a stray counts twice.
                if strays == 0 && self.tree.stats().stray_blocks == 0 {
                    assert_eq!(applied, expected, "{op:?}");
                } else {
                    assert_eq!(
                        (applied.orphans, applied.unknown, applied.refused),
                        (expected.orphans, expected.unknown, expected.refused),
                        "{op:?}"
                    );
                }
            }
            Op::RemoveWorker(worker) => {
                self.tree.remove_worker(*worker);
                self.reference.remove_worker(*worker);
            }
        }
    }

    /// One prompt, and whether each rank holds its end.
    fn check(&mut self, path: &[u64], ranks: impl Iterator<Item = WorkerRank>) {
        let blocks = locals(path);
        self.reader.find(&blocks, &mut self.matches);
        let expected = self.reference.find_matches(&blocks);
        assert_eq!(self.matches.overlaps(), expected, "{path:?}");
        for rank in ranks {
            assert_eq!(self.matches.get(rank), expected.get(rank));
            assert_eq!(self.reader.holds(rank, &blocks), KvIndex::holds(&self.reference, rank, &blocks), "{path:?}");
        }
    }

    fn check_counts(&self, ranks: impl Iterator<Item = WorkerRank>) {
        if self.tree.stats().stray_blocks == 0 {
            assert_eq!(self.reader.len(), self.reference.len());
            for rank in ranks {
                assert_eq!(self.reader.blocks(rank), self.reference.blocks(rank));
            }
        }
    }

    fn drop_everything(mut self) {
        let ranks: Vec<WorkerRank> = self.tree.ranks().collect();
        for rank in ranks {
            self.tree.remove_worker(rank.worker);
        }
        let stats = self.tree.stats();
        assert_eq!((stats.distinct_blocks, stats.owned_blocks, stats.stray_blocks), (0, 0, 0));
        assert_eq!((self.tree.runs.allocator.live(), self.tree.pool.live()), (0, 0), "nothing leaks");
        assert!(self.reader.is_empty());
    }
}

fn all_ranks() -> impl Iterator<Item = WorkerRank> {
    (0..5).flat_map(|worker| (0..2).map(move |dp_rank| rank(worker, dp_rank)))
}

/// Ranks are known to a match by their slots, and every index numbers its own.
#[test]
fn what_one_index_was_matched_in_serves_another() {
    let indexes = [1, 2].map(|worker| {
        let (mut tree, reader) = new(Limits::default());
        tree.apply(rank(worker, 0), Tier::Device, &stored(&[7], 0));
        (tree, reader, rank(worker, 0))
    });
    let (mut matches, blocks) = (Matches::default(), locals(&[7]));
    for (_, reader, rank) in indexes.iter().chain(&indexes) {
        let expected = Overlaps::new([(*rank, device(1))], Vec::new());
        reader.find(&blocks, &mut matches);
        assert_eq!((matches.overlaps(), reader.find_matches(&blocks)), (expected.clone(), expected));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn random_histories_equal_the_reference(
        history in proptest::collection::vec(ops(), 1..120),
        queries in proptest::collection::vec(paths(), 8),
    ) {
        let mut pair = Pair::new();
        for op in &history {
            pair.apply(op);
            pair.check_counts(all_ranks());
            pair.check(&queries[0], all_ranks());
        }
        for path in &queries {
            pair.check(path, all_ranks());
        }
        pair.drop_everything();
    }
}
