//! One sequence: its tokens, its blocks, and how far they are computed.

use std::cmp::Reverse;

use kv_hashing::{BlockHash, BlockSize, HashSpace, SequenceHash, chain};
use protocol::request_plane::TokenLogprobs;

use super::request::Choice;
use super::{Handover, Request, RequestId};
use crate::engine::builtin::pool::BlockPool;
use crate::engine::builtin::sampling::token_logprobs;
use crate::engine::builtin::stop::{Ending, StopWatch};
use crate::engine::builtin::{BlockId, Chunk, Context, Logits};
use crate::engine::{EngineOutput, Finish, Prefilled};

mod loading;

pub use loading::Loaded;
use loading::Loading;

/// Order of service: higher priority first, then the older request.
pub(super) type Rank = (Reverse<i32>, RequestId);

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: RequestId,
    pub(super) rank: Rank,
    /// Prompt and output.
    pub(super) tokens: Vec<u32>,
    /// Blocks held, in order of position.
    pub(super) table: Vec<BlockId>,
    /// The request has its last output.
    pub(super) ended: bool,
    prompt_tokens: usize,
    /// Prompt, and output that was generated elsewhere.
    given_tokens: usize,
    block_size: BlockSize,
    space: HashSpace,
    /// Of the full blocks of `tokens`, as far as they are needed.
    hashes: Vec<(BlockHash, SequenceHash)>,
    /// Leading tokens whose KV is in the table; below `tokens.len()`.
    computed: usize,
    /// Leading blocks of the table that are cached; `computed` covers them.
    committed: usize,
    choice: Choice,
    stop: StopWatch,
    /// Alternatives to return with each token.
    logprobs: Option<usize>,
    /// Entries so far, while prompt log-probabilities are collected. Then no block is reused: its logits are gone.
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// The first output is out.
    answered: bool,
    /// It has been preempted: blocks reused from now on are not new savings.
    restarted: bool,
    reused_tokens: usize,
    /// The prompt is computed for another engine, which goes on after the first token.
    prefill_only: bool,
    loading: Loading,
}

impl Sequence {
    pub(super) fn new(id: RequestId, request: Request) -> Self {
        Self {
            id,
            rank: (Reverse(request.priority), id),
            prompt_tokens: request.prompt_tokens,
            given_tokens: request.tokens.len(),
            tokens: request.tokens,
            table: Vec::new(),
            ended: false,
            block_size: request.block_size,
            space: request.space,
            hashes: request.hashes,
            computed: 0,
            committed: 0,
            choice: request.choice,
            stop: request.stop,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs.then(Vec::new),
            answered: false,
            restarted: false,
            reused_tokens: 0,
            prefill_only: request.prefill_only,
            loading: Loading::default(),
        }
    }

    /// Tokens to compute before the next one can be chosen; at least 1.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether one token is all that is missing.
    pub(super) fn decodes(&self) -> bool {
        self.remaining() == 1 && !self.collects_prompt_logprobs()
    }

    pub(super) fn collects_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some()
    }

    /// Given tokens not computed yet.
    pub(super) fn pending_prefill(&self) -> usize {
        self.given_tokens.saturating_sub(self.computed)
    }

    /// Blocks that all tokens need.
    pub(super) fn blocks(&self) -> usize {
        self.block_size.blocks_for(self.tokens.len())
    }

    /// Hashes of the blocks that may be reused: never the last token, whose logits are needed.
    pub(super) fn reusable(&self) -> impl Iterator<Item = SequenceHash> {
        let blocks =
            if self.collects_prompt_logprobs() { 0 } else { self.block_size.full_blocks(self.tokens.len() - 1) };
        self.hashes[..blocks].iter().map(|hash| hash.1)
    }

    /// The next block that may be reused.
    fn next_reusable(&self) -> Option<(BlockHash, SequenceHash)> {
        self.reusable().nth(self.committed).map(|_| self.hashes[self.committed])
    }

    /// Takes cached blocks for the positions that come next, in place of those in the table that are not computed.
    pub(super) fn reuse_cached(&mut self, pool: &mut BlockPool) {
        while let Some((_, hash)) = self.next_reusable() {
            let Some(block) = pool.acquire(hash) else { break };
            match self.table.get_mut(self.committed) {
                Some(own) => pool.release(&[std::mem::replace(own, block)]),
                None => self.table.push(block),
            }
            self.cover_next();
        }
    }

    /// The next block of the table has its content, and is cached.
    fn cover_next(&mut self) {
        self.committed += 1;
        let computed = self.committed * self.block_size.get();
        if !self.restarted {
            self.reused_tokens += computed - self.computed;
        }
        self.computed = computed;
    }

    /// The next `tokens` tokens as a chunk.
    pub(super) fn chunk(&self, tokens: usize, logits: Logits) -> Chunk<'_> {
        let end = self.computed + tokens;
        Chunk { tokens: &self.tokens[self.computed..end], start: self.computed, blocks: &self.table, logits }
    }

    /// Counts `tokens` more tokens as computed, and caches the blocks they fill.
    pub(super) fn advance(&mut self, tokens: usize, pool: &mut BlockPool) {
        let size = self.block_size;
        self.computed += tokens;
        while self.committed < size.full_blocks(self.computed) {
            let parent = self.committed.checked_sub(1).map(|last| self.hashes[last].1);
            if self.hashes.len() == self.committed {
                let start = self.committed * size.get();
                let local = self.space.block(&self.tokens[start..start + size.get()], &[]);
                self.hashes.push((local, chain(parent, local)));
            }
            let (local, hash) = self.hashes[self.committed];
            let block = &mut self.table[self.committed];
            *block = pool.commit(*block, parent, hash, local);
            self.committed += 1;
        }
    }

    /// Takes the rows of logits of the chunk just computed, one for each of `positions`, and chooses a token if the last of
    /// them is the newest position. Rows have length 0 where there are no logits.
    pub(super) fn take_logits(
        &mut self,
        rows: &mut [f32],
        positions: usize,
        outputs: &mut Vec<(RequestId, EngineOutput)>,
    ) {
        let length = rows.len().checked_div(positions).unwrap_or(0);
        if let Some(entries) = &mut self.prompt_logprobs {
            let first = self.computed - positions;
            for (row, position) in rows.chunks_exact(length.max(1)).zip(first..) {
                if position + 1 < self.prompt_tokens {
                    entries.push(token_logprobs(row, self.tokens[position + 1], self.logprobs.unwrap_or(0)));
                }
            }
        }
        if positions > 0 && self.computed == self.tokens.len() {
            let row = &mut rows[(positions - 1) * length..];
            self.choose(row, outputs);
        }
    }

    /// Gives up the blocks (the caller has released them) and begins again, with the tokens generated so far as prompt.
    pub(super) fn restart(&mut self) {
        self.table.clear();
        self.computed = 0;
        self.committed = 0;
        self.restarted = true;
        self.loading = Loading::default();
        if let Some(entries) = &mut self.prompt_logprobs {
            entries.clear();
        }
    }

    fn choose(&mut self, row: &mut [f32], outputs: &mut Vec<(RequestId, EngineOutput)>) {
        let raw = self.logprobs.map(|_| row.to_vec());
        let masked = self.stop.masked();
        let chosen = match &mut self.choice {
            Choice::Sampled(sampler) => sampler.sample(row, masked, self.tokens.len()),
            Choice::Given(next_token) => {
                let full = self.block_size.full_blocks(self.tokens.len());
                let prefix = full.checked_sub(1).map(|last| self.hashes[last].1);
                let tail = &self.tokens[full * self.block_size.get()..];
                Ok(next_token.next(Context { tokens: &self.tokens, prefix, tail }, masked))
            }
        };
        let token = match chosen {
            Ok(token) => token,
            Err(error) => {
                self.ended = true;
                self.prefill_only = false;
                outputs.push((self.id, EngineOutput::Failed(format!("{error} at position {}", self.tokens.len()))));
                return;
            }
        };
        let logprobs = raw.zip(self.logprobs).map(|(raw, top)| token_logprobs(&raw, token, top));
        self.tokens.push(token);
        let ending = self.stop.push(token);
        let prompt_logprobs = self.prompt_logprobs.take().unwrap_or_default();
        // A token that only signals the end is no part of the answer, except that prompt log-probabilities need a carrier.
        let delivered = !ending.as_ref().is_some_and(Ending::by_token) || !prompt_logprobs.is_empty();
        if delivered {
            outputs.push((self.id, self.output(token, logprobs, prompt_logprobs)));
        }
        if let Some(ending) = ending {
            self.ended = true;
            outputs.push((self.id, EngineOutput::Finished(self.finish(ending))));
            self.prefill_only = false;
        } else if self.prefill_only {
            self.ended = true;
            let prefilled = Prefilled {
                prompt_tokens: self.prompt_tokens,
                completion_tokens: self.stop.generated(),
                reused_tokens: self.reused_tokens.min(self.prompt_tokens),
                disaggregated_params: None,
            };
            outputs.push((self.id, EngineOutput::Prefilled(prefilled)));
        }
    }

    /// Takes the given tokens' full blocks out of the table of a sequence that has ended, if another engine goes on with it.
    pub(super) fn hand_over(&mut self) -> Option<Handover> {
        let full = self.block_size.full_blocks(self.given_tokens);
        if !self.prefill_only || full == 0 || self.committed < full {
            return None;
        }
        let hashes = self.hashes[..full].iter().map(|hash| hash.1).collect();
        Some(Handover { id: self.id, hashes, table: self.table.drain(..full).collect() })
    }

    fn output(
        &mut self,
        token: u32,
        logprobs: Option<TokenLogprobs>,
        prompt_logprobs: Vec<TokenLogprobs>,
    ) -> EngineOutput {
        if std::mem::replace(&mut self.answered, true) {
            return EngineOutput::Token { token, logprobs };
        }
        let size = self.block_size;
        EngineOutput::First {
            token,
            logprobs,
            reused_blocks: size.full_blocks(self.reused_tokens),
            prompt_blocks: size.full_blocks(self.given_tokens),
            prompt_logprobs,
        }
    }

    fn finish(&self, ending: Ending) -> Finish {
        Finish {
            reason: ending.reason,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.stop.generated(),
            reused_tokens: self.reused_tokens.min(self.prompt_tokens),
            stop_string: ending.stop_string,
            stop_token: ending.stop_token,
        }
    }
}
