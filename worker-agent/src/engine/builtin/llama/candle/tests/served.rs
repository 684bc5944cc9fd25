//! The engine around the model, as it is served: blocks come from an engine on our own kernels, go to one, and come back from
//! the tiers below the arena.
//!
//! Every answer is checked against the plain implementation, wherever that is decided.

use std::sync::mpsc;
use std::time::Duration;

use kv_hashing::BlockSize;
use protocol::request_plane::{Generate, Stop};
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::engine::builtin::exchange::{Lease, Terms};
use crate::engine::builtin::scheduler::SchedulerConfig;
use crate::engine::builtin::service::BuiltIn;
use crate::engine::builtin::stop::Vocabulary;
use crate::engine::builtin::tiers::TierOptions;
use crate::engine::{Engine, EngineInfo, EngineOutput};

const DEADLINE: Duration = Duration::from_secs(60);
const ANSWER: u32 = 12;
/// Below this part of the largest logit, either of the two best is right.
const TIE: f64 = 0.01;

fn start(model: impl Forward + 'static, total_blocks: usize, tiers: &TierOptions) -> BuiltIn {
    let engine = EngineInfo {
        block_size: BlockSize::new(16).expect("not zero"),
        total_blocks,
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        context_length: 128,
    };
    let config = SchedulerConfig { engine, max_waiting: 64 };
    BuiltIn::start_with_tiers(model, config, Vocabulary::default(), tiers).expect("starts")
}

fn request(prompt: &[u32]) -> Generate {
    let stop = Stop { max_tokens: ANSWER, ignore_eos: true, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

/// Tokens of an answer, and prompt tokens whose KV was reused.
async fn whole(mut outputs: UnboundedReceiver<EngineOutput>) -> (Vec<u32>, usize) {
    let mut tokens = Vec::new();
    loop {
        let next = tokio::time::timeout(DEADLINE, outputs.recv()).await;
        match next.expect("the engine answers in time").expect("outputs end with Finished") {
            EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => tokens.push(token),
            EngineOutput::Finished(finish) => return (tokens, finish.reused_tokens),
            EngineOutput::Prefilled(_) => return (tokens, 0),
            other => panic!("{other:?}"),
        }
    }
}

/// Fails where a token is not the best one; returns how many were decided.
fn check(model: &Model, prompt: &[u32], answer: &[u32]) -> usize {
    let all = [prompt, answer].concat();
    let logits = model.logits(&all[..all.len() - 1]);
    let rows = logits.chunks_exact(VOCAB).skip(prompt.len() - 1);
    let mut decided = 0;
    for (row, &token) in rows.zip(answer) {
        let largest = row.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
        let chosen = row[token as usize];
        let others = row.iter().enumerate().filter(|(other, _)| *other != token as usize);
        let best = others.map(|(_, v)| *v).fold(f64::NEG_INFINITY, f64::max);
        assert!(chosen > best - TIE * largest, "token {token} has {chosen}, another {best}");
        decided += usize::from(chosen > best + TIE * largest);
    }
    decided
}

/// Computes a prompt, and keeps its blocks under a lease.
async fn prefill(engine: &BuiltIn, prompt: &[u32]) -> Arc<Lease> {
    let (tell, told) = mpsc::channel();
    let describe = Box::new(move |lease: &Arc<Lease>| {
        tell.send(lease.clone()).expect("the test waits");
        "fetch them".to_owned()
    });
    engine.exchange().expect("there are blocks").open(Terms { lifetime: DEADLINE, describe });
    whole(engine.submit(Generate { prefill_only: true, ..request(prompt) }).expect("room")).await;
    told.recv_timeout(DEADLINE).expect("a lease")
}

/// Goes on with a prompt whose blocks another engine has.
async fn decode(engine: &BuiltIn, prompt: &[u32], lease: &Lease) -> (Vec<u32>, usize) {
    let exchange = engine.exchange().expect("there are blocks");
    let (place, outputs) = exchange.place(request(prompt)).expect("room");
    let place = place.expect("not ended");
    let mut room = exchange.reserve(place.reusable().to_vec(), DEADLINE).await.expect("room");
    let missing = room.missing().len();
    for index in 0..missing {
        room.next_bytes().expect("a missing block").copy_from_slice(lease.bytes(index));
        room.complete_next();
    }
    place.enter(Some(room.finish()));
    whole(outputs).await
}

#[tokio::test]
async fn engines_of_both_kinds_go_on_with_each_other_s_prompts() {
    let model = Model::llama();
    for device in devices() {
        let plain = start(own(&model, 16), BLOCKS, &TierOptions::default());
        let candle = start(load(&model, device), BLOCKS, &TierOptions::default());
        let layout = |engine: &BuiltIn| engine.kv_layout().expect("there are blocks");
        assert_eq!(layout(&plain), layout(&candle));
        let mut decided = 0;
        for (from, to, seed) in [(&plain, &candle, 21), (&candle, &plain, 22)] {
            let prompt = tokens(70, seed);
            let lease = prefill(from, &prompt).await;
            let (answer, reused) = decode(to, &prompt, &lease).await;
            assert_eq!(reused, 64);
            decided += check(&model, &prompt, &answer);
        }
        assert!(decided > ANSWER as usize, "only {decided} tokens were decided");
    }
}

#[tokio::test]
async fn blocks_that_were_evicted_come_back_to_the_device() {
    /// One prompt and its answer.
    const ARENA: usize = 8;
    let model = Model::llama();
    for device in devices() {
        let small = CandleOptions { total_blocks: ARENA, ..options(device, 16) };
        let small = CandleLlama::from_gguf(&opened(&model.file()), small).expect("loads");
        let tiers =
            TierOptions { host_bytes: 100 * small.arena().shape().block_bytes() as u64, ..TierOptions::default() };
        let engine = start(small, ARENA, &tiers);
        let mut decided = 0;
        for round in 0..3 {
            for seed in 30..36 {
                let prompt = tokens(70, seed);
                let (answer, reused) = whole(engine.submit(request(&prompt)).expect("room")).await;
                assert_eq!(reused, if round == 0 { 0 } else { 64 }, "round {round}");
                decided += check(&model, &prompt, &answer);
            }
        }
        assert!(decided > 100, "only {decided} tokens were decided");
    }
}
