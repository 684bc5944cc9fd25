//! A small random model against a plain implementation, and every way of cutting the same work against every other.

pub(super) mod plain;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use self::plain::Model;
use super::super::gguf::fixture::GgufBuilder;
use super::super::quant::Quant;
use super::super::{BlockId, Chunk, Forward, Logits};
use super::*;

fn load_with(file: &GgufBuilder, threads: usize, block_size: usize) -> Result<Llama, LoadError> {
    let dir = tempfile::tempdir().unwrap();
    Llama::load(file.write(dir.path()), LlamaOptions { threads, block_size, total_blocks: 64 })
}

fn load(model: &Model) -> Llama {
    load_with(&model.file(), 1, 16).unwrap()
}

/// A tiny random model for tests of what is around it, and one of equal shapes that is another.
pub(crate) fn tiny(total_blocks: usize, other: bool) -> Llama {
    let dir = tempfile::tempdir().unwrap();
    let model = Model { rope_scale: other.then_some(2.0), ..Model::llama() };
    Llama::load(model.file().write(dir.path()), LlamaOptions { threads: 1, block_size: 16, total_blocks }).unwrap()
}

/// Tokens of that model.
pub(crate) fn tokens(len: usize, seed: u64) -> Vec<u32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(0..plain::VOCAB as u32)).collect()
}

fn table(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

/// Logits of every token, computed in chunks of the given lengths.
fn in_chunks(llama: &mut Llama, tokens: &[u32], blocks: &[BlockId], lens: &[usize]) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut start = 0;
    for &len in lens {
        let chunk = Chunk { tokens: &tokens[start..start + len], start, blocks, logits: Logits::All };
        llama.forward(&[chunk], &mut logits);
        start += len;
    }
    assert_eq!((start, logits.len()), (tokens.len(), tokens.len() * plain::VOCAB));
    assert!(logits.iter().all(|v| v.is_finite()));
    logits
}

fn assert_same_bits(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    let different = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(different, None, "the results differ from here on");
}

#[test]
fn logits_equal_a_plain_implementation() {
    let models = [
        Model::llama(),
        Model { output: false, ..Model::llama() },
        Model { rope_factors: true, rope_scale: Some(2.0), ..Model::llama() },
        Model { rope_dims: Some(8), bias: true, ..Model::llama() },
        Model { kv_heads: 4, ..Model::llama() },
        Model { kv_heads: 1, ..Model::llama() },
        Model { architecture: "qwen2", bias: true, ..Model::llama() },
        Model { architecture: "qwen3", head_norms: true, head_dim: 32, ..Model::llama() },
    ];
    let tokens = tokens(53, 1);
    for model in models {
        let expected = model.logits(&tokens);
        for block_size in [16, 32, 64] {
            let mut llama = load_with(&model.file(), 2, block_size).unwrap();
            let got = in_chunks(&mut llama, &tokens, &table([5, 3, 9, 0]), &[40, 1, 12]);
            let error = expected.iter().zip(&got).map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max);
            let size = expected.iter().map(|v| v.abs()).fold(0.0, f64::max);
            assert!(error < 2e-3 * size, "{model:?}, blocks of {block_size}: {error} of {size}");
        }
    }
}

#[test]
fn cutting_a_prompt_changes_no_bit() {
    let model = Model::quantized(Quant::Q4_1);
    let tokens = tokens(100, 2);
    let blocks = table(0..7);
    let whole = in_chunks(&mut load(&model), &tokens, &blocks, &[100]);
    for lens in [&[1; 100][..], &[50, 50], &[3, 16, 17, 64], &[99, 1], &[8, 9, 83]] {
        assert_same_bits(&in_chunks(&mut load(&model), &tokens, &blocks, lens), &whole);
    }
}

#[test]
fn a_step_that_is_given_up_changes_no_bit_of_the_next() {
    let model = Model::quantized(Quant::Q4_1);
    let tokens = tokens(60, 4);
    let blocks = table(0..4);
    let whole = in_chunks(&mut load(&model), &tokens, &blocks, &[60]);
    let mut llama = load(&model);
    let mut logits = in_chunks(&mut llama, &tokens[..20], &blocks, &[20]);
    for layers in 0..2 {
        // A step over other tokens of the same positions, which ends after so many layers.
        let other: Vec<u32> = tokens.iter().rev().copied().collect();
        let asked = std::cell::Cell::new(0);
        let worth = |done: f64| {
            assert!((0.0..1.0).contains(&done));
            asked.replace(asked.get() + 1) < layers
        };
        let chunk = Chunk { tokens: &other[20..], start: 20, blocks: &blocks, logits: Logits::All };
        let mut none = Vec::new();
        assert!(!llama.forward_while(&[chunk], &mut none, &worth) && none.is_empty());
        assert_eq!(asked.get(), layers + 1);
    }
    let chunk = Chunk { tokens: &tokens[20..], start: 20, blocks: &blocks, logits: Logits::All };
    assert!(llama.forward_while(&[chunk], &mut logits, &|_| true));
    assert_same_bits(&logits, &whole);
}

#[test]
fn threads_and_block_sizes_change_no_bit() {
    for quant in [Quant::Q8_0, Quant::F16, Quant::Q4K, Quant::Q6K] {
        let model = Model::quantized(quant);
        let (tokens, blocks) = (tokens(60, 3), table(0..4));
        let one = in_chunks(&mut load(&model), &tokens, &blocks, &[50, 10]);
        for (threads, block_size) in [(3, 16), (1, 32), (2, 64)] {
            let mut llama = load_with(&model.file(), threads, block_size).unwrap();
            assert_same_bits(&in_chunks(&mut llama, &tokens, &blocks, &[50, 10]), &one);
        }
    }
}

#[test]
fn a_batch_gives_each_sequence_what_it_gets_alone() {
    let model = Model::quantized(Quant::Q4_0);
    let lens = [1, 30, 17, 48, 2];
    let prompts: Vec<_> = lens.iter().zip(10..).map(|(&len, seed)| tokens(len, seed)).collect();
    let tables: Vec<_> = (0..5).map(|s| table([s, s + 10, s + 20])).collect();
    let mut llama = load(&model);
    // First all but the last two tokens of each in one step, then the rest, beside one that has nothing to say.
    let mut logits = Vec::new();
    let chunk = |s: usize, range: std::ops::Range<usize>, logits| {
        let tokens: &[u32] = &prompts[s];
        Chunk { tokens: &tokens[range.clone()], start: range.start, blocks: &tables[s], logits }
    };
    llama.forward(
        &[chunk(3, 0..46, Logits::None), chunk(1, 0..28, Logits::Last), chunk(2, 0..15, Logits::None)],
        &mut logits,
    );
    let early = logits.split_off(0);
    let rest = [
        chunk(4, 0..2, Logits::All),
        chunk(3, 46..48, Logits::Last),
        chunk(0, 0..1, Logits::Last),
        chunk(2, 15..17, Logits::None),
        chunk(1, 28..30, Logits::All),
    ];
    llama.forward(&rest, &mut logits);

    let alone = |s: usize| in_chunks(&mut load(&model), &prompts[s], &tables[s], &[lens[s]]);
    let row = |logits: &[f32], r: usize| logits[r * plain::VOCAB..][..plain::VOCAB].to_vec();
    assert_same_bits(&early, &row(&alone(1), 27));
    let expected = [alone(4), row(&alone(3), 47), alone(0), row(&alone(1), 28), row(&alone(1), 29)].concat();
    assert_same_bits(&logits, &expected);
}

#[test]
fn reused_blocks_give_what_computing_them_again_gives() {
    let model = Model::quantized(Quant::Q5K);
    let mut llama = load(&model);
    let (first, mut second) = (tokens(50, 4), tokens(70, 5));
    second[..32].copy_from_slice(&first[..32]);
    in_chunks(&mut llama, &first, &table([7, 2, 11, 4]), &[50]);

    // The second sequence takes over the two full blocks that both begin with, one of them as a copy of its bytes.
    // SAFETY: no step is under way, and the blocks are two.
    unsafe { llama.arena().block_mut(BlockId(30)).copy_from_slice(llama.arena().block(BlockId(2))) };
    let blocks = table([7, 30, 20, 21, 22]);
    let mut reused = Vec::new();
    llama.forward(&[Chunk { tokens: &second[32..], start: 32, blocks: &blocks, logits: Logits::Last }], &mut reused);

    let anew = in_chunks(&mut load(&model), &second, &blocks, &[70]);
    assert_same_bits(&reused, &anew[69 * plain::VOCAB..]);
}

#[test]
fn a_step_that_wants_nothing_still_stores_keys() {
    let model = Model::llama();
    let (mut llama, tokens, blocks) = (load(&model), tokens(20, 6), table([1, 0]));
    let mut logits = Vec::new();
    llama.forward(&[Chunk { tokens: &tokens[..19], start: 0, blocks: &blocks, logits: Logits::None }], &mut logits);
    assert!(logits.is_empty());
    llama.forward(&[Chunk { tokens: &tokens[19..], start: 19, blocks: &blocks, logits: Logits::Last }], &mut logits);
    let whole = in_chunks(&mut load(&model), &tokens, &blocks, &[20]);
    assert_same_bits(&logits, &whole[19 * plain::VOCAB..]);
}

#[test]
fn the_config_is_what_the_file_says() {
    let file = Model::llama().file().u32("tokenizer.ggml.bos_token_id", 1).u32("tokenizer.ggml.eos_token_id", 2);
    let llama = load_with(&file.u32("tokenizer.ggml.eot_token_id", 2), 1, 32).unwrap();
    let config = llama.config();
    assert_eq!((config.bos, &config.eos[..]), (Some(1), &[2][..]));
    assert_eq!((config.layers, config.heads, config.kv_heads, config.head_dim), (2, 4, 2, 16));
    assert_eq!((config.context_length, config.vocab, llama.vocab()), (128, plain::VOCAB, plain::VOCAB));
    assert_eq!(llama.arena().shape().block_bytes(), 2 * 2 * 2 * 16 * 32 * 2);
}

#[test]
fn says_why_a_model_cannot_run() {
    let problem = |file: GgufBuilder| match load_with(&file, 1, 16) {
        Ok(_) => panic!("the model loaded"),
        Err(error) => error.to_string(),
    };
    let falcon = GgufBuilder::default().str("general.architecture", "falcon");
    assert!(problem(falcon).ends_with("the architecture is \"falcon\"; supported: llama, qwen2, qwen3"));
    assert!(problem(GgufBuilder::default()).ends_with("has no metadata key \"general.architecture\""));
    let model = Model::llama;
    assert!(
        problem(Model { missing: Some("blk.1.ffn_up.weight"), ..model() }.file()).contains("no tensor \"blk.1.ffn_up")
    );
    assert!(problem(model().file().u32("llama.expert_count", 8)).contains("mixtures of experts"));
    assert!(problem(model().file().str("llama.rope.scaling.type", "yarn")).contains("type \"yarn\" is not supported"));
    assert!(problem(Model { kv_heads: 3, ..model() }.file()).contains("4 heads cannot share 3"));
    assert!(problem(Model { head_dim: 24, ..model() }.file()).contains("heads of 24 elements"));
    let shape = Model { rope_factors: true, rope_dims: Some(8), ..model() };
    assert!(load_with(&shape.file(), 1, 16).is_ok());
    let block_size = load_with(&model().file(), 1, 8).err().unwrap().to_string();
    assert!(block_size.contains("the block size is 8"), "{block_size}");
}
