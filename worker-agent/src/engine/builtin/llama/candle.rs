//! The same models on candle's tensors: how they are computed on a GPU.
//!
//! The arena in host memory stays what it is for every engine: the truth, which blocks are leased, fetched, tiered and reused
//! from. The device has a copy of it (`mirror`). What a step computes goes into both; what others have written to the arena is
//! copied to the device before a step reads it. So blocks have the same meaning here as with our own kernels, and workers of
//! both kinds can exchange them.
//!
//! Candle multiplies quantised weights with activations of eight bits. Results are close to those of our own kernels, not equal,
//! and depend a little on what else is in the step.

mod attention;
mod carrier;
mod mirror;
mod scratch;
#[cfg(test)]
mod tests;
mod weights;

use std::sync::Arc;

use candle_core::{D, Device, Module, Tensor};
use device::{Description, DeviceError, cuda};
use half::f16;

use self::attention::Plan;
use self::carrier::Carrier;
use self::mirror::Mirror;
use self::scratch::Largest;
use self::weights::{Layer, Weights};
use super::config::{Config, LoadError};
use super::forward::{Place, places, unwanted, wanted_rows};
use super::rope::Rope;
use crate::engine::builtin::arena::KvArena;
use crate::engine::builtin::gguf::Gguf;
use crate::engine::builtin::{Chunk, Forward, Kv};

/// Which of candle's devices computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandleDevice {
    /// The processor; to check what is computed without a GPU.
    Cpu,
    /// The CUDA device of this number.
    Cuda(usize),
}

/// Why a model does not run on a device.
#[derive(Debug, thiserror::Error)]
pub enum CandleError {
    /// The file, or the arena.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// There is none of this number.
    #[error("there is no CUDA device {wanted}: this process sees {found}")]
    NoDevice {
        /// The number.
        wanted: usize,
        /// How many there are.
        found: usize,
    },
    /// The device cannot hold it all.
    #[error(
        "{:.1} GB of weights, {:.1} GB for {blocks} KV blocks and {:.1} GB for a step of {tokens} tokens do not fit into the {:.1} GB \
         that are free on {name}; --kv-blocks and --max-num-batched-tokens say how much the last two are",
        gb(.needs.weights), gb(.needs.kv), gb(.needs.scratch), gb(*.free), blocks = .needs.blocks, tokens = .needs.tokens
    )]
    NoRoom {
        /// What it would have to hold.
        needs: Needs,
        /// Free bytes.
        free: u64,
        /// The device.
        name: String,
    },
    /// More than candle's kernels can number.
    #[error("{blocks} KV blocks are more than candle can address: {most} at most")]
    Blocks {
        /// What was asked for.
        blocks: usize,
        /// Most that can be.
        most: usize,
    },
    /// The driver.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Candle, while weights or blocks were placed.
    #[error("candle: {0}")]
    Candle(Box<candle_core::Error>),
}

impl From<candle_core::Error> for CandleError {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(Box::new(error))
    }
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// What a device has to hold, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// The weights.
    pub weights: u64,
    /// The KV blocks.
    pub kv: u64,
    /// How many these are.
    pub blocks: usize,
    /// What the largest step computes, at most: an estimate.
    pub scratch: u64,
    /// How many tokens it has.
    pub tokens: usize,
}

impl Needs {
    /// Checks that `free` bytes on the device `name` are enough.
    fn fit(self, free: u64, name: &str) -> Result<(), CandleError> {
        let all = self.weights.saturating_add(self.kv).saturating_add(self.scratch);
        if all <= free { Ok(()) } else { Err(CandleError::NoRoom { needs: self, free, name: name.into() }) }
    }
}

/// How to run a model.
#[derive(Clone, Copy, Debug)]
pub struct CandleOptions {
    /// What computes.
    pub device: CandleDevice,
    /// Tokens in a KV block: 16, 32 or 64.
    pub block_size: usize,
    /// KV blocks, in host memory and on the device.
    pub total_blocks: usize,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Most tokens in one step.
    pub max_num_batched_tokens: usize,
}

/// A model on candle's tensors, ready to run.
pub struct CandleLlama {
    config: Config,
    weights: Weights,
    rope: Rope,
    /// Shared with whoever moves blocks.
    arena: Arc<KvArena>,
    /// Names the weights.
    fingerprint: u64,
    device: Device,
    mirror: Mirror,
    carrier: Carrier,
}

impl CandleLlama {
    /// Copies a model's weights to the device, quantised as they are, and makes room for its KV blocks.
    pub fn from_gguf(gguf: &Gguf, options: CandleOptions) -> Result<Self, CandleError> {
        let config = Config::read(gguf)?;
        let shape = config.kv_shape(options.block_size);
        let arena = Arc::new(KvArena::new(shape, options.total_blocks).map_err(LoadError::from)?);
        let (device, host): (Device, Box<dyn device::Device>) = match options.device {
            CandleDevice::Cpu => (Device::Cpu, Box::new(device::Cpu::default())),
            CandleDevice::Cuda(ordinal) => {
                let cuda = open_cuda(ordinal, needs(gguf, &config, options)?)?;
                (Device::new_cuda(ordinal)?, Box::new(cuda))
            }
        };
        let weights = Weights::load(gguf, &config, &device)?;
        let rope = Rope::load(gguf, &config).map_err(LoadError::from)?;
        let mirror = Mirror::new(shape, options.total_blocks, &device)?;
        let carrier = Carrier::new(device.clone(), host)?;
        let fingerprint = gguf.fingerprint();
        Ok(Self { config, weights, rope, arena, fingerprint, device, mirror, carrier })
    }

    /// The model's fixed properties.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The KV arena in host memory.
    pub fn arena(&self) -> &Arc<KvArena> {
        &self.arena
    }

    /// Blocks that were copied from there to the device, since the start.
    pub fn blocks_brought(&self) -> u64 {
        self.mirror.brought()
    }
}

/// What the device has to hold.
fn needs(gguf: &Gguf, config: &Config, options: CandleOptions) -> Result<Needs, LoadError> {
    let (blocks, tokens) = (options.total_blocks, options.max_num_batched_tokens);
    let positions = config.context_length.min(blocks.saturating_mul(options.block_size));
    let largest = Largest { tokens, sequences: options.max_num_seqs, positions };
    Ok(Needs {
        weights: weights::bytes(gguf, config)?,
        kv: (blocks as u64).saturating_mul(config.kv_shape(options.block_size).block_bytes() as u64),
        blocks,
        scratch: scratch::bytes(config, largest),
        tokens,
    })
}

/// Opens the device if it can hold so much.
fn open_cuda(ordinal: usize, needs: Needs) -> Result<cuda::Cuda, CandleError> {
    let devices = cuda::inventory()?;
    let found = devices.len();
    let description: Description =
        devices.into_iter().nth(ordinal).ok_or(CandleError::NoDevice { wanted: ordinal, found })?;
    let name = description.name.clone();
    let device = cuda::Cuda::open(description)?;
    needs.fit(device.free_bytes()?, &name)?;
    Ok(device)
}

impl Forward for CandleLlama {
    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn kv(&self) -> Option<Kv> {
        Some(Kv { arena: self.arena.clone(), model: self.fingerprint })
    }

    /// # Panics
    /// When the device fails: nothing is known of its memory then, and the engine must not go on.
    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        if let Err(error) = self.step(chunks, logits) {
            panic!("the device that computes has failed: {error}");
        }
    }
}

/// What a step needs in every layer.
struct Step {
    /// Rotations of the positions, for each row: cosines and sines of the pairs.
    turns: (Tensor, Tensor),
    /// Rows of the mirror that the step's tokens are written to.
    slots: Tensor,
}

impl CandleLlama {
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> candle_core::Result<()> {
        let places = places(chunks, self.arena.shape().block_size);
        self.mirror.refresh(&self.arena, chunks, &mut self.carrier)?;
        let step = Step { turns: self.turns(chunks)?, slots: self.mirror.slots(&places)? };
        let wanted = wanted_rows(chunks);
        let plan = Plan::new(chunks, &self.config, &self.device, self.arena.shape().block_size, |_| 0)?;
        let mut x = self.embed(chunks)?;
        let mut computed = Vec::with_capacity(self.config.layers);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let (query, key, value) = self.attention_input(layer, &x, &step.turns)?;
            self.mirror.write(index, &step.slots, &key, &value)?;
            computed.push((key, value));
            let blocks = self.mirror.layer(index);
            let attended = if index + 1 < self.config.layers {
                plan.attend(&query, blocks)?
            } else if wanted.is_empty() {
                break;
            } else {
                // Only the wanted rows go further than the last layer's keys and values.
                x = x.index_select(&indices(&wanted, &self.device)?, 0)?;
                Plan::new(chunks, &self.config, &self.device, self.arena.shape().block_size, unwanted)?
                    .attend(&query, blocks)?
            };
            x = self.finish_layer(layer, &x, &attended)?;
        }
        self.keep(&places, &computed)?;
        if !wanted.is_empty() {
            let normed = self.norm(&x, &self.weights.output_norm)?;
            let rows = self.weights.output.forward(&normed)?;
            logits.extend(rows.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(())
    }

    /// The tokens' embeddings. Their rows are few, so that they are unpacked here and the table stays in the file.
    fn embed(&self, chunks: &[Chunk<'_>]) -> candle_core::Result<Tensor> {
        let (vocab, hidden, table) = (self.config.vocab, self.config.hidden, &self.weights.embedding);
        let row_bytes = table.bytes().len() / vocab;
        let tokens: Vec<usize> = chunks.iter().flat_map(|c| c.tokens.iter().map(|&token| token as usize)).collect();
        let mut rows = vec![0.0; tokens.len() * hidden];
        for (&token, row) in tokens.iter().zip(rows.chunks_exact_mut(hidden)) {
            assert!(token < vocab, "token {token} is not in the vocabulary");
            table.quant.dequantize(&table.bytes()[token * row_bytes..][..row_bytes], row);
        }
        Tensor::from_vec(rows, (tokens.len(), hidden), &self.device)
    }

    fn turns(&self, chunks: &[Chunk<'_>]) -> candle_core::Result<(Tensor, Tensor)> {
        let length = self.rope.turn_len();
        let positions: Vec<usize> = chunks.iter().flat_map(|c| c.start..c.start + c.tokens.len()).collect();
        let mut turns = vec![0.0; positions.len() * length];
        for (&position, turn) in positions.iter().zip(turns.chunks_exact_mut(length)) {
            self.rope.turn(position, turn);
        }
        // One axis for the heads, which all turn alike.
        let turns = Tensor::from_vec(turns, (positions.len(), 1, length), &self.device)?;
        Ok((turns.narrow(2, 0, length / 2)?.contiguous()?, turns.narrow(2, length / 2, length / 2)?.contiguous()?))
    }

    /// A layer's queries `[rows, heads × head_dim]`, rotated, and its keys and values `[rows, kv_heads × head_dim]` in half
    /// precision, the keys rotated.
    fn attention_input(
        &self,
        layer: &Layer,
        x: &Tensor,
        turns: &(Tensor, Tensor),
    ) -> candle_core::Result<(Tensor, Tensor, Tensor)> {
        let normed = self.norm(x, &layer.attention_norm)?;
        let turned = |heads: usize, norm: &Option<Tensor>, rows: Tensor| -> candle_core::Result<Tensor> {
            let mut rows = rows.reshape((x.dim(0)?, heads, self.config.head_dim))?;
            if let Some(norm) = norm {
                rows = self.norm(&rows, norm)?;
            }
            rotate(&rows, turns, self.rope.pairs_are_neighbours())?.flatten_from(1)
        };
        let query = turned(self.config.heads, &layer.query_norm, layer.query.forward(&normed)?)?;
        let key = turned(self.config.kv_heads, &layer.key_norm, layer.key.forward(&normed)?)?;
        let value = layer.value.forward(&normed)?;
        Ok((query, half(&key)?, half(&value)?))
    }

    /// Adds the attention's result and the feed-forward network's to the stream.
    fn finish_layer(&self, layer: &Layer, x: &Tensor, attended: &Tensor) -> candle_core::Result<Tensor> {
        let x = (x + layer.attention_output.forward(attended)?)?;
        let normed = self.norm(&x, &layer.feed_forward_norm)?;
        let inner = (layer.gate.forward(&normed)?.silu()? * layer.up.forward(&normed)?)?;
        x + layer.down.forward(&inner)?
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        let size = (mean + f64::from(self.config.norm_eps))?.sqrt()?;
        x.broadcast_div(&size)?.broadcast_mul(weight)
    }

    /// Copies what the step has computed to the arena: it is there when the step ends, as the scheduler and all who move blocks
    /// expect.
    fn keep(&mut self, places: &[Place], computed: &[(Tensor, Tensor)]) -> candle_core::Result<()> {
        let width = self.config.kv_heads * self.config.head_dim;
        for (layer, (keys, values)) in computed.iter().enumerate() {
            let rows = self.carrier.down(&Tensor::cat(&[keys, values], 1)?)?;
            for (place, row) in places.iter().zip(rows.chunks_exact(2 * width)) {
                let (key, value) = row.split_at(width);
                // SAFETY: a step has no two tokens for one slot: sequences own the blocks that they write to.
                unsafe { self.arena.write(place.block, layer, place.slot, bits(key), bits(value)) };
            }
        }
        Ok(())
    }
}

/// Rotates the leading elements of every head of `x`, `[rows, heads, head_dim]`; see [`Rope`].
fn rotate(x: &Tensor, (cosines, sines): &(Tensor, Tensor), neighbours: bool) -> candle_core::Result<Tensor> {
    let (rows, heads, dim) = x.dims3()?;
    let pairs = cosines.dim(2)?;
    let turn = |a: &Tensor, b: &Tensor| -> candle_core::Result<(Tensor, Tensor)> {
        let first = (a.broadcast_mul(cosines)? - b.broadcast_mul(sines)?)?;
        let second = (a.broadcast_mul(sines)? + b.broadcast_mul(cosines)?)?;
        Ok((first, second))
    };
    let turned = if neighbours {
        let paired = x.narrow(2, 0, 2 * pairs)?.reshape((rows, heads, pairs, 2))?;
        let (a, b) = turn(&paired.narrow(3, 0, 1)?.squeeze(3)?, &paired.narrow(3, 1, 1)?.squeeze(3)?)?;
        Tensor::stack(&[a, b], 3)?.flatten_from(2)?
    } else {
        let (a, b) = turn(&x.narrow(2, 0, pairs)?, &x.narrow(2, pairs, pairs)?)?;
        Tensor::cat(&[a, b], 2)?
    };
    if 2 * pairs == dim {
        return Ok(turned);
    }
    Tensor::cat(&[turned, x.narrow(2, 2 * pairs, dim - 2 * pairs)?], 2)
}

fn half(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_dtype(candle_core::DType::F16)?.contiguous()
}

/// Numbers of rows, for tensors that are picked from.
fn indices(rows: &[usize], device: &Device) -> candle_core::Result<Tensor> {
    Tensor::from_vec(rows.iter().map(|&row| row as u32).collect(), rows.len(), device)
}

/// The bits of halves, as the arena has them.
fn bits(halves: &[f16]) -> &[u16] {
    half::slice::HalfFloatSliceExt::reinterpret_cast(halves)
}
