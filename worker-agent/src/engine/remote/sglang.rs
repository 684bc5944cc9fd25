//! SGLang: `/generate` with token ids in and out, its load, and the bootstrap room where two of them meet.
//!
//! From its documented interface: not tested with the real engine. A server that computes prompts ends a request only when one that
//! decodes has fetched its KV, and one that decodes computes no prompt: each does its half, at the same time, or none.

mod answer;
mod generate;
mod page;

use bytes::Bytes;
use hyper::header::HeaderMap;
use protocol::request_plane::Generate;
use serde::{Deserialize, Serialize};

use super::dialect::{Busy, Call, Calls, Dialect, HandOver, Piece, Refusal};
use super::elsewhere;
use super::http::{HttpError, Server};
use super::ready::{ConnectError, Ready, Sizes};
use super::watch::wait_until_ready;
use crate::config::RemoteSettings;
use generate::Body;
use page::{Half, ServerInfo};

/// What `disaggregated_params` call it.
const BACKEND: &str = "sglang";
/// Where tokens are asked for.
const GENERATE: &str = "/generate";
/// Where a request is given up.
const ABORT: &str = "/abort_request";
/// Where its load is asked for: the first one that a version has. One without is as busy as we keep it.
const LOADS: [&str; 3] = ["/v1/loads", "/get_load", HEALTH];
/// Where it says that it works.
const HEALTH: &str = "/health";

/// Why a look at a server that starts gave nothing.
#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("/get_server_info is unreadable: {0}")]
    Info(#[from] serde_json::Error),
}

/// What a server says of itself.
struct Found {
    info: ServerInfo,
    load_path: &'static str,
}

/// Waits until the server is ready.
pub(super) async fn wait(settings: &RemoteSettings) -> Result<Ready, ConnectError> {
    let server = Server::new(&settings.url, HeaderMap::new());
    let Found { info: said, load_path } = wait_until_ready(&settings.url, settings.start_max, || look(&server)).await?;
    let block_size = settings.block_size.map(|size| size as usize).or(said.page_size);
    let blocks = said.max_total_num_tokens.zip(block_size).map(|(tokens, size)| tokens / size.max(1));
    let ranks = (0..said.dp_size.clamp(1, MAX_RANKS)).collect();
    let sizes = Sizes { block_size, blocks, context_length: said.context_length, ranks };
    let (info, dp_rank) = (sizes.info("SGLang", settings)?, sizes.rank("SGLang", settings)?);
    let model = said.name().to_owned();
    let dialect = Sglang {
        model: model.clone(),
        half: said.half(),
        kv_tokens: info.total_blocks * info.block_size.get(),
        load_path,
        rank: settings.dp_rank,
        ranks: u64::from(said.dp_size.max(1)),
        priority: settings.priority,
        bootstrap_host: settings.bootstrap_host.clone(),
        bootstrap_port: said.disaggregation_bootstrap_port,
        first_room: rand::random::<u64>() >> ROOM_BITS,
    };
    Ok(Ready { server, info, dp_rank, dialect: Box::new(dialect), model })
}

/// Rooms are signed there, and are multiplied by the number of ranks: 2^40 of them are left to begin with.
const ROOM_BITS: u32 = 24;
/// More data-parallel ranks no server has.
const MAX_RANKS: u32 = 1 << 12;

/// Looks once: a server that answers is ready.
async fn look(server: &Server) -> Result<Found, LookError> {
    server.page(HEALTH).await?;
    let said = match server.page("/get_server_info").await {
        // Its newer name.
        Err(HttpError::Status { .. }) => server.page("/server_info").await?,
        said => said?,
    };
    let mut info: ServerInfo = serde_json::from_slice(&said)?;
    if info.context_length.is_none() {
        info.context_length = page::context_length(&server.page("/v1/models").await?);
    }
    let mut load_path = HEALTH;
    for path in LOADS {
        match server.page(path).await {
            Ok(_) => {
                load_path = path;
                break;
            }
            Err(HttpError::Status { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Found { info, load_path })
}

/// What is said to SGLang and heard from it.
#[derive(Debug)]
struct Sglang {
    /// The name under which it serves its model.
    model: String,
    /// What it does of a request.
    half: Half,
    /// Tokens that its cache has room for.
    kv_tokens: usize,
    /// Where its load is.
    load_path: &'static str,
    /// Its rank, where it has several.
    rank: Option<u32>,
    /// How many it has.
    ranks: u64,
    /// Whether it schedules by priority.
    priority: bool,
    /// Where those that decode find it.
    bootstrap_host: String,
    bootstrap_port: u16,
    /// Room of the first request, before ranks.
    first_room: u64,
}

/// Where two servers meet for a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Room {
    bootstrap_host: String,
    bootstrap_port: u16,
    bootstrap_room: u64,
}

/// What is told of a prompt that is computed for another server.
#[derive(Serialize, Deserialize)]
struct Params {
    #[serde(flatten)]
    room: Room,
    /// What keeps the KV there, as every engine's parameters have it: the room.
    lease: String,
}

impl Dialect for Sglang {
    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn calls(&self, request: &Generate, number: u64) -> Result<Calls, Refusal> {
        if request.prefill_only && self.half == Half::Prefill {
            let room = self.room(number);
            let lease = room.bootstrap_room;
            let params = elsewhere::write(BACKEND, Params { room: room.clone(), lease: format!("{lease:016x}") });
            let handed_over = Some(HandOver { params, lease });
            return Ok(Calls { handed_over, ..Calls::only(self.say(request, number, Some(&room))) });
        }
        let room = (!request.disaggregated_params.is_empty()).then(|| computed_elsewhere(request));
        match (self.half, room) {
            (Half::Decode, Some(Ok(room))) => Ok(Calls::only(self.say(request, number, Some(&room)))),
            (Half::Both, None) if !request.prefill_only => Ok(Calls::only(self.say(request, number, None))),
            (Half::Both, Some(_)) => {
                let unusable = Some("this SGLang was not started to decode what another one computed");
                Ok(Calls { unusable, ..Calls::only(self.say(request, number, None)) })
            }
            // Another worker may do it; where none can, it is not the request that is wrong.
            (Half::Decode, Some(Err(why))) => {
                Err(Refusal::Overloaded(format!("{why}, and this one computes no prompts")))
            }
            (Half::Decode, None) => {
                Err(Refusal::Overloaded("this SGLang was started to decode, not to compute prompts".into()))
            }
            (Half::Prefill, _) => Err(Refusal::Overloaded("this SGLang was started to compute prompts only".into())),
            (Half::Both, None) => {
                Err(Refusal::Overloaded("this SGLang was not started to compute prompts for others".into()))
            }
        }
    }

    fn abort(&self, request: &Generate, number: u64) -> Option<Call> {
        let body = serde_json::json!({ "rid": generate::rid(request, number) }).to_string();
        Some(Call { path: ABORT, body: Bytes::from(body), streamed: false, repeats: Vec::new() })
    }

    fn prefill_generates(&self) -> bool {
        self.half != Half::Prefill
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
        self.load_path
    }

    fn load(&self, page: &str) -> Busy {
        page::load(page, self.rank, self.kv_tokens)
    }
}

impl Sglang {
    /// The room of a request: no other one's, and of its rank, which is the room's remainder.
    fn room(&self, number: u64) -> Room {
        let room = self.first_room.wrapping_add(number) * self.ranks + u64::from(self.rank.unwrap_or(0)) % self.ranks;
        Room { bootstrap_host: self.bootstrap_host.clone(), bootstrap_port: self.bootstrap_port, bootstrap_room: room }
    }

    fn say(&self, request: &Generate, number: u64, room: Option<&Room>) -> Call {
        let body = Body::new(self, request, number, room);
        let body = serde_json::to_vec(&body).expect("numbers and strings are JSON");
        Call { path: GENERATE, body: Bytes::from(body), streamed: !request.prefill_only, repeats: Vec::new() }
    }
}

/// Where another server computes the prompt.
fn computed_elsewhere(request: &Generate) -> Result<Room, &'static str> {
    let params: Params = elsewhere::read(BACKEND, request)?;
    if request.generated == 0 { Ok(params.room) } else { Err("the parameters are of fewer tokens") }
}
