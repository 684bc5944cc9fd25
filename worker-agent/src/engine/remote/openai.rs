//! What servers with OpenAI's completions API have in common, whichever engine is behind it.

use serde::{Deserialize, Serialize};

use super::dialect::{End, Refusal};
use super::http::{HttpError, Server};

/// Where completions are asked for.
pub(super) const COMPLETIONS: &str = "/v1/completions";
/// Where they say that they are well.
pub(super) const HEALTH: &str = "/health";

/// Why a look at a server that starts gave nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum LookError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("/v1/models is no list of models: {0}")]
    Models(#[from] serde_json::Error),
    #[error("it serves no model")]
    NoModel,
}

/// The answer of `/v1/models`, as far as it is read here.
#[derive(Deserialize)]
struct Models {
    data: Vec<ServedModel>,
}

/// A model that is served.
#[derive(Deserialize)]
pub(super) struct ServedModel {
    /// Its name.
    pub(super) id: String,
    #[serde(default)]
    pub(super) max_model_len: Option<usize>,
    /// Adapters are listed beside the model that they belong to.
    #[serde(default)]
    parent: Option<String>,
}

/// Looks once for the model of a server; one that answers is ready.
pub(super) async fn look(server: &Server) -> Result<ServedModel, LookError> {
    server.page(HEALTH).await?;
    let models: Models = serde_json::from_slice(&server.page("/v1/models").await?)?;
    models.data.into_iter().find(|model| model.parent.is_none()).ok_or(LookError::NoModel)
}

/// What a stream is asked to tell at its end.
#[derive(Debug, Serialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: bool,
}

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
