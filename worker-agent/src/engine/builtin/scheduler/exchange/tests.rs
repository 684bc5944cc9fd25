//! Two schedulers that hand prompts over, on random histories: whatever is reserved, comes, comes in part or does not come,
//! answers are the same, and at the end nothing is held. The shadow arenas check that every block has its content.

use std::collections::HashMap;
use std::sync::Arc;

use kv_hashing::BlockSize;
use proptest::prelude::*;
use protocol::request_plane::{Generate, Stop};

use super::*;
use crate::engine::builtin::Forward;
use crate::engine::builtin::shadow::{Shadow, VOCAB};
use crate::engine::builtin::stop::Vocabulary;
use crate::engine::{EngineInfo, EngineOutput};

use super::super::SchedulerConfig;

const SIZE: usize = 4;
const ANSWER: u32 = 6;

struct Side {
    scheduler: Scheduler,
    shadow: Shadow,
    tokens: HashMap<RequestId, Vec<u32>>,
}

impl Side {
    fn new(total_blocks: usize) -> Self {
        let engine = EngineInfo {
            block_size: BlockSize::new(SIZE as u32).expect("not zero"),
            total_blocks,
            max_num_seqs: 3,
            max_num_batched_tokens: 8,
            context_length: 40,
        };
        let scheduler = Scheduler::new(SchedulerConfig { engine, max_waiting: 500 }, VOCAB).expect("valid");
        Self { scheduler, shadow: Shadow::new(total_blocks, SIZE), tokens: HashMap::new() }
    }

    fn request(&self, wire: Generate) -> Request {
        Request::new(wire, &self.scheduler.limits(Arc::new(Vocabulary::default())), 0).expect("valid")
    }

    fn enqueue(&mut self, wire: Generate) -> RequestId {
        let request = self.request(wire);
        self.scheduler.enqueue(request).expect("room to wait")
    }

    /// One step, if blocks allow it.
    fn step(&mut self) {
        let mut logits = Vec::new();
        self.scheduler.plan();
        let chunks = self.scheduler.chunks();
        if !chunks.is_empty() {
            self.shadow.forward(&chunks, &mut logits);
        }
        for (id, output) in self.scheduler.apply(&mut logits) {
            if let EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } = output {
                self.tokens.entry(id).or_default().push(token);
            }
        }
    }

    fn finish(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
        }
    }

    /// Computes a prompt for another scheduler.
    fn prefill(&mut self, prompt: &[u32]) -> (u32, Option<Handover>) {
        let id = self.enqueue(Generate { prefill_only: true, ..generate(prompt) });
        self.finish();
        (self.tokens[&id][0], self.scheduler.take_handovers().pop())
    }
}

fn generate(prompt: &[u32]) -> Generate {
    let stop = Stop { max_tokens: ANSWER, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

fn alone(prompt: &[u32]) -> Vec<u32> {
    let mut side = Side::new(64);
    let id = side.enqueue(generate(prompt));
    side.finish();
    side.tokens.remove(&id).expect("answered")
}

/// Blocks, their table, and how many were there.
type Reserved = (Vec<(BlockHash, SequenceHash)>, Vec<BlockId>, usize);

/// A prompt on its way.
struct Coming {
    prompt: Vec<u32>,
    first: u32,
    handover: Handover,
    reserved: Option<Reserved>,
}

#[derive(Clone, Debug)]
enum Step {
    Ask(Vec<u32>),
    HandOver(Vec<u32>),
    /// So many of the missing blocks come.
    Arrive(usize, usize),
    Cancel(usize),
    Compute,
}

fn step() -> impl Strategy<Value = Step> {
    let prompt = || prop::collection::vec(0..2u32, 1..24);
    prop_oneof![
        2 => prompt().prop_map(Step::Ask),
        3 => prompt().prop_map(Step::HandOver),
        3 => (0..4usize, 0..6usize).prop_map(|(which, blocks)| Step::Arrive(which, blocks)),
        1 => (0..4usize).prop_map(Step::Cancel),
        8 => Just(Step::Compute),
    ]
}

fn hand_over(from: &mut Side, to: &mut Side, prompt: Vec<u32>) -> Option<Coming> {
    let (first, handover) = from.prefill(&prompt);
    let handover = handover?;
    let wanted = to.request(decode(&prompt, first)).reusable().to_vec();
    assert!(wanted.iter().map(|block| block.1).eq(handover.hashes.iter().copied()), "all full blocks of the prompt");
    let reserved = to.scheduler.reserve(&wanted, usize::MAX).map(|(table, _, here)| (wanted, table, here));
    Some(Coming { prompt, first, handover, reserved })
}

fn decode(prompt: &[u32], first: u32) -> Generate {
    Generate { generated: 1, ..generate(&[prompt, &[first]].concat()) }
}

/// Lets a request begin with the blocks that have come; returns it with what it shall answer.
fn arrive(from: &mut Side, to: &mut Side, coming: Coming, count: usize) -> (RequestId, Vec<u32>) {
    if let Some((blocks, table, here)) = coming.reserved {
        let new = here..table.len().min(here + count);
        new.clone().for_each(|at| to.shadow.copy_block(table[at], &from.shadow, coming.handover.table[at]));
        to.scheduler.import(Import { blocks, table, new, share: Default::default() });
    }
    from.scheduler.release(&coming.handover.table);
    let id = to.enqueue(decode(&coming.prompt, coming.first));
    let answer = alone(&coming.prompt);
    assert_eq!(answer[0], coming.first);
    (id, answer[1..].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn handed_over_prompts_change_no_answer_and_leave_nothing(
        total in 12..40usize,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let (mut from, mut to, mut coming) = (Side::new(400), Side::new(total), Vec::<Coming>::new());
        let mut expected = Vec::new();
        for step in steps {
            match step {
                Step::Ask(prompt) => expected.push((to.enqueue(generate(&prompt)), alone(&prompt))),
                Step::HandOver(prompt) if coming.len() < 4 => coming.extend(hand_over(&mut from, &mut to, prompt)),
                Step::Arrive(which, count) if which < coming.len() => {
                    expected.push(arrive(&mut from, &mut to, coming.swap_remove(which), count));
                }
                Step::Cancel(which) if which < coming.len() => {
                    let gone = coming.swap_remove(which);
                    gone.reserved.iter().for_each(|(_, table, _)| to.scheduler.release(table));
                    from.scheduler.release(&gone.handover.table);
                }
                Step::Compute => to.step(),
                _ => {}
            }
        }
        for coming in coming {
            expected.push(arrive(&mut from, &mut to, coming, 0));
        }
        to.finish();
        for (id, answer) in expected {
            prop_assert_eq!(&to.tokens[&id], &answer);
        }
        prop_assert_eq!((from.scheduler.load().active_blocks, to.scheduler.load().active_blocks), (0, 0));
    }
}
