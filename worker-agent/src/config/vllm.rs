//! Flags of the adapter for vLLM.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hyper::Uri;
use protocol::vllm_events::EventSource;

use super::{Config, ConfigError, EngineKind};

/// Flags of the adapter for vLLM.
#[derive(Args, Clone, Debug)]
pub struct VllmConfig {
    /// With `--engine vllm`: the server beside this worker
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub vllm_url: String,
    /// With `--engine vllm`: directory with the model's tokenizer.json and tokenizer_config.json, or its place in a cache of
    /// Hugging Face's libraries (models--org--name)
    #[arg(long)]
    pub model_path: Option<PathBuf>,
    /// Where vLLM publishes its KV events: tcp://HOST:PORT, or tcp://*:PORT if it connects to that port here; add
    /// ;replay=tcp://HOST:PORT where it sends past events again. Without it routers do not know what is cached
    #[arg(long)]
    pub vllm_kv_events: Option<EventSource>,
    /// Data-parallel rank of vLLM that this worker stands for; each rank has a worker of its own
    #[arg(long)]
    pub vllm_dp_rank: Option<u32>,
    /// vLLM schedules by priority (its `--scheduling-policy priority`): requests carry theirs
    #[arg(long)]
    pub vllm_priority: bool,
    /// Tokens per KV block [default: what vLLM says]
    #[arg(long)]
    pub vllm_block_size: Option<u32>,
    /// KV blocks [default: what vLLM says]
    #[arg(long)]
    pub vllm_kv_blocks: Option<usize>,
    /// Most tokens of prompt and answer together [default: what vLLM says]
    #[arg(long)]
    pub vllm_context_length: Option<usize>,
    /// vLLM's `--max-num-seqs`, which it does not tell
    #[arg(long, default_value_t = 256)]
    pub vllm_max_num_seqs: usize,
    /// vLLM's `--max-num-batched-tokens`, which it does not tell
    #[arg(long, default_value_t = 8192)]
    pub vllm_max_num_batched_tokens: usize,
    /// Requests beyond `--vllm-max-num-seqs` that may wait in vLLM; more are refused
    #[arg(long, default_value_t = 1024)]
    pub vllm_max_waiting: usize,
    /// Time from a request to its first token, in seconds; routers give up sooner
    #[arg(long, default_value_t = 900)]
    pub vllm_first_token_s_max: u64,
    /// Time between two tokens, in seconds; routers give up sooner
    #[arg(long, default_value_t = 300)]
    pub vllm_token_s_max: u64,
    /// Longest wait for vLLM to be ready, at the start and after it was lost, in seconds
    #[arg(long, default_value_t = 1800)]
    pub vllm_start_s_max: u64,
}

/// Checked settings of the adapter.
#[derive(Clone, Debug)]
pub struct VllmSettings {
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
    /// Longest wait for it to be ready.
    pub start_max: Duration,
}

impl Config {
    /// The adapter's settings; an error where something is missing or cannot be.
    pub fn vllm_settings(&self) -> Result<VllmSettings, ConfigError> {
        let flags = &self.vllm;
        let by = "--engine vllm";
        let url = url(&flags.vllm_url)?;
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let local = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let v6 = host.parse::<Ipv6Addr>().is_ok();
        for (flag, value) in [
            ("--vllm-block-size", flags.vllm_block_size.map(|size| size as usize)),
            ("--vllm-kv-blocks", flags.vllm_kv_blocks),
            ("--vllm-context-length", flags.vllm_context_length),
            ("--vllm-max-num-seqs", Some(flags.vllm_max_num_seqs)),
            ("--vllm-max-num-batched-tokens", Some(flags.vllm_max_num_batched_tokens)),
            ("--vllm-first-token-s-max", Some(flags.vllm_first_token_s_max as usize)),
            ("--vllm-token-s-max", Some(flags.vllm_token_s_max as usize)),
            ("--vllm-start-s-max", Some(flags.vllm_start_s_max as usize)),
        ] {
            if value == Some(0) {
                return Err(ConfigError::Invalid { flag, value: "0".into(), rule: "must be at least 1" });
            }
        }
        Ok(VllmSettings {
            url: url.to_string().trim_end_matches('/').to_owned(),
            model_path: flags.model_path.clone().ok_or(ConfigError::Missing { flag: "--model-path", by })?,
            events: flags.vllm_kv_events.clone(),
            events_bind: match (local, v6) {
                (true, true) => Ipv6Addr::LOCALHOST.into(),
                (true, false) => Ipv4Addr::LOCALHOST.into(),
                (false, _) => Ipv4Addr::UNSPECIFIED.into(),
            },
            dp_rank: flags.vllm_dp_rank,
            priority: flags.vllm_priority,
            block_size: flags.vllm_block_size,
            kv_blocks: flags.vllm_kv_blocks,
            context_length: flags.vllm_context_length,
            max_num_seqs: flags.vllm_max_num_seqs,
            max_num_batched_tokens: flags.vllm_max_num_batched_tokens,
            max_waiting: flags.vllm_max_waiting,
            first_token_max: Duration::from_secs(flags.vllm_first_token_s_max),
            token_max: Duration::from_secs(flags.vllm_token_s_max),
            start_max: Duration::from_secs(flags.vllm_start_s_max),
        })
    }

    pub(super) fn check_vllm(&self) -> Result<(), ConfigError> {
        if self.engine == EngineKind::Vllm {
            return self.vllm_settings().map(drop);
        }
        match &self.vllm.model_path {
            Some(_) => Err(ConfigError::Missing { flag: "--engine vllm", by: "--model-path" }),
            None => Ok(()),
        }
    }
}

/// An address that can be asked without TLS: the server is beside us.
fn url(text: &str) -> Result<Uri, ConfigError> {
    let rule = "must be http://HOST:PORT";
    let invalid = || ConfigError::Invalid { flag: "--vllm-url", value: text.to_owned(), rule };
    let text = text.trim_end_matches('/');
    let uri: Uri = text.strip_suffix("/v1").unwrap_or(text).parse().map_err(|_| invalid())?;
    let plain = uri.scheme_str() == Some("http") && uri.query().is_none();
    let host = uri.authority().is_some_and(|at| !at.host().is_empty() && !at.as_str().contains('@'));
    if plain && host { Ok(uri) } else { Err(invalid()) }
}
