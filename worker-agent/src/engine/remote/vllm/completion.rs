//! A request as vLLM's completions API takes it.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use protocol::request_plane::{Generate, Sampling};
use serde::Serialize;
use serde_json::value::RawValue;

use super::super::openai::StreamOptions;
use super::super::sampling::Settings;
use super::Vllm;

/// Asks a server to keep a prompt's KV for another one.
pub(super) const HAND_OVER: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// What a completion is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For its tokens, as they come.
    Answer,
    /// For its first token, and for what lets another server go on.
    HandOver,
    /// Only so that KV comes here.
    Fetch,
}

/// The body of a request.
#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    /// The model, or an adapter.
    model: &'a str,
    prompt: &'a [u32],
    request_id: String,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    return_token_ids: bool,
    return_tokens_as_token_ids: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
    echo: bool,
    max_tokens: u32,
    min_tokens: u32,
    #[serde(flatten)]
    sampling: Settings<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a RawValue>,
}

impl<'a> Completion<'a> {
    /// Of `tokens`, the first ones of the request's.
    pub(super) fn new(
        vllm: &'a Vllm,
        request: &'a Generate,
        number: u64,
        purpose: Purpose,
        tokens: &'a [u32],
        kv: Option<&'a RawValue>,
    ) -> Self {
        let stop = request.stop.as_ref();
        let fetch = purpose == Purpose::Fetch;
        let most = if purpose == Purpose::Answer { stop.map_or(1, |stop| stop.max_tokens) } else { 1 };
        let text = |text: &'a str| (!text.is_empty()).then_some(text);
        Self {
            model: text(&request.lora).unwrap_or(&vllm.model),
            prompt: tokens,
            request_id: format!("{}-{number}{}", request.request_id, if fetch { "-fetch" } else { "" }),
            stream: purpose == Purpose::Answer,
            stream_options: (purpose == Purpose::Answer).then_some(StreamOptions { include_usage: true }),
            return_token_ids: true,
            return_tokens_as_token_ids: true,
            logprobs: request.logprobs.or(request.prompt_logprobs.then_some(0)).filter(|_| !fetch),
            echo: request.prompt_logprobs && !fetch,
            max_tokens: most,
            min_tokens: if fetch { 0 } else { stop.map_or(0, |stop| stop.min_tokens.min(most)) },
            sampling: sampling(request),
            cache_salt: text(&request.cache_namespace),
            // There the lower one runs first.
            priority: vllm.priority.then_some(-i64::from(request.priority)),
            kv_transfer_params: kv,
        }
    }
}

fn sampling(request: &Generate) -> Settings<'_> {
    let mut settings = Settings::of(request);
    if let Some(bias) = request.sampling.as_ref().and_then(|sampling| bias(sampling, request)) {
        settings.logit_bias = Some(Cow::Owned(bias));
    }
    settings
}

/// The request's own bias, and the penalties for what was generated elsewhere: vLLM takes those tokens for a prompt, which only
/// its repetition penalty looks at. The presence penalty counts twice for one of them that is generated again.
/// `None` where there are none of them.
fn bias(sampling: &Sampling, request: &Generate) -> Option<HashMap<u32, f32>> {
    let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
    if request.generated == 0 || presence == 0.0 && frequency == 0.0 {
        return None;
    }
    let mut bias = sampling.logit_bias.clone();
    let begin = request.token_ids.len() - request.generated as usize;
    let mut seen = HashSet::new();
    for token in &request.token_ids[begin..] {
        let penalty = frequency + if seen.insert(token) { presence } else { 0.0 };
        *bias.entry(*token).or_default() -= penalty;
    }
    Some(bias)
}
