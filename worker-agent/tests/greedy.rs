//! The engine's greedy tokens against llama.cpp's, on a real model.
//!
//! The reference was made by `tests/reference/generate`: llama.cpp on the same weights as 32-bit floats. It holds the
//! prompts' tokens, 48 chosen tokens each, and how far the second-best logit was. Two correct programs round differently, so
//! a prompt is compared up to the first step at which the reference itself was undecided.

use integration_tests::model;
use serde::Deserialize;
use worker_agent::engine::builtin::llama::{Llama, LlamaOptions};
use worker_agent::engine::builtin::{BlockId, Chunk, Forward, Logits};

#[cfg(feature = "candle")]
#[path = "greedy/candle.rs"]
mod candle;
#[path = "greedy/tiers.rs"]
mod tiers;

/// Below this distance of the two best logits, either is right.
const TIE: f32 = 1e-2;

const BLOCK_SIZE: usize = 16;

#[derive(Deserialize)]
struct Reference {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    gaps: Vec<f32>,
}

impl Reference {
    /// Steps at which there is one right answer.
    fn decided(&self) -> usize {
        self.gaps.iter().position(|&gap| gap < TIE).unwrap_or(self.gaps.len())
    }

    fn blocks(&self) -> usize {
        (self.prompt.len() + self.tokens.len()).div_ceil(BLOCK_SIZE)
    }
}

fn references() -> Vec<Reference> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/reference/greedy_smollm2.json");
    let text = std::fs::read_to_string(path).expect("the reference is in the repository");
    serde_json::from_str(&text).expect("the reference is JSON")
}

fn load(threads: usize, blocks: usize) -> Llama {
    let options = LlamaOptions { threads, block_size: BLOCK_SIZE, total_blocks: blocks };
    Llama::load(model::path(), options).expect("the model loads")
}

fn best(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a vocabulary is not empty").0 as u32
}

#[test]
fn greedy_tokens_equal_llama_cpp() {
    let mut compared = 0;
    let references = references();
    for (number, reference) in references.iter().enumerate() {
        let mut llama = load(2, reference.blocks());
        let blocks: Vec<_> = (0..reference.blocks() as u32).map(BlockId).collect();
        let mut tokens = reference.prompt.clone();
        let mut start = 0;
        for step in 0..reference.decided() {
            let mut logits = Vec::new();
            llama.forward(
                &[Chunk { tokens: &tokens[start..], start, blocks: &blocks, logits: Logits::Last }],
                &mut logits,
            );
            let token = best(&logits);
            assert_eq!(token, reference.tokens[step], "prompt {number}, step {step}, gap {}", reference.gaps[step]);
            start = tokens.len();
            tokens.push(token);
            compared += 1;
        }
    }
    let tied: Vec<_> = references.iter().filter(|reference| reference.decided() < reference.tokens.len()).collect();
    let cut: usize = tied.iter().map(|reference| reference.tokens.len() - reference.decided()).sum();
    println!(
        "greedy tokens equal llama.cpp's: {} of {} prompts to their end and {} up to a tie under {TIE}, {compared} tokens; \
         {cut} after ties are not compared",
        references.len() - tied.len(),
        references.len(),
        tied.len(),
    );
    // Were the ties more than a few, this test would prove little.
    assert!(compared >= 600, "only {compared} steps were decided");
}

/// All prompts in one batch, prompts in chunks beside decoding sequences: the same tokens as alone.
#[test]
fn a_mixed_batch_gives_the_same_tokens() {
    const PROMPT_CHUNK: usize = 37;
    let references = references();
    let mut llama = load(2, references.iter().map(Reference::blocks).sum());
    let mut next_block = 0;
    let tables: Vec<Vec<BlockId>> = references
        .iter()
        .map(|r| {
            let first = next_block;
            next_block += r.blocks() as u32;
            (first..next_block).rev().map(BlockId).collect()
        })
        .collect();
    let mut tokens: Vec<Vec<u32>> = references.iter().map(|r| r.prompt.clone()).collect();
    let mut done = vec![0; references.len()];
    // Sequence s joins at step s.
    for step in 0.. {
        let running: Vec<usize> = (0..references.len())
            .filter(|&s| s <= step && tokens[s].len() < references[s].prompt.len() + references[s].decided())
            .collect();
        if running.is_empty() && step >= references.len() {
            break;
        }
        let chunks: Vec<Chunk<'_>> = running
            .iter()
            .map(|&s| {
                let end = tokens[s].len().min(done[s] + PROMPT_CHUNK);
                let logits = if end == tokens[s].len() { Logits::Last } else { Logits::None };
                Chunk { tokens: &tokens[s][done[s]..end], start: done[s], blocks: &tables[s], logits }
            })
            .collect();
        let mut logits = Vec::new();
        llama.forward(&chunks, &mut logits);
        let mut rows = logits.chunks_exact(llama.vocab());
        let steps: Vec<_> = chunks.iter().map(|c| (c.tokens.len(), c.logits)).collect();
        for (&s, (len, wanted)) in running.iter().zip(steps) {
            done[s] += len;
            if wanted == Logits::Last {
                let step = tokens[s].len() - references[s].prompt.len();
                let token = best(rows.next().expect("a row for each chunk that wants one"));
                assert_eq!(token, references[s].tokens[step], "prompt {s}, step {step}");
                tokens[s].push(token);
            }
        }
    }
}
