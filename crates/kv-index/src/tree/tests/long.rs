//! Long prompts, many owners, dumps, budgets: what short random histories do not reach.

use super::*;
use crate::tree::tests::races::Dice;

/// A conversation out of a small tree of prompts: up to 200 blocks, leaving a common path at some block.
fn long_path(dice: &mut Dice) -> Vec<u64> {
    let cuts = [0, 1, 15, 16, 17, 40, 63, 64, 65, 100, 128, 150];
    let cut = cuts[dice.roll(cuts.len() as u64) as usize];
    let (branch, len) = (dice.roll(4), 1 + dice.roll(200) as usize);
    (0..len as u64)
        .map(|at| if (at as usize) < cut { at } else { (branch + 1) * 1000 * (cut as u64 + 1) + at })
        .collect()
}

fn engine(worker: u64, prefix: &[u64], opaque: bool) -> u64 {
    let hash = sequence(prefix).0;
    if opaque { hash.rotate_left(7) ^ worker } else { hash }
}

/// A run of 1 to 40 blocks whose parent the worker holds, or is lost; or removals of such a run.
fn long_op(dice: &mut Dice, workers: u64) -> Op {
    let worker = dice.roll(workers);
    let path = long_path(dice);
    let opaque = worker.is_multiple_of(2);
    let from = if dice.roll(3) == 0 { dice.roll(path.len() as u64) as usize } else { 0 };
    let tier = if dice.roll(10) == 0 { Tier::Host } else { Tier::Device };
    let data = match dice.roll(40) {
        0 => return Op::RemoveWorker(WorkerId(worker)),
        1 => KvEventData::Cleared,
        2..12 => {
            let to = (from + 40).min(path.len());
            let gone = (from..to).rev().map(|end| EngineHash(engine(worker, &path[..=end], opaque)));
            KvEventData::Removed { blocks: gone.collect() }
        }
        _ => stored_as(&path, from, |prefix| engine(worker, prefix, opaque)),
    };
    Op::Apply(rank(worker, 0), tier, data)
}

#[test]
fn long_prompts_of_many_workers_equal_the_reference() {
    for (seed, workers) in [(1, 3), (2, 12), (3, 12), (4, 70), (5, 70), (6, 200)] {
        let (mut pair, mut dice) = (Pair::new(), Dice(seed));
        for step in 0..400 {
            pair.apply(&long_op(&mut dice, workers));
            if step % 20 == 0 {
                let path = long_path(&mut dice);
                pair.check(&path, (0..workers).map(|worker| rank(worker, 0)));
                pair.check_counts((0..workers).map(|worker| rank(worker, 0)));
            }
        }
        pair.drop_everything();
    }
}

fn load(dumped: &Writer) -> (Writer, Reader) {
    let (mut loaded, reader) = new(Limits::default());
    for rank in dumped.ranks() {
        for event in dumped.dump(rank) {
            let applied = loaded.apply(rank, event.tier, &event.data);
            assert_eq!((applied.orphans, applied.unknown, applied.refused), (0, 0, 0), "{event:?}");
        }
    }
    (loaded, reader)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn what_is_loaded_equals_what_was_dumped_and_goes_on_like_it(
        history in proptest::collection::vec(ops(), 1..80),
        more in proptest::collection::vec(ops(), 1..20),
        queries in proptest::collection::vec(paths(), 8),
    ) {
        let mut pair = Pair::new();
        for op in &history {
            pair.apply(op);
            // Strays have a test of their own.
            if let Op::Apply(rank, _, _) = op
                && pair.tree.stats().stray_blocks > 0
            {
                pair.apply(&Op::RemoveWorker(rank.worker));
            }
        }
        let (tree, reader) = load(&pair.tree);
        prop_assert_eq!(tree.stats().owned_blocks, pair.tree.stats().owned_blocks);
        (pair.tree, pair.reader) = (tree, reader);
        pair.matches = Matches::default();
        for path in &queries {
            pair.check(path, all_ranks());
        }
        more.iter().for_each(|op| pair.apply(op));
        for path in &queries {
            pair.check(path, all_ranks());
        }
        pair.drop_everything();
    }
}

#[test]
fn strays_survive_a_dump() {
    let (mut tree, _) = new(Limits::default());
    tree.apply(rank(1, 0), Tier::Device, &stored(&[1, 2, 3, 4], 2));
    assert_eq!(tree.stats().stray_blocks, 2);
    let (mut loaded, reader) = load(&tree);
    assert_eq!(reader.find_matches(&locals(&[1, 2, 3, 4])).get(rank(1, 0)).total(), 0);
    loaded.apply(rank(1, 0), Tier::Device, &stored(&[1, 2], 0));
    assert_eq!(reader.find_matches(&locals(&[1, 2, 3, 4])).get(rank(1, 0)).device, 4);
    loaded.apply(rank(1, 0), Tier::Device, &stored(&[1, 2, 3, 4], 0));
    assert_eq!((loaded.stats().stray_blocks, reader.len()), (0, 4), "stored again, they are at home");
}

/// A conversation of 160 blocks, 32 of them common.
fn conversation(n: u64) -> Vec<u64> {
    (0..32).chain((0..128).map(|at| 1_000_000 + n * 1000 + at)).collect()
}

#[test]
fn memory_stays_within_its_budget_and_what_is_used_stays() {
    let bytes = 8 << 20;
    let (mut tree, reader) = new(Limits { bytes, ..Limits::default() });
    let favourite = conversation(0);
    for n in 0..6_000 {
        let path = conversation(n);
        let applied = tree.apply(rank(n % 4, 0), Tier::Device, &stored(&path, 0));
        assert_eq!(applied.orphans, 0);
        assert!(tree.bytes() <= bytes, "{} bytes after {n} conversations", tree.bytes());
        assert_eq!(reader.find_matches(&locals(&path)).get(rank(n % 4, 0)).device as usize, path.len());
        // Matching counts as use.
        assert_eq!(reader.find_matches(&locals(&favourite)).get(rank(0, 0)).device, 160, "after {n} conversations");
    }
    let stats = tree.stats();
    assert!(stats.evicted_blocks > 100_000 && stats.owned_blocks > 100_000, "{stats:?}");
    assert_eq!(reader.find_matches(&locals(&conversation(1))).get(rank(1, 0)).device, 32, "the oldest went");
    // What was dropped may still be removed by the engine, or continued: neither is taken for a loss.
    let gone = removed(&[&conversation(1)]);
    assert_eq!(tree.apply(rank(1, 0), Tier::Device, &gone).unknown, 1);
    let opaque = KvEventData::Stored {
        parent: Some(EngineHash(sequence(&conversation(1)).0)),
        blocks: vec![StoredBlock { engine: EngineHash(7), local: BlockHash(7) }],
    };
    let applied = tree.apply(rank(1, 0), Tier::Device, &opaque);
    assert_eq!((applied.refused, applied.orphans), (1, 0));
    for worker in 0..4 {
        tree.remove_worker(WorkerId(worker));
    }
    assert_eq!((tree.runs.allocator.live(), tree.pool.live()), (0, 0));
}

#[test]
fn churn_takes_no_more_memory() {
    let (mut tree, _) = new(Limits::default());
    let mut level = 0;
    for n in 0..4_000 {
        tree.apply(rank(n % 4, 0), Tier::Device, &stored(&conversation(n), 0));
        if n >= 400 {
            let path = conversation(n - 400);
            let ends: Vec<&[u64]> = (32..160).rev().map(|end| &path[..=end]).collect();
            assert_eq!(tree.apply(rank((n - 400) % 4, 0), Tier::Device, &removed(&ends)).unknown, 0);
        }
        if n == 1_000 {
            level = tree.bytes();
        }
    }
    assert!(tree.bytes() <= level + level / 50, "{} bytes, {level} before", tree.bytes());
}

#[test]
fn an_announced_size_is_taken_at_once() {
    let (mut tree, _) = new(Limits::default());
    tree.expect_blocks(rank(1, 0), 100_000);
    let before = tree.pool.live();
    assert!((800_000..1_000_000).contains(&before), "{before} bytes");
    let path: Vec<u64> = (0..50_000).collect();
    let all = (0..50_000).map(|n| StoredBlock { engine: EngineHash(n), local: BlockHash(n) }).collect();
    tree.apply(rank(1, 0), Tier::Device, &KvEventData::Stored { parent: None, blocks: all });
    assert_eq!(tree.reader().find_matches(&locals(&path)).get(rank(1, 0)).device, 50_000);
    assert!(tree.contains(rank(1, 0), Tier::Device, EngineHash(49_999)));
    assert!(!tree.contains(rank(1, 0), Tier::Host, EngineHash(49_999)));
    tree.remove_worker(WorkerId(1));
    assert_eq!(tree.pool.live(), 0);
}

#[test]
fn a_full_rank_gets_no_more_until_something_leaves() {
    let (mut pair, path) = (Pair::new(), (0..10).collect::<Vec<u64>>());
    pair.tree.set_limit(rank(1, 0), 6);
    pair.reference.set_limit(rank(1, 0), 6);
    for data in [
        stored(&path, 0),
        stored(&[7, 8], 0),
        removed(&[&path[..6], &path[..5]]),
        stored(&[7, 8], 0),
        stored(&path[..4], 0),
        KvEventData::Cleared,
        stored(&path, 0),
    ] {
        pair.apply(&Op::Apply(rank(1, 0), Tier::Device, data));
        pair.check(&path, std::iter::once(rank(1, 0)));
        pair.check_counts(std::iter::once(rank(1, 0)));
    }
    pair.drop_everything();
}

/// Each rank's tables grow at other times, so that what is free has other sizes than what is wanted.
#[test]
fn a_full_budget_is_met_by_eviction_and_not_by_refusal() {
    let limits = Limits { bytes: 64 << 20, ..Limits::default() };
    let (mut tree, _) = new(limits);
    let mut refused = 0;
    for round in 0..60_000_u64 {
        let hashes = round * 64..(round + 1) * 64;
        let blocks =
            hashes.map(|hash| StoredBlock { engine: EngineHash(hash + 1000), local: BlockHash(hash) }).collect();
        let stored = KvEventData::Stored { parent: None, blocks };
        refused += u64::from(tree.apply(rank(round % 16, 0), Tier::Device, &stored).refused > 0);
        if round % 1000 == 0 {
            assert!(tree.bytes() <= limits.bytes, "{} bytes", tree.bytes());
        }
    }
    assert!(tree.stats().evicted_blocks > 0);
    assert!(refused < 600, "{refused} of 60,000 prompts were refused");
}

#[test]
fn what_a_pool_has_is_found_where_no_rank_holds_all_before_it() {
    let (mut tree, reader) = new(Limits::default());
    let path: Vec<u64> = (1..=400).collect();
    // One rank has the beginning on its device, one the middle in a pool, one the end, in another run of the tree.
    tree.apply(rank(1, 0), Tier::Device, &stored(&path[..100], 0));
    tree.apply(rank(2, 0), Tier::Shared, &stored(&path[..300], 0));
    tree.apply(rank(2, 0), Tier::Shared, &removed(&(0..100).map(|at| &path[..=at]).collect::<Vec<_>>()));
    tree.apply(rank(3, 0), Tier::Device, &stored(&path[..300], 0));
    tree.apply(rank(3, 0), Tier::Shared, &stored(&path, 300));
    tree.apply(rank(3, 0), Tier::Device, &removed(&(0..300).map(|at| &path[..=at]).collect::<Vec<_>>()));
    let found = reader.find_matches(&locals(&path));
    assert_eq!(found.iter().collect::<Vec<_>>(), [(rank(1, 0), device(100))]);
    let pooled: Vec<(u64, u32, u32)> =
        found.pooled().iter().map(|run| (run.rank.worker.0, run.start, run.len)).collect();
    assert_eq!(pooled, [(2, 100, 200), (3, 300, 100)]);
    tree.remove_worker(WorkerId(2));
    assert_eq!(reader.find_matches(&locals(&path)).pooled(), [], "between the two is nothing any more");
}
