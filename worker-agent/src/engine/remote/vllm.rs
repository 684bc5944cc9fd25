//! vLLM: its OpenAI server with token ids in and out, its metrics, and `kv_transfer_params`.
//!
//! Seen with 0.32 on CPU; what is used of it is older. What it does not tell is a flag.

mod answer;
mod completion;
mod page;

use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use protocol::request_plane::Generate;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::dialect::{Busy, Call, Calls, Dialect, Piece, Refusal};
use super::elsewhere;
use super::http::Server;
use super::openai::{self, COMPLETIONS, HEALTH, LookError, ServedModel};
use super::ready::{ConnectError, Ready, Sizes};
use super::watch::wait_until_ready;
use crate::config::RemoteSettings;
use completion::{Completion, HAND_OVER, Purpose};

/// What `disaggregated_params` call it.
const BACKEND: &str = "vllm";
/// Waits until vLLM is ready.
pub(super) async fn wait(settings: &RemoteSettings) -> Result<Ready, ConnectError> {
    let mut headers = HeaderMap::new();
    if let Some(rank) = settings.dp_rank {
        headers.insert(HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank));
    }
    let server = Server::new(&settings.url, headers);
    let Found { model, cache } = wait_until_ready(&settings.url, settings.start_max, || look(&server)).await?;
    let page::CacheConfig { block_size, blocks, ranks } = cache;
    let sizes = Sizes { block_size, blocks, context_length: model.max_model_len, ranks };
    let (info, dp_rank) = (sizes.info("vLLM", settings)?, sizes.rank("vLLM", settings)?);
    let dialect = Vllm {
        model: model.id.clone(),
        rank: settings.dp_rank,
        priority: settings.priority,
        block_size: info.block_size.get(),
    };
    Ok(Ready { server, info, dp_rank, dialect: Box::new(dialect), model: model.id })
}

/// What a server says of itself.
struct Found {
    model: ServedModel,
    cache: page::CacheConfig,
}

/// Looks once: a server that answers all three is ready.
async fn look(server: &Server) -> Result<Found, LookError> {
    let model = openai::look(server).await?;
    let metrics = server.page("/metrics").await?;
    Ok(Found { model, cache: page::cache_config(&String::from_utf8_lossy(&metrics)) })
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

/// What is told of a prompt that was computed for another server.
#[derive(Serialize, Deserialize)]
struct Params<'a> {
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
    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn calls(&self, request: &Generate, number: u64) -> Result<Calls, Refusal> {
        let all = &request.token_ids[..];
        let say = |purpose, tokens: &[u32], kv: Option<&RawValue>| {
            let completion = Completion::new(self, request, number, purpose, tokens, kv);
            let body = serde_json::to_vec(&completion).expect("numbers and strings are JSON");
            Call {
                path: COMPLETIONS,
                body: Bytes::from(body),
                streamed: purpose == Purpose::Answer,
                repeats: Vec::new(),
            }
        };
        if request.prefill_only {
            let hand_over = RawValue::from_string(HAND_OVER.to_owned()).expect("it is JSON");
            return Ok(Calls::only(say(Purpose::HandOver, all, Some(&hand_over))));
        }
        let local = say(Purpose::Answer, all, None);
        if request.disaggregated_params.is_empty() {
            return Ok(Calls::only(local));
        }
        let there = match computed_elsewhere(request) {
            Ok(there) => there,
            Err(why) => return Ok(Calls { unusable: Some(why), ..Calls::only(local) }),
        };
        // Whoever brings such parameters is taken to find the KV of all its tokens but the last there. So one token may come
        // behind what the other server computed, the one that it generated, and only within the last block that comes.
        if all.len() == there.tokens + 1 && !there.tokens.is_multiple_of(self.block_size) {
            let main = say(Purpose::Answer, all, Some(there.params));
            return Ok(Calls { local: Some(local), ..Calls::only(main) });
        }
        // Else a request of its own, for one token, brings the KV here, and this one finds it cached.
        let fetch = say(Purpose::Fetch, &all[..there.tokens], Some(there.params));
        Ok(Calls { fetch: Some(fetch), ..Calls::only(local) })
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
        page::load(page, self.rank)
    }
}

/// What another server says of the prompt.
fn computed_elsewhere(request: &Generate) -> Result<Elsewhere<'_>, &'static str> {
    let params: Params<'_> = elsewhere::read(BACKEND, request)?;
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
