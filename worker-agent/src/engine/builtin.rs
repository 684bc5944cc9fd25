//! The built-in engine: Llama-family GGUF models on the CPU, with a paged KV arena and continuous batching.
//!
//! Six rooms: the model's numerics (`gguf`, `quant`, `kernels`, `llama`), where KV lives (`arena`) and where it goes when
//! there is no more room (`tiers`), what runs next (`pool`, `scheduler`), which token comes out (`sampling`), and blocks that
//! go to and come from other engines (`exchange`). The scheduler sees the numerics only through [`Forward`];
//! the mocker is the same engine with another [`Forward`].

use std::sync::Arc;

use kv_hashing::SequenceHash;

use arena::KvArena;

pub mod arena;
pub mod compute;
pub mod exchange;
pub mod gguf;
mod kernels;
pub mod llama;
pub mod memory;
pub mod open;
pub mod pool;
pub mod quant;
pub mod sampling;
pub mod scheduler;
pub mod service;
#[cfg(test)]
pub(crate) mod shadow;
pub mod stop;
pub mod tiers;

/// Index of a block in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// A run of tokens of one sequence to compute in a step.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The tokens; not empty.
    pub tokens: &'a [u32],
    /// Position of the first one in its sequence; KV of all earlier positions is in `blocks` already.
    pub start: usize,
    /// The sequence's block table: position `p` lives in `blocks[p / block_size]`, slot `p % block_size`. Covers
    /// `start + tokens.len()`.
    pub blocks: &'a [BlockId],
    /// Which positions' logits are wanted.
    pub logits: Logits,
}

/// Which logits a chunk wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the prompt goes on in a later chunk.
    None,
    /// Those of the last token.
    Last,
    /// Those of every token (prompt log-probabilities).
    All,
}

impl Logits {
    /// Rows of logits for a chunk of `tokens` tokens.
    pub fn rows(self, tokens: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => 1,
            Self::All => tokens,
        }
    }
}

/// A sequence, as far as its next token may depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Prompt and output so far.
    pub tokens: &'a [u32],
    /// Hash of all its full blocks; it stands for their tokens.
    pub prefix: Option<SequenceHash>,
    /// The tokens after them; fewer than a block.
    pub tail: &'a [u32],
}

/// Chooses tokens for a forward pass that has no logits.
pub trait NextToken: Send + Sync + std::fmt::Debug {
    /// The token that follows: a function of the sequence alone, whatever runs beside it and wherever it runs. None of
    /// `masked`.
    fn next(&self, context: Context<'_>, masked: &[u32]) -> u32;
}

/// The KV blocks of a forward pass, for those that move them.
#[derive(Clone, Debug)]
pub struct Kv {
    /// The blocks.
    pub arena: Arc<KvArena>,
    /// Names the weights that the blocks were computed with.
    pub model: u64,
}

/// The numerics of a model together with the KV arena it writes to.
pub trait Forward: Send {
    /// Size of the vocabulary, in tokens: the length of one row of logits.
    fn vocab(&self) -> usize;

    /// What chooses tokens, where the pass has no logits and appends none. Most have: then samplers choose.
    fn next_token(&self) -> Option<Arc<dyn NextToken>> {
        None
    }

    /// Where its KV blocks are; `None` when they cannot be moved.
    fn kv(&self) -> Option<Kv> {
        None
    }

    /// The engine had nothing to do before the step that follows.
    fn resume(&mut self) {}

    /// Computes one step: every chunk attends to its own sequence only. KV of the chunk's tokens is written into its blocks.
    /// Appends one row of `vocab` logits to `logits` for each position wanted, in the order of the chunks.
    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>);

    /// As [`Self::forward`], but gives the step up when `worth`, asked now and then in the middle of it with the share of it that
    /// is done, says that it is not worth its end. False then: there are no logits, and KV of the chunks' positions may be written
    /// or not. A pass that cannot stop half-way goes on to the end.
    fn forward_while(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>, _worth: &dyn Fn(f64) -> bool) -> bool {
        self.forward(chunks, logits);
        true
    }
}
