//! What every engine offers the agent around it. Engines know blocks, tokens and steps; they know no network.

pub mod builtin;
pub mod mocker;
pub mod remote;

use std::sync::Arc;

use builtin::exchange::Exchange;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use kv_hashing::BlockSize;
use kv_index::{KvEventData, Tier};
use prometheus_client::registry::Registry;
use protocol::request_plane::{ErrorCode, FinishReason, Generate, TokenLogprobs};

/// Fixed properties of a running engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Tokens per KV block.
    pub block_size: BlockSize,
    /// KV blocks in the arena.
    pub total_blocks: usize,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Most tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Most tokens of prompt and answer together.
    pub context_length: usize,
}

/// A snapshot of how busy an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Sequences in the running batch.
    pub running: usize,
    /// Requests waiting for a place or for blocks.
    pub waiting: usize,
    /// Blocks held by running sequences, leases and transfers.
    pub active_blocks: usize,
    /// Blocks that are referenced or cached, ≤ the arena's total.
    pub used_blocks: usize,
    /// Prompt tokens admitted and not yet computed.
    pub pending_prefill_tokens: usize,
}

/// One thing an engine says about a request.
#[derive(Clone, Debug)]
pub enum EngineOutput {
    /// The first token; prefill has ended.
    First {
        /// The token.
        token: u32,
        /// Its log-probabilities, if asked for.
        logprobs: Option<TokenLogprobs>,
        /// Prompt blocks whose KV was reused.
        reused_blocks: usize,
        /// Full blocks of the prompt.
        prompt_blocks: usize,
        /// One entry for each prompt token but the first, if asked for.
        prompt_logprobs: Vec<TokenLogprobs>,
    },
    /// One more token.
    Token {
        /// The token.
        token: u32,
        /// Its log-probabilities, if asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The end; nothing follows. An EOS or stop token that signalled it is counted, but was not delivered: it is no part of
    /// the answer (except as the carrier of prompt log-probabilities, when it is the first token).
    Finished(Finish),
    /// The end of a request for prefill only, whose answer goes on elsewhere; nothing follows.
    Prefilled(Prefilled),
    /// The engine could not go on with this request; nothing follows.
    Failed(String),
    /// The same, where more is known than that it failed; nothing follows.
    Refused {
        /// What routers make of it.
        code: ErrorCode,
        /// One line, for a person.
        message: String,
        /// Nothing was done for it, and nothing fetched.
        not_begun: bool,
    },
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the stop token included.
    pub completion_tokens: usize,
    /// Prompt tokens whose KV was reused.
    pub reused_tokens: usize,
    /// The stop string that matched.
    pub stop_string: Option<String>,
    /// The stop token that matched.
    pub stop_token: Option<u32>,
}

/// A prompt that was computed for another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefilled {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated: those that came with the request, and one more.
    pub completion_tokens: usize,
    /// Prompt tokens whose KV was reused.
    pub reused_tokens: usize,
    /// How the prompt's blocks are fetched, as the other engine reads it; absent: they cannot be.
    pub disaggregated_params: Option<String>,
}

/// What happened in the KV arena, in order, exactly as it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaEvent {
    /// Where.
    pub tier: Tier,
    /// What; engine hashes are sequence hashes.
    pub data: KvEventData,
}

/// Why an engine refuses a request at once.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// It can never work.
    #[error("{0}")]
    Invalid(String),
    /// The waiting queue is full.
    #[error("the engine's queue of {0} requests is full")]
    Overloaded(usize),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// An engine. Cheap to share; all methods return at once.
pub trait Engine: Send + Sync + 'static {
    /// Fixed properties.
    fn info(&self) -> &EngineInfo;

    /// Starts a request. Dropping the receiver cancels it: its blocks are free within one step. The channel is unbounded,
    /// and holds at most `max_tokens + 1` messages.
    fn submit(&self, request: Generate) -> Result<mpsc::UnboundedReceiver<EngineOutput>, SubmitError>;

    /// Data-parallel ranks, each with a cache and a queue of its own; a request names one of them.
    fn ranks(&self) -> u32 {
        1
    }

    /// How busy the engine is now.
    fn load(&self) -> EngineLoad;

    /// The stream of arena events. Taken once, by the publisher; `None` afterwards.
    fn take_events(&self) -> Option<mpsc::UnboundedReceiver<ArenaEvent>>;

    /// KV blocks that others fetch from this engine, and that it gets from others; `None` where blocks cannot be moved.
    fn exchange(&self) -> Option<Arc<Exchange>> {
        None
    }

    /// Nobody will fetch what this lease keeps.
    fn end_lease(&self, lease: u64) {
        if let Some(exchange) = self.exchange() {
            exchange.end_lease(lease);
        }
    }

    /// Prompts computed here whose KV others have still to fetch.
    fn leases(&self) -> usize {
        self.exchange().map_or(0, |exchange| exchange.leased().0)
    }

    /// Waits until there are none of these any more: all are fetched, given up or expired.
    fn unleased(&self) -> BoxFuture<'static, ()> {
        match self.exchange() {
            Some(exchange) => Box::pin(async move { exchange.unleased().await }),
            None => Box::pin(std::future::ready(())),
        }
    }

    /// What its blocks are: engines with equal texts, and they alone, can exchange them. `None` where blocks cannot be moved.
    fn kv_layout(&self) -> Option<String> {
        self.exchange().map(|exchange| exchange.layout().to_string())
    }

    /// KV blocks that it has room for below its arena, all tiers together; `None` where that is not known.
    fn tier_blocks(&self) -> Option<usize> {
        None
    }

    /// Makes what only this kind of engine counts part of the worker's metrics.
    fn register(&self, _registry: &mut Registry) {}
}
