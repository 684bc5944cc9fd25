//! The trie, against the list of what is in it.

use std::collections::BTreeSet;

use kv_hashing::sequence_hashes;
use proptest::prelude::*;

use super::*;
use crate::histories::{locals, paths};

fn blocks(path: &[u64]) -> Vec<SequenceHash> {
    sequence_hashes(&locals(path))
}

/// Counts the sequences that go through each run.
fn insert(runs: &mut Runs<u32>, path: &[u64]) -> Option<RunId> {
    runs.insert(&blocks(path), |count, _| *count += 1)
}

fn release(runs: &mut Runs<u32>, path: &[u64]) {
    runs.release(&blocks(path), |count, _| {
        *count -= 1;
        *count == 0
    });
}

fn walked(runs: &Runs<u32>, path: &[u64]) -> Vec<(u32, usize)> {
    let mut seen = Vec::new();
    runs.walk(&blocks(path), |count, end| {
        seen.push((*count, end));
        true
    });
    seen
}

#[test]
fn a_run_is_cut_where_a_sequence_leaves_it() {
    let mut runs = Runs::default();
    insert(&mut runs, &[1, 2, 3, 4]);
    insert(&mut runs, &[1, 2, 5]);
    insert(&mut runs, &[1]);
    assert_eq!(walked(&runs, &[1, 2, 3, 4]), [(3, 1), (2, 2), (1, 4)]);
    assert_eq!(walked(&runs, &[1, 2, 3, 9]), [(3, 1), (2, 2), (1, 3)], "in part");
    assert_eq!(walked(&runs, &[1, 2, 9, 4]), [(3, 1), (2, 2)]);
    assert_eq!((walked(&runs, &[9]), walked(&runs, &[])), (vec![], vec![]));
    release(&mut runs, &[1, 2, 3, 4]);
    assert_eq!((walked(&runs, &[1, 2, 3, 4]), runs.blocks()), (vec![(2, 1), (1, 2)], 3));
}

#[test]
fn a_sequence_is_shortened_from_its_end() {
    let mut runs = Runs::default();
    insert(&mut runs, &[1, 2, 3, 4]);
    let last = insert(&mut runs, &[1, 2, 5, 6]).expect("has blocks");
    let all = blocks(&[1, 2, 5, 6]);
    assert_eq!(runs.shorten(last, 1), (all[3..].into(), None));
    assert_eq!(runs.get(last), (&1, &all[2..3]));
    let (rest, before) = runs.shorten(last, 0);
    assert_eq!((&*rest, runs.get(before.expect("the shared run")).1), (&all[2..3], &all[..2]));
    assert_eq!((walked(&runs, &[1, 2, 5]), runs.blocks()), (vec![(2, 2)], 4));
}

#[test]
fn the_room_of_runs_that_ended_is_given_back() {
    let mut runs = Runs::default();
    for n in 0..1000 {
        insert(&mut runs, &[n, n + 1, n + 2]);
    }
    let last = insert(&mut runs, &[7, 8, 10]).expect("has blocks");
    (0..1000).filter(|n| *n != 7).for_each(|n| release(&mut runs, &[n, n + 1, n + 2]));
    assert!(runs.bytes() > runs.weight(), "{} for {} blocks", runs.bytes(), runs.blocks());
    let before = runs.get(last).1.to_vec();
    let name = runs.compact();
    assert!(runs.bytes() <= runs.weight(), "{} for {} blocks", runs.bytes(), runs.blocks());
    assert_eq!(runs.runs.len(), 3, "the shared run, and two ends");
    let last = name(last).expect("it lives");
    assert_eq!(runs.get(last), (&1, &before[..]));
    assert_eq!((walked(&runs, &[7, 8, 9]), walked(&runs, &[7, 8, 10])), (vec![(2, 2), (1, 3)], vec![(2, 2), (1, 3)]));
    assert_eq!(insert(&mut runs, &[7, 8, 10]), Some(last));
}

proptest! {
    #[test]
    fn any_sequences_equal_the_list(steps in proptest::collection::vec((paths(), any::<bool>()), 1..40), query in paths()) {
        let mut runs = Runs::default();
        let mut list: Vec<Vec<u64>> = Vec::new();
        for (path, leaves) in steps {
            if leaves && !list.is_empty() {
                let at = path.len() % list.len();
                release(&mut runs, &list.swap_remove(at));
            } else {
                insert(&mut runs, &path);
                list.push(path);
            }
            if list.len().is_multiple_of(5) {
                let _ = runs.compact();
            }
            let distinct: BTreeSet<_> = list.iter().flat_map(|path| blocks(path)).collect();
            prop_assert_eq!(runs.blocks(), distinct.len());
            prop_assert_eq!(runs.runs.len() - runs.free.len(), runs.begins.len());
            let mut from = 0;
            for (count, end) in walked(&runs, &query) {
                for length in from + 1..=end {
                    let through = list.iter().filter(|path| path.starts_with(&query[..length])).count();
                    prop_assert_eq!(count as usize, through);
                }
                from = end;
            }
            let longest = list.iter().map(|path| path.iter().zip(&query).take_while(|(a, b)| a == b).count()).max();
            prop_assert_eq!(from, longest.unwrap_or(0));
        }
    }
}
