//! The local indexer against a plain map, on random histories.

use std::collections::{BTreeMap, HashSet};

use kv_hashing::BlockHash;
use proptest::prelude::*;

use super::*;

/// What a reader knows: the obvious implementation.
#[derive(Clone, Debug, Default, PartialEq)]
struct Reader {
    blocks: BTreeMap<(Tier, EngineHash), (Option<EngineHash>, BlockHash)>,
    cursor: Option<u64>,
}

impl Reader {
    fn apply(&mut self, event: &KvEvent) {
        match &event.data {
            KvEventData::Stored { parent, blocks } => {
                let mut parent = *parent;
                for block in blocks {
                    self.blocks.insert((event.tier, block.engine), (parent, block.local));
                    parent = Some(block.engine);
                }
            }
            KvEventData::Removed { blocks } => {
                for &engine in blocks {
                    self.blocks.remove(&(event.tier, engine));
                }
            }
            KvEventData::Cleared => self.blocks.clear(),
        }
    }

    fn live(&mut self, event: &KvEvent) {
        assert_eq!(event.id, self.cursor.map_or(0, |id| id + 1), "a gap in the live stream");
        self.apply(event);
        self.cursor = Some(event.id);
    }

    fn recover(&mut self, answer: Answer) {
        match answer {
            Answer::Events { events, last_id } => {
                events.iter().for_each(|event| self.live(event));
                assert_eq!(self.cursor, last_id);
            }
            Answer::Dump(snapshot) => {
                let (last_id, blocks) = (snapshot.last_id(), snapshot.blocks());
                let events = snapshot.into_events();
                self.blocks.clear();
                events.iter().for_each(|event| self.apply(event));
                self.cursor = last_id;
                assert_eq!(events.iter().map(|event| blocks_of(&event.data)).sum::<usize>(), blocks, "each block once");
            }
        }
    }
}

fn block(engine: u64) -> StoredBlock {
    StoredBlock { engine: EngineHash(engine), local: BlockHash(engine ^ 0xabc) }
}

fn stored(parent: Option<u64>, blocks: impl IntoIterator<Item = u64>) -> KvEventData {
    KvEventData::Stored { parent: parent.map(EngineHash), blocks: blocks.into_iter().map(block).collect() }
}

fn removed(blocks: impl IntoIterator<Item = u64>) -> KvEventData {
    KvEventData::Removed { blocks: blocks.into_iter().map(EngineHash).collect() }
}

fn history() -> impl Strategy<Value = Vec<(Tier, KvEventData)>> {
    let tier = prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host), 1 => Just(Tier::Disk)];
    // Parents have lower numbers than their children, so that no history contains a cycle.
    let run = (0..40u64, proptest::option::of(1..5u64), 0..5u64);
    let data = prop_oneof![
        6 => run.prop_map(|(at, up, len)| stored(up.and_then(|up| at.checked_sub(up)), at..at + len)),
        3 => proptest::collection::vec(0..44u64, 0..4).prop_map(removed),
        1 => Just(KvEventData::Cleared),
    ];
    proptest::collection::vec((tier, data), 1..60)
}

proptest! {
    /// Whatever a reader missed, one answer brings it to the state of a reader that missed nothing, and the live stream
    /// then keeps it there.
    #[test]
    fn any_cut_recovers(history in history(), split in 0..60usize, events in 1..12usize, blocks in 1..30usize) {
        let mut indexer = LocalIndexer::new(3, RingLimits { events, blocks });
        let (mut complete, mut before) = (Reader::default(), vec![Reader::default()]);
        let (early, late) = history.split_at(split.min(history.len()));
        for (tier, data) in early {
            for event in indexer.apply(*tier, data.clone()) {
                complete.live(&event);
                before.push(complete.clone());
            }
        }
        let mut readers = before;
        for (cut, reader) in readers.iter_mut().enumerate() {
            reader.recover(indexer.range(cut as u64, None));
            prop_assert_eq!(&*reader, &complete);
        }
        let mut fresh = Reader::default();
        fresh.recover(Answer::Dump(indexer.dump()));
        readers.push(fresh);
        for (tier, data) in late {
            for event in indexer.apply(*tier, data.clone()) {
                complete.live(&event);
                readers.iter_mut().for_each(|reader| reader.live(&event));
            }
        }
        for reader in &readers {
            prop_assert_eq!(reader, &complete);
        }
        prop_assert_eq!(indexer.blocks(), complete.blocks.len());
    }

    #[test]
    fn a_dump_puts_parents_before_children(history in history()) {
        let mut indexer = LocalIndexer::new(0, RingLimits::default());
        for (tier, data) in history {
            indexer.apply(tier, data);
        }
        let events = indexer.dump().into_events();
        let known: HashSet<EngineHash> = events.iter().flat_map(|event| stored_parts(event).1).map(|b| b.engine).collect();
        let mut seen = HashSet::new();
        for event in &events {
            let (parent, blocks) = stored_parts(event);
            prop_assert!(parent.is_none_or(|parent| seen.contains(&parent) || !known.contains(&parent)));
            seen.extend(blocks.iter().map(|block| block.engine));
        }
    }
}

fn stored_parts(event: &KvEvent) -> (Option<EngineHash>, Vec<StoredBlock>) {
    match &event.data {
        KvEventData::Stored { parent, blocks } => (*parent, blocks.clone()),
        other => panic!("a dump holds only Stored events, not {other:?}"),
    }
}

#[test]
fn a_chain_is_one_event_and_each_branch_one_more() {
    let mut indexer = LocalIndexer::new(0, RingLimits::default());
    for at in 0..10u64 {
        indexer.apply(Tier::Device, stored(at.checked_sub(1), [at]));
    }
    indexer.apply(Tier::Device, stored(Some(4), [20, 21]));
    let runs: Vec<usize> = indexer.dump().into_events().iter().map(|event| blocks_of(&event.data)).collect();
    assert_eq!(runs.len(), 2);
    assert_eq!(runs.iter().sum::<usize>(), 12);
}

#[test]
fn long_events_are_split_into_numbered_runs() {
    let mut indexer = LocalIndexer::new(0, RingLimits::default());
    let count = 2 * MAX_EVENT_BLOCKS as u64 + 1;
    let events = indexer.apply(Tier::Device, stored(None, 0..count));
    let runs: Vec<_> = events.iter().map(|event| (event.id, stored_parts(event).0, blocks_of(&event.data))).collect();
    let (first, second) = (EngineHash(4095), EngineHash(8191));
    assert_eq!(runs, [(0, None, 4096), (1, Some(first), 4096), (2, Some(second), 1)]);
    assert_eq!(indexer.dump().into_events().len(), 3);
    assert_eq!(indexer.apply(Tier::Device, removed(0..count)).len(), 3);
    assert_eq!((indexer.blocks(), indexer.last_id()), (0, Some(5)));
}

#[test]
fn events_without_blocks_get_no_number() {
    let mut indexer = LocalIndexer::new(0, RingLimits::default());
    assert!(indexer.apply(Tier::Device, stored(None, [])).is_empty());
    assert!(indexer.apply(Tier::Device, removed([])).is_empty());
    assert_eq!(indexer.last_id(), None);
    assert_eq!(indexer.apply(Tier::Device, KvEventData::Cleared)[0].id, 0);
}

#[test]
fn the_edges_of_a_range() {
    let mut indexer = LocalIndexer::new(0, RingLimits { events: 2, blocks: 100 });
    let ids = |answer| match answer {
        Answer::Events { events, last_id } => Some((events.iter().map(|event| event.id).collect::<Vec<_>>(), last_id)),
        Answer::Dump(_) => None,
    };
    assert_eq!(ids(indexer.range(0, None)), Some((vec![], None)));
    for at in 0..4 {
        indexer.apply(Tier::Device, stored(None, [at]));
    }
    assert_eq!(ids(indexer.range(2, None)), Some((vec![2, 3], Some(3))));
    assert_eq!(ids(indexer.range(2, Some(2))), Some((vec![2], Some(2))));
    assert_eq!(ids(indexer.range(3, Some(u64::MAX))), Some((vec![3], Some(3))));
    assert_eq!(ids(indexer.range(3, Some(1))), Some((vec![], Some(2))), "an empty range moves no cursor");
    assert_eq!(ids(indexer.range(4, None)), Some((vec![], Some(3))), "nothing new");
    assert_eq!(ids(indexer.range(1, None)), None, "fell out of the ring");
    assert_eq!(ids(indexer.range(9, None)), None, "the cursor of another life");
}

#[test]
fn an_event_larger_than_the_ring_leaves_it_empty_but_the_state_whole() {
    let mut indexer = LocalIndexer::new(0, RingLimits { events: 8, blocks: 3 });
    indexer.apply(Tier::Device, stored(None, 0..5));
    assert!(matches!(indexer.range(0, None), Answer::Dump(dump) if dump.blocks() == 5 && dump.last_id() == Some(0)));
    assert!(matches!(indexer.range(1, None), Answer::Events { .. }));
}

#[test]
fn cycles_come_once_and_end() {
    let mut indexer = LocalIndexer::new(0, RingLimits::default());
    indexer.apply(Tier::Device, stored(Some(2), [1]));
    indexer.apply(Tier::Device, stored(Some(1), [2]));
    indexer.apply(Tier::Device, stored(Some(3), [3]));
    let blocks: usize = indexer.dump().into_events().iter().map(|event| blocks_of(&event.data)).sum();
    assert_eq!(blocks, 3);
}

#[test]
fn draws_are_different_blocks_that_are_held() {
    let mut indexer = LocalIndexer::new(0, RingLimits::default());
    assert_eq!(indexer.draw(5, 3), []);
    indexer.apply(Tier::Device, KvEventData::Stored { parent: None, blocks: (0..50).map(block).collect() });
    indexer.apply(Tier::Host, KvEventData::Stored { parent: None, blocks: (0..10).map(block).collect() });
    indexer.apply(Tier::Device, KvEventData::Removed { blocks: (0..20).map(EngineHash).collect() });
    let mut seen = HashSet::new();
    for step in 0..64 {
        let drawn: HashSet<_> = indexer.draw(step << 58, 8).into_iter().collect();
        assert_eq!(drawn.len(), 8);
        assert!(drawn.iter().all(|(tier, engine)| indexer.holds(*tier, *engine)));
        seen.extend(drawn);
    }
    assert_eq!(seen.len(), 40, "each is drawn sooner or later");
    assert_eq!(indexer.draw(u64::MAX, 100).len(), 40);
    assert!(!indexer.holds(Tier::Device, EngineHash(3)) && indexer.holds(Tier::Host, EngineHash(3)));
}
