//! Predictions by age and by capacity, against a list of what was predicted when.

use proptest::prelude::*;

use super::*;
use crate::histories::{locals, paths, rank};
use crate::overlap::TierBlocks;

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn depth(reader: &Reader, worker: u64, path: &[u64]) -> u32 {
    reader.find_matches(&locals(path)).get(rank(worker, 0)).device
}

#[test]
fn a_prediction_lasts_until_its_time_and_again_from_the_last_one() {
    let (mut predictor, reader) = new(Policy::Ttl(s(10)), Limits::default());
    predictor.predict(rank(1, 0), &locals(&[1, 2, 3]), s(0));
    predictor.predict(rank(1, 0), &locals(&[1, 2, 4]), s(5));
    assert_eq!(predictor.next_expiry(), Some(s(10)));
    assert_eq!(predictor.expire(s(9)), 0);
    assert_eq!(predictor.expire(s(10)), 1, "only what the second did not name");
    assert_eq!((depth(&reader, 1, &[1, 2, 3]), depth(&reader, 1, &[1, 2, 4])), (2, 3));
    assert_eq!(predictor.expire(s(15)), 3);
    assert_eq!((predictor.next_expiry(), reader.is_empty()), (None, true));
}

#[test]
fn a_full_rank_loses_the_ends_of_what_was_predicted_first() {
    let (mut predictor, reader) = new(Policy::Lru, Limits::default());
    predictor.set_capacity(rank(1, 0), 5);
    predictor.predict(rank(1, 0), &locals(&[1, 2, 3, 4]), s(0));
    predictor.predict(rank(1, 0), &locals(&[9, 8, 7]), s(1));
    assert_eq!((depth(&reader, 1, &[1, 2, 3, 4]), depth(&reader, 1, &[9, 8, 7])), (2, 3));
    predictor.predict(rank(1, 0), &locals(&[1]), s(2));
    predictor.predict(rank(1, 0), &locals(&[9, 8, 6, 5, 4]), s(3));
    assert_eq!((depth(&reader, 1, &[1, 2]), depth(&reader, 1, &[9, 8, 6, 5, 4])), (0, 5));
    predictor.predict(rank(1, 0), &locals(&[1, 2, 3, 4, 5, 6, 7]), s(4));
    assert_eq!(depth(&reader, 1, &[1, 2, 3, 4, 5, 6, 7]), 5, "more than it can hold is not expected");
    assert_eq!(reader.len(), 5);
}

#[test]
fn a_worker_that_leaves_takes_its_predictions_along() {
    let (mut predictor, reader) = new(Policy::Ttl(s(10)), Limits::default());
    for worker in [1, 2] {
        predictor.predict(rank(worker, 0), &locals(&[1, 2]), s(0));
    }
    assert_eq!(predictor.remove_worker(WorkerId(1)), 2);
    assert_eq!((depth(&reader, 1, &[1, 2]), depth(&reader, 2, &[1, 2])), (0, 2));
    assert_eq!(predictor.remove_rank(rank(2, 0)), 2);
    assert_eq!(predictor.expire(s(100)), 0);
}

#[test]
fn its_memory_counts_what_is_beside_the_tree() {
    let (mut predictor, _) = new(Policy::Ttl(s(10)), Limits::default());
    let empty = predictor.bytes();
    for n in 0..100 {
        let path: Vec<u64> = (n * 100..n * 100 + 100).collect();
        predictor.predict(rank(1, 0), &locals(&path), s(0));
    }
    let beside = predictor.bytes() - predictor.stats().bytes;
    assert!((10_000 * 8..10_000 * 12).contains(&beside), "{beside} for 10,000 blocks");
    predictor.remove_worker(WorkerId(1));
    assert_eq!(predictor.bytes() - predictor.stats().bytes, 0);
    assert!(empty < 1 << 20, "{empty}");
}

/// Predicts prompts of `blocks` blocks of which none is like another, for three ranks in turn, and looks at the memory after each.
fn predict_within(bytes: usize, prompts: u64, blocks: u64) {
    let (mut predictor, reader) = new(Policy::Ttl(s(1_000_000)), Limits { bytes, ..Limits::default() });
    let path = |n: u64| -> Vec<u64> { (n * blocks..(n + 1) * blocks).collect() };
    for n in 0..prompts {
        predictor.predict(rank(n % 3, 0), &locals(&path(n)), s(n));
        assert!(predictor.bytes() <= bytes, "{} bytes after {n} prompts of {blocks}", predictor.bytes());
        let weight: usize = predictor.lanes.values().map(|lane| lane.weight).sum();
        assert_eq!(weight, predictor.weight);
        assert!(predictor.lanes.values().all(|lane| lane.bytes() <= lane.weight));
    }
    let depth = |n: u64| u64::from(depth(&reader, n % 3, &path(n)));
    assert_eq!((depth(0), depth(prompts - 1)), (0, blocks), "the oldest makes room for the newest");
    let (known, all) = (predictor.stats().owned_blocks as u64, prompts * blocks);
    assert!(known > 10 * blocks && known < all / 2, "{known} of {all} blocks");
}

#[test]
fn memory_is_bounded_and_the_oldest_prediction_of_all_ranks_goes_first() {
    predict_within(2 << 20, 10_000, 1);
    predict_within(2 << 20, 4500, 20);
    predict_within(4 << 20, 1500, 200);
}

#[test]
fn a_prompt_that_memory_has_no_room_for_is_not_predicted() {
    let (mut predictor, reader) = new(Policy::Lru, Limits { bytes: 1 << 20, ..Limits::default() });
    let path: Vec<u64> = (0..100_000).collect();
    predictor.predict(rank(1, 0), &locals(&path), s(0));
    assert_eq!((predictor.weight, reader.is_empty()), (0, true));
    predictor.predict(rank(1, 0), &locals(&path[..100]), s(1));
    assert_eq!(depth(&reader, 1, &path), 100);
}

#[test]
fn predicting_the_same_for_ever_takes_no_more_memory() {
    let (mut predictor, _) = new(Policy::Lru, Limits::default());
    predictor.set_capacity(rank(1, 0), 100);
    for n in 0..10_000 {
        predictor.predict(rank(1, 0), &locals(&[1, 2, 3, n % 7]), s(n));
    }
    let lane = &predictor.lanes[&rank(1, 0)];
    assert!(lane.queue.len() <= STALE * SHORT && lane.newest.blocks() == 10, "{} queued", lane.queue.len());
}

#[test]
fn a_part_of_the_oldest_prediction_makes_room() {
    let (mut predictor, reader) = new(Policy::Lru, Limits::default());
    predictor.set_capacity(rank(1, 0), 6);
    predictor.predict(rank(1, 0), &locals(&[1, 2, 3, 4]), s(0));
    predictor.predict(rank(1, 0), &locals(&[1, 2, 5]), s(1));
    for (capacity, first, second) in [(4, 3, 3), (3, 2, 3), (2, 2, 2), (1, 1, 1), (0, 0, 0)] {
        predictor.set_capacity(rank(1, 0), capacity);
        assert_eq!((depth(&reader, 1, &[1, 2, 3, 4]), depth(&reader, 1, &[1, 2, 5])), (first, second), "{capacity}");
    }
    assert!(predictor.lanes[&rank(1, 0)].queue.is_empty());
}

proptest! {
    #[test]
    fn any_predictions_equal_the_list(
        predictions in proptest::collection::vec((0..3_u64, paths(), 0..4_u64), 1..60),
        query in paths(),
    ) {
        let (mut predictor, reader) = new(Policy::Ttl(s(10)), Limits::default());
        let mut list: Vec<(u64, Vec<u64>, Duration)> = Vec::new();
        let mut now = s(0);
        for (worker, path, pause) in predictions {
            now += s(pause);
            predictor.expire(now);
            list.retain(|(_, _, at)| *at + s(10) > now);
            predictor.predict(rank(worker, 0), &locals(&path), now);
            list.push((worker, path, now));
            for worker in 0..3 {
                let own = list.iter().filter(|(other, _, _)| *other == worker);
                let common = |path: &Vec<u64>| path.iter().zip(&query).take_while(|(a, b)| a == b).count();
                let expected = own.map(|(_, path, _)| common(path)).max().unwrap_or(0) as u32;
                let found = reader.find_matches(&locals(&query)).get(rank(worker, 0));
                prop_assert_eq!(found, TierBlocks { device: expected, ..TierBlocks::default() });
            }
        }
    }

    #[test]
    fn a_full_rank_equals_a_table_of_its_blocks(
        steps in proptest::collection::vec((paths(), proptest::option::weighted(0.2, 0..20_usize)), 1..60),
        query in paths(),
    ) {
        let (mut predictor, reader) = new(Policy::Lru, Limits::default());
        // Each block by its path, with the number of the newest prediction that names it.
        let mut held: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
        let mut capacity = 20;
        predictor.set_capacity(rank(1, 0), capacity);
        for (number, (path, changed)) in steps.into_iter().enumerate() {
            if let Some(blocks) = changed {
                capacity = blocks;
                predictor.set_capacity(rank(1, 0), capacity);
            } else {
                predictor.predict(rank(1, 0), &locals(&path), s(0));
                held.extend((1..=path.len().min(capacity)).map(|end| (path[..end].to_vec(), number)));
            }
            while held.len() > capacity {
                let oldest = held.iter().min_by_key(|(path, number)| (**number, usize::MAX - path.len()));
                let oldest = oldest.map(|(path, _)| path.clone());
                oldest.map(|path| held.remove(&path));
            }
            let depth = (1..=query.len()).take_while(|end| held.contains_key(&query[..*end])).count();
            prop_assert_eq!(reader.find_matches(&locals(&query)).get(rank(1, 0)).device as usize, depth);
            prop_assert_eq!(predictor.lanes[&rank(1, 0)].newest.blocks(), held.len());
        }
    }
}
