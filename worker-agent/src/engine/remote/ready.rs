//! From a server that starts to an engine: waited for, asked for its sizes, taken over.

use std::fmt;

use kv_hashing::BlockSize;

use super::dialect::Dialect;
use super::http::Server;
use super::metrics::RemoteMetrics;
use super::watch::NotReady;
use super::{Remote, RemoteOptions, sglang, trtllm, vllm};
use crate::config::{RemoteSettings, ServerKind};
use crate::engine::EngineInfo;

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It did not become ready.
    #[error(transparent)]
    NotReady(#[from] NotReady),
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

impl Ready {
    /// Makes it an engine. Must be called inside a Tokio runtime.
    pub fn start(self, settings: &RemoteSettings, eos_token_ids: Vec<u32>, metrics: RemoteMetrics) -> Remote {
        let Self { server, info, dialect, .. } = self;
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
        Remote::start(server, dialect, options, metrics)
    }
}

/// What a server says of its sizes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    /// Tokens of a block.
    pub(super) block_size: Option<usize>,
    /// Blocks on the device.
    pub(super) blocks: Option<usize>,
    /// Most tokens of prompt and answer together.
    pub(super) context_length: Option<usize>,
}

impl Sizes {
    /// Fixed properties: what was set, else what the server says.
    pub(super) fn info(self, engine: &'static str, settings: &RemoteSettings) -> Result<EngineInfo, ConnectError> {
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
}
