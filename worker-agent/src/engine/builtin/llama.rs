//! Models of the Llama family, from GGUF files.
//!
//! Owns the weights (mapped, never copied), the KV arena they write to and the threads they run on. It computes what a step
//! asks for and decides nothing: which sequences run, and which blocks they own, is the scheduler's business.
//!
//! A sequence's results have the same bits whatever runs beside it, however its prompt is cut into chunks, and with any
//! number of threads; see `kernels`. Only the kind of processor changes them.

mod attention;
#[cfg(feature = "candle")]
pub mod candle;
mod config;
mod forward;
mod linear;
mod rope;
#[cfg(test)]
pub(crate) mod tests;
mod weights;

use std::path::Path;
use std::sync::Arc;

pub use self::config::{Architecture, Config, LoadError};
use self::forward::Scratch;
use self::weights::Weights;
use super::arena::KvArena;
use super::gguf::Gguf;
use super::kernels::Isa;
use super::kernels::threads::ThreadPool;

/// How to run a model.
#[derive(Clone, Copy, Debug)]
pub struct LlamaOptions {
    /// Threads that compute a step, the caller's included; at least 1.
    pub threads: usize,
    /// Tokens in a KV block: 16, 32 or 64.
    pub block_size: usize,
    /// KV blocks in the arena.
    pub total_blocks: usize,
}

/// A model, ready to run. See the module for what it guarantees.
pub struct Llama {
    config: Config,
    weights: Weights,
    /// Shared with whoever moves blocks.
    arena: Arc<KvArena>,
    /// Names the weights.
    fingerprint: u64,
    pool: ThreadPool,
    isa: Isa,
    scratch: Scratch,
}

impl Llama {
    /// Opens a model file and checks that everything needed is there.
    pub fn load(path: impl AsRef<Path>, options: LlamaOptions) -> Result<Llama, LoadError> {
        Llama::from_gguf(&Gguf::open(path)?, options)
    }

    /// As [`Llama::load`], from an open file.
    pub fn from_gguf(gguf: &Gguf, options: LlamaOptions) -> Result<Llama, LoadError> {
        let config = Config::read(gguf)?;
        let weights = Weights::load(gguf, &config)?;
        let arena = Arc::new(KvArena::new(config.kv_shape(options.block_size), options.total_blocks)?);
        let pool = ThreadPool::new(options.threads).map_err(LoadError::Threads)?;
        let fingerprint = gguf.fingerprint();
        Ok(Llama { config, weights, arena, fingerprint, pool, isa: Isa::detect(), scratch: Scratch::default() })
    }

    /// The model's fixed properties.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The KV arena.
    pub fn arena(&self) -> &Arc<KvArena> {
        &self.arena
    }
}
