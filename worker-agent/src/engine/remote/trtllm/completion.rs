//! A request as `trtllm-serve` takes it. It refuses a field that it does not know, so that only what every version has is said.

use protocol::request_plane::Generate;
use serde::Serialize;

use super::super::openai::StreamOptions;
use super::super::sampling::Settings;
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
    #[serde(flatten)]
    sampling: Settings<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a State>,
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
            sampling: Settings::of(request),
            disaggregated_params: state,
        }
    }
}
