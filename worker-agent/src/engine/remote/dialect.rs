//! What one kind of server calls things: how a request is said to it, what its answers mean, where it tells how it is.
//!
//! Pure: text in, values out. A dialect knows no socket and keeps nothing between two requests.

use bytes::Bytes;
use kv_index::{EngineHash, Tier};
use protocol::request_plane::{Generate, TokenLogprobs};

use super::pulse::Figures;

/// A kind of server.
pub(super) trait Dialect: Send + Sync + 'static {
    /// What [`super::elsewhere`] calls it.
    fn backend(&self) -> &'static str;

    /// The name under which the server serves its model.
    fn model(&self) -> &str;

    /// Says a request; `number` tells it from every other one to this server. Of `request.token_ids` all are computed;
    /// `request.stop.max_tokens` is what is left to generate.
    /// An error where this server cannot do it.
    fn calls(&self, request: &Generate, number: u64) -> Result<Calls, Refusal>;

    /// Gives up a request that [`Self::calls`] said, where closing its connection might not be enough.
    fn abort(&self, _request: &Generate, _number: u64) -> Option<Call> {
        None
    }

    /// Whether a request for prefill only brings the first token here. Where it does not, the other half generates all of them.
    fn prefill_generates(&self) -> bool {
        true
    }

    /// Reads a whole answer, or one event of a stream.
    fn read(&self, text: &[u8]) -> Result<Piece, Refusal>;

    /// Reads an answer that is none: its status, and what it says.
    fn refusal(&self, status: u16, body: &[u8]) -> Refusal;

    /// Path that says whether the server can work.
    fn health_path(&self) -> &'static str;

    /// Path of the page that [`Self::load`] reads.
    fn load_path(&self) -> &'static str;

    /// How busy the server is.
    fn load(&self, page: &str) -> Busy;

    /// Asks for the KV events since the last such call, where the server is asked for them and does not publish them.
    fn events_call(&self) -> Option<Call> {
        None
    }

    /// Reads its answer.
    fn events(&self, _text: &[u8]) -> Result<Vec<Told>, Refusal> {
        Ok(Vec::new())
    }
}

/// A KV event that the server was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// Its number; they are consecutive.
    pub(super) number: u64,
    /// The rank that it is of, if the server says.
    pub(super) dp_rank: Option<u32>,
    /// Tokens that the attention sees which the blocks are of; those that see all have the widest window.
    pub(super) window: u64,
    pub(super) event: ToldEvent,
}

/// What such an event says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToldEvent {
    /// The server's cache is new, and empty.
    Created,
    /// Consecutive blocks behind `parent`.
    Stored { parent: Option<EngineHash>, blocks: Vec<ToldBlock> },
    /// Blocks that are gone, in whichever tier they were.
    Removed(Vec<EngineHash>),
    /// A block went to another tier.
    Moved { block: EngineHash, to: Tier },
    /// It is of no use, for this reason.
    Useless(&'static str),
}

/// A block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToldBlock {
    pub(super) hash: EngineHash,
    pub(super) tier: Tier,
    /// `None` where more than its tokens and the blocks before it tell it from others.
    pub(super) tokens: Option<Vec<u32>>,
}

/// What is asked of the server for one request, in order.
#[derive(Debug)]
pub(super) struct Calls {
    /// Brings the prompt's KV here from another server; what it answers is not used, and neither is its failure.
    pub(super) fetch: Option<Call>,
    /// The request.
    pub(super) main: Call,
    /// The request without what another server has computed, if `main` uses it and fails.
    pub(super) local: Option<Call>,
    /// Why what another server has computed cannot be used, if it cannot.
    pub(super) unusable: Option<&'static str>,
    /// The request is for the KV of its prompt alone, and these parameters let another server fetch it while `main` runs: it only
    /// ends when that has happened.
    pub(super) handed_over: Option<HandOver>,
}

impl Calls {
    /// One call.
    pub(super) fn only(main: Call) -> Self {
        Self { fetch: None, main, local: None, unusable: None, handed_over: None }
    }
}

/// KV that another server fetches from a request that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HandOver {
    /// As [`Generate::disaggregated_params`] carries them.
    pub(super) params: String,
    /// What ends the request when nobody fetches: [`crate::engine::Engine::end_lease`].
    pub(super) lease: u64,
}

/// A POST.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// Path.
    pub(super) path: &'static str,
    /// JSON.
    pub(super) body: Bytes,
    /// The answer comes as events, and not as one document.
    pub(super) streamed: bool,
    /// Its first tokens, which came with the request: nobody waits for them.
    pub(super) repeats: Vec<u32>,
}

/// A part of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    /// Tokens, those that only signal the end included.
    pub(super) tokens: Vec<u32>,
    /// Tokens of the whole answer up to here, where the server counts them: those of `tokens` that were said before are no news.
    pub(super) so_far: Option<usize>,
    /// Empty, or one for each token.
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// Of the prompt's tokens but the first.
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    /// The answer ends with these tokens.
    pub(super) end: Option<End>,
    /// Prompt tokens whose KV was reused, as the server counts them.
    pub(super) reused_tokens: Option<usize>,
    /// How another server gets the prompt's KV, as [`Generate::disaggregated_params`] carries it.
    pub(super) disaggregated_params: Option<String>,
}

/// Why an answer ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It is as long as it may be.
    Length,
    /// A stop string.
    String(String),
    /// This token.
    Token(u32),
    /// The last token, whichever it is.
    LastToken,
    /// The server gave it up, for this reason.
    GivenUp(String),
}

/// An answer that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// The request can never work.
    #[error("{0}")]
    Invalid(String),
    /// Later, or elsewhere.
    #[error("{0}")]
    Overloaded(String),
    /// The server failed.
    #[error("{0}")]
    Failed(String),
}

/// Most characters of what an error says that are passed on.
const MAX_MESSAGE: usize = 500;

impl Refusal {
    /// What a status means that is no success.
    pub(super) fn of_status(status: u16, message: &str) -> Self {
        let message: String = message.lines().next().unwrap_or_default().chars().take(MAX_MESSAGE).collect();
        match status {
            400 | 413 | 422 => Self::Invalid(message),
            429 | 503 => Self::Overloaded(message),
            _ => Self::Failed(message),
        }
    }
}

/// How busy a server is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Busy {
    /// Sequences in its batch.
    pub(super) running: usize,
    /// Requests that wait.
    pub(super) waiting: usize,
    /// Part of its KV blocks that is in use, 0 to 1.
    pub(super) kv_usage: f64,
    /// Stands for the figures that move with every step that it makes, and then only; `None` where it tells none.
    pub(super) moves: Option<u64>,
}

impl Busy {
    /// What of it tells that the engine gets somewhere.
    pub(super) fn figures(&self) -> Figures {
        Figures { running: self.running, moves: self.moves }
    }
}
