//! The tensors of a model by role, on the device that computes; quantised as they are in the file.

use std::borrow::Cow;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{Device, Module, Tensor};

use super::super::config::{Config, LoadError};
use super::super::weights::vector;
use super::CandleError;
use crate::engine::builtin::gguf::{self, Gguf};
use crate::engine::builtin::quant::Quant;

/// A transformer layer.
pub(super) struct Layer {
    pub(super) attention_norm: Tensor,
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    /// Norms of each head's query and key, where the architecture has them.
    pub(super) query_norm: Option<Tensor>,
    pub(super) key_norm: Option<Tensor>,
    pub(super) attention_output: Linear,
    pub(super) feed_forward_norm: Tensor,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// All of a model.
pub(super) struct Weights {
    /// In the file: only single rows of it are read.
    pub(super) embedding: gguf::Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: Tensor,
    /// The embedding again where the file has no output matrix.
    pub(super) output: Linear,
}

/// A matrix with its bias.
pub(super) struct Linear {
    weights: QMatMul,
    bias: Option<Tensor>,
}

impl Module for Linear {
    /// `[rows, cols]` to `[rows, outputs]`, in single precision.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let product = self.weights.forward(x)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

impl Weights {
    pub(super) fn load(gguf: &Gguf, config: &Config, device: &Device) -> Result<Self, CandleError> {
        let from = Source { gguf, device };
        let embedding = gguf.tensor("token_embd.weight", &[config.hidden, config.vocab]).map_err(LoadError::from)?;
        Ok(Self {
            embedding,
            layers: (0..config.layers).map(|index| from.layer(config, index)).collect::<Result<_, _>>()?,
            output_norm: from.vector("output_norm.weight", config.hidden)?,
            output: from.linear(output(gguf), config.hidden, config.vocab)?,
        })
    }
}

fn output(gguf: &Gguf) -> &'static str {
    if gguf.has_tensor("output.weight") { "output" } else { "token_embd" }
}

/// Bytes of the matrices that go to the device; the rest is small.
pub(super) fn bytes(gguf: &Gguf, config: &Config) -> Result<u64, LoadError> {
    let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let matrices = [
        ("attn_q", config.hidden, queries),
        ("attn_k", config.hidden, keys),
        ("attn_v", config.hidden, keys),
        ("attn_output", queries, config.hidden),
        ("ffn_gate", config.hidden, config.feed_forward),
        ("ffn_up", config.hidden, config.feed_forward),
        ("ffn_down", config.feed_forward, config.hidden),
    ];
    let layers = (0..config.layers)
        .flat_map(|layer| matrices.map(|(name, cols, rows)| (format!("blk.{layer}.{name}.weight"), cols, rows)));
    let output = (format!("{}.weight", output(gguf)), config.hidden, config.vocab);
    let mut bytes = 0;
    for (name, cols, rows) in layers.chain([output]) {
        let tensor = gguf.tensor(&name, &[cols, rows])?;
        // What is no block format becomes single precision.
        let whole = tensor.quant.block_len() == 1;
        bytes += if whole { cols * rows * size_of::<f32>() } else { tensor.bytes().len() } as u64;
    }
    Ok(bytes)
}

/// Where tensors come from and go to.
struct Source<'a> {
    gguf: &'a Gguf,
    device: &'a Device,
}

impl Source<'_> {
    fn layer(&self, config: &Config, index: usize) -> Result<Layer, CandleError> {
        let Config { hidden, feed_forward, head_dim, .. } = *config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let head_norm = |suffix: &str| {
            let name = name(suffix);
            self.gguf.has_tensor(&name).then(|| self.vector(&name, head_dim)).transpose()
        };
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm.weight"), hidden)?,
            query: self.linear(&name("attn_q"), hidden, queries)?,
            key: self.linear(&name("attn_k"), hidden, keys)?,
            value: self.linear(&name("attn_v"), hidden, keys)?,
            query_norm: head_norm("attn_q_norm.weight")?,
            key_norm: head_norm("attn_k_norm.weight")?,
            attention_output: self.linear(&name("attn_output"), queries, hidden)?,
            feed_forward_norm: self.vector(&name("ffn_norm.weight"), hidden)?,
            gate: self.linear(&name("ffn_gate"), hidden, feed_forward)?,
            up: self.linear(&name("ffn_up"), hidden, feed_forward)?,
            down: self.linear(&name("ffn_down"), feed_forward, hidden)?,
        })
    }

    fn linear(&self, name: &str, cols: usize, rows: usize) -> Result<Linear, CandleError> {
        let tensor = self.gguf.tensor(&format!("{name}.weight"), &[cols, rows]).map_err(LoadError::from)?;
        let storage = QStorage::from_data(Cow::Borrowed(tensor.bytes()), self.device, format(tensor.quant))?;
        let weights = QMatMul::from_qtensor(QTensor::new(storage, (rows, cols))?)?;
        let bias = format!("{name}.bias");
        let bias = self.gguf.has_tensor(&bias).then(|| self.vector(&bias, rows)).transpose()?;
        Ok(Linear { weights, bias })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor, CandleError> {
        let values = vector(self.gguf, name, len).map_err(LoadError::from)?;
        Ok(Tensor::from_vec(values, len, self.device)?)
    }
}

/// Candle's name of a format. It has products for all that we read; of those that are no blocks, in single precision.
fn format(quant: Quant) -> GgmlDType {
    match quant {
        Quant::F32 => GgmlDType::F32,
        Quant::F16 => GgmlDType::F16,
        Quant::Bf16 => GgmlDType::BF16,
        Quant::Q4_0 => GgmlDType::Q4_0,
        Quant::Q4_1 => GgmlDType::Q4_1,
        Quant::Q5_0 => GgmlDType::Q5_0,
        Quant::Q5_1 => GgmlDType::Q5_1,
        Quant::Q8_0 => GgmlDType::Q8_0,
        Quant::Q4K => GgmlDType::Q4K,
        Quant::Q5K => GgmlDType::Q5K,
        Quant::Q6K => GgmlDType::Q6K,
    }
}
