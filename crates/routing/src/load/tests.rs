//! The load book: named scenarios, and random lives against a recount from scratch.

use std::collections::HashSet;

use kv_hashing::{BlockHash, sequence_hashes};
use kv_index::WorkerId;
use proptest::prelude::*;

use super::*;

const SIZE: BlockSize = BlockSize::new(4).expect("not zero");

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

fn prompt(path: &[u64], extra_tokens: usize) -> Prompt {
    let locals: Vec<BlockHash> = path.iter().map(|n| BlockHash(*n)).collect();
    let tokens = path.len() * SIZE.get() + extra_tokens;
    Prompt { blocks: sequence_hashes(&locals).into(), tokens, block_size: SIZE }
}

#[test]
fn a_request_lives_from_routing_to_its_end() {
    let mut load = ActiveLoad::new();
    let id = load.book(rank(1), prompt(&[1, 2], 1), 9);
    assert_eq!((load.active_blocks(rank(1)), load.prefill_tokens(rank(1)), load.requests(rank(1))), (3, 9, 1));
    load.prefill_completed(id);
    load.prefill_completed(id);
    assert_eq!(load.prefill_tokens(rank(1)), 0, "counted off once");
    load.add_output(id, 3);
    assert_eq!(load.active_blocks(rank(1)), 3, "the open block had room for three");
    load.add_output(id, 1);
    assert_eq!(load.active_blocks(rank(1)), 4);
    load.free(id);
    load.free(id);
    assert_eq!((load.active_blocks(rank(1)), load.requests(rank(1)), load.total_requests()), (0, 0, 0));
    assert!(load.ranks.is_empty(), "an idle rank leaves nothing behind");
}

#[test]
fn a_shared_prefix_counts_once() {
    let mut load = ActiveLoad::new();
    let first = load.book(rank(1), prompt(&[1, 2, 3], 0), 12);
    let second = prompt(&[1, 2, 4], 2);
    assert_eq!(load.potential_blocks(rank(1), &second), 3 + 1 + 1, "one full block and the partial one are new");
    assert_eq!(load.potential_blocks(rank(2), &second), 4);
    load.book(rank(1), second, 14);
    assert_eq!(load.active_blocks(rank(1)), 5);
    load.free(first);
    assert_eq!(load.active_blocks(rank(1)), 4, "what the other uses stays");
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
type Live = (BookingId, u64, Prompt, usize, usize);

fn recount(live: &[Live], worker: u64) -> (usize, usize, usize) {
    let here: Vec<&Live> = live.iter().filter(|l| l.1 == worker).collect();
    let shared: HashSet<SequenceHash> = here.iter().flat_map(|l| l.2.blocks.iter().copied()).collect();
    let private: usize = here.iter().map(|l| (l.2.tokens + l.3).div_ceil(SIZE.get()) - l.2.blocks.len()).sum();
    (shared.len() + private, here.iter().map(|l| l.4).sum(), here.len())
}

proptest! {
    #[test]
    fn random_lives_equal_a_recount(history in prop::collection::vec(ops(), 1..80), probe in prop::collection::vec(0..2_u64, 0..5)) {
        let mut load = ActiveLoad::new();
        let mut live: Vec<Live> = Vec::new();
        for op in history {
            match op {
                Op::Book(worker, path, extra) => {
                    let prompt = prompt(&path, extra);
                    let id = load.book(rank(worker), prompt.clone(), prompt.tokens);
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
            for worker in 0..3 {
                let seen = (load.active_blocks(rank(worker)), load.prefill_tokens(rank(worker)), load.requests(rank(worker)));
                prop_assert_eq!(seen, recount(&live, worker));
                // Asking first and booking then must agree.
                let probe = prompt(&probe, 1);
                let potential = load.potential_blocks(rank(worker), &probe);
                let id = load.book(rank(worker), probe, 0);
                prop_assert_eq!(potential, load.active_blocks(rank(worker)));
                load.free(id);
            }
        }
    }
}
