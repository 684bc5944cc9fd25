//! From a server that starts to an engine: waited for, asked for its sizes, taken over.

use std::fmt;
use std::time::Duration;

use kv_hashing::BlockSize;
use parking_lot::Mutex;
use protocol::request_plane::{Generate, Stop};

use super::dialect::Dialect;
use super::http::{self, Server, Stage};
use super::metrics::RemoteMetrics;
use super::poll::AskError;
use super::pulse::Figures;
use super::watch::{NotReady, wait_until_ready};
use super::{Remote, RemoteOptions, sglang, trtllm, vllm};
use crate::config::{RemoteSettings, ServerKind};
use crate::engine::EngineInfo;

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It did not become ready.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    /// It has not the rank that it is to have.
    #[error(
        "{engine} at {url} has the data-parallel ranks {ranks:?}: a worker stands for one of them; set --engine-dp-rank"
    )]
    Rank {
        /// What it is.
        engine: &'static str,
        /// Where.
        url: String,
        /// Those that it has.
        ranks: Vec<u32>,
    },
    /// It does not tell something that is needed.
    #[error("{engine} at {url} does not tell its {what}; set {flag}")]
    Untold {
        /// What it is.
        engine: &'static str,
        /// Where.
        url: String,
        /// What.
        what: &'static str,
        /// The flag that says it.
        flag: &'static str,
    },
}

/// A server that is ready.
pub struct Ready {
    pub(super) server: Server,
    pub(super) info: EngineInfo,
    pub(super) dp_rank: u32,
    pub(super) dialect: Box<dyn Dialect>,
    /// The name under which it serves its model.
    pub model: String,
}

impl fmt::Debug for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ready").field("info", &self.info).field("model", &self.model).finish_non_exhaustive()
    }
}

/// Waits until the server is ready.
pub async fn wait(settings: &RemoteSettings) -> Result<Ready, ConnectError> {
    match settings.kind {
        ServerKind::Vllm => vllm::wait(settings).await,
        ServerKind::Sglang => sglang::wait(settings).await,
        ServerKind::TensorRtLlm => trtllm::wait(settings).await,
    }
}

/// As [`wait`], for a server that hung: it says that it is ready all the time, and is when it answers a request of one token.
pub async fn wait_until_it_computes(settings: &RemoteSettings) -> Result<Ready, ConnectError> {
    let hung = wait(settings).await?;
    let still = Mutex::new(None);
    wait_until_ready(&settings.url, settings.start_max, || hung.computes(settings.stall_max, &still)).await?;
    // It may be another process meanwhile, of other sizes.
    wait(settings).await
}

impl Ready {
    /// Asks for one token. A server that does only one half of requests cannot be tried: it computes when nothing runs there any
    /// more, or figures have moved since the first look, which `first` keeps.
    async fn computes(&self, limit: Duration, first: &Mutex<Option<Figures>>) -> Result<(), AskError> {
        let stop = Some(Stop { max_tokens: 1, ..Stop::default() });
        let request = Generate { request_id: "trial".into(), token_ids: vec![0], stop, ..Generate::default() };
        let Ok(calls) = self.dialect.calls(&request, 0) else {
            let page = self.server.page(self.dialect.load_path()).await?;
            let figures = self.dialect.load(&String::from_utf8_lossy(&page)).figures();
            let moved = *first.lock().get_or_insert(figures) != figures;
            return if moved || figures.running == 0 { Ok(()) } else { Err(AskError::Still) };
        };
        let answer = self.server.call(&calls.main, Stage::FirstToken, limit).await?;
        let status = answer.status();
        let body = http::read_whole(answer.into_body(), Stage::FirstToken, limit).await?;
        if status.is_success() { Ok(()) } else { Err(self.dialect.refusal(status.as_u16(), &body).into()) }
    }

    /// Makes it an engine. Must be called inside a Tokio runtime.
    pub fn start(self, settings: &RemoteSettings, eos_token_ids: Vec<u32>, metrics: RemoteMetrics) -> Remote {
        let Self { server, info, dp_rank, dialect, .. } = self;
        let options = RemoteOptions {
            max_requests: info.max_num_seqs + settings.max_waiting,
            info,
            eos_token_ids,
            events: settings.events.clone(),
            events_bind: settings.events_bind,
            dp_rank,
            first_token_max: settings.first_token_max,
            token_max: settings.token_max,
            stall_max: settings.stall_max,
        };
        Remote::start(server, dialect, options, metrics)
    }
}

/// What a server says of its sizes.
#[derive(Clone, Debug, Default)]
pub(super) struct Sizes {
    /// Tokens of a block.
    pub(super) block_size: Option<usize>,
    /// Blocks on the device.
    pub(super) blocks: Option<usize>,
    /// Most tokens of prompt and answer together.
    pub(super) context_length: Option<usize>,
    /// Its data-parallel ranks; empty where it does not say.
    pub(super) ranks: Vec<u32>,
}

impl Sizes {
    /// Fixed properties: what was set, else what the server says.
    pub(super) fn info(&self, engine: &'static str, settings: &RemoteSettings) -> Result<EngineInfo, ConnectError> {
        let untold = |what, flag| ConnectError::Untold { engine, url: settings.url.clone(), what, flag };
        let block_size = settings.block_size.map(|size| size as usize).or(self.block_size);
        let block_size = block_size.and_then(|size| BlockSize::new(u32::try_from(size).ok()?));
        let blocks = settings.kv_blocks.or(self.blocks);
        let context_length = settings.context_length.or(self.context_length);
        Ok(EngineInfo {
            block_size: block_size.ok_or_else(|| untold("block size", "--engine-block-size"))?,
            total_blocks: blocks.ok_or_else(|| untold("number of KV blocks", "--engine-kv-blocks"))?,
            max_num_seqs: settings.max_num_seqs,
            max_num_batched_tokens: settings.max_num_batched_tokens,
            context_length: context_length.ok_or_else(|| untold("context length", "--engine-context-length"))?,
        })
    }

    /// The rank whose KV events are followed: routers know one rank of a worker, so it has to be said where there are several.
    pub(super) fn rank(&self, engine: &'static str, settings: &RemoteSettings) -> Result<u32, ConnectError> {
        match (settings.dp_rank, &self.ranks[..]) {
            (Some(rank), ranks) if ranks.is_empty() || ranks.contains(&rank) => Ok(rank),
            (None, []) => Ok(0),
            (None, [only]) => Ok(*only),
            // Nothing is told of its cache, and its load is that of all of them.
            (None, _) if settings.events.is_none() => Ok(0),
            (_, ranks) => Err(ConnectError::Rank { engine, url: settings.url.clone(), ranks: ranks.to_vec() }),
        }
    }
}
