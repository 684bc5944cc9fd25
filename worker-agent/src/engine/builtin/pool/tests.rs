//! The pool against an obvious model of it, on random histories and on the cases worth a name.

use std::collections::{HashMap, HashSet};

use kv_hashing::{BlockSize, HashSpace, sequence_hashes};
use kv_index::{EngineHash, KvEventData};
use proptest::prelude::*;

use super::*;

const SIZE: usize = 2;

/// What a reader of the events believes: each cached block and its parent.
#[derive(Default)]
struct Mirror {
    parent_of: HashMap<u64, Option<u64>>,
}

impl Mirror {
    fn apply(&mut self, events: Vec<ArenaEvent>) {
        for event in events {
            match event.data {
                KvEventData::Stored { parent, blocks } => {
                    assert!(!blocks.is_empty());
                    let mut parent = parent.map(|hash| hash.0);
                    for block in blocks {
                        assert!(parent.is_none_or(|p| self.parent_of.contains_key(&p)), "stored before its parent");
                        assert!(self.parent_of.insert(block.engine.0, parent).is_none(), "stored twice");
                        parent = Some(block.engine.0);
                    }
                }
                KvEventData::Removed { blocks } => {
                    for block in blocks {
                        assert!(self.parent_of.remove(&block.0).is_some(), "removed what was not there");
                        assert!(!self.parent_of.values().any(|p| *p == Some(block.0)), "removed before its child");
                    }
                }
                KvEventData::Cleared => self.parent_of.clear(),
            }
        }
    }
}

/// One sequence as a scheduler would hold it.
struct Held {
    hashes: Vec<(BlockHash, SequenceHash)>,
    table: Vec<BlockId>,
    committed: usize,
}

fn hashes(tokens: &[u32]) -> Vec<(BlockHash, SequenceHash)> {
    let local = HashSpace::default().blocks(tokens, BlockSize::new(SIZE as u32).expect("not zero"));
    let sequence = sequence_hashes(&local);
    local.into_iter().zip(sequence).collect()
}

fn admit(pool: &mut BlockPool, tokens: &[u32]) -> Option<Held> {
    let mut held = Held { hashes: hashes(tokens), table: Vec::new(), committed: 0 };
    let reusable = (tokens.len() - 1) / SIZE;
    let prefix = pool.prefix(held.hashes[..reusable].iter().map(|h| h.1));
    let fresh = tokens.len().div_ceil(SIZE) - prefix.blocks;
    if pool.available() - prefix.idle < fresh {
        return None;
    }
    for &(_, hash) in &held.hashes[..prefix.blocks] {
        held.table.push(pool.acquire(hash).expect("just seen"));
    }
    held.committed = prefix.blocks;
    pool.allocate(fresh, &mut held.table).expect("just counted");
    Some(held)
}

fn commit_next(pool: &mut BlockPool, held: &mut Held) {
    let Some(&(local, hash)) = held.hashes.get(held.committed) else { return };
    let parent = held.committed.checked_sub(1).map(|i| held.hashes[i].1);
    held.table[held.committed] = pool.commit(held.table[held.committed], parent, hash, local);
    held.committed += 1;
}

/// Every block is in exactly one place, and reference counts are the number of tables that list the block.
fn check(pool: &BlockPool, held: &[Held], mirror: &Mirror) {
    let mut refs: HashMap<BlockId, u32> = HashMap::new();
    for table in held.iter().map(|h| &h.table) {
        assert_eq!(table.iter().collect::<HashSet<_>>().len(), table.len(), "a table lists a block twice");
        table.iter().for_each(|id| *refs.entry(*id).or_default() += 1);
    }
    let free: HashSet<_> = pool.free.iter().copied().collect();
    let idle: HashSet<_> = pool.idle.values().copied().collect();
    assert_eq!((free.len(), idle.len()), (pool.free.len(), pool.idle.len()), "a block is in a list twice");
    for (index, block) in pool.blocks.iter().enumerate() {
        let id = BlockId(index as u32);
        assert_eq!(block.refs, refs.get(&id).copied().unwrap_or(0));
        let places = [block.refs > 0, free.contains(&id), idle.contains(&id)];
        assert_eq!(places.iter().filter(|p| **p).count(), 1, "block {index} is leaked or owned twice");
        assert!(block.cached.is_none_or(|hash| pool.cached[&hash.hash] == id));
    }
    let cached: HashSet<u64> = pool.cached.keys().map(|hash| hash.0).collect();
    assert_eq!(cached, mirror.parent_of.keys().copied().collect::<HashSet<_>>());
    assert!(mirror.parent_of.values().flatten().all(|p| cached.contains(p)), "a cached block lost its parent");
}

#[derive(Clone, Debug)]
enum Step {
    Admit(Vec<u32>),
    Compute(usize),
    Free(usize),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    // Few distinct tokens, so that prefixes are shared and equal blocks are computed side by side.
    prop_oneof![
        4 => prop::collection::vec(0..2u32, 1..13).prop_map(Step::Admit),
        10 => (0..8usize).prop_map(Step::Compute),
        3 => (0..8usize).prop_map(Step::Free),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_tell_exactly_what_is_cached(total in 1..16usize, steps in prop::collection::vec(step(), 1..120)) {
        let (mut pool, mut held, mut mirror) = (BlockPool::new(total), Vec::<Held>::new(), Mirror::default());
        for step in steps {
            match step {
                Step::Admit(tokens) => held.extend(admit(&mut pool, &tokens)),
                Step::Compute(i) if i < held.len() => commit_next(&mut pool, &mut held[i]),
                Step::Free(i) if i < held.len() => {
                    let gone = held.swap_remove(i);
                    pool.release(&gone.table);
                }
                Step::Clear => {
                    pool.clear();
                    // Whoever holds blocks gives them up: what they would cache next has no parent any more.
                    held.drain(..).for_each(|gone| pool.release(&gone.table));
                }
                _ => {}
            }
            mirror.apply(pool.take_events());
            check(&pool, &held, &mirror);
        }
    }
}

#[test]
fn the_tail_of_a_sequence_goes_before_its_head() {
    let mut pool = BlockPool::new(3);
    let mut held = admit(&mut pool, &[1, 2, 3, 4, 5, 6]).expect("three free blocks");
    (0..3).for_each(|_| commit_next(&mut pool, &mut held));
    pool.release(&held.table);
    pool.take_events();

    let mut table = Vec::new();
    pool.allocate(2, &mut table).expect("all three are idle");
    let gone = vec![EngineHash(held.hashes[2].1.0), EngineHash(held.hashes[1].1.0)];
    let data = KvEventData::Removed { blocks: gone };
    assert_eq!(pool.take_events(), [ArenaEvent { tier: Tier::Device, data }]);
    assert_eq!(pool.prefix(held.hashes.iter().map(|h| h.1)), Prefix { blocks: 1, idle: 1 });
}

#[test]
fn equal_blocks_are_kept_once_and_told_once() {
    let mut pool = BlockPool::new(4);
    let mut first = admit(&mut pool, &[1, 2, 3]).expect("free blocks");
    let mut second = admit(&mut pool, &[1, 2, 4]).expect("free blocks");
    commit_next(&mut pool, &mut first);
    commit_next(&mut pool, &mut second);
    assert_eq!(first.table[0], second.table[0]);
    assert_eq!(pool.take_events().len(), 1);
    assert_eq!(pool.active(), 3);
    pool.release(&first.table);
    assert_eq!(pool.active(), 2, "the second sequence still holds the shared block");
}

#[test]
fn a_run_of_blocks_is_one_event() {
    let mut pool = BlockPool::new(3);
    let mut held = admit(&mut pool, &[1, 2, 3, 4, 5, 6]).expect("free blocks");
    (0..3).for_each(|_| commit_next(&mut pool, &mut held));
    let events = pool.take_events();
    assert!(
        matches!(&events[..], [ArenaEvent { data: KvEventData::Stored { parent: None, blocks }, .. }] if blocks.len() == 3)
    );
}

#[test]
fn an_allocation_that_does_not_fit_takes_nothing() {
    let mut pool = BlockPool::new(2);
    let mut table = Vec::new();
    assert_eq!(pool.allocate(3, &mut table), Err(Exhausted));
    assert!(table.is_empty());
    assert_eq!(pool.available(), 2);
}
