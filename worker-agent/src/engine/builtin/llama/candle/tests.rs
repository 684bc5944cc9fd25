//! Candle's results against those of our own kernels, and the device's copy of the arena against the arena.
//!
//! On every device that candle has here: the processor, and with feature `cuda` what GPUs there are.

mod mirrored;
mod served;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::super::gguf::fixture::GgufBuilder;
use super::super::super::{BlockId, Logits};
use super::super::tests::plain::{Model, VOCAB};
use super::super::tests::tokens;
use super::super::{Llama, LlamaOptions};
use super::*;
use crate::engine::builtin::quant::Quant;

const BLOCKS: usize = 64;

fn devices() -> Vec<CandleDevice> {
    let gpus = if cfg!(feature = "cuda") { cuda::inventory().expect("a driver that works").len() } else { 0 };
    std::iter::once(CandleDevice::Cpu).chain((0..gpus).map(CandleDevice::Cuda)).collect()
}

fn opened(file: &GgufBuilder) -> Gguf {
    let dir = tempfile::tempdir().expect("a temporary directory");
    Gguf::open(file.write(dir.path())).expect("just written")
}

fn options(device: CandleDevice, block_size: usize) -> CandleOptions {
    CandleOptions { device, block_size, total_blocks: BLOCKS, max_num_seqs: 8, max_num_batched_tokens: 512 }
}

fn load_with(file: &GgufBuilder, device: CandleDevice, block_size: usize) -> CandleLlama {
    CandleLlama::from_gguf(&opened(file), options(device, block_size)).expect("loads")
}

fn load(model: &Model, device: CandleDevice) -> CandleLlama {
    load_with(&model.file(), device, 16)
}

/// The same model on our own kernels.
fn own(model: &Model, block_size: usize) -> Llama {
    let options = LlamaOptions { threads: 1, block_size, total_blocks: BLOCKS };
    Llama::from_gguf(&opened(&model.file()), options).expect("loads")
}

fn table(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

/// Logits of every token, computed in chunks of the given lengths.
fn in_chunks(model: &mut impl Forward, tokens: &[u32], blocks: &[BlockId], lens: &[usize]) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut start = 0;
    for &len in lens {
        let chunk = Chunk { tokens: &tokens[start..start + len], start, blocks, logits: Logits::All };
        model.forward(&[chunk], &mut logits);
        start += len;
    }
    assert_eq!((start, logits.len()), (tokens.len(), tokens.len() * VOCAB));
    logits
}

/// What rounding of keys and values to halves and another order of sums may change.
const ROUNDING: f32 = 2e-3;

/// Compares the largest difference with the largest value.
fn assert_close(expected: &[f32], got: &[f32], what: &str) {
    assert_eq!(expected.len(), got.len());
    assert!(got.iter().all(|v| v.is_finite()));
    let size = expected.iter().map(|v| v.abs()).fold(0.0, f32::max);
    let error = expected.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(error < ROUNDING * size, "{what}: {error} of {size}");
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
        Model { architecture: "qwen3", head_norms: true, head_dim: 32, rope_dims: Some(16), ..Model::llama() },
    ];
    let tokens = tokens(53, 1);
    for model in models {
        let expected: Vec<f32> = model.logits(&tokens).into_iter().map(|v| v as f32).collect();
        for device in devices() {
            for block_size in [16, 32, 64] {
                let mut candle = load_with(&model.file(), device, block_size);
                let got = in_chunks(&mut candle, &tokens, &table([5, 3, 9, 0]), &[40, 1, 12]);
                assert_close(&expected, &got, &format!("{model:?}, blocks of {block_size}"));
                assert_eq!(candle.blocks_brought(), 0);
            }
        }
    }
}

/// Activations of eight bits change some in a thousand of a product. Another meaning of the bits would change all of it.
#[test]
fn products_of_every_format_are_about_those_of_its_definition() {
    const COLS: usize = 512;
    let mut rng = SmallRng::seed_from_u64(2);
    let rows: Vec<f32> = (0..40 * COLS).map(|_| rng.random_range(-1.0..1.0)).collect();
    for quant in Quant::ALL {
        let gguf = opened(&Model::quantized(quant).file());
        let config = Config::read(&gguf).expect("read");
        let down = gguf.tensor("blk.0.ffn_down.weight", &[COLS, config.hidden]).expect("there");
        let mut matrix = vec![0.0; COLS * config.hidden];
        quant.dequantize(down.bytes(), &mut matrix);
        for device in devices() {
            let device = match device {
                CandleDevice::Cpu => Device::Cpu,
                CandleDevice::Cuda(ordinal) => Device::new_cuda(ordinal).expect("there"),
            };
            let weights = Weights::load(&gguf, &config, &device).expect("loads");
            // Vectors and matrices have kernels of their own.
            for count in [1, 5, 40] {
                let x = Tensor::from_slice(&rows[..count * COLS], (count, COLS), &device).expect("made");
                let product = weights.layers[0].down.forward(&x).expect("computed");
                let got = product.flatten_all().expect("flat").to_vec1::<f32>().expect("copied");
                let exact = rows.chunks(COLS).flat_map(|x| matrix.chunks(COLS).map(|row| dot(x, row)));
                let (mut difference, mut size) = (0.0, 0.0);
                for (exact, got) in exact.zip(&got) {
                    difference += (exact - f64::from(*got)).powi(2);
                    size += exact.powi(2);
                }
                let error = (difference / size).sqrt();
                let most = if quant.block_len() == 1 { 1e-5 } else { 0.02 };
                assert!(error < most, "{quant:?}, {count} rows: {error}");
            }
        }
    }
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

#[test]
fn cutting_a_prompt_changes_next_to_nothing() {
    let model = Model::llama();
    let (tokens, blocks) = (tokens(120, 3), table(0..8));
    for device in devices() {
        let whole = in_chunks(&mut load(&model, device), &tokens, &blocks, &[120]);
        for lens in [&[1; 120][..], &[60, 60], &[3, 16, 17, 84], &[119, 1]] {
            assert_close(&whole, &in_chunks(&mut load(&model, device), &tokens, &blocks, lens), &format!("{lens:?}"));
        }
    }
}

#[test]
fn a_batch_gives_each_sequence_what_it_gets_alone() {
    let model = Model::llama();
    let lens = [1, 30, 17, 120, 2];
    let prompts: Vec<_> = lens.iter().zip(10..).map(|(&len, seed)| tokens(len, seed)).collect();
    let tables: Vec<_> = (0..5).map(|s| table((0..8).map(|block| block * 5 + s))).collect();
    let chunk = |s: usize, range: std::ops::Range<usize>, logits| {
        let tokens: &[u32] = &prompts[s];
        Chunk { tokens: &tokens[range.clone()], start: range.start, blocks: &tables[s], logits }
    };
    for device in devices() {
        let mut candle = load(&model, device);
        let mut logits = Vec::new();
        candle.forward(
            &[chunk(3, 0..118, Logits::None), chunk(1, 0..29, Logits::Last), chunk(2, 0..16, Logits::None)],
            &mut logits,
        );
        let early = logits.split_off(0);
        // Sequences that decode, at lengths that differ, beside those that do not and one that has nothing to say.
        let rest = [
            chunk(4, 0..2, Logits::All),
            chunk(3, 118..119, Logits::Last),
            chunk(0, 0..1, Logits::Last),
            chunk(2, 16..17, Logits::None),
            chunk(1, 29..30, Logits::All),
        ];
        candle.forward(&rest, &mut logits);
        candle.forward(&[chunk(3, 119..120, Logits::Last)], &mut logits);

        let alone = |s: usize| in_chunks(&mut load(&model, device), &prompts[s], &tables[s], &[lens[s]]);
        let row = |logits: &[f32], r: usize| logits[r * VOCAB..][..VOCAB].to_vec();
        assert_close(&row(&alone(1), 28), &early, "a prompt in part");
        let expected = [alone(4), row(&alone(3), 118), alone(0), row(&alone(1), 29), row(&alone(3), 119)].concat();
        assert_close(&expected, &logits, "all");
    }
}

#[test]
fn a_prompt_longer_than_a_tile_sees_all_of_itself() {
    let model = Model::llama();
    let (tokens, blocks) = (tokens(300, 7), table((0..19).rev()));
    let expected: Vec<f32> = model.logits(&tokens).into_iter().map(|v| v as f32).collect();
    for device in devices() {
        let got = in_chunks(&mut load(&model, device), &tokens, &blocks, &[290, 10]);
        assert_close(&expected, &got, "300 tokens");
    }
}

#[test]
fn what_cannot_be_on_a_device_is_one_line() {
    let gguf = opened(&Model::llama().file());
    let refused = |device, block_size| {
        CandleLlama::from_gguf(&gguf, options(device, block_size)).err().expect("refused").to_string()
    };
    assert!(refused(CandleDevice::Cpu, 24).contains("the block size is 24"));
    let gpus = devices().len() - 1;
    let missing = format!("there is no CUDA device 99: this process sees {gpus}");
    assert_eq!(refused(CandleDevice::Cuda(99), 16), missing);
    let missing = opened(&Model { missing: Some("blk.1.ffn_up.weight"), ..Model::llama() }.file());
    let error = CandleLlama::from_gguf(&missing, options(CandleDevice::Cpu, 16)).err().expect("refused").to_string();
    assert!(error.contains("no tensor \"blk.1.ffn_up"), "{error}");
}

/// Weights and blocks that just fit leave nothing to compute with.
#[test]
fn a_device_needs_room_for_a_step_as_well() {
    let gguf = opened(&Model::llama().file());
    let config = Config::read(&gguf).expect("readable");
    let needs = |tokens| {
        let options = CandleOptions { max_num_batched_tokens: tokens, ..options(CandleDevice::Cpu, 16) };
        needs(&gguf, &config, options).expect("known")
    };
    let Needs { weights, kv, scratch, .. } = needs(512);
    assert_eq!(kv, (BLOCKS * config.kv_shape(16).block_bytes()) as u64);
    assert!(weights > 0 && scratch > needs(16).scratch, "a step of fewer tokens takes less");
    assert!(needs(512).fit(weights + kv + scratch, "a device").is_ok());
    let refused = needs(512).fit(weights + kv, "a device").expect_err("nothing is left").to_string();
    assert!(refused.contains("64 KV blocks and 0.3 GB for a step of 512 tokens do not fit"), "{refused}");
    assert!(refused.contains("free on a device; --kv-blocks and --max-num-batched-tokens") && !refused.contains('\n'));
    let endless = Needs { kv: u64::MAX, ..needs(512) };
    assert!(endless.fit(u64::MAX - 1, "a device").is_err());
}
