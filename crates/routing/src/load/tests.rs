//! The load book: named scenarios, and random lives against a recount from scratch.

use std::collections::HashSet;

use kv_hashing::{BlockHash, sequence_hashes};
use proptest::prelude::*;

use super::*;

mod replicas;

const SIZE: BlockSize = BlockSize::new(4).expect("not zero");

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

fn prompt(path: &[u64], extra_tokens: usize) -> Prompt {
    let locals: Vec<BlockHash> = path.iter().map(|n| BlockHash(*n)).collect();
    let tokens = path.len() * SIZE.get() + extra_tokens;
    Prompt { blocks: sequence_hashes(&locals).into(), tokens, block_size: SIZE }
}

fn new(rank: WorkerRank, prompt: Prompt) -> NewBooking {
    let prefill_tokens = prompt.tokens;
    NewBooking { request: "r".into(), rank, prompt, prefill_tokens, expected_output_tokens: None }
}

fn empty(config: LoadConfig) -> ActiveLoad {
    ActiveLoad::new(RouterId(0), config)
}

fn seen(load: &ActiveLoad, at: WorkerRank) -> (u32, u32, u32) {
    let RankView { active_blocks, prefill_tokens, requests } = load.rank(at);
    (active_blocks, prefill_tokens, requests)
}

#[test]
fn a_request_lives_from_routing_to_its_end() {
    let mut load = empty(LoadConfig::default());
    let id = load.book(new(rank(1), prompt(&[1, 2], 1)));
    assert_eq!(seen(&load, rank(1)), (3, 9, 1));
    load.prefill_completed(id);
    load.prefill_completed(id);
    assert_eq!(load.rank(rank(1)).prefill_tokens, 0, "counted off once");
    load.add_output(id, 3);
    assert_eq!(load.rank(rank(1)).active_blocks, 3, "the open block had room for three");
    load.add_output(id, 1);
    assert_eq!(load.rank(rank(1)).active_blocks, 4);
    load.free(id);
    load.free(id);
    assert_eq!((seen(&load, rank(1)), load.total_requests()), ((0, 0, 0), 0));
    assert_eq!((load.ledger.ranks(), load.ledger.shared_blocks()), (0, 0), "an idle rank leaves nothing behind");
}

#[test]
fn a_shared_prefix_counts_once() {
    let mut load = empty(LoadConfig::default());
    let first = load.book(new(rank(1), prompt(&[1, 2, 3], 0)));
    let second = prompt(&[1, 2, 4], 2);
    assert_eq!(load.potential_blocks(rank(1), &second), 3 + 1 + 1, "one full block and the partial one are new");
    assert_eq!(load.potential_blocks(rank(2), &second), 4);
    load.book(new(rank(1), second));
    assert_eq!(load.rank(rank(1)).active_blocks, 5);
    load.free(first);
    assert_eq!(load.rank(rank(1)).active_blocks, 4, "what the other uses stays");
}

#[test]
fn without_reuse_every_request_counts_alone() {
    let mut load = empty(LoadConfig { assume_kv_reuse: false, ..LoadConfig::default() });
    let first = load.book(new(rank(1), prompt(&[1, 2, 3], 0)));
    assert_eq!(load.potential_blocks(rank(1), &prompt(&[1, 2, 3], 0)), 6);
    load.book(new(rank(1), prompt(&[1, 2, 3], 0)));
    assert_eq!(load.rank(rank(1)).active_blocks, 6);
    load.free(first);
    assert_eq!(load.rank(rank(1)).active_blocks, 3);
}

#[test]
fn what_is_not_tracked_does_not_count() {
    let mut load = empty(LoadConfig { track_output_blocks: false, ..LoadConfig::default() });
    let id = load.book(new(rank(1), prompt(&[1, 2], 1)));
    load.add_output(id, 100);
    assert_eq!(seen(&load, rank(1)), (3, 9, 1));
    let mut load = empty(LoadConfig { track_prefill_tokens: false, ..LoadConfig::default() });
    let id = load.book(new(rank(1), prompt(&[1, 2], 1)));
    assert_eq!(seen(&load, rank(1)), (3, 0, 1));
    load.prefill_completed(id);
    assert_eq!(seen(&load, rank(1)), (3, 0, 1));
    let mut load = empty(LoadConfig { track_active_blocks: false, ..LoadConfig::default() });
    let id = load.book(new(rank(1), prompt(&[1, 2], 1)));
    load.add_output(id, 100);
    assert_eq!(seen(&load, rank(1)), (0, 9, 1));
    assert_eq!(load.potential_blocks(rank(1), &prompt(&[1, 2], 1)), 3, "the request's own blocks alone");
    load.free(id);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0));
}

#[test]
fn output_counts_less_as_its_expected_end_comes_near() {
    let mut load = empty(LoadConfig::default());
    let booking = NewBooking { expected_output_tokens: Some(40), ..new(rank(1), prompt(&[1], 0)) };
    let id = load.book(booking);
    let mut blocks = Vec::new();
    for _ in 0..6 {
        load.add_output(id, 8);
        blocks.push(load.rank(rank(1)).active_blocks - 1);
    }
    // 2, 4, 6, 8 blocks with 4/5, 3/5, 2/5, 1/5 of the way to go; then none, though it goes on.
    assert_eq!(blocks, [2, 3, 3, 2, 0, 0]);
    load.free(id);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0));
}

#[test]
fn a_worker_that_leaves_takes_its_load_along() {
    let mut load = empty(LoadConfig::default());
    let second_rank = WorkerRank { dp_rank: 1, ..rank(1) };
    let gone = [load.book(new(rank(1), prompt(&[1], 0))), load.book(new(second_rank, prompt(&[1], 0)))];
    let stays = load.book(new(rank(2), prompt(&[1], 0)));
    load.report(rank(1), Reported { active_blocks: Some(9), ..Reported::default() }, Duration::ZERO);
    assert_eq!(load.remove_worker(WorkerId(1)), 2);
    assert_eq!((seen(&load, rank(1)), seen(&load, second_rank)), ((0, 0, 0), (0, 0, 0)));
    assert_eq!(load.reported(rank(1)), None);
    // The worker comes back under the same id: what ends late must not take from what is new.
    load.book(new(rank(1), prompt(&[7], 0)));
    gone.iter().for_each(|id| {
        load.add_output(*id, 100);
        load.free(*id);
    });
    assert_eq!((seen(&load, rank(1)), seen(&load, rank(2))), ((1, 4, 1), (1, 4, 1)));
    assert!(load.state(stays).is_some() && load.state(gone[0]).is_none());
}

#[test]
fn reports_count_until_the_worker_has_been_silent_too_long() {
    let mut load = empty(LoadConfig::default());
    let report = Reported { active_blocks: Some(7), ..Reported::default() };
    load.report(rank(1), report, Duration::from_secs(5));
    load.expire_reports(Duration::from_secs(15));
    assert_eq!(load.reported(rank(1)), Some(report));
    load.expire_reports(Duration::from_secs(16));
    assert_eq!(load.reported(rank(1)), None);
}

#[test]
fn of_a_report_what_is_beyond_the_bookings_counts_until_the_next_one() {
    let mut load = empty(LoadConfig::default());
    let unbooked = |load: &ActiveLoad| load.survey(&prompt(&[], 0), &mut Vec::new()).unbooked(rank(1));
    let report = |blocks, tokens, running, waiting| Reported {
        active_blocks: Some(blocks),
        prefill_tokens: Some(tokens),
        running_requests: Some(running),
        waiting_requests: Some(waiting),
        kv_used_blocks: None,
    };
    let own = load.book(new(rank(1), prompt(&[1, 2], 0)));
    assert_eq!(seen(&load, rank(1)), (2, 8, 1));
    load.report(rank(1), report(12, 8, 3, 2), Duration::ZERO);
    assert_eq!(unbooked(&load), RankView { active_blocks: 10, prefill_tokens: 0, requests: 4 });
    // What ends or begins here meanwhile is counted here.
    load.free(own);
    load.book(new(rank(1), prompt(&[3], 0)));
    assert_eq!(unbooked(&load), RankView { active_blocks: 10, prefill_tokens: 0, requests: 4 });
    // A worker that has not heard yet of what was sent to it has nothing from others.
    load.report(rank(1), report(0, 0, 0, 0), Duration::ZERO);
    assert_eq!(unbooked(&load), RankView::default());
    load.report(rank(1), Reported::default(), Duration::ZERO);
    assert_eq!(load.reported(rank(1)), None, "it tells nothing any more");
}

#[derive(Clone, Debug)]
enum Op {
    Book(u64, Vec<u64>, usize),
    Prefilled(prop::sample::Index),
    Output(prop::sample::Index, usize),
    Free(prop::sample::Index),
}

fn ops() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => (0..3_u64, prop::collection::vec(0..2_u64, 0..5), 0..4_usize).prop_map(|(w, p, extra)| Op::Book(w, p, extra)),
        3 => index().prop_map(Op::Prefilled),
        5 => (index(), 0..9_usize).prop_map(|(i, n)| Op::Output(i, n)),
        4 => index().prop_map(Op::Free),
    ]
}

/// One live request of the model: (id, worker, prompt, output tokens, prefill tokens).
type Running = (BookingId, u64, Prompt, usize, usize);

fn recount(live: &[Running], worker: u64) -> (u32, u32, u32) {
    let here: Vec<&Running> = live.iter().filter(|l| l.1 == worker).collect();
    let shared: HashSet<SequenceHash> = here.iter().flat_map(|l| l.2.blocks.iter().copied()).collect();
    let private: usize = here.iter().map(|l| (l.2.tokens + l.3).div_ceil(SIZE.get()) - l.2.blocks.len()).sum();
    let prefill: usize = here.iter().map(|l| l.4).sum();
    ((shared.len() + private) as u32, prefill as u32, here.len() as u32)
}

proptest! {
    #[test]
    fn random_lives_equal_a_recount(history in prop::collection::vec(ops(), 1..80), probe in prop::collection::vec(0..2_u64, 0..5)) {
        let mut load = empty(LoadConfig::default());
        let mut live: Vec<Running> = Vec::new();
        for op in history {
            match op {
                Op::Book(worker, path, extra) => {
                    let prompt = prompt(&path, extra);
                    let id = load.book(new(rank(worker), prompt.clone()));
                    live.push((id, worker, prompt.clone(), 0, prompt.tokens));
                }
                _ if live.is_empty() => {}
                Op::Prefilled(i) => {
                    let at = i.index(live.len());
                    load.prefill_completed(live[at].0);
                    live[at].4 = 0;
                }
                Op::Output(i, tokens) => {
                    let at = i.index(live.len());
                    load.add_output(live[at].0, tokens);
                    live[at].3 += tokens;
                }
                Op::Free(i) => {
                    let gone = live.swap_remove(i.index(live.len()));
                    load.free(gone.0);
                }
            }
            let probe = prompt(&probe, 1);
            let mut depths = Vec::new();
            let mut survey = load.survey(&probe, &mut depths);
            let surveyed: Vec<(RankView, u32)> = (0..4).map(|worker| survey.at(rank(worker))).collect();
            for worker in 0..4 {
                prop_assert_eq!(seen(&load, rank(worker)), recount(&live, worker));
                // Asking first, for one rank or for all, and booking then must agree.
                let potential = load.potential_blocks(rank(worker), &probe);
                prop_assert_eq!(surveyed[worker as usize], (load.rank(rank(worker)), potential as u32));
                let id = load.book(new(rank(worker), probe.clone()));
                prop_assert_eq!(potential as u32, load.rank(rank(worker)).active_blocks);
                load.free(id);
            }
        }
    }

    /// Many ranks at many depths of one prompt: what one look at the shared table finds is what each rank has by itself.
    #[test]
    fn depths_of_all_ranks_equal_each_ones_own(held in prop::collection::vec(0..40_usize, 1..30), length in 0..60_usize) {
        let mut load = empty(LoadConfig::default());
        let path: Vec<u64> = (0..60).collect();
        for (worker, blocks) in held.iter().enumerate() {
            load.book(new(rank(worker as u64), prompt(&path[..*blocks], 0)));
        }
        let probe = prompt(&path[..length], 0);
        let mut depths = Vec::new();
        let mut survey = load.survey(&probe, &mut depths);
        for (worker, blocks) in held.iter().enumerate() {
            let potential = (*blocks).max(length) as u32;
            prop_assert_eq!(survey.at(rank(worker as u64)).1, potential);
            prop_assert_eq!(load.potential_blocks(rank(worker as u64), &probe) as u32, potential);
        }
    }
}
