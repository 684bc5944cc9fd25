//! A request as vLLM's completions API takes it.
//!
//! Every sampling setting is said: what is not said, vLLM takes from the model's own `generation_config.json`.

use std::collections::{HashMap, HashSet};

use protocol::request_plane::{Generate, Sampling};
use serde::Serialize;
use serde_json::value::RawValue;

use super::super::dialect::seed_of;
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
    ignore_eos: bool,
    stop: &'a [String],
    stop_token_ids: &'a [u32],
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logit_bias: Option<HashMap<u32, f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a RawValue>,
}

#[derive(Debug, Serialize)]
struct StreamOptions {
    include_usage: bool,
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
        let sampling = request.sampling.as_ref();
        let set = |value: fn(&Sampling) -> f32| sampling.map_or(0.0, value);
        let stop = request.stop.as_ref();
        let fetch = purpose == Purpose::Fetch;
        let most = if purpose == Purpose::Answer { stop.map_or(1, |stop| stop.max_tokens) } else { 1 };
        let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
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
            ignore_eos: stop.is_some_and(|stop| stop.ignore_eos),
            stop: stop.map_or(&[], |stop| &stop.strings),
            stop_token_ids: stop.map_or(&[], |stop| &stop.token_ids),
            temperature: set(|s| s.temperature),
            top_p: or_one(set(|s| s.top_p)),
            top_k: sampling.map_or(0, |s| s.top_k),
            min_p: set(|s| s.min_p),
            repetition_penalty: or_one(set(|s| s.repetition_penalty)),
            presence_penalty: set(|s| s.presence_penalty),
            frequency_penalty: set(|s| s.frequency_penalty),
            seed: sampling.and_then(|s| s.seed).map(|seed| seed_of(seed, request.generated)),
            logit_bias: sampling.map(|sampling| bias(sampling, request)).filter(|bias| !bias.is_empty()),
            cache_salt: text(&request.cache_namespace),
            // There the lower one runs first.
            priority: vllm.priority.then_some(-i64::from(request.priority)),
            kv_transfer_params: kv,
        }
    }
}

/// The request's own bias, and the penalties for what was generated elsewhere: vLLM takes those tokens for a prompt, which only
/// its repetition penalty looks at. The presence penalty counts twice for one of them that is generated again.
fn bias(sampling: &Sampling, request: &Generate) -> HashMap<u32, f32> {
    let mut bias = sampling.logit_bias.clone();
    let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
    if presence == 0.0 && frequency == 0.0 {
        return bias;
    }
    let begin = request.token_ids.len() - request.generated as usize;
    let mut seen = HashSet::new();
    for token in &request.token_ids[begin..] {
        let penalty = frequency + if seen.insert(token) { presence } else { 0.0 };
        *bias.entry(*token).or_default() -= penalty;
    }
    bias
}
