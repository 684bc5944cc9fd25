//! The catalog alone: what goes where, in which order, and what is told of it.

use kv_hashing::{BlockHash, chain};
use kv_index::StoredBlock;

use super::*;
use crate::engine::ArenaEvent;

/// A chain of blocks of one sequence, first to last.
fn path(seed: u64, length: usize) -> Vec<CachedBlock> {
    let mut parent = None;
    (0..length as u64)
        .map(|at| {
            let local = BlockHash(seed * 1000 + at);
            let hash = chain(parent, local);
            CachedBlock { hash, parent: parent.replace(hash), local }
        })
        .collect()
}

/// As the arena evicts them: the last one first.
fn evicted(path: &[CachedBlock]) -> Vec<(BlockId, CachedBlock)> {
    path.iter().enumerate().rev().map(|(at, block)| (BlockId(at as u32), *block)).collect()
}

fn stored(tier: Tier, path: &[CachedBlock]) -> ArenaEvent {
    let blocks: Vec<StoredBlock> = path.iter().map(CachedBlock::stored).collect();
    ArenaEvent { tier, data: KvEventData::Stored { parent: path[0].parent.map(|hash| EngineHash(hash.0)), blocks } }
}

fn removed(tier: Tier, blocks: &[CachedBlock]) -> ArenaEvent {
    let blocks = blocks.iter().map(|block| EngineHash(block.hash.0)).collect();
    ArenaEvent { tier, data: KvEventData::Removed { blocks } }
}

fn written(block: &CachedBlock) -> Done {
    Done::Written { hash: block.hash, outcome: Ok(()) }
}

const SIZES: Sizes = Sizes { host: 4, disk: 4, writes: 2, reads: 2, per_step: 8 };

#[test]
fn a_sequence_comes_into_host_memory_as_one_run() {
    let (mut catalog, mut log) = (Catalog::new(SIZES, Policy::Lru, Vec::new()), EventLog::default());
    let path = path(1, 3);
    catalog.offload(&evicted(&path), &mut log);
    assert_eq!(log.take(), [stored(Tier::Host, &path)]);
    assert_eq!(catalog.take_moves().len(), 3);
    catalog.offload(&evicted(&path), &mut log);
    assert!(log.take().is_empty() && catalog.take_moves().is_empty(), "it is there already");
    catalog.check();
}

#[test]
fn tails_go_to_disk_before_their_heads_and_are_told_when_they_are_there() {
    let (mut catalog, mut log) = (Catalog::new(SIZES, Policy::Lru, Vec::new()), EventLog::default());
    let (first, second) = (path(1, 4), path(2, 2));
    catalog.offload(&evicted(&first), &mut log);
    log.take();
    catalog.take_moves();
    catalog.offload(&evicted(&second), &mut log);
    let gone = [first[3], first[2]];
    assert_eq!(log.take(), [removed(Tier::Host, &gone), stored(Tier::Host, &second)]);
    let writes: Vec<_> = catalog
        .take_moves()
        .into_iter()
        .filter_map(|a_move| match a_move {
            Move::Write { block, .. } => Some(block),
            _ => None,
        })
        .collect();
    assert_eq!(writes, gone);
    catalog.done(written(&first[3]), &mut log);
    assert_eq!(log.take(), [stored(Tier::Disk, &first[3..])]);
    catalog.check();
}

#[test]
fn a_full_queue_drops_blocks_and_counts_them() {
    let (mut catalog, mut log) = (Catalog::new(SIZES, Policy::Lru, Vec::new()), EventLog::default());
    catalog.offload(&evicted(&path(1, 4)), &mut log);
    catalog.offload(&evicted(&path(2, 4)), &mut log);
    assert_eq!(catalog.usage().disk, TierCounts { dropped: 2, ..TierCounts::default() });
    assert_eq!(catalog.usage().host_blocks, 4);
    let mut written = catalog.take_moves().into_iter().filter_map(|a_move| match a_move {
        Move::Write { block, .. } => Some(block),
        _ => None,
    });
    let first = path(1, 4);
    assert!(written.by_ref().eq([first[1], first[0]]), "the head of the sequence is worth more than its tail");
    catalog.check();
}

#[test]
fn a_batch_larger_than_the_tier_tells_only_what_stays() {
    let sizes = Sizes { disk: 0, ..SIZES };
    let (mut catalog, mut log) = (Catalog::new(sizes, Policy::Lru, Vec::new()), EventLog::default());
    let path = path(1, 10);
    catalog.offload(&evicted(&path), &mut log);
    assert_eq!(log.take(), [stored(Tier::Host, &path[..4])]);
    catalog.check();
}

#[test]
fn a_full_disk_goes_on_with_the_room_that_it_has() {
    let sizes = Sizes { host: 0, disk: 100, writes: 8, reads: 8, per_step: 8 };
    let (mut catalog, mut log) = (Catalog::new(sizes, Policy::Lru, Vec::new()), EventLog::default());
    let blocks: Vec<_> = (0..8).flat_map(|seed| path(seed, 1)).collect();
    for (at, block) in blocks.iter().enumerate() {
        catalog.offload(&[(BlockId(0), *block)], &mut log);
        let outcome = if at < 3 { Ok(()) } else { Err(WriteFault::Full) };
        catalog.done(Done::Written { hash: block.hash, outcome }, &mut log);
        catalog.check();
        if at == 3 {
            // The next takes the place of an older one.
            break;
        }
    }
    log.take();
    catalog.offload(&[(BlockId(0), blocks[4])], &mut log);
    catalog.done(written(&blocks[4]), &mut log);
    assert_eq!(log.take(), [removed(Tier::Disk, &blocks[..1]), stored(Tier::Disk, &blocks[4..5])]);
    assert_eq!((catalog.usage().disk_blocks, catalog.usage().faults.full), (3, 1));
    // After a while it asks for more.
    catalog.tick(Duration::from_secs(61));
    catalog.offload(&[(BlockId(0), blocks[5])], &mut log);
    catalog.done(written(&blocks[5]), &mut log);
    assert_eq!(catalog.usage().disk_blocks, 4);
    catalog.check();
}

#[test]
fn what_was_on_disk_is_told_parents_first_and_its_tails_go_first() {
    let (first, second) = (path(1, 3), path(2, 2));
    let on_disk = [first[2], second[1], first[0], second[0], first[1]];
    let on_disk = (0u32..).map(DiskSlot).zip(on_disk).collect();
    let sizes = Sizes { host: 0, disk: 5, writes: 2, reads: 2, per_step: 8 };
    let (mut catalog, mut log) = (Catalog::new(sizes, Policy::Lru, on_disk), EventLog::default());
    catalog.tell_disk(&mut log);
    let told = log.take();
    assert_eq!(told.len(), 2);
    assert!(told.contains(&stored(Tier::Disk, &first)) && told.contains(&stored(Tier::Disk, &second)));
    catalog.offload(&[(BlockId(0), path(3, 1)[0])], &mut log);
    let gone = log.take();
    assert!(gone == [removed(Tier::Disk, &first[2..])] || gone == [removed(Tier::Disk, &second[1..])], "{gone:?}");
    catalog.check();
}

#[test]
fn forgetting_everything_leaves_nothing_on_its_way() {
    let (mut catalog, mut log) = (Catalog::new(SIZES, Policy::Lru, Vec::new()), EventLog::default());
    let paths = [path(1, 4), path(2, 2)];
    paths.iter().for_each(|path| catalog.offload(&evicted(path), &mut log));
    catalog.clear();
    log.take();
    catalog.done(written(&paths[0][3]), &mut log);
    catalog.done(written(&paths[0][2]), &mut log);
    assert!(log.take().is_empty());
    assert_eq!((catalog.usage().host_blocks, catalog.usage().disk_blocks), (0, 0));
    catalog.check();
}

/// A catalog without host memory and these blocks on disk, told.
fn on_disk(sizes: Sizes, blocks: &[CachedBlock]) -> (Catalog, EventLog) {
    let blocks = (0u32..).map(DiskSlot).zip(blocks.iter().copied()).collect();
    let (mut catalog, mut log) = (Catalog::new(sizes, Policy::Lru, blocks), EventLog::default());
    catalog.tell_disk(&mut log);
    log.take();
    (catalog, log)
}

#[test]
fn a_block_that_is_on_disk_twice_takes_one_place() {
    let path = path(1, 3);
    let sizes = Sizes { host: 0, disk: 5, writes: 4, reads: 2, per_step: 8 };
    let (mut catalog, mut log) = on_disk(sizes, &[path[0], path[0], path[1], path[0]]);
    catalog.check();
    assert_eq!(catalog.usage().disk_blocks, 2);
    for seed in 2..5 {
        let block = self::path(seed, 1)[0];
        catalog.offload(&[(BlockId(0), block)], &mut log);
        catalog.done(written(&block), &mut log);
    }
    assert_eq!(catalog.usage().disk_blocks, 5, "all of the tier is used");
    catalog.check();
}

#[test]
fn a_read_that_fails_late_does_not_cost_the_copy_that_was_written_since() {
    let (first, second) = (path(1, 1), path(2, 1));
    let sizes = Sizes { host: 0, disk: 1, writes: 2, reads: 1, per_step: 8 };
    let (mut catalog, mut log) = on_disk(sizes, &first);
    catalog.begin_step();
    assert_eq!(catalog.fetch(first[0].hash, BlockId(0)), Found::Later);
    for path in [&second, &first] {
        catalog.offload(&evicted(path), &mut log);
        catalog.done(written(&path[0]), &mut log);
    }
    log.take();
    catalog.done(Done::Read { hash: first[0].hash, outcome: Err(ReadFault::Damaged) }, &mut log);
    assert!(log.take().is_empty());
    assert_eq!(catalog.contents(Tier::Disk), [(first[0].hash, 0)]);
    assert_eq!(catalog.usage().faults, DiskFaults::default());
    catalog.check();
    // It is read anew, and then it is its own fault.
    assert_eq!(catalog.fetch(first[0].hash, BlockId(0)), Found::Later);
    catalog.done(Done::Read { hash: first[0].hash, outcome: Err(ReadFault::Damaged) }, &mut log);
    assert_eq!(log.take(), [removed(Tier::Disk, &first)]);
    assert_eq!(catalog.usage().faults.damaged, 1);
    catalog.check();
}

#[test]
fn a_disk_whose_thread_is_gone_has_nothing_and_gets_nothing() {
    let (kept, new) = (path(1, 2), path(2, 3));
    let sizes = Sizes { host: 1, disk: 4, writes: 3, reads: 2, per_step: 8 };
    let (mut catalog, mut log) = on_disk(sizes, &kept);
    catalog.begin_step();
    assert_eq!(catalog.fetch(kept[0].hash, BlockId(0)), Found::Later);
    assert_eq!(catalog.fetch(kept[1].hash, BlockId(1)), Found::Later);
    catalog.done(Done::Read { hash: kept[0].hash, outcome: Ok(()) }, &mut log);
    catalog.offload(&evicted(&new), &mut log);
    assert!(catalog.take_moves().iter().any(|a_move| matches!(a_move, Move::Write { .. })));
    log.take();
    catalog.done(Done::Stopped, &mut log);
    assert_eq!(log.take(), [removed(Tier::Disk, &[kept[1], kept[0]])]);
    assert_eq!((catalog.usage().disk_blocks, catalog.usage().faults.stopped), (0, 1));
    assert_eq!(catalog.usage().disk.dropped, 2, "those on their way");
    catalog.check();
    assert_eq!(catalog.fetch(kept[0].hash, BlockId(0)), Found::Here(Tier::Disk), "it had come");
    assert_eq!(catalog.fetch(kept[1].hash, BlockId(1)), Found::Nowhere);
    catalog.end_step();
    // Host memory goes on alone.
    catalog.offload(&evicted(&path(3, 1)), &mut log);
    assert!(!catalog.take_moves().iter().any(|a_move| matches!(a_move, Move::Write { .. })));
    assert_eq!((catalog.usage().host_blocks, catalog.usage().disk.dropped), (1, 3));
    catalog.check();
}

#[test]
fn all_that_is_copied_between_two_steps_and_in_the_next_has_one_bound() {
    let sizes = Sizes { host: 4, disk: 0, writes: 0, reads: 0, per_step: 2 };
    let (mut catalog, mut log) = (Catalog::new(sizes, Policy::Lru, Vec::new()), EventLog::default());
    let path = path(1, 4);
    catalog.offload(&evicted(&path), &mut log);
    for _ in 0..2 {
        // Two reservations, and then a sequence.
        assert!(catalog.fetch_from_host(path[0].hash, BlockId(0)));
        assert!(catalog.fetch_from_host(path[1].hash, BlockId(1)));
        assert!(!catalog.fetch_from_host(path[2].hash, BlockId(2)));
        catalog.begin_step();
        assert_eq!(catalog.fetch(path[2].hash, BlockId(2)), Found::Later);
        catalog.end_step();
    }
    catalog.begin_step();
    assert_eq!(catalog.fetch(path[2].hash, BlockId(2)), Found::Here(Tier::Host), "without others it has all of it");
    catalog.end_step();
    assert_eq!(catalog.usage().host.onboarded, 5);
}

#[test]
fn a_disk_that_cannot_bring_all_in_time_is_not_waited_for() {
    let path = path(1, 33);
    let sizes = Sizes { host: 0, disk: 40, writes: 1, reads: 1, per_step: 1 };
    let (catalog, _) = on_disk(sizes, &path);
    let hashes = |count: usize| path[..count].iter().map(|block| block.hash);
    assert!(catalog.all_below_and_some_on_disk(hashes(32)));
    assert!(!catalog.all_below_and_some_on_disk(hashes(33)));
    assert!(!catalog.all_below_and_some_on_disk(hashes(0)), "nothing is missing");
}
