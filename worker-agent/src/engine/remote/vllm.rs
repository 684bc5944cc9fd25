//! vLLM: its OpenAI server with token ids in and out, its metrics, and `kv_transfer_params`.
//!
//! Seen with 0.32 on CPU; what is used of it is older. What it does not tell is a flag.

mod answer;
mod completion;
mod page;

use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use kv_hashing::BlockSize;
use protocol::request_plane::Generate;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::dialect::{Busy, Call, Calls, Dialect, Piece, Refusal};
use super::http::{HttpError, Server};
use super::metrics::RemoteMetrics;
use super::watch::{NotReady, wait_until_ready};
use super::{Remote, RemoteOptions};
use crate::config::VllmSettings;
use crate::engine::EngineInfo;
use completion::{Completion, HAND_OVER, Purpose};

/// What `disaggregated_params` call it.
const BACKEND: &str = "vllm";
/// Where completions are asked for.
const COMPLETIONS: &str = "/v1/completions";

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It did not become ready.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    /// It does not tell something that is needed.
    #[error("vLLM at {url} does not tell its {what}; set {flag}")]
    Untold {
        /// Where.
        url: String,
        /// What.
        what: &'static str,
        /// The flag that says it.
        flag: &'static str,
    },
}

/// Why a look at a server that starts gave nothing.
#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("/v1/models is no list of models: {0}")]
    Models(#[from] serde_json::Error),
    #[error("it serves no model")]
    NoModel,
}

/// A server that is ready.
pub struct Ready {
    server: Server,
    info: EngineInfo,
    /// The name under which it serves its model.
    pub model: String,
}

/// Waits until vLLM is ready.
pub async fn wait(settings: &VllmSettings) -> Result<Ready, ConnectError> {
    let mut headers = HeaderMap::new();
    if let Some(rank) = settings.dp_rank {
        headers.insert(HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank));
    }
    let server = Server::new(&settings.url, headers);
    let found = wait_until_ready(&settings.url, settings.start_max, || look(&server)).await?;
    Ok(Ready { info: info(settings, &found)?, server, model: found.model.id })
}

impl Ready {
    /// Makes it an engine. Must be called inside a Tokio runtime.
    pub fn start(self, settings: &VllmSettings, eos_token_ids: Vec<u32>, metrics: RemoteMetrics) -> Remote {
        let Self { server, info, model } = self;
        let dialect =
            Vllm { model, rank: settings.dp_rank, priority: settings.priority, block_size: info.block_size.get() };
        let options = RemoteOptions {
            max_requests: info.max_num_seqs + settings.max_waiting,
            info,
            eos_token_ids,
            events: settings.events.clone(),
            events_bind: settings.events_bind,
            dp_rank: settings.dp_rank.unwrap_or(0),
            first_token_max: settings.first_token_max,
            token_max: settings.token_max,
        };
        Remote::start(server, Box::new(dialect), options, metrics)
    }
}

/// What a server says of itself.
struct Found {
    model: ServedModel,
    cache: page::CacheConfig,
}

/// The answer of `/v1/models`, as far as it is read here.
#[derive(Deserialize)]
struct Models {
    data: Vec<ServedModel>,
}

#[derive(Deserialize)]
struct ServedModel {
    id: String,
    #[serde(default)]
    max_model_len: Option<usize>,
    /// Adapters are listed beside the model that they belong to.
    #[serde(default)]
    parent: Option<String>,
}

/// Looks once: a server that answers all three is ready.
async fn look(server: &Server) -> Result<Found, LookError> {
    server.page("/health").await?;
    let models: Models = serde_json::from_slice(&server.page("/v1/models").await?)?;
    let model = models.data.into_iter().find(|model| model.parent.is_none()).ok_or(LookError::NoModel)?;
    let metrics = server.page("/metrics").await?;
    Ok(Found { model, cache: page::cache_config(&String::from_utf8_lossy(&metrics)) })
}

/// Fixed properties: what was set, else what the server says.
fn info(settings: &VllmSettings, found: &Found) -> Result<EngineInfo, ConnectError> {
    let untold = |what, flag| ConnectError::Untold { url: settings.url.clone(), what, flag };
    let block_size = settings.block_size.map(|size| size as usize).or(found.cache.block_size);
    let block_size = block_size.and_then(|size| BlockSize::new(u32::try_from(size).ok()?));
    Ok(EngineInfo {
        block_size: block_size.ok_or_else(|| untold("block size", "--vllm-block-size"))?,
        total_blocks: settings
            .kv_blocks
            .or(found.cache.blocks)
            .ok_or_else(|| untold("number of KV blocks", "--vllm-kv-blocks"))?,
        max_num_seqs: settings.max_num_seqs,
        max_num_batched_tokens: settings.max_num_batched_tokens,
        context_length: settings
            .context_length
            .or(found.model.max_model_len)
            .ok_or_else(|| untold("context length", "--vllm-context-length"))?,
    })
}

/// What is said to vLLM and heard from it.
#[derive(Debug)]
pub(super) struct Vllm {
    /// The name under which it serves its model.
    pub(super) model: String,
    /// Its rank, where it has several: only that one's figures count.
    pub(super) rank: Option<u32>,
    /// Whether it schedules by priority.
    pub(super) priority: bool,
    /// Tokens of a block.
    pub(super) block_size: usize,
}

/// `disaggregated_params`, as one agent writes them and another reads them.
#[derive(Serialize, Deserialize)]
struct Params<'a> {
    backend: &'a str,
    #[serde(borrow)]
    kv_transfer_params: &'a RawValue,
}

/// What is read of `kv_transfer_params`; they go on as they came.
#[derive(Deserialize)]
struct Transfer {
    #[serde(default)]
    remote_num_tokens: Option<usize>,
    #[serde(default)]
    remote_block_ids: Option<Vec<serde_json::Value>>,
}

/// What another server has computed of a prompt.
struct Elsewhere<'a> {
    params: &'a RawValue,
    /// How many leading tokens.
    tokens: usize,
}

impl Dialect for Vllm {
    fn calls(&self, request: &Generate, number: u64) -> Calls {
        let all = &request.token_ids[..];
        let say = |purpose, tokens: &[u32], kv: Option<&RawValue>| {
            let completion = Completion::new(self, request, number, purpose, tokens, kv);
            let body = serde_json::to_vec(&completion).expect("numbers and strings are JSON");
            Call { path: COMPLETIONS, body: Bytes::from(body), streamed: purpose == Purpose::Answer }
        };
        let only = |main| Calls { fetch: None, main, local: None, unusable: None };
        if request.prefill_only {
            let hand_over = RawValue::from_string(HAND_OVER.to_owned()).expect("it is JSON");
            return only(say(Purpose::HandOver, all, Some(&hand_over)));
        }
        let local = say(Purpose::Answer, all, None);
        if request.disaggregated_params.is_empty() {
            return only(local);
        }
        let there = match computed_elsewhere(request) {
            Ok(there) => there,
            Err(why) => return Calls { unusable: Some(why), ..only(local) },
        };
        // Whoever brings such parameters is taken to find the KV of all its tokens but the last there. So one token may come
        // behind what the other server computed, the one that it generated, and only within the last block that comes.
        if all.len() == there.tokens + 1 && !there.tokens.is_multiple_of(self.block_size) {
            let main = say(Purpose::Answer, all, Some(there.params));
            return Calls { local: Some(local), ..only(main) };
        }
        // Else a request of its own, for one token, brings the KV here, and this one finds it cached.
        let fetch = say(Purpose::Fetch, &all[..there.tokens], Some(there.params));
        Calls { fetch: Some(fetch), ..only(local) }
    }

    fn read(&self, text: &[u8]) -> Result<Piece, Refusal> {
        answer::read(text)
    }

    fn refusal(&self, status: u16, body: &[u8]) -> Refusal {
        answer::refusal(status, body)
    }

    /// Connectors compare the rest when they meet.
    fn kv_layout(&self) -> Option<String> {
        Some(format!("{BACKEND}/{}/{}", self.block_size, self.model))
    }

    fn health_path(&self) -> &'static str {
        "/health"
    }

    fn load_path(&self) -> &'static str {
        "/metrics"
    }

    fn load(&self, page: &str) -> Busy {
        page::load(page, self.rank)
    }
}

/// Reads `disaggregated_params`.
fn computed_elsewhere(request: &Generate) -> Result<Elsewhere<'_>, &'static str> {
    let params: Params<'_> =
        serde_json::from_str(&request.disaggregated_params).map_err(|_| "the parameters are another engine's")?;
    if params.backend != BACKEND {
        return Err("the parameters are another engine's");
    }
    let transfer: Transfer =
        serde_json::from_str(params.kv_transfer_params.get()).map_err(|_| "the parameters are unreadable")?;
    // Versions that do not say how many mean the prompt.
    let prompt = request.token_ids.len() - request.generated as usize;
    let tokens = transfer.remote_num_tokens.unwrap_or(prompt);
    match transfer.remote_block_ids {
        Some(blocks) if !blocks.is_empty() && (1..=request.token_ids.len()).contains(&tokens) => {
            Ok(Elsewhere { params: params.kv_transfer_params, tokens })
        }
        _ => Err("the other server kept nothing"),
    }
}
