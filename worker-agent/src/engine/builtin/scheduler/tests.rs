//! The scheduler over a forward pass that checks the KV contract: what comes out must not depend on what else runs.

use std::collections::HashMap;

use kv_hashing::BlockSize;
use proptest::prelude::*;
use protocol::request_plane::{FinishReason, Generate, Sampling, Stop};

use super::*;
use crate::engine::Finish;
use crate::engine::builtin::Forward;
use crate::engine::builtin::sampling::{Sampler, SamplingParams, token_logprobs};
use crate::engine::builtin::shadow::{Shadow, VOCAB, extend, push_row};
use crate::engine::builtin::stop::StopWatch;

mod continued;
mod tiers;

const SIZE: usize = 4;

fn vocabulary() -> Arc<Vocabulary> {
    // Token 1 is EOS; the others are letters.
    let text = (0..VOCAB as u8).map(|i| if i == 1 { vec![] } else { vec![b'A' + i] });
    Arc::new(Vocabulary { token_bytes: text.collect(), eos_token_ids: vec![1] })
}

fn config(total_blocks: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> SchedulerConfig {
    let engine = EngineInfo {
        block_size: BlockSize::new(SIZE as u32).expect("not zero"),
        total_blocks,
        max_num_seqs,
        max_num_batched_tokens,
        context_length: 64,
    };
    SchedulerConfig { engine, max_waiting: 2000 }
}

fn generate(prompt: &[u32], max_tokens: u32) -> Generate {
    let stop = Stop { max_tokens, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

fn seeded(prompt: &[u32], max_tokens: u32, seed: u64) -> Generate {
    let sampling = Sampling { temperature: 1.0, seed: Some(seed), frequency_penalty: 0.5, ..Default::default() };
    Generate { sampling: Some(sampling), ..generate(prompt, max_tokens) }
}

/// A request that always generates `max_tokens` tokens.
fn ranked(priority: i32, prompt: &[u32], max_tokens: u32) -> Generate {
    let mut wire = generate(prompt, max_tokens);
    wire.stop.as_mut().expect("set").ignore_eos = true;
    Generate { priority, ..wire }
}

/// What the request gives when it has the engine for itself, without scheduler, blocks or steps.
fn alone(wire: &Generate, context_length: usize) -> (Vec<u32>, FinishReason) {
    let params = SamplingParams::new(wire.sampling.as_ref().unwrap_or(&Sampling::default()), VOCAB, 0).expect("valid");
    let mut sampler = Sampler::new(params, &wire.token_ids);
    let room = context_length - wire.token_ids.len();
    let mut stop = StopWatch::new(wire.stop.clone().unwrap_or_default(), room, vocabulary());
    let mut context = wire.token_ids.iter().fold(0, |context, &token| extend(context, token));
    let mut answer = Vec::new();
    loop {
        let mut row = Vec::new();
        push_row(context, &mut row);
        let position = wire.token_ids.len() + answer.len();
        let token = sampler.sample(&mut row, stop.masked(), position).expect("usable logits");
        let ending = stop.push(token);
        if !ending.as_ref().is_some_and(|e| e.by_token()) {
            answer.push(token);
        }
        if let Some(ending) = ending {
            return (answer, ending.reason);
        }
        context = extend(context, token);
    }
}

/// A scheduler with its forward pass, and everything it has said.
struct Run {
    scheduler: Scheduler,
    shadow: Shadow,
    outputs: HashMap<RequestId, Vec<EngineOutput>>,
    /// Most sequences that were preempted at a time.
    preempted: usize,
}

impl Run {
    fn new(config: SchedulerConfig) -> Self {
        let shadow = Shadow::new(config.engine.total_blocks, SIZE);
        let scheduler = Scheduler::new(config, VOCAB).expect("valid config");
        Self { scheduler, shadow, outputs: HashMap::new(), preempted: 0 }
    }

    fn enqueue(&mut self, wire: Generate) -> RequestId {
        let limits = self.scheduler.limits(vocabulary());
        self.scheduler.enqueue(Request::new(wire, &limits, 0).expect("a valid request")).expect("room to wait")
    }

    fn step(&mut self) {
        let (seqs, budget) = {
            let info = self.scheduler.info();
            (info.max_num_seqs, info.max_num_batched_tokens)
        };
        let mut logits = Vec::new();
        self.scheduler.plan();
        let chunks = self.scheduler.chunks();
        assert!(!chunks.is_empty(), "there is work, but no step");
        assert!(chunks.len() <= seqs);
        assert!(chunks.iter().map(|c| c.tokens.len()).sum::<usize>() <= budget);
        self.shadow.forward(&chunks, &mut logits);
        for (id, output) in self.scheduler.apply(&mut logits) {
            self.outputs.entry(id).or_default().push(output);
        }
        self.preempted = self.preempted.max(self.scheduler.preempted.len());
    }

    fn finish(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
        }
        assert_eq!(self.scheduler.load().active_blocks, 0, "blocks are still held");
    }

    fn answer(&self, id: RequestId) -> (Vec<u32>, FinishReason) {
        let outputs = &self.outputs[&id];
        let tokens = outputs.iter().filter_map(|output| match output {
            EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => Some(*token),
            _ => None,
        });
        (tokens.collect(), self.finished(id).reason)
    }

    fn finished(&self, id: RequestId) -> Finish {
        match self.outputs[&id].last() {
            Some(EngineOutput::Finished(finish)) => finish.clone(),
            other => panic!("request {id:?} ended with {other:?}"),
        }
    }

    fn run_alone(&mut self, wire: Generate) -> RequestId {
        let id = self.enqueue(wire);
        self.finish();
        id
    }
}

/// Prompts with shared beginnings, of many lengths.
fn mixed_requests(n: usize) -> Vec<Generate> {
    let prompt = |i: usize| -> Vec<u32> {
        let (shared, own) = (i % 3 * 5, i * 7 % 19 + 1);
        let shared = (0..shared as u32).map(|t| 2 + t * 3 % 40);
        shared.chain((0..own).map(|t| (2 + (t * 11 + i * 17) % 45) as u32)).collect()
    };
    let request = |i: usize| match i % 2 {
        0 => generate(&prompt(i), 1 + (i % 23) as u32),
        _ => seeded(&prompt(i), 1 + (i % 31) as u32, i as u64),
    };
    (0..n).map(request).collect()
}

fn assert_equal_to_alone(config: SchedulerConfig, requests: &[Generate]) -> Run {
    let mut run = Run::new(config);
    let context_length = run.scheduler.info().context_length;
    let ids: Vec<_> = requests.iter().map(|wire| run.enqueue(wire.clone())).collect();
    run.finish();
    for (id, wire) in ids.iter().zip(requests) {
        assert_eq!(run.answer(*id), alone(wire, context_length), "of {wire:?}");
        assert_eq!(run.finished(*id).prompt_tokens, wire.token_ids.len());
    }
    run
}

#[test]
fn a_batch_gives_what_each_request_gives_alone() {
    let run = assert_equal_to_alone(config(500, 8, 24), &mixed_requests(60));
    assert_eq!(run.preempted, 0);
}

#[test]
fn chunked_prefill_gives_the_same_answers() {
    for budget in [4, 5, 7] {
        assert_equal_to_alone(config(500, 4, budget), &mixed_requests(30));
    }
}

#[test]
fn preemption_changes_no_answer() {
    let run = assert_equal_to_alone(config(16, 8, 16), &mixed_requests(60));
    assert!(run.preempted > 0, "the arena is small enough to preempt");
}

#[test]
fn the_youngest_of_the_lowest_priority_is_preempted() {
    let mut run = Run::new(config(8, 4, 16));
    let low = run.enqueue(ranked(0, &[2, 3, 4], 20));
    let high = run.enqueue(ranked(1, &[5, 6, 7], 20));
    while run.preempted == 0 {
        run.step();
    }
    assert_eq!(run.scheduler.running.iter().map(|s| s.id).collect::<Vec<_>>(), [high]);
    run.finish();
    assert_eq!((run.answer(low).0.len(), run.answer(high).0.len()), (20, 20));
    assert_eq!(run.finished(low).reused_tokens, 0, "recomputing after preemption saves nothing of the prompt");
}

#[test]
fn a_higher_priority_does_not_block_a_full_queue_of_preempted_sequences() {
    let mut run = Run::new(config(8, 2, 16));
    let (a, b) = (run.enqueue(ranked(0, &[2, 3, 4], 25)), run.enqueue(ranked(0, &[5, 6, 7], 25)));
    while run.preempted == 0 {
        run.step();
    }
    assert!(run.scheduler.preempted.values().any(|s| s.id == b));
    let c = run.enqueue(ranked(1, &[8, 9, 10, 11, 12], 20));
    while run.preempted < 2 {
        run.step();
    }
    assert_eq!(run.scheduler.running.iter().map(|s| s.id).collect::<Vec<_>>(), [c]);
    // As many are preempted as there are seats when the best request of all arrives, and then the last running one ends.
    let d = run.enqueue(ranked(2, &[13, 14, 15], 4));
    run.finish();
    assert_eq!([a, b, c, d].map(|id| run.answer(id).0.len()), [25, 25, 20, 4]);
}

#[test]
fn higher_priority_starts_first_then_the_older_request() {
    let mut run = Run::new(config(100, 1, 16));
    let ids = [0, 0, 5].map(|priority| run.enqueue(Generate { priority, ..generate(&[2, 3], 1) }));
    let mut order = Vec::new();
    while !run.scheduler.is_idle() {
        run.step();
        order.extend(
            ids.iter().filter(|id| run.outputs.contains_key(id) && !order.contains(*id)).copied().collect::<Vec<_>>(),
        );
    }
    assert_eq!(order, [ids[2], ids[0], ids[1]]);
}

#[test]
fn a_second_turn_reuses_prompt_and_answer_exactly_as_far_as_they_are_computed() {
    let mut run = Run::new(config(100, 4, 64));
    let prompt: Vec<u32> = (2..12).collect();
    let mut wire = generate(&prompt, 7);
    wire.stop.as_mut().expect("set").ignore_eos = true;
    let first = run.run_alone(wire);
    let answer = run.answer(first).0;
    assert_eq!(answer.len(), 7);
    // 17 tokens, the last of them never computed: four full blocks.
    let turn: Vec<u32> = prompt.iter().chain(&answer).chain(&[9, 9, 9]).copied().collect();
    let second = run.run_alone(generate(&turn, 3));
    assert_eq!(run.finished(second).reused_tokens, 16);
    assert_eq!(run.answer(second), alone(&generate(&turn, 3), 64));
}

#[test]
fn the_last_token_is_always_computed() {
    let mut run = Run::new(config(100, 4, 64));
    let prompt: Vec<u32> = (2..2 + 2 * SIZE as u32).collect();
    run.run_alone(generate(&prompt, 1));
    let again = run.run_alone(generate(&prompt, 1));
    assert_eq!(run.finished(again).reused_tokens, SIZE, "one of two blocks: the other holds the last token");
    match &run.outputs[&again][0] {
        EngineOutput::First { reused_blocks, prompt_blocks, .. } => {
            assert_eq!((*reused_blocks, *prompt_blocks), (1, 2))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn namespaces_do_not_share_blocks() {
    let mut run = Run::new(config(100, 4, 64));
    let prompt: Vec<u32> = (2..14).collect();
    run.run_alone(generate(&prompt, 1));
    let other = run.run_alone(Generate { cache_namespace: "tenant".into(), ..generate(&prompt, 1) });
    assert_eq!(run.finished(other).reused_tokens, 0);
}

#[test]
fn a_prompt_in_prefill_is_not_computed_twice() {
    let mut run = Run::new(config(100, 4, 8));
    let prompt: Vec<u32> = (2..42).collect();
    let ids = [run.enqueue(generate(&prompt, 1)), run.enqueue(generate(&prompt, 1))];
    run.finish();
    assert!(run.shadow.computed <= prompt.len() + 2 * SIZE, "{} tokens computed", run.shadow.computed);
    assert_eq!(run.answer(ids[0]), run.answer(ids[1]));
}

#[test]
fn prompt_logprobs_are_complete_whatever_is_cached() {
    let mut run = Run::new(config(100, 2, 9));
    let prompt: Vec<u32> = (2..32).collect();
    run.run_alone(generate(&prompt, 1));
    let wire = Generate { prompt_logprobs: true, logprobs: Some(2), ..generate(&prompt, 1) };
    let id = run.run_alone(wire);
    let EngineOutput::First { prompt_logprobs, logprobs, token, .. } = &run.outputs[&id][0] else { panic!("no first") };
    let mut context = 0;
    let mut expected = Vec::new();
    for (i, &current) in prompt.iter().enumerate() {
        context = extend(context, current);
        let mut row = Vec::new();
        push_row(context, &mut row);
        expected.push(token_logprobs(&row, *prompt.get(i + 1).unwrap_or(token), 2));
    }
    assert_eq!(logprobs.as_ref(), expected.last());
    assert_eq!(prompt_logprobs[..], expected[..expected.len() - 1]);
}

#[test]
fn what_can_never_fit_is_refused() {
    let limits = Run::new(config(4, 2, 16)).scheduler.limits(vocabulary());
    assert_eq!(limits.context_length, 4 * SIZE, "the arena bounds the context");
    let refused = |wire: Generate| match Request::new(wire, &limits, 0) {
        Err(SubmitError::Invalid(message)) => message,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(generate(&[2; 16], 1)), "a prompt of 16 tokens leaves no room in the context of 16");
    assert!(refused(generate(&[], 1)).contains("empty"));
    assert!(refused(generate(&[VOCAB as u32], 1)).contains("48"));
    assert!(refused(generate(&[2], 0)).contains("max_tokens"));
    let wild = Sampling { temperature: -1.0, ..Default::default() };
    assert!(refused(Generate { sampling: Some(wild), ..generate(&[2], 1) }).contains("temperature"));

    let mut run = Run::new(config(4, 2, 16));
    let mut longest = generate(&[2; 15], 1000);
    longest.stop.as_mut().expect("set").ignore_eos = true;
    let id = run.run_alone(longest);
    assert_eq!((run.finished(id).completion_tokens, run.finished(id).reason), (1, FinishReason::Length));
}

#[test]
fn the_waiting_queue_is_bounded() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_waiting: 2, ..config(8, 1, 8) }, VOCAB).expect("valid");
    let limits = scheduler.limits(vocabulary());
    let mut enqueue = || scheduler.enqueue(Request::new(generate(&[2], 1), &limits, 0).expect("valid"));
    assert!(enqueue().is_ok() && enqueue().is_ok());
    assert!(matches!(enqueue(), Err(SubmitError::Overloaded(2))));
}

#[test]
fn sizes_that_cannot_work_are_refused() {
    let error = |config| Scheduler::new(config, VOCAB).expect_err("invalid");
    assert_eq!(error(config(0, 1, 1)), InvalidConfig::TooSmall("total_blocks", 1));
    assert_eq!(error(config(1, 8, 7)), InvalidConfig::Batch { tokens: 7, seqs: 8 });
}

#[test]
fn abort_leaves_an_empty_arena() {
    let mut run = Run::new(config(32, 4, 16));
    mixed_requests(6).into_iter().for_each(|wire| _ = run.enqueue(wire));
    (0..3).for_each(|_| run.step());
    run.scheduler.plan();
    run.scheduler.abort();
    assert!(run.scheduler.is_idle());
    assert_eq!(run.scheduler.load(), EngineLoad::default());
    assert!(matches!(run.scheduler.take_events().last(), Some(event) if event.data == kv_index::KvEventData::Cleared));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Arrivals and cancellations at any time, in arenas of any size: nothing leaks, nobody starves, no answer changes.
    #[test]
    fn random_histories_end_clean(
        blocks in 16..40usize, seqs in 1..9usize, extra in 0..20usize, steps in prop::collection::vec((0..3usize, 0..6usize), 10..60),
    ) {
        let mut run = Run::new(config(blocks, seqs, seqs + extra));
        let mut requests = mixed_requests(200).into_iter();
        let mut sent: HashMap<RequestId, Generate> = HashMap::new();
        for (arrivals, cancel) in steps {
            for mut wire in requests.by_ref().take(arrivals) {
                wire.priority = (wire.token_ids.len() % 3) as i32;
                sent.insert(run.enqueue(wire.clone()), wire);
            }
            if cancel == 0 {
                let victim = sent.keys().min().copied();
                run.scheduler.retain(|id| Some(id) != victim);
                victim.map(|id| sent.remove(&id));
            }
            if !run.scheduler.is_idle() {
                run.step();
            }
        }
        run.finish();
        let context_length = run.scheduler.info().context_length;
        for (id, wire) in &sent {
            prop_assert_eq!(run.answer(*id), alone(wire, context_length));
        }
    }

    /// Few seats, few blocks, any priorities: `Run::step` fails when somebody waits and no step is planned.
    #[test]
    fn whoever_waits_while_nothing_runs_is_started(
        blocks in 6..14usize, seqs in 1..4usize,
        arrivals in prop::collection::vec((0..4i32, 1..10u32, 1..24u32, 0..12usize), 4..24),
    ) {
        let mut run = Run::new(config(blocks, seqs, seqs + 8));
        for (i, (priority, prompt, max_tokens, steps)) in (0u32..).zip(arrivals) {
            let prompt: Vec<u32> = (0..prompt).map(|t| 2 + (i * 7 + t * 5) % 46).collect();
            run.enqueue(ranked(priority, &prompt, max_tokens));
            for _ in 0..steps {
                if !run.scheduler.is_idle() {
                    run.step();
                }
                prop_assert!(run.scheduler.preempted.len() < 2 * seqs);
            }
        }
        run.finish();
    }
}
