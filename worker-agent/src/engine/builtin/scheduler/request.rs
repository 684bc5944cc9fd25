//! A request that has been checked: it can be scheduled and will fit.

use std::sync::Arc;

use kv_hashing::{BlockHash, BlockSize, HashSpace, SequenceHash, sequence_hashes};
use protocol::request_plane::Generate;

use crate::engine::builtin::NextToken;
use crate::engine::builtin::sampling::{Sampler, SamplingParams};
use crate::engine::builtin::stop::{Ending, StopWatch, Vocabulary};
use crate::engine::{Finish, SubmitError};

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
    /// The prompt, and what was generated elsewhere.
    pub(super) tokens: Vec<u32>,
    /// How many of the tokens are the prompt.
    pub(super) prompt_tokens: usize,
    pub(super) block_size: BlockSize,
    pub(super) space: HashSpace,
    pub(super) hashes: Vec<(BlockHash, SequenceHash)>,
    pub(super) choice: Choice,
    pub(super) stop: StopWatch,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: bool,
    pub(super) priority: i32,
    /// Another engine goes on after the first token.
    pub(super) prefill_only: bool,
    /// The answer had ended with the last of the tokens.
    ended: Option<Ending>,
}

impl Request {
    /// Checks `wire` against the limits; errors are [`SubmitError::Invalid`] and name the field. `seed` is for requests
    /// without one.
    pub fn new(wire: Generate, limits: &Limits, seed: u64) -> Result<Self, SubmitError> {
        let invalid = |message: String| Err(SubmitError::Invalid(message));
        let stop = wire.stop.unwrap_or_default();
        let prompt_tokens = check_lengths(&wire.token_ids, wire.generated, stop.max_tokens, limits)?;
        let tokens = wire.token_ids;
        let (prompt, output) = tokens.split_at(prompt_tokens);
        if limits.next_token.is_some() && (wire.logprobs.is_some() || wire.prompt_logprobs) {
            return invalid("this engine has no logits, and so no log-probabilities".into());
        }
        let params = SamplingParams::new(&wire.sampling.unwrap_or_default(), limits.vocab, seed)
            .map_err(|error| SubmitError::Invalid(error.to_string()))?;
        let space = HashSpace::new(Some(&wire.lora), Some(&wire.cache_namespace));
        let local = space.blocks(&tokens, limits.block_size);
        let sequence = sequence_hashes(&local);
        let mut stop = StopWatch::new(stop, limits.context_length - prompt_tokens, limits.vocabulary.clone());
        Ok(Self {
            choice: match &limits.next_token {
                None => {
                    let mut sampler = Sampler::new(params, prompt);
                    sampler.replay(output);
                    Choice::Sampled(sampler)
                }
                Some(next_token) => Choice::Given(next_token.clone()),
            },
            ended: stop.replay(output),
            // Whoever generated the first token delivered them.
            prompt_logprobs: wire.prompt_logprobs && output.is_empty(),
            stop,
            hashes: local.into_iter().zip(sequence).collect(),
            block_size: limits.block_size,
            space,
            tokens,
            prompt_tokens,
            logprobs: wire.logprobs.map(|n| n as usize),
            priority: wire.priority,
            prefill_only: wire.prefill_only,
        })
    }

    /// How the answer ended before it came here, if it had: its last token was delivered, but not that it was the last. There is
    /// nothing left to schedule then.
    pub fn finished(&self) -> Option<Finish> {
        let ending = self.ended.clone()?;
        Some(Finish {
            reason: ending.reason,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.stop.generated(),
            reused_tokens: 0,
            stop_string: ending.stop_string,
            stop_token: ending.stop_token,
        })
    }
}

/// Whether the tokens, the last `generated` of them output, leave something to compute and something to generate; how many
/// of them are the prompt.
fn check_lengths(tokens: &[u32], generated: u32, max_tokens: u32, limits: &Limits) -> Result<usize, SubmitError> {
    let invalid = |message: String| Err(SubmitError::Invalid(message));
    let (count, context) = (tokens.len(), limits.context_length);
    if count == 0 {
        return invalid("token_ids is empty".into());
    }
    if count >= context {
        return invalid(format!("a prompt of {count} tokens leaves no room in the context of {context}"));
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= limits.vocab) {
        return invalid(format!("token_ids holds {token}, but the vocabulary has {} tokens", limits.vocab));
    }
    if max_tokens == 0 {
        return invalid("stop.max_tokens must be at least 1".into());
    }
    if generated as usize >= count {
        return invalid(format!(
            "token_ids holds {count} tokens, of which {generated} are generated: there is no prompt"
        ));
    }
    if generated >= max_tokens {
        return invalid(format!("generated is {generated}, which stop.max_tokens of {max_tokens} does not exceed"));
    }
    Ok(count - generated as usize)
}
