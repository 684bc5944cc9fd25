//! TensorRT-LLM: `trtllm-serve` with token ids in and out, its list of KV events, and the opaque state that lets another one go on.
//!
//! From its documented interface: not tested with the real engine. What it does not tell is a flag; what it has no word for, as
//! adapters and namespaces of its cache, is refused.

mod answer;
mod completion;
mod events;
mod page;

use std::collections::BTreeMap;

use bytes::Bytes;
use hyper::header::HeaderMap;
use protocol::request_plane::Generate;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::dialect::{Busy, Call, Calls, Dialect, Piece, Refusal, Told};
use super::elsewhere;
use super::http::Server;
use super::openai::{self, COMPLETIONS, HEALTH};
use super::ready::{ConnectError, Ready, Sizes};
use super::watch::wait_until_ready;
use crate::config::RemoteSettings;
use completion::Completion;

/// What `disaggregated_params` call it.
const BACKEND: &str = "tensorrt-llm";
/// Where KV events are asked for.
const EVENTS: &str = "/kv_cache_events";

/// Waits until the server is ready.
pub(super) async fn wait(settings: &RemoteSettings) -> Result<Ready, ConnectError> {
    let sizes = Sizes::default();
    let (info, dp_rank) = (sizes.info("TensorRT-LLM", settings)?, sizes.rank("TensorRT-LLM", settings)?);
    let server = Server::new(&settings.url, HeaderMap::new());
    let model = wait_until_ready(&settings.url, settings.start_max, || openai::look(&server)).await?.id;
    let dialect = TensorRtLlm { model: model.clone() };
    Ok(Ready { server, info, dp_rank, dialect: Box::new(dialect), model })
}

/// What is said to the server and heard from it.
#[derive(Debug)]
struct TensorRtLlm {
    /// The name under which it serves its model.
    model: String,
}

/// What is told of a prompt that was computed for another server.
#[derive(Serialize, Deserialize)]
struct Params<'a> {
    #[serde(borrow)]
    disaggregated_params: &'a RawValue,
}

/// The server's own parameters: passed on as they came, but for what is asked for.
type State = BTreeMap<String, Box<RawValue>>;

/// What another server has computed of a prompt.
struct Elsewhere {
    state: State,
    /// What it has generated.
    first: Vec<u32>,
}

impl Dialect for TensorRtLlm {
    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn calls(&self, request: &Generate, _number: u64) -> Result<Calls, Refusal> {
        for (unsaid, what) in [
            (!request.lora.is_empty(), "adapters are not passed on to TensorRT-LLM"),
            (!request.cache_namespace.is_empty(), "TensorRT-LLM does not keep namespaces of its cache apart"),
            (request.prompt_logprobs, "TensorRT-LLM does not tell the prompt's log-probabilities with token ids"),
        ] {
            if unsaid {
                return Err(Refusal::Invalid(what.into()));
            }
        }
        let all = &request.token_ids[..];
        if request.prefill_only {
            return Ok(Calls::only(self.say(request, all, Some(&ask_for("context_only", State::new())), Vec::new())));
        }
        let local = self.say(request, all, None, Vec::new());
        if request.disaggregated_params.is_empty() {
            return Ok(Calls::only(local));
        }
        let there = match computed_elsewhere(request) {
            Ok(there) => there,
            Err(why) => return Ok(Calls { unusable: Some(why), ..Calls::only(local) }),
        };
        let prompt = &all[..all.len() - there.first.len()];
        let main = self.say(request, prompt, Some(&ask_for("generation_only", there.state)), there.first);
        Ok(Calls { local: Some(local), ..Calls::only(main) })
    }

    fn read(&self, text: &[u8]) -> Result<Piece, Refusal> {
        answer::read(text)
    }

    fn refusal(&self, status: u16, body: &[u8]) -> Refusal {
        answer::refusal(status, body)
    }

    fn health_path(&self) -> &'static str {
        HEALTH
    }

    fn load_path(&self) -> &'static str {
        "/metrics"
    }

    fn load(&self, page: &str) -> Busy {
        page::load(page)
    }

    fn events_call(&self) -> Option<Call> {
        Some(Call { path: EVENTS, body: Bytes::new(), streamed: false, repeats: Vec::new() })
    }

    fn events(&self, text: &[u8]) -> Result<Vec<Told>, Refusal> {
        events::read(text)
    }
}

impl TensorRtLlm {
    /// A completion of `tokens`, the first ones of the request's; the answer begins with `repeats`.
    fn say(&self, request: &Generate, tokens: &[u32], state: Option<&State>, repeats: Vec<u32>) -> Call {
        let completion = Completion::new(self, request, tokens, state, repeats.len() as u32);
        let body = serde_json::to_vec(&completion).expect("numbers and strings are JSON");
        Call { path: COMPLETIONS, body: Bytes::from(body), streamed: !request.prefill_only, repeats }
    }
}

/// Parameters that ask for one half of a request.
fn ask_for(what: &'static str, mut state: State) -> State {
    let request_type = RawValue::from_string(format!("{what:?}")).expect("a string");
    state.insert("request_type".into(), request_type);
    state
}

/// What another server says of the prompt.
fn computed_elsewhere(request: &Generate) -> Result<Elsewhere, &'static str> {
    /// What is read of them.
    #[derive(Deserialize)]
    struct First {
        first_gen_tokens: Option<Vec<u32>>,
    }
    let params: Params<'_> = elsewhere::read(BACKEND, request)?;
    let unreadable = |_| "the parameters are unreadable";
    let own = params.disaggregated_params.get();
    let mut state: State = serde_json::from_str(own).map_err(unreadable)?;
    // A field without a value is no field.
    state.retain(|_, value| value.get() != "null");
    let first = serde_json::from_str::<First>(own).map_err(unreadable)?.first_gen_tokens.unwrap_or_default();
    if first.is_empty() || first.len() != request.generated as usize || !request.token_ids.ends_with(&first) {
        return Err("the parameters are of other tokens");
    }
    Ok(Elsewhere { state, first })
}
