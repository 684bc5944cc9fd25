//! A request that has been checked: it can be scheduled and will fit.

use std::sync::Arc;

use kv_hashing::{BlockHash, BlockSize, HashSpace, SequenceHash, sequence_hashes};
use protocol::request_plane::Generate;

use crate::engine::SubmitError;
use crate::engine::builtin::NextToken;
use crate::engine::builtin::sampling::{Sampler, SamplingParams};
use crate::engine::builtin::stop::{StopWatch, Vocabulary};

/// What a request must keep to.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most tokens of prompt and answer together; no more than the arena holds.
    pub context_length: usize,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Text of tokens, and which end an answer.
    pub vocabulary: Arc<Vocabulary>,
    /// Chooses tokens; absent where each request's sampler chooses by logits.
    pub next_token: Option<Arc<dyn NextToken>>,
}

/// How a request's tokens are chosen.
#[derive(Clone, Debug)]
pub(super) enum Choice {
    /// By logits.
    Sampled(Sampler),
    /// There are no logits.
    Given(Arc<dyn NextToken>),
}

/// A validated request, its prompt already hashed: made on the caller's thread, not on the engine's.
#[derive(Debug)]
pub struct Request {
    pub(super) prompt: Vec<u32>,
    pub(super) block_size: BlockSize,
    pub(super) space: HashSpace,
    pub(super) hashes: Vec<(BlockHash, SequenceHash)>,
    pub(super) choice: Choice,
    pub(super) stop: StopWatch,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: bool,
    pub(super) priority: i32,
}

impl Request {
    /// Checks `wire` against the limits; errors are [`SubmitError::Invalid`] and name the field. `seed` is for requests
    /// without one.
    pub fn new(wire: Generate, limits: &Limits, seed: u64) -> Result<Self, SubmitError> {
        let invalid = |message: String| Err(SubmitError::Invalid(message));
        let prompt = wire.token_ids;
        let (tokens, context) = (prompt.len(), limits.context_length);
        if tokens == 0 {
            return invalid("token_ids is empty".into());
        }
        if tokens >= context {
            return invalid(format!("a prompt of {tokens} tokens leaves no room in the context of {context}"));
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= limits.vocab) {
            return invalid(format!("token_ids holds {token}, but the vocabulary has {} tokens", limits.vocab));
        }
        let stop = wire.stop.unwrap_or_default();
        if stop.max_tokens == 0 {
            return invalid("stop.max_tokens must be at least 1".into());
        }
        if limits.next_token.is_some() && (wire.logprobs.is_some() || wire.prompt_logprobs) {
            return invalid("this engine has no logits, and so no log-probabilities".into());
        }
        let params = SamplingParams::new(&wire.sampling.unwrap_or_default(), limits.vocab, seed)
            .map_err(|error| SubmitError::Invalid(error.to_string()))?;
        let space = HashSpace::new(Some(&wire.lora), Some(&wire.cache_namespace));
        let local = space.blocks(&prompt, limits.block_size);
        let sequence = sequence_hashes(&local);
        Ok(Self {
            choice: match &limits.next_token {
                None => Choice::Sampled(Sampler::new(params, &prompt)),
                Some(next_token) => Choice::Given(next_token.clone()),
            },
            stop: StopWatch::new(stop, context - tokens, limits.vocabulary.clone()),
            hashes: local.into_iter().zip(sequence).collect(),
            block_size: limits.block_size,
            space,
            prompt,
            logprobs: wire.logprobs.map(|n| n as usize),
            prompt_logprobs: wire.prompt_logprobs,
            priority: wire.priority,
        })
    }
}
