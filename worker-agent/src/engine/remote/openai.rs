//! What answers of servers with OpenAI's completions API have in common, whichever engine is behind it.

use serde::Deserialize;

use super::dialect::{End, Refusal};

/// What ended an answer early: a token, or a string.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum StopReason {
    Token(u32),
    String(String),
}

#[derive(Deserialize)]
pub(super) struct Usage {
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<usize>,
}

impl Usage {
    /// Prompt tokens that were reused, where the server says so.
    pub(super) fn reused_tokens(self) -> Option<usize> {
        self.prompt_tokens_details?.cached_tokens
    }
}

/// How a choice with this `finish_reason` and `stop_reason` ended.
pub(super) fn end(reason: &str, stop: Option<StopReason>) -> End {
    match (reason, stop) {
        ("length", _) => End::Length,
        ("stop", None) => End::LastToken,
        ("stop", Some(StopReason::Token(token))) => End::Token(token),
        ("stop", Some(StopReason::String(string))) => End::String(string),
        (other, _) => End::GivenUp(other.to_owned()),
    }
}

/// What an answer of another status means: its `message`, or where none could be read, its body as it is.
pub(super) fn refusal(status: u16, message: Option<String>, body: &[u8]) -> Refusal {
    Refusal::of_status(status, &message.unwrap_or_else(|| format!("{status} {}", String::from_utf8_lossy(body))))
}
