//! A model's hyperparameters, read from metadata and checked against each other.

use std::path::PathBuf;

use super::super::arena::{ArenaError, KvShape};
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
    /// Added to the mean square before the root, in RMSNorm; positive.
    pub norm_eps: f32,
    /// Rotated elements of a head, even, ≥ 2, ≤ `head_dim`.
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
    /// What a block of `block_size` tokens holds.
    pub fn kv_shape(&self, block_size: usize) -> KvShape {
        KvShape { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim, block_size }
    }

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
            return Err(format!("{name} = {value} is not possible"));
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
        if self.rope_dims < 2 || !self.rope_dims.is_multiple_of(2) || self.rope_dims > self.head_dim {
            return Err(format!("{} rotated elements in heads of {} are not possible", self.rope_dims, self.head_dim));
        }
        let positive = [
            ("attention.layer_norm_rms_epsilon", self.norm_eps),
            ("rope.freq_base", self.rope_base),
            ("rope scale", self.rope_scale),
        ];
        match positive.iter().find(|(_, value)| !value.is_finite() || *value <= 0.0) {
            Some((name, value)) => Err(format!("{name} = {value} is not possible")),
            None => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn possible() -> Config {
        Config {
            architecture: Architecture::Llama,
            context_length: 128,
            layers: 2,
            hidden: 64,
            feed_forward: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocab: 48,
            norm_eps: 1e-5,
            rope_dims: 16,
            rope_base: 10_000.0,
            rope_scale: 1.0,
            bos: None,
            eos: Vec::new(),
        }
    }

    #[test]
    fn what_would_fail_at_the_first_request_is_refused_by_name() {
        assert_eq!(possible().check(), Ok(()));
        assert_eq!(Config { rope_dims: 2, ..possible() }.check(), Ok(()));
        let cases = [
            (Config { context_length: 0, ..possible() }, "context_length = 0"),
            (Config { layers: 0, ..possible() }, "block_count = 0"),
            (Config { hidden: 0, ..possible() }, "embedding_length = 0"),
            (Config { feed_forward: 0, ..possible() }, "feed_forward_length = 0"),
            (Config { heads: 0, ..possible() }, "attention.head_count = 0"),
            (Config { kv_heads: 0, ..possible() }, "attention.head_count_kv = 0"),
            (Config { kv_heads: 8, ..possible() }, "4 heads cannot share 8"),
            (Config { vocab: 0, ..possible() }, "vocabulary size = 0"),
            (Config { vocab: usize::MAX, ..possible() }, "vocabulary size = 18446744073709551615"),
            (Config { head_dim: 0, ..possible() }, "heads of 0 elements"),
            (Config { head_dim: 8, ..possible() }, "heads of 8 elements"),
            (Config { head_dim: 2048, ..possible() }, "heads of 2048 elements"),
            (Config { hidden: 48, ..possible() }, "no multiples of 32"),
            (Config { rope_dims: 0, ..possible() }, "0 rotated elements in heads of 16"),
            (Config { rope_dims: 3, ..possible() }, "3 rotated elements in heads of 16"),
            (Config { rope_dims: 18, ..possible() }, "18 rotated elements in heads of 16"),
            (Config { norm_eps: f32::NAN, ..possible() }, "attention.layer_norm_rms_epsilon = NaN"),
            (Config { norm_eps: 0.0, ..possible() }, "attention.layer_norm_rms_epsilon = 0"),
            (Config { rope_base: 0.0, ..possible() }, "rope.freq_base = 0"),
            (Config { rope_base: -1.0, ..possible() }, "rope.freq_base = -1"),
            (Config { rope_base: f32::INFINITY, ..possible() }, "rope.freq_base = inf"),
            (Config { rope_scale: 0.0, ..possible() }, "rope scale = 0"),
        ];
        for (config, expected) in cases {
            let problem = config.check().expect_err(expected);
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
