//! Greedy answers of the real model when the arena is far too small for all prompts, and their KV comes back from host
//! memory, from disk, and from disk after a restart: token by token those of an engine that computes everything.

use std::path::Path;
use std::time::Duration;

use protocol::request_plane::{Generate, Stop};
use worker_agent::engine::builtin::open::{OpenOptions, open};
use worker_agent::engine::builtin::service::BuiltIn;
use worker_agent::engine::builtin::tiers::metrics::TierName;
use worker_agent::engine::builtin::tiers::{DiskOptions, TierOptions};
use worker_agent::engine::{Engine, EngineOutput};

use super::{model, references};

const PROMPTS: usize = 50;
const ANSWER: u32 = 8;
/// Four prompts at a time, of fifty, and some room.
const ARENA: usize = 32;

/// Fifty prompts: the reference's, cut and joined.
fn prompts() -> Vec<Vec<u32>> {
    let texts: Vec<Vec<u32>> = references().into_iter().map(|reference| reference.prompt).collect();
    (0..PROMPTS)
        .map(|number| {
            let (first, second) = (&texts[number % texts.len()], &texts[(number * 7 + 3) % texts.len()]);
            let mut prompt = [&first[number / texts.len() * 3..], &second[..]].concat();
            prompt.truncate(84);
            prompt
        })
        .collect()
}

fn start(tiers: TierOptions) -> BuiltIn {
    let threads = std::num::NonZeroUsize::new(2);
    let options = OpenOptions { threads, total_blocks: ARENA, max_num_seqs: 8, tiers, ..OpenOptions::default() };
    open(&model::path(), options).expect("opens").0
}

fn disk(dir: &Path) -> TierOptions {
    let disk = DiskOptions { dir: dir.to_path_buf(), bytes: 1 << 30, revision: String::new() };
    TierOptions { disk: Some(disk), ..TierOptions::default() }
}

/// All answers, and the prompt tokens that were reused; four requests are in the engine at a time.
async fn answers(engine: &BuiltIn, prompts: &[Vec<u32>]) -> (Vec<Vec<u32>>, usize) {
    let (mut all, mut reused) = (Vec::new(), 0);
    for some in prompts.chunks(4) {
        let stop = Stop { max_tokens: ANSWER, ignore_eos: true, ..Default::default() };
        let request =
            |prompt: &Vec<u32>| Generate { token_ids: prompt.clone(), stop: Some(stop.clone()), ..Default::default() };
        let running: Vec<_> = some.iter().map(|prompt| engine.submit(request(prompt)).expect("room")).collect();
        for mut outputs in running {
            let mut tokens = Vec::new();
            loop {
                let next = tokio::time::timeout(Duration::from_secs(120), outputs.recv()).await;
                match next.expect("a token in time").expect("outputs end with Finished") {
                    EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => tokens.push(token),
                    EngineOutput::Finished(finish) => {
                        reused += finish.reused_tokens;
                        break;
                    }
                    other => panic!("{other:?}"),
                }
            }
            all.push(tokens);
        }
    }
    (all, reused)
}

fn onboarded(engine: &BuiltIn, tier: TierName) -> u64 {
    engine.tier_metrics().expect("there are tiers").onboarded_blocks(tier)
}

#[tokio::test]
async fn fifty_prompts_answer_the_same_from_host_memory() {
    let prompts = prompts();
    let (expected, reused_without) = answers(&start(TierOptions::default()), &prompts).await;
    let engine = start(TierOptions { host_bytes: 1 << 30, ..TierOptions::default() });
    assert_eq!(answers(&engine, &prompts).await.0, expected, "while blocks go to host memory");
    let (again, reused) = answers(&engine, &prompts).await;
    assert_eq!(again, expected, "from host memory");
    let blocks = onboarded(&engine, TierName::host);
    assert!(blocks > 100 && reused > reused_without + 16 * 100, "{blocks} blocks, {reused} tokens");
    println!("{PROMPTS} prompts answer the same with {blocks} blocks from host memory");
}

#[tokio::test]
async fn fifty_prompts_answer_the_same_from_disk_before_and_after_a_restart() {
    let prompts = prompts();
    let expected = answers(&start(TierOptions::default()), &prompts).await.0;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let engine = start(disk(dir.path()));
    assert_eq!(answers(&engine, &prompts).await.0, expected, "while blocks go to disk");
    assert_eq!(answers(&engine, &prompts).await.0, expected, "from disk");
    let before = onboarded(&engine, TierName::disk);
    assert!(before > 100, "{before} blocks");
    drop(engine);

    let engine = start(disk(dir.path()));
    assert_eq!(answers(&engine, &prompts).await.0, expected, "from disk, after a restart");
    let after = onboarded(&engine, TierName::disk);
    assert!(after > 100, "{after} blocks");
    println!("{PROMPTS} prompts answer the same with {before} blocks from disk, and {after} after a restart");
}
