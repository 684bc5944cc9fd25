//! A model's hyperparameters, read from metadata and checked against each other.

use std::path::PathBuf;

use super::super::arena::ArenaError;
use super::super::gguf::{Gguf, GgufError};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is unreadable or incomplete.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A model of another kind.
    #[error("{}: the architecture is {found:?}; supported: llama, qwen2, qwen3", path.display())]
    Architecture {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
    },
    /// Hyperparameters that contradict each other or that we do not compute.
    #[error("{}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// There is no room for keys and values.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The system gives no threads.
    #[error("cannot start the model's threads: {0}")]
    Threads(std::io::Error),
}

/// Members of the family. They differ in the order of the rotated pairs and in optional tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3, Mistral, SmolLM and others that are stored as such.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
}

/// Fixed properties of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The kind of model.
    pub architecture: Architecture,
    /// Most positions of a sequence, in tokens.
    pub context_length: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward network.
    pub feed_forward: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Elements of a query, key or value; a multiple of 16.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Added to the mean square before the root, in RMSNorm.
    pub norm_eps: f32,
    /// Rotated elements of a head, even, ≤ `head_dim`.
    pub rope_dims: usize,
    /// Base of the rotation frequencies.
    pub rope_base: f32,
    /// What positions are divided by (linear scaling).
    pub rope_scale: f32,
    /// Token that begins a text.
    pub bos: Option<u32>,
    /// Tokens that end a text or a turn.
    pub eos: Vec<u32>,
}

impl Config {
    /// Reads and checks the metadata.
    pub fn read(gguf: &Gguf) -> Result<Config, LoadError> {
        let name: &str = gguf.require("general.architecture")?;
        let architecture = match name {
            "llama" => Architecture::Llama,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            other => return Err(LoadError::Architecture { path: gguf.path().into(), found: other.into() }),
        };
        let key = |suffix: &str| format!("{name}.{suffix}");
        let size = |suffix: &str| gguf.require::<usize>(&key(suffix));
        let optional_size = |suffix: &str| gguf.get::<usize>(&key(suffix));

        let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let head_dim = match optional_size("attention.key_length")? {
            Some(n) => n,
            None => hidden.checked_div(heads).unwrap_or(0),
        };
        let embedding = gguf.dims("token_embd.weight")?;
        let config = Config {
            architecture,
            context_length: size("context_length")?,
            layers: size("block_count")?,
            hidden,
            feed_forward: size("feed_forward_length")?,
            heads,
            kv_heads: optional_size("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            vocab: embedding.get(1).copied().unwrap_or(0),
            norm_eps: gguf.require(&key("attention.layer_norm_rms_epsilon"))?,
            rope_dims: optional_size("rope.dimension_count")?.unwrap_or(head_dim),
            rope_base: gguf.get(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scale: rope_scale(gguf, name)?,
            bos: gguf.get("tokenizer.ggml.bos_token_id")?,
            eos: end_tokens(gguf)?,
        };
        let value_dim = optional_size("attention.value_length")?.unwrap_or(head_dim);
        let experts = optional_size("expert_count")?.unwrap_or(0);
        let fail = |problem| LoadError::Config { path: gguf.path().into(), problem };
        if value_dim != head_dim {
            return Err(fail(format!("values of {value_dim} elements beside keys of {head_dim} are not supported")));
        }
        if experts > 0 {
            return Err(fail(format!("mixtures of experts are not supported ({experts} experts)")));
        }
        config.check().map_err(fail)?;
        Ok(config)
    }

    /// Refuses what the forward pass relies on and would otherwise meet as an index out of bounds.
    fn check(&self) -> Result<(), String> {
        let positive = [
            ("context_length", self.context_length),
            ("block_count", self.layers),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.feed_forward),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("vocabulary size", self.vocab),
        ];
        // Far above any model, and far below overflow in the products of two.
        const MOST: usize = 1 << 24;
        if let Some((name, value)) = positive.iter().find(|(_, value)| !(1..=MOST).contains(value)) {
            return Err(format!("a {name} of {value} is not possible"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} heads cannot share {} key-value heads", self.heads, self.kv_heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) || self.head_dim > 1024 {
            return Err(format!("heads of {} elements are not supported: it must be a multiple of 16", self.head_dim));
        }
        if [self.hidden, self.feed_forward, self.heads * self.head_dim].iter().any(|width| !width.is_multiple_of(32)) {
            return Err("layer widths that are no multiples of 32 are not supported".into());
        }
        if !self.rope_dims.is_multiple_of(2) || self.rope_dims > self.head_dim {
            return Err(format!("{} rotated elements in heads of {} are not possible", self.rope_dims, self.head_dim));
        }
        let finite = [self.norm_eps, self.rope_base, self.rope_scale];
        if finite.iter().any(|v| !v.is_finite())
            || self.norm_eps < 0.0
            || self.rope_base <= 0.0
            || self.rope_scale <= 0.0
        {
            return Err("the norm's epsilon, the rotation's base or its scale is not possible".into());
        }
        Ok(())
    }

    /// Query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

fn rope_scale(gguf: &Gguf, name: &str) -> Result<f32, LoadError> {
    let factor = gguf.get::<f32>(&format!("{name}.rope.scaling.factor"))?;
    match gguf.get::<&str>(&format!("{name}.rope.scaling.type"))? {
        // Older files have this key alone.
        None => Ok(gguf.get::<f32>(&format!("{name}.rope.scale_linear"))?.unwrap_or(1.0)),
        Some("none") => Ok(1.0),
        Some("linear") => Ok(factor.unwrap_or(1.0)),
        Some(other) => Err(LoadError::Config {
            path: gguf.path().into(),
            problem: format!("rope scaling of type {other:?} is not supported; supported: none, linear"),
        }),
    }
}

fn end_tokens(gguf: &Gguf) -> Result<Vec<u32>, GgufError> {
    let mut tokens = Vec::new();
    for name in ["eos", "eot", "eom"] {
        if let Some(token) = gguf.get::<u32>(&format!("tokenizer.ggml.{name}_token_id"))?
            && !tokens.contains(&token)
        {
            tokens.push(token);
        }
    }
    Ok(tokens)
}
