//! The ring of past decisions.

use kv_hashing::BlockSize;
use kv_index::{Overlaps, TierBlocks, WorkerId, WorkerRank};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::*;
use crate::load::{ActiveLoad, LoadConfig, Prompt, RouterId};
use crate::select::SelectorConfig;
use crate::worker::{Worker, WorkerSet};

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

/// Decides for `workers` workers, the first of which holds `overlap` blocks, and records it.
fn decide(log: &mut DecisionLog, names: impl Into<RequestNames>, workers: u64, overlap: u32) -> Explanation {
    let set: WorkerSet = (1..=workers).map(|id| Worker::new(rank(id), format!("w{id}"), "m")).collect();
    let prompt = Prompt { blocks: [].into(), tokens: 160, block_size: BlockSize::new(16).expect("not zero") };
    let overlaps: Overlaps = [(rank(1), TierBlocks { device: overlap, ..TierBlocks::default() })].into_iter().collect();
    let load = ActiveLoad::new(RouterId(0), LoadConfig::default());
    let mut selector = Selector::new(SelectorConfig::default());
    let request = Request::new("m", &prompt);
    let explanation = selector.explain(&set, &request, &overlaps, &load, &mut StdRng::seed_from_u64(3));
    let outcome = selector.decide(&set, &request, &overlaps, &load, &mut StdRng::seed_from_u64(3));
    log.push(names.into(), Duration::from_secs(1), &selector, &request, outcome);
    explanation
}

#[test]
fn a_record_is_what_an_explanation_would_have_said() {
    let mut log = DecisionLog::new(10, 100);
    let first = decide(&mut log, "a", 3, 4);
    decide(&mut log, "b", 2, 0);
    let again = decide(&mut log, "a", 2, 7);
    let records: Vec<Explanation> = log.get("a").into_iter().map(|record| record.explanation).collect();
    assert_eq!(records, [first, again], "one for each attempt");
    let record = &log.get("b")[0];
    assert_eq!((&*record.model, record.omitted, record.explanation.candidates.len()), ("m", 0, 2));
    assert!(log.get("c").is_empty());
}

#[test]
fn a_request_is_found_by_every_name_it_has() {
    let mut log = DecisionLog::new(10, 100);
    let known_as: Arc<[Box<str>]> = ["answer".into(), "client".into()].into();
    for id in ["answer-0", "answer-1"] {
        decide(&mut log, RequestNames::new(id, known_as.clone()), 2, 0);
    }
    let ids = |log: &DecisionLog, name: &str| -> Vec<String> {
        log.get(name).iter().map(|record| record.request.to_string()).collect()
    };
    for name in ["answer", "client"] {
        assert_eq!(ids(&log, name), ["answer-0", "answer-1"], "all of its choices");
    }
    assert_eq!(ids(&log, "answer-1"), ["answer-1"]);
    let late = RequestNames::from("r");
    decide(&mut log, late.clone(), 2, 0);
    assert!(ids(&log, "chatcmpl-7").is_empty());
    late.answered_as("chatcmpl-7");
    late.answered_as("chatcmpl-8");
    assert_eq!((ids(&log, "chatcmpl-7"), ids(&log, "chatcmpl-8").len()), (vec!["r".to_owned()], 0));
}

#[test]
fn the_oldest_make_room_by_number_and_by_rows() {
    let mut log = DecisionLog::new(3, 100);
    ["a", "b", "c", "d"].into_iter().for_each(|id| {
        decide(&mut log, id, 2, 0);
    });
    assert_eq!((log.len(), log.rows(), log.get("a").len(), log.get("b").len()), (3, 6, 0, 1));
    let mut log = DecisionLog::new(100, 10);
    for (id, workers) in [("a", 4), ("b", 4), ("c", 6)] {
        decide(&mut log, id, workers, 0);
    }
    assert_eq!((log.len(), log.rows(), log.get("a").len()), (2, 10, 0));
    assert_eq!(log.get("b")[0].explanation.candidates.len(), 4);
}

#[test]
fn more_workers_than_the_log_holds_are_left_out_by_number() {
    let mut log = DecisionLog::new(10, 5);
    decide(&mut log, "a", 8, 3);
    let record = &log.get("a")[0];
    assert_eq!((record.omitted, record.explanation.candidates.len()), (3, 5));
    assert_eq!(record.explanation.outcome.expect("chosen").rank, rank(1));
    let mut none = DecisionLog::new(0, 5);
    decide(&mut none, "a", 2, 0);
    assert!(none.is_empty());
}
