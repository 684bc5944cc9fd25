//! Flags of the adapters: an engine that is a server beside this worker.
//!
//! vLLM was the first of them: its names of the flags go on to work.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hyper::Uri;
use protocol::vllm_events::EventSource;

use super::{Config, ConfigError, EngineKind};

/// Flags of the adapters.
#[derive(Args, Clone, Debug)]
pub struct RemoteConfig {
    /// With `--engine vllm`, `sglang` or `tensorrt-llm`: the server beside this worker [default: port 8000 of this host; SGLang's
    /// is 30000]
    #[arg(long, visible_alias = "vllm-url")]
    pub engine_url: Option<String>,
    /// With such an engine: directory with the model's tokenizer.json and tokenizer_config.json, or its place in a cache of
    /// Hugging Face's libraries (models--org--name)
    #[arg(long)]
    pub model_path: Option<PathBuf>,
    /// Where vLLM or SGLang publishes its KV events: tcp://HOST:PORT, or tcp://*:PORT if it connects to that port here; add
    /// ;replay=tcp://HOST:PORT where it sends past events again. Without it routers do not know what is cached. TensorRT-LLM is
    /// asked for its events at its own address
    #[arg(long, visible_alias = "vllm-kv-events")]
    pub engine_kv_events: Option<EventSource>,
    /// Data-parallel rank of the engine that this worker stands for; each rank has a worker of its own
    #[arg(long, visible_alias = "vllm-dp-rank")]
    pub engine_dp_rank: Option<u32>,
    /// The engine schedules by priority (vLLM's `--scheduling-policy priority`, SGLang's `--enable-priority-scheduling`): requests
    /// carry theirs
    #[arg(long, visible_alias = "vllm-priority")]
    pub engine_priority: bool,
    /// Tokens per KV block [default: what the engine says; TensorRT-LLM does not]
    #[arg(long, visible_alias = "vllm-block-size")]
    pub engine_block_size: Option<u32>,
    /// KV blocks [default: what the engine says; TensorRT-LLM does not]
    #[arg(long, visible_alias = "vllm-kv-blocks")]
    pub engine_kv_blocks: Option<usize>,
    /// Most tokens of prompt and answer together [default: what the engine says; TensorRT-LLM does not]
    #[arg(long, visible_alias = "vllm-context-length")]
    pub engine_context_length: Option<usize>,
    /// Most sequences in a step of the engine (vLLM's `--max-num-seqs`), which it does not tell
    #[arg(long, default_value_t = 256, visible_alias = "vllm-max-num-seqs")]
    pub engine_max_num_seqs: usize,
    /// Most tokens in a step of the engine (vLLM's `--max-num-batched-tokens`), which it does not tell
    #[arg(long, default_value_t = 8192, visible_alias = "vllm-max-num-batched-tokens")]
    pub engine_max_num_batched_tokens: usize,
    /// Requests beyond `--engine-max-num-seqs` that may wait in the engine; more are refused
    #[arg(long, default_value_t = 1024, visible_alias = "vllm-max-waiting")]
    pub engine_max_waiting: usize,
    /// Time from a request to its first token, in seconds; routers give up sooner
    #[arg(long, default_value_t = 900, visible_alias = "vllm-first-token-s-max")]
    pub engine_first_token_s_max: u64,
    /// Time between two tokens, in seconds; routers give up sooner
    #[arg(long, default_value_t = 300, visible_alias = "vllm-token-s-max")]
    pub engine_token_s_max: u64,
    /// Time, in seconds, in which the engine has to get somewhere with what it computes: it is taken for hung when there is no token
    /// on any stream for so long and nothing else moves, although it says that it is well. Longer than its longest step; shorter
    /// than routers wait for a token (120), so that streams go on elsewhere
    #[arg(long, default_value_t = 60)]
    pub engine_stall_s_max: u64,
    /// Longest wait for the engine to be ready, at the start and after it was lost, in seconds
    #[arg(long, default_value_t = 1800, visible_alias = "vllm-start-s-max")]
    pub engine_start_s_max: u64,
    /// Host of the SGLang beside this worker, as those that decode reach it when it computes prompts [default: --host]. Not tested
    /// with the real engine
    #[arg(long)]
    pub sglang_bootstrap_host: Option<String>,
}

/// Engines that are servers.
const SERVERS: &str = "--engine vllm, sglang or tensorrt-llm";

/// What a server beside a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// `trtllm-serve`.
    TensorRtLlm,
}

impl ServerKind {
    /// The flag that says so.
    fn flag(self) -> &'static str {
        match self {
            Self::Vllm => "--engine vllm",
            Self::Sglang => "--engine sglang",
            Self::TensorRtLlm => "--engine tensorrt-llm",
        }
    }

    /// Where it is unless it was told otherwise.
    fn url(self) -> &'static str {
        match self {
            Self::Vllm | Self::TensorRtLlm => "http://127.0.0.1:8000",
            Self::Sglang => "http://127.0.0.1:30000",
        }
    }
}

impl EngineKind {
    /// The server that the engine is, if it is one.
    pub fn server(self) -> Option<ServerKind> {
        match self {
            Self::BuiltIn | Self::Mocker => None,
            Self::Vllm => Some(ServerKind::Vllm),
            Self::Sglang => Some(ServerKind::Sglang),
            Self::TensorRtLlm => Some(ServerKind::TensorRtLlm),
        }
    }
}

/// Checked settings of an adapter.
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// What is there.
    pub kind: ServerKind,
    /// `http://HOST:PORT`, with a path where the server has one; no slash at its end.
    pub url: String,
    /// Directory of the model's files.
    pub model_path: PathBuf,
    /// KV events.
    pub events: Option<EventSource>,
    /// Where we listen, if the engine connects to us.
    pub events_bind: IpAddr,
    /// Rank.
    pub dp_rank: Option<u32>,
    /// Whether requests carry their priority.
    pub priority: bool,
    /// Tokens per block, if set.
    pub block_size: Option<u32>,
    /// Blocks, if set.
    pub kv_blocks: Option<usize>,
    /// Context, if set.
    pub context_length: Option<usize>,
    /// Most sequences in a step.
    pub max_num_seqs: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Most requests that wait.
    pub max_waiting: usize,
    /// Time from a request to its first token.
    pub first_token_max: Duration,
    /// Time between two tokens.
    pub token_max: Duration,
    /// Time in which it has to get somewhere with what it computes.
    pub stall_max: Duration,
    /// Longest wait for it to be ready.
    pub start_max: Duration,
    /// Host of the server as others reach it.
    pub bootstrap_host: String,
}

impl Config {
    /// The adapter's settings; an error where something is missing or cannot be.
    pub fn remote_settings(&self) -> Result<RemoteSettings, ConfigError> {
        let flags = &self.remote;
        let kind = self.engine.server().ok_or(ConfigError::Missing { flag: SERVERS, by: "an adapter" })?;
        let by = kind.flag();
        let url = url(flags.engine_url.as_deref().unwrap_or(kind.url()))?;
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let local = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let v6 = host.parse::<Ipv6Addr>().is_ok();
        for (flag, value) in [
            ("--engine-block-size", flags.engine_block_size.map(|size| size as usize)),
            ("--engine-kv-blocks", flags.engine_kv_blocks),
            ("--engine-context-length", flags.engine_context_length),
            ("--engine-max-num-seqs", Some(flags.engine_max_num_seqs)),
            ("--engine-max-num-batched-tokens", Some(flags.engine_max_num_batched_tokens)),
            ("--engine-first-token-s-max", Some(flags.engine_first_token_s_max as usize)),
            ("--engine-token-s-max", Some(flags.engine_token_s_max as usize)),
            ("--engine-stall-s-max", Some(flags.engine_stall_s_max as usize)),
            ("--engine-start-s-max", Some(flags.engine_start_s_max as usize)),
        ] {
            if value == Some(0) {
                return Err(ConfigError::Invalid { flag, value: "0".into(), rule: "must be at least 1" });
            }
        }
        Ok(RemoteSettings {
            kind,
            url: url.to_string().trim_end_matches('/').to_owned(),
            model_path: flags.model_path.clone().ok_or(ConfigError::Missing { flag: "--model-path", by })?,
            events: flags.engine_kv_events.clone(),
            events_bind: match (local, v6) {
                (true, true) => Ipv6Addr::LOCALHOST.into(),
                (true, false) => Ipv4Addr::LOCALHOST.into(),
                (false, _) => Ipv4Addr::UNSPECIFIED.into(),
            },
            dp_rank: flags.engine_dp_rank,
            priority: flags.engine_priority,
            block_size: flags.engine_block_size,
            kv_blocks: flags.engine_kv_blocks,
            context_length: flags.engine_context_length,
            max_num_seqs: flags.engine_max_num_seqs,
            max_num_batched_tokens: flags.engine_max_num_batched_tokens,
            max_waiting: flags.engine_max_waiting,
            first_token_max: Duration::from_secs(flags.engine_first_token_s_max),
            token_max: Duration::from_secs(flags.engine_token_s_max),
            stall_max: Duration::from_secs(flags.engine_stall_s_max),
            start_max: Duration::from_secs(flags.engine_start_s_max),
            bootstrap_host: flags.sglang_bootstrap_host.as_ref().unwrap_or(&self.host).clone(),
        })
    }

    pub(super) fn check_remote(&self) -> Result<(), ConfigError> {
        if self.engine.server().is_some() {
            return self.remote_settings().map(drop);
        }
        match &self.remote.model_path {
            Some(_) => Err(ConfigError::Missing { flag: SERVERS, by: "--model-path" }),
            None => Ok(()),
        }
    }
}

/// An address that can be asked without TLS: the server is beside us.
fn url(text: &str) -> Result<Uri, ConfigError> {
    let rule = "must be http://HOST:PORT";
    let invalid = || ConfigError::Invalid { flag: "--engine-url", value: text.to_owned(), rule };
    let text = text.trim_end_matches('/');
    let uri: Uri = text.strip_suffix("/v1").unwrap_or(text).parse().map_err(|_| invalid())?;
    let plain = uri.scheme_str() == Some("http") && uri.query().is_none();
    let host = uri.authority().is_some_and(|at| !at.host().is_empty() && !at.as_str().contains('@'));
    if plain && host { Ok(uri) } else { Err(invalid()) }
}
