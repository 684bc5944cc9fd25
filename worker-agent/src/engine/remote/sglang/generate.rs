//! A request as SGLang's `/generate` takes it.
//!
//! A seed is not said: only servers that were started to be deterministic take one, and the others refuse it.

use protocol::request_plane::Generate;
use serde::Serialize;

use super::super::sampling::Settings;
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
    #[serde(flatten)]
    sampling: Settings<'a>,
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
    let stop = request.stop.as_ref();
    let most = if request.prefill_only { 1 } else { stop.map_or(1, |stop| stop.max_tokens) };
    Params {
        max_new_tokens: most,
        min_new_tokens: stop.map_or(0, |stop| stop.min_tokens.min(most)),
        sampling: Settings::of(request).with_all_tokens_as_minus_one().without_seed(),
    }
}
