//! The engine as the agent sees it: submit, read, drop, stop.

use std::sync::mpsc;
use std::time::Duration;

use kv_hashing::BlockSize;
use kv_index::KvEventData;
use protocol::request_plane::{FinishReason, Stop};

use super::*;
use crate::engine::builtin::shadow::{Shadow, VOCAB};
use crate::engine::builtin::{Chunk, Logits};

mod tiers;

const DEADLINE: Duration = Duration::from_secs(60);

fn config(total_blocks: usize, max_num_batched_tokens: usize, max_waiting: usize) -> SchedulerConfig {
    let engine = EngineInfo {
        block_size: BlockSize::new(4).expect("not zero"),
        total_blocks,
        max_num_seqs: 8,
        max_num_batched_tokens,
        context_length: 256,
    };
    SchedulerConfig { engine, max_waiting }
}

fn start(forward: impl Forward + 'static, config: SchedulerConfig) -> BuiltIn {
    BuiltIn::start(forward, config, Vocabulary::default()).expect("starts")
}

fn generate(prompt: std::ops::Range<u32>, max_tokens: u32) -> Generate {
    let stop = Stop { max_tokens, ..Default::default() };
    Generate { token_ids: prompt.map(|t| t % VOCAB as u32).collect(), stop: Some(stop), ..Default::default() }
}

async fn next(receiver: &mut UnboundedReceiver<EngineOutput>) -> Option<EngineOutput> {
    tokio::time::timeout(DEADLINE, receiver.recv()).await.expect("the engine answers in time")
}

async fn last(receiver: &mut UnboundedReceiver<EngineOutput>) -> EngineOutput {
    let mut last = None;
    while let Some(output) = next(receiver).await {
        last = Some(output);
    }
    last.expect("at least one output")
}

/// A forward pass whose steps begin only when the test lets them.
struct Gated<F> {
    inner: F,
    entered: mpsc::Sender<usize>,
    permits: mpsc::Receiver<()>,
}

/// The test's side of [`Gated`].
struct Gate {
    entered: mpsc::Receiver<usize>,
    permits: mpsc::Sender<()>,
}

impl Gate {
    fn new<F: Forward>(inner: F) -> (Self, Gated<F>) {
        let ((entered, entered_rx), (permits, permits_rx)) = (mpsc::channel(), mpsc::channel());
        (Self { entered: entered_rx, permits }, Gated { inner, entered, permits: permits_rx })
    }

    /// Waits until a step is about to compute; returns its number of chunks.
    fn entered(&self) -> usize {
        self.entered.recv_timeout(DEADLINE).expect("a step begins in time")
    }

    fn permit(&self) {
        self.permits.send(()).expect("the engine runs");
    }
}

impl<F: Forward> Forward for Gated<F> {
    fn vocab(&self) -> usize {
        self.inner.vocab()
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        self.entered.send(chunks.len()).expect("the test listens");
        self.permits.recv_timeout(DEADLINE).expect("the test permits the step in time");
        self.inner.forward(chunks, logits);
    }

    fn forward_while(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>, worth: &dyn Fn(f64) -> bool) -> bool {
        self.entered.send(chunks.len()).expect("the test listens");
        self.permits.recv_timeout(DEADLINE).expect("the test permits the step in time");
        worth(0.5) && self.inner.forward_while(chunks, logits, worth)
    }
}

/// A forward pass that fails in its second step.
struct Failing(usize);

impl Forward for Failing {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        self.0 += 1;
        assert!(self.0 < 2, "the device is gone");
        let rows = chunks.iter().filter(|c| c.logits == Logits::Last).count();
        logits.resize(rows * VOCAB, 1.0);
    }
}

#[tokio::test]
async fn a_request_streams_and_its_blocks_are_told_as_events() {
    let engine = start(Shadow::new(64, 4), config(64, 32, 8));
    let mut events = engine.take_events().expect("the first taker");
    assert!(engine.take_events().is_none());
    let mut outputs = engine.submit(generate(0..10, 3)).expect("room");
    assert!(matches!(next(&mut outputs).await, Some(EngineOutput::First { reused_blocks: 0, prompt_blocks: 2, .. })));
    assert!(matches!(next(&mut outputs).await, Some(EngineOutput::Token { .. })));
    let EngineOutput::Finished(finish) = last(&mut outputs).await else { panic!("not finished") };
    assert_eq!((finish.reason, finish.prompt_tokens, finish.completion_tokens), (FinishReason::Length, 10, 3));
    let event = events.try_recv().expect("told before the first token");
    assert!(matches!(event.data, KvEventData::Stored { parent: None, blocks } if blocks.len() == 2));
    let load = engine.load();
    assert_eq!((load.running, load.active_blocks, load.used_blocks), (0, 0, 3));
}

#[tokio::test]
async fn a_dropped_receiver_frees_its_blocks_in_one_step() {
    let (gate, forward) = Gate::new(Shadow::new(64, 4));
    let engine = start(forward, config(64, 16, 8));
    let prefilling = engine.submit(generate(0..100, 3)).expect("room");
    assert_eq!(gate.entered(), 1);
    let waiting = engine.submit(generate(0..8, 3)).expect("room");
    drop((prefilling, waiting));
    let mut third = engine.submit(generate(0..8, 1)).expect("room");
    gate.permit();
    assert_eq!(gate.entered(), 1, "the second step computes the third request alone");
    gate.permit();
    assert!(matches!(last(&mut third).await, EngineOutput::Finished(_)));
    assert_eq!(engine.load(), EngineLoad { used_blocks: 4, ..EngineLoad::default() });
}

/// The tokens of an answer that ends as it should.
async fn tokens(outputs: &mut UnboundedReceiver<EngineOutput>) -> Vec<u32> {
    let mut tokens = Vec::new();
    loop {
        match next(outputs).await.expect("it ends with Finished") {
            EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => tokens.push(token),
            EngineOutput::Finished(_) => return tokens,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_step_that_is_mostly_for_nobody_is_given_up_and_the_others_lose_nothing_by_it() {
    // Prompts of two requests that share a step of 64 tokens, whose client leaves, and how many chunks the next step has.
    for (lengths, leaves, chunks) in [([40, 24], 0, 2), ([40, 24], 1, 1), ([24, 40], 1, 2)] {
        let (gate, forward) = Gate::new(Shadow::new(64, 4));
        let engine = start(forward, config(64, 64, 8));
        let mut before = engine.submit(generate(0..4, 1)).expect("room");
        gate.entered();
        let prompts = [generate(0..lengths[0], 1), generate(20..20 + lengths[1], 1)];
        let mut outputs = prompts.clone().map(|prompt| Some(engine.submit(prompt).expect("room")));
        gate.permit();
        assert!(matches!(last(&mut before).await, EngineOutput::Finished(_)));
        assert_eq!(gate.entered(), 2, "both are in one step");
        drop(outputs[leaves].take());
        let mut after = engine.submit(generate(40..44, 1)).expect("room");
        gate.permit();
        assert_eq!(gate.entered(), chunks, "{lengths:?} {leaves}: with the one that stays, if it has to begin anew");
        gate.permit();
        let stays = 1 - leaves;
        let answer = tokens(outputs[stays].as_mut().expect("its client")).await;
        assert_eq!(tokens(&mut after).await.len(), 1);
        let alone = start(Shadow::new(64, 4), config(64, 64, 8));
        assert_eq!(answer, tokens(&mut alone.submit(prompts[stays].clone()).expect("room")).await);
        assert_eq!(engine.load().active_blocks, 0);
    }
}

#[tokio::test]
async fn a_step_after_one_that_was_given_up_is_computed_to_its_end() {
    let (gate, forward) = Gate::new(Shadow::new(64, 4));
    let engine = start(forward, config(64, 64, 8));
    let mut before = engine.submit(generate(0..4, 1)).expect("room");
    gate.entered();
    let mut stays = engine.submit(generate(0..24, 1)).expect("room");
    let leaves = engine.submit(generate(20..60, 1)).expect("room");
    gate.permit();
    assert!(matches!(last(&mut before).await, EngineOutput::Finished(_)));
    assert_eq!(gate.entered(), 2);
    drop(leaves);
    let leaves_too = engine.submit(generate(30..70, 1)).expect("room");
    gate.permit();
    assert_eq!(gate.entered(), 2, "the first one anew, with the next of those that leave");
    drop(leaves_too);
    let mut after = engine.submit(generate(40..44, 1)).expect("room");
    gate.permit();
    assert_eq!(tokens(&mut stays).await.len(), 1);
    assert_eq!(gate.entered(), 1, "it is not begun a third time");
    gate.permit();
    assert_eq!(tokens(&mut after).await.len(), 1);
    assert_eq!(engine.load().active_blocks, 0);
}

#[tokio::test]
async fn the_queue_is_bounded_and_load_shows_it() {
    let (gate, forward) = Gate::new(Shadow::new(64, 4));
    let engine = start(forward, config(64, 16, 2));
    let mut first = engine.submit(generate(0..8, 1)).expect("room");
    gate.entered();
    let waiting = [engine.submit(generate(0..8, 1)).expect("room"), engine.submit(generate(0..8, 1)).expect("room")];
    assert!(matches!(engine.submit(generate(0..8, 1)), Err(SubmitError::Overloaded(2))));
    assert_eq!(engine.load().waiting, 2);
    (0..3).for_each(|_| gate.permit());
    assert!(matches!(last(&mut first).await, EngineOutput::Finished(_)));
    for mut outputs in waiting {
        assert!(matches!(last(&mut outputs).await, EngineOutput::Finished(_)));
    }
}

#[tokio::test]
async fn cancelled_requests_take_no_place_in_the_queue() {
    let (gate, forward) = Gate::new(Shadow::new(8, 4));
    // The arena holds one request at a time: the others wait, first in the inbox, then in the scheduler.
    let engine = start(forward, config(8, 8, 2));
    let mut first = engine.submit(generate(0..24, 1)).expect("room");
    gate.entered();
    for _ in 0..10 {
        let cancelled = [engine.submit(generate(0..8, 1)), engine.submit(generate(0..8, 1))];
        assert!(cancelled.iter().all(Result::is_ok), "only those count that somebody waits for");
    }
    let waiting =
        [engine.submit(generate(30..50, 1)).expect("room"), engine.submit(generate(60..80, 1)).expect("room")];
    gate.permit();
    gate.entered();
    assert!(matches!(engine.submit(generate(0..8, 1)), Err(SubmitError::Overloaded(2))), "both wait in the scheduler");
    drop(waiting);
    let mut last_two =
        [engine.submit(generate(0..8, 1)).expect("room"), engine.submit(generate(0..8, 1)).expect("room")];
    assert!(matches!(engine.submit(generate(0..8, 1)), Err(SubmitError::Overloaded(2))));
    (0..16).for_each(|_| gate.permit());
    assert!(matches!(last(&mut first).await, EngineOutput::Finished(_)));
    for outputs in &mut last_two {
        assert!(matches!(last(outputs).await, EngineOutput::Finished(_)));
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_at_once() {
    let engine = start(Shadow::new(8, 4), config(8, 16, 8));
    assert!(matches!(engine.submit(generate(0..32, 1)), Err(SubmitError::Invalid(_))));
    let lora = Generate { lora: "poet".into(), ..generate(0..4, 1) };
    assert!(matches!(engine.submit(lora), Err(SubmitError::Invalid(message)) if message.contains("poet")));
}

#[tokio::test]
async fn a_panic_in_the_forward_pass_fails_everyone_and_stops_the_engine() {
    let engine = start(Failing(0), config(64, 32, 8));
    let mut events = engine.take_events().expect("the first taker");
    let mut outputs = engine.submit(generate(0..10, 5)).expect("room");
    let failed = last(&mut outputs).await;
    assert!(matches!(failed, EngineOutput::Failed(message) if message.contains("the device is gone")));
    let mut told = Vec::new();
    while let Some(event) = tokio::time::timeout(DEADLINE, events.recv()).await.expect("the events end") {
        told.push(event.data);
    }
    assert_eq!(told.last(), Some(&KvEventData::Cleared));
    assert!(engine.is_stopped());
    assert!(matches!(engine.submit(generate(0..10, 5)), Err(SubmitError::Stopped)));
}

#[tokio::test]
async fn shutdown_ends_running_and_waiting_requests() {
    let (gate, forward) = Gate::new(Shadow::new(64, 4));
    let engine = start(forward, config(64, 16, 8));
    let mut running = engine.submit(generate(0..8, 50)).expect("room");
    gate.entered();
    let mut waiting = engine.submit(generate(0..8, 50)).expect("room");
    gate.permit();
    // Later steps of the gated pass may begin before the thread sees the shutdown.
    (0..60).for_each(|_| gate.permit());
    engine.shutdown();
    for outputs in [&mut running, &mut waiting] {
        assert!(matches!(last(outputs).await, EngineOutput::Failed(_) | EngineOutput::Finished(_)));
    }
    assert!(matches!(engine.submit(generate(0..8, 1)), Err(SubmitError::Stopped)));
}

#[tokio::test]
async fn a_thousand_requests_with_cancellations_leave_nothing_behind() {
    let engine = start(Shadow::new(80, 4), config(80, 24, 1000));
    let mut kept = Vec::new();
    for i in 0..1000u32 {
        let sampling = protocol::request_plane::Sampling { temperature: 1.0, ..Default::default() };
        let request = Generate { sampling: Some(sampling), ..generate(i % 7..i % 7 + 5 + i * 13 % 40, 1 + i % 17) };
        let mut outputs = engine.submit(request).expect("room");
        match i % 5 {
            0 => drop(outputs),
            1 => drop(next(&mut outputs).await),
            _ => kept.push(outputs),
        }
    }
    for mut outputs in kept {
        assert!(matches!(last(&mut outputs).await, EngineOutput::Finished(_)));
    }
    // Its step comes after the last cancellation.
    let mut end = engine.submit(generate(0..4, 2)).expect("room");
    assert!(matches!(last(&mut end).await, EngineOutput::Finished(_)));
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.active_blocks, load.pending_prefill_tokens), (0, 0, 0, 0));
}

#[tokio::test]
async fn an_answer_that_had_ended_elsewhere_ends_at_once() {
    let engine = start(Shadow::new(64, 4), config(64, 32, 4));
    let mut wire = Generate { generated: 3, ..generate(2..10, 9) };
    wire.stop.as_mut().expect("set").token_ids = vec![9];
    let mut receiver = engine.submit(wire).expect("taken");
    let Some(EngineOutput::Finished(finish)) = next(&mut receiver).await else { panic!("no end") };
    assert_eq!((finish.reason, finish.stop_token), (FinishReason::StopToken, Some(9)));
    assert_eq!((finish.prompt_tokens, finish.completion_tokens), (5, 3));
    assert!(next(&mut receiver).await.is_none());
}
