//! The index against an obvious model: per (rank, tier) a map from engine hash to the exact prefix.

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use proptest::prelude::*;

use super::*;
use crate::histories::*;

const SIZE: BlockSize = BlockSize::new(4).expect("not zero");

#[test]
fn a_prompt_matches_what_each_rank_holds_of_it() {
    let mut index = PrefixIndex::new();
    let prompt: Vec<u32> = (0..19).collect();
    let blocks = HashSpace::default().blocks(&prompt, SIZE);
    let path: Vec<u64> = blocks.iter().map(|b| b.0).collect();
    index.apply(rank(1, 0), Tier::Device, &stored(&path, 0));
    index.apply(rank(2, 1), Tier::Device, &stored(&path[..2], 0));
    let overlaps = index.find_matches_for_request(&prompt, SIZE, HashSpace::default());
    assert_eq!(overlaps.get(rank(1, 0)), device(4));
    assert_eq!(overlaps.get(rank(2, 1)), device(2));
    assert_eq!(overlaps.get(rank(2, 0)), device(0));
    assert_eq!(overlaps.iter().len(), 2);
    let other = index.find_matches_for_request(&prompt, SIZE, HashSpace::new(Some("lora"), None));
    assert_eq!(other, Overlaps::default(), "another adapter shares nothing");
}

#[test]
fn a_removed_middle_block_cuts_until_it_is_stored_again() {
    let mut index = PrefixIndex::new();
    let path = [1, 2, 3, 4];
    index.apply(rank(1, 0), Tier::Device, &stored(&path, 0));
    index.apply(rank(1, 0), Tier::Device, &removed(&[&path[..2]]));
    assert_eq!(index.find_matches(&locals(&path)).get(rank(1, 0)), device(1));
    index.apply(rank(1, 0), Tier::Device, &stored(&path[..2], 1));
    assert_eq!(index.find_matches(&locals(&path)).get(rank(1, 0)), device(4));
}

#[test]
fn a_lower_tier_continues_where_the_device_ends() {
    let mut index = PrefixIndex::new();
    let path = [1, 2, 3, 4, 5];
    index.apply(rank(1, 0), Tier::Device, &stored(&path[..2], 0));
    let applied = index.apply(rank(1, 0), Tier::Host, &stored(&path[..4], 1));
    assert_eq!((applied.added, applied.orphans), (3, 0), "the parent is found in another tier");
    let expected = TierBlocks { device: 2, host: 2, ..TierBlocks::default() };
    assert_eq!(index.find_matches(&locals(&path)).get(rank(1, 0)), expected, "block 2 is in both and counts as device");
    assert_eq!(index.blocks(rank(1, 0)), TierBlocks { device: 2, host: 3, ..TierBlocks::default() });
}

#[test]
fn a_full_rank_gets_no_more_until_something_leaves() {
    let mut index = PrefixIndex::new();
    let path = [1, 2, 3, 4, 5];
    index.set_limit(rank(1, 0), 3);
    let applied = index.apply(rank(1, 0), Tier::Device, &stored(&path, 0));
    assert_eq!(applied, Applied { added: 3, refused: 2, ..Applied::default() });
    let again = index.apply(rank(1, 0), Tier::Device, &stored(&path[..3], 0));
    assert_eq!(again, Applied::default(), "what it holds is not refused");
    assert_eq!(index.apply(rank(1, 0), Tier::Host, &stored(&path[..1], 0)).refused, 1, "tiers count together");
    assert_eq!(index.apply(rank(2, 0), Tier::Device, &stored(&path, 0)).refused, 0, "others have their own limit");
    index.apply(rank(1, 0), Tier::Device, &removed(&[&path[..3]]));
    assert_eq!(index.apply(rank(1, 0), Tier::Device, &stored(&path[..3], 2)).added, 1);
    index.apply(rank(1, 0), Tier::Device, &KvEventData::Cleared);
    assert_eq!(index.apply(rank(1, 0), Tier::Device, &stored(&path, 0)).refused, 2, "clearing keeps the limit");
    index.remove_worker(WorkerId(1));
    assert_eq!(index.apply(rank(1, 0), Tier::Device, &stored(&path, 0)).refused, 0, "removing drops it");
}

#[test]
fn holding_a_prefix_is_seen_in_any_tier() {
    let mut index = PrefixIndex::new();
    index.apply(rank(1, 0), Tier::Host, &stored(&[1, 2], 0));
    assert!(index.holds(rank(1, 0), sequence(&[1, 2])));
    assert!(!index.holds(rank(1, 0), sequence(&[2])) && !index.holds(rank(2, 0), sequence(&[1])));
}

#[test]
fn an_unknown_parent_is_reported_and_nothing_is_stored() {
    let mut index = PrefixIndex::new();
    let opaque = |path: &[u64], from| stored_as(path, from, |prefix| sequence(prefix).0 ^ 1);
    let applied = index.apply(rank(1, 0), Tier::Device, &opaque(&[1, 2, 3], 1));
    assert_eq!(applied, Applied { orphans: 2, ..Applied::default() });
    assert!(index.is_empty());
    index.apply(rank(2, 0), Tier::Device, &opaque(&[1], 0));
    let applied = index.apply(rank(1, 0), Tier::Device, &opaque(&[1, 2, 3], 1));
    assert_eq!(applied.orphans, 2, "another rank's block is no parent");
}

#[test]
fn sequence_hashes_name_their_prefix_even_when_the_parent_is_gone() {
    let mut index = PrefixIndex::new();
    let applied = index.apply(rank(1, 0), Tier::Device, &stored(&[1, 2, 3], 1));
    assert_eq!((applied.added, applied.orphans), (2, 0));
    assert_eq!(index.find_matches(&locals(&[1, 2, 3])).get(rank(1, 0)), device(0), "its first block is missing");
    index.apply(rank(1, 0), Tier::Device, &stored(&[1], 0));
    assert_eq!(index.find_matches(&locals(&[1, 2, 3])).get(rank(1, 0)), device(3));
}

#[test]
fn content_under_two_engine_hashes_stays_until_both_are_gone() {
    let mut index = PrefixIndex::new();
    for engine in [70, 71] {
        index.apply(rank(1, 0), Tier::Device, &stored_as(&[1], 0, |_| engine));
    }
    assert_eq!(index.blocks(rank(1, 0)), device(1));
    let gone = |engine| KvEventData::Removed { blocks: vec![EngineHash(engine)] };
    assert_eq!(index.apply(rank(1, 0), Tier::Device, &gone(70)).removed, 0);
    assert_eq!(index.find_matches(&locals(&[1])).get(rank(1, 0)), device(1));
    assert_eq!(index.apply(rank(1, 0), Tier::Device, &gone(71)).removed, 1);
    assert!(index.is_empty());
}

#[test]
fn removing_a_worker_removes_all_its_ranks_and_nothing_else() {
    let mut index = PrefixIndex::new();
    for worker in 1..=3 {
        for dp_rank in 0..2 {
            index.apply(rank(worker, dp_rank), Tier::Device, &stored(&[1, 2, 10 + worker], 0));
        }
    }
    assert_eq!(index.remove_worker(WorkerId(2)), 6);
    let overlaps = index.find_matches(&locals(&[1, 2, 12]));
    assert_eq!(overlaps.iter().map(|(rank, _)| rank.worker.0).collect::<Vec<_>>(), [1, 1, 3, 3]);
    assert_eq!(index.len(), 4, "the branch only worker 2 held is gone");
    // A new rank takes the free slot and inherits nothing.
    index.apply(rank(9, 0), Tier::Device, &stored(&[1], 0));
    assert_eq!(index.find_matches(&locals(&[1, 2, 12])).get(rank(9, 0)), device(1));
}

#[test]
fn hundreds_of_owners_of_one_prefix_match_alike() {
    let mut index = PrefixIndex::new();
    for worker in 0..300 {
        let length = 1 + worker as usize % 5;
        index.apply(rank(worker, 0), Tier::Device, &stored(&[1, 2, 3, 4, 5][..length], 0));
    }
    let overlaps = index.find_matches(&locals(&[1, 2, 3, 4, 5]));
    for worker in 0..300 {
        assert_eq!(overlaps.get(rank(worker, 0)), device(1 + worker as u32 % 5));
    }
}

/// The model.
#[derive(Default)]
struct Model {
    held: HashMap<(WorkerRank, Tier), HashMap<u64, Vec<u64>>>,
}

impl Model {
    fn apply(&mut self, rank: WorkerRank, tier: Tier, data: &KvEventData) -> usize {
        match data {
            KvEventData::Stored { parent, blocks } => {
                let mut path = Vec::new();
                if let Some(parent) = parent {
                    let tiers = std::iter::once(tier).chain(TIERS);
                    let known = tiers.into_iter().find_map(|t| self.held.get(&(rank, t))?.get(&parent.0).cloned());
                    let named = prefixes_by_hash().get(&parent.0).filter(|prefix| {
                        let child = [prefix, &[blocks[0].local.0][..]].concat();
                        sequence(&child).0 == blocks[0].engine.0
                    });
                    let Some(known) = known.or_else(|| named.cloned()) else { return blocks.len() };
                    path = known;
                }
                for block in blocks {
                    path.push(block.local.0);
                    self.held.entry((rank, tier)).or_default().insert(block.engine.0, path.clone());
                }
            }
            KvEventData::Removed { blocks } => {
                for engine in blocks {
                    self.held.entry((rank, tier)).or_default().remove(&engine.0);
                }
            }
            KvEventData::Cleared => self.held.retain(|(r, _), _| *r != rank),
        }
        0
    }

    fn prefixes(&self, rank: WorkerRank, tier: Tier) -> HashSet<&Vec<u64>> {
        self.held.get(&(rank, tier)).into_iter().flat_map(|held| held.values()).collect()
    }

    fn overlap(&self, rank: WorkerRank, path: &[u64]) -> TierBlocks {
        let mut blocks = TierBlocks::default();
        for end in 1..=path.len() {
            let fastest = TIERS.into_iter().find(|t| self.prefixes(rank, *t).contains(&path[..end].to_vec()));
            let Some(tier) = fastest else { break };
            *blocks.of(tier) += 1;
        }
        blocks
    }

    fn distinct(&self) -> usize {
        self.held.values().flat_map(|held| held.values()).collect::<HashSet<_>>().len()
    }
}

/// Every prefix that a history can contain, by its sequence hash.
fn prefixes_by_hash() -> &'static HashMap<u64, Vec<u64>> {
    static PREFIXES: OnceLock<HashMap<u64, Vec<u64>>> = OnceLock::new();
    PREFIXES.get_or_init(|| {
        let mut level = vec![Vec::new()];
        let mut all = HashMap::new();
        for _ in 0..6 {
            level = level.iter().flat_map(|p| (0..3).map(move |next| [&p[..], &[next]].concat())).collect();
            all.extend(level.iter().map(|path| (sequence(path).0, path.clone())));
        }
        all
    })
}

proptest! {
    #[test]
    fn random_histories_equal_the_model(
        history in proptest::collection::vec(ops(), 1..120),
        queries in proptest::collection::vec(paths(), 8),
    ) {
        let (mut index, mut model) = (PrefixIndex::new(), Model::default());
        for op in history {
            match op {
                Op::Apply(rank, tier, data) => {
                    let applied = index.apply(rank, tier, &data);
                    prop_assert_eq!(applied.orphans, model.apply(rank, tier, &data));
                    // The same event once more changes nothing.
                    if !matches!(data, KvEventData::Stored { .. }) || applied.orphans > 0 {
                        let again = index.apply(rank, tier, &data);
                        prop_assert_eq!((again.added, again.removed), (0, 0));
                    }
                }
                Op::RemoveWorker(worker) => {
                    index.remove_worker(worker);
                    model.held.retain(|(rank, _), _| rank.worker != worker);
                }
            }
            prop_assert_eq!(index.len(), model.distinct());
        }
        for worker in 0..5 {
            for dp_rank in 0..2 {
                let rank = rank(worker, dp_rank);
                let counts = index.blocks(rank);
                let held = TIERS.map(|tier| model.prefixes(rank, tier).len() as u32);
                prop_assert_eq!([counts.device, counts.host, counts.disk, counts.shared], held);
                for path in &queries {
                    prop_assert_eq!(index.find_matches(&locals(path)).get(rank), model.overlap(rank, path));
                }
            }
        }
        for worker in 0..5 {
            index.remove_worker(WorkerId(worker));
        }
        prop_assert!(index.is_empty());
        prop_assert!(index.slot_of.is_empty() && index.free.len() == index.ranks.len(), "no slot leaks");
    }
}
