//! A request as `trtllm-serve` takes it. It refuses a field that it does not know, so that only what every version has is said.

use std::collections::HashMap;

use protocol::request_plane::{Generate, Sampling};
use serde::Serialize;

use super::super::dialect::seed_of;
use super::{State, TensorRtLlm};

/// The body of a request.
#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    model: &'a str,
    prompt: &'a [u32],
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    /// Without text, an answer has token ids.
    detokenize: bool,
    add_special_tokens: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
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
    logit_bias: Option<&'a HashMap<u32, f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a State>,
}

#[derive(Debug, Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl<'a> Completion<'a> {
    /// Of `tokens`, the first ones of the request's; the answer repeats `repeated` of those that follow.
    pub(super) fn new(
        server: &'a TensorRtLlm,
        request: &'a Generate,
        tokens: &'a [u32],
        state: Option<&'a State>,
        repeated: u32,
    ) -> Self {
        let sampling = request.sampling.as_ref();
        let set = |value: fn(&Sampling) -> f32| sampling.map_or(0.0, value);
        let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
        let stop = request.stop.as_ref();
        let stream = !request.prefill_only;
        let most = if stream { stop.map_or(1, |stop| stop.max_tokens) + repeated } else { 1 };
        Self {
            model: &server.model,
            prompt: tokens,
            stream,
            stream_options: stream.then_some(StreamOptions { include_usage: true }),
            detokenize: false,
            add_special_tokens: false,
            // None, to it, is no log-probability at all.
            logprobs: request.logprobs.map(|most| most.max(1)),
            max_tokens: most,
            min_tokens: stop.map_or(0, |stop| (stop.min_tokens + repeated).min(most)),
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
            logit_bias: sampling.map(|s| &s.logit_bias).filter(|bias| !bias.is_empty()),
            disaggregated_params: state,
        }
    }
}
