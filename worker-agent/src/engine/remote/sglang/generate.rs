//! A request as SGLang's `/generate` takes it.
//!
//! Every sampling setting is said: what is not said, SGLang takes from the model's own `generation_config.json`. A seed is not: only
//! servers that were started to be deterministic take one, and the others refuse it.

use std::collections::HashMap;

use protocol::request_plane::{Generate, Sampling};
use serde::Serialize;

use super::{Room, Sglang};

/// The body of a request.
#[derive(Debug, Serialize)]
pub(super) struct Body<'a> {
    rid: String,
    input_ids: &'a [u32],
    stream: bool,
    sampling_params: Params<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    return_logprob: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob_start_len: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs_num: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lora_path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_parallel_rank: Option<u32>,
    #[serde(flatten)]
    room: Option<&'a Room>,
}

#[derive(Debug, Serialize)]
struct Params<'a> {
    max_new_tokens: u32,
    min_new_tokens: u32,
    ignore_eos: bool,
    stop: &'a [String],
    stop_token_ids: &'a [u32],
    temperature: f32,
    top_p: f32,
    top_k: i64,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    logit_bias: Option<&'a HashMap<u32, f32>>,
}

/// The name of a request, by which it is given up.
pub(super) fn rid(request: &Generate, number: u64) -> String {
    format!("{}-{number}", request.request_id)
}

impl<'a> Body<'a> {
    pub(super) fn new(server: &Sglang, request: &'a Generate, number: u64, room: Option<&'a Room>) -> Self {
        let logprobs = request.logprobs.or(request.prompt_logprobs.then_some(0)).filter(|_| !request.prefill_only);
        let text = |text: &'a str| (!text.is_empty()).then_some(text);
        Self {
            rid: rid(request, number),
            input_ids: &request.token_ids,
            stream: !request.prefill_only,
            sampling_params: params(request),
            return_logprob: logprobs.map(|_| true),
            logprob_start_len: logprobs.map(|_| if request.prompt_logprobs { 0 } else { -1 }),
            top_logprobs_num: logprobs,
            lora_path: text(&request.lora),
            extra_key: text(&request.cache_namespace),
            priority: server.priority.then_some(request.priority),
            // A room says its rank itself.
            data_parallel_rank: server.rank.filter(|_| room.is_none()),
            room,
        }
    }
}

fn params(request: &Generate) -> Params<'_> {
    let sampling = request.sampling.as_ref();
    let set = |value: fn(&Sampling) -> f32| sampling.map_or(0.0, value);
    let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
    let stop = request.stop.as_ref();
    let most = if request.prefill_only { 1 } else { stop.map_or(1, |stop| stop.max_tokens) };
    Params {
        max_new_tokens: most,
        min_new_tokens: stop.map_or(0, |stop| stop.min_tokens.min(most)),
        ignore_eos: stop.is_some_and(|stop| stop.ignore_eos),
        stop: stop.map_or(&[], |stop| &stop.strings),
        stop_token_ids: stop.map_or(&[], |stop| &stop.token_ids),
        temperature: set(|s| s.temperature),
        top_p: or_one(set(|s| s.top_p)),
        top_k: sampling.map(|s| i64::from(s.top_k)).filter(|&k| k > 0).unwrap_or(-1),
        min_p: set(|s| s.min_p),
        repetition_penalty: or_one(set(|s| s.repetition_penalty)),
        presence_penalty: set(|s| s.presence_penalty),
        frequency_penalty: set(|s| s.frequency_penalty),
        logit_bias: sampling.map(|s| &s.logit_bias).filter(|bias| !bias.is_empty()),
    }
}
