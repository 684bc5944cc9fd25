//! The same reference, computed on candle's tensors: short prompts at once, then their answers as one batch.
//!
//! Candle multiplies with activations of eight bits, which moves logits further than another order of sums does. So a step
//! counts as decided from a larger distance on. On processors candle is slow: the prompts are few, and only the first tokens of
//! their answers are compared.

use worker_agent::engine::builtin::gguf::Gguf;
use worker_agent::engine::builtin::llama::candle::{CandleDevice, CandleLlama, CandleOptions};

use super::*;

/// Below this distance of the two best logits, either is right here.
const TIE: f32 = 0.3;
/// Prompts, most tokens of one, and tokens of its answer.
const PROMPTS: usize = 5;
const PROMPT: usize = 40;
const ANSWER: usize = 16;

#[test]
fn candle_s_greedy_tokens_are_llama_cpp_s() {
    let short = references().into_iter().filter(|reference| reference.prompt.len() <= PROMPT);
    let references: Vec<_> = short.take(PROMPTS).collect();
    let total_blocks = references.iter().map(Reference::blocks).sum();
    let gguf = Gguf::open(model::path()).expect("the model opens");
    let options = CandleOptions {
        device: CandleDevice::Cpu,
        block_size: BLOCK_SIZE,
        total_blocks,
        max_num_seqs: PROMPTS,
        max_num_batched_tokens: PROMPTS * PROMPT,
    };
    let mut candle = CandleLlama::from_gguf(&gguf, options).expect("the model loads");
    let mut next_block = 0;
    let tables: Vec<Vec<BlockId>> = references
        .iter()
        .map(|reference| {
            let first = next_block;
            next_block += reference.blocks() as u32;
            (first..next_block).map(BlockId).collect()
        })
        .collect();
    let mut tokens: Vec<Vec<u32>> = references.iter().map(|reference| reference.prompt.clone()).collect();
    let mut done = vec![0; references.len()];
    let (mut compared, mut other) = (0, 0);
    for step in 0..ANSWER {
        let chunks: Vec<Chunk<'_>> = (0..references.len())
            .map(|s| Chunk { tokens: &tokens[s][done[s]..], start: done[s], blocks: &tables[s], logits: Logits::Last })
            .collect();
        let mut logits = Vec::new();
        candle.forward(&chunks, &mut logits);
        for (s, row) in logits.chunks_exact(candle.vocab()).enumerate() {
            let (reference, token) = (&references[s], best(row));
            if token != reference.tokens[step] {
                assert!(reference.gaps[step] < TIE, "prompt {s}, step {step}, gap {}", reference.gaps[step]);
                other += 1;
            } else if reference.gaps[step] >= TIE {
                compared += 1;
            }
            done[s] = tokens[s].len();
            // Always the reference's token: so every step is compared, whatever was chosen before.
            tokens[s].push(reference.tokens[step]);
        }
    }
    assert_eq!(candle.blocks_brought(), 0);
    println!("candle: {compared} decided tokens equal llama.cpp's; {other} others differ, all at gaps under {TIE}");
    assert!(compared >= 50, "only {compared} steps were decided");
}
