//! The tensors of a model, by role.

use super::super::gguf::{Gguf, GgufError, Tensor};
use super::config::{Config, LoadError};
use super::linear::Linear;
use super::rope::Rope;

/// A transformer layer.
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    /// Norms of each head's query and key, where the architecture has them.
    pub(super) query_norm: Option<Vec<f32>>,
    pub(super) key_norm: Option<Vec<f32>>,
    pub(super) attention_output: Linear,
    pub(super) feed_forward_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// All of a model.
pub(super) struct Weights {
    pub(super) embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: Vec<f32>,
    /// The embedding again where the file has no output matrix.
    pub(super) output: Linear,
    pub(super) rope: Rope,
}

impl Weights {
    pub(super) fn load(gguf: &Gguf, config: &Config) -> Result<Weights, LoadError> {
        let shape = [config.hidden, config.vocab];
        let embedding = gguf.tensor("token_embd.weight", &shape)?;
        let output = if gguf.has_tensor("output.weight") { "output" } else { "token_embd" };
        Ok(Weights {
            embedding,
            layers: (0..config.layers).map(|i| layer(gguf, config, i)).collect::<Result<_, _>>()?,
            output_norm: vector(gguf, "output_norm.weight", config.hidden)?,
            output: linear(gguf, output, config.hidden, config.vocab)?,
            rope: Rope::load(gguf, config)?,
        })
    }
}

fn layer(gguf: &Gguf, config: &Config, index: usize) -> Result<Layer, GgufError> {
    let Config { hidden, feed_forward, head_dim, .. } = *config;
    let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
    let name = |suffix: &str| format!("blk.{index}.{suffix}");
    let head_norm = |suffix: &str| {
        let name = name(suffix);
        gguf.has_tensor(&name).then(|| vector(gguf, &name, head_dim)).transpose()
    };
    Ok(Layer {
        attention_norm: vector(gguf, &name("attn_norm.weight"), hidden)?,
        query: linear(gguf, &name("attn_q"), hidden, queries)?,
        key: linear(gguf, &name("attn_k"), hidden, keys)?,
        value: linear(gguf, &name("attn_v"), hidden, keys)?,
        query_norm: head_norm("attn_q_norm.weight")?,
        key_norm: head_norm("attn_k_norm.weight")?,
        attention_output: linear(gguf, &name("attn_output"), queries, hidden)?,
        feed_forward_norm: vector(gguf, &name("ffn_norm.weight"), hidden)?,
        gate: linear(gguf, &name("ffn_gate"), hidden, feed_forward)?,
        up: linear(gguf, &name("ffn_up"), hidden, feed_forward)?,
        down: linear(gguf, &name("ffn_down"), feed_forward, hidden)?,
    })
}

fn linear(gguf: &Gguf, name: &str, cols: usize, rows: usize) -> Result<Linear, GgufError> {
    let weights = gguf.tensor(&format!("{name}.weight"), &[cols, rows])?;
    let bias = format!("{name}.bias");
    let bias = gguf.has_tensor(&bias).then(|| vector(gguf, &bias, rows)).transpose()?;
    Ok(Linear { rows, cols, weights, bias })
}

/// A tensor of one dimension, in single precision.
pub(super) fn vector(gguf: &Gguf, name: &str, len: usize) -> Result<Vec<f32>, GgufError> {
    let tensor = gguf.tensor(name, &[len])?;
    let mut values = vec![0.0; len];
    tensor.quant.dequantize(tensor.bytes(), &mut values);
    Ok(values)
}
