//! What one kind of server calls things: how a request is said to it, what its answers mean, where it tells how it is.
//!
//! Pure: text in, values out. A dialect knows no socket and keeps nothing between two requests.

use bytes::Bytes;
use protocol::request_plane::{Generate, TokenLogprobs};

/// A kind of server.
pub(super) trait Dialect: Send + Sync + 'static {
    /// Says a request; `number` tells it from every other one to this server. Of `request.token_ids` all are computed;
    /// `request.stop.max_tokens` is what is left to generate.
    fn calls(&self, request: &Generate, number: u64) -> Calls;

    /// Reads a whole answer, or one event of a stream.
    fn read(&self, text: &[u8]) -> Result<Piece, Refusal>;

    /// Reads an answer that is none: its status, and what it says.
    fn refusal(&self, status: u16, body: &[u8]) -> Refusal;

    /// What the server's KV blocks are, as [`crate::engine::Engine::kv_layout`] has it.
    fn kv_layout(&self) -> Option<String>;

    /// Path that says whether the server can work.
    fn health_path(&self) -> &'static str;

    /// Path of the page that [`Self::load`] reads.
    fn load_path(&self) -> &'static str;

    /// How busy the server is.
    fn load(&self, page: &str) -> Busy;
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
}

/// A part of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    /// Tokens, those that only signal the end included.
    pub(super) tokens: Vec<u32>,
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

/// How busy a server is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Busy {
    /// Sequences in its batch.
    pub(super) running: usize,
    /// Requests that wait.
    pub(super) waiting: usize,
    /// Part of its KV blocks that is in use, 0 to 1.
    pub(super) kv_usage: f64,
}
