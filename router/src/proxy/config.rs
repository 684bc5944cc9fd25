//! Flags of a router in front of OpenAI servers, and what they become once they are checked.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kv_hashing::BlockSize;

use crate::config::{ConfigError, SelectionOptions, seconds};
use crate::discovery::static_servers::{EventsOf, ServerUrl, StaticServer};
use crate::index::config::{CachePolicy, IndexOptions};

/// Tokens per block where nobody says.
const BLOCK_SIZE: u32 = 16;

/// Flags for workers that are plain OpenAI servers.
#[derive(Clone, Debug, Args)]
pub struct ProxyConfig {
    /// OpenAI servers to route to, by URL: vLLM, SGLang, llama.cpp or any other; implies --discovery-backend static
    #[arg(long, env = "ARMATURE_WORKERS", value_name = "URL,…", value_delimiter = ',')]
    pub workers: Vec<ServerUrl>,
    /// Directory with the tokenizer.json and chat template of these servers' model; without it prompts are compared as text
    #[arg(long, env = "DYN_MODEL_PATH", value_name = "DIR")]
    pub model_path: Option<PathBuf>,
    /// Model that --model-path belongs to [default: every model of these servers]
    #[arg(long, env = "DYN_MODEL_NAME", value_name = "NAME")]
    pub model_name: Option<String>,
    /// Tokens per KV block of these servers
    #[arg(long, env = "DYN_KV_CACHE_BLOCK_SIZE", default_value_t = BLOCK_SIZE, value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_cache_block_size: u32,
    /// KV blocks of each of these servers' engines [default: not known]
    #[arg(long, env = "ARMATURE_WORKER_KV_BLOCKS", value_name = "BLOCKS", value_parser = clap::value_parser!(u32).range(1..))]
    pub worker_kv_blocks: Option<u32>,
    /// Most tokens in one step of each of these servers' engines [default: not known]
    #[arg(
        long, env = "ARMATURE_WORKER_MAX_BATCHED_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub worker_max_batched_tokens: Option<u32>,
    /// Where such a server publishes its KV events: URL=tcp://HOST:PORT, and ;replay=tcp://HOST:PORT where it sends past
    /// ones again; tcp://*:PORT when it connects to the router. May be given several times
    #[arg(long, env = "ARMATURE_KV_EVENTS_ENDPOINTS", value_name = "URL=ADDRESS,…", value_delimiter = ',')]
    pub kv_events_endpoints: Vec<EventsOf>,
    /// Certificate authorities of https:// servers, in PEM [default: the machine's; SSL_CERT_FILE names others]
    #[arg(long, env = "ARMATURE_WORKER_CA_FILE", value_name = "FILE")]
    pub worker_ca_file: Option<PathBuf>,
    /// Bearer token for the health checks of these servers; requests carry their client's own
    #[arg(long, env = "ARMATURE_WORKER_API_KEY", value_name = "TOKEN", hide_env_values = true)]
    pub worker_api_key: Option<String>,
    /// Time between two health checks of such a server, in seconds
    #[arg(long, env = "ARMATURE_WORKER_CHECK_INTERVAL_SECS", default_value = "5", value_parser = seconds)]
    pub worker_check_interval_secs: Duration,
    /// Deadline of a health check, in seconds
    #[arg(long, env = "ARMATURE_WORKER_CHECK_TIMEOUT_SECS", default_value = "5", value_parser = seconds)]
    pub worker_check_timeout_secs: Duration,
    /// Deadline of an answer that such a server gives as a whole, in seconds
    #[arg(long, env = "ARMATURE_ANSWER_TIMEOUT_SECS", default_value = "1800", value_parser = seconds)]
    pub answer_timeout_secs: Duration,
}

/// Settings that have been checked.
#[derive(Clone, Debug)]
pub struct ProxySettings {
    /// The servers; not empty, each once.
    pub servers: Vec<StaticServer>,
    /// Files of their model.
    pub model: Option<ModelSource>,
    /// Tokens per KV block.
    pub block_size: BlockSize,
    /// KV blocks of each server, if they are known.
    pub total_blocks: Option<u32>,
    /// Most tokens in one step of each server's engine, if it is known.
    pub max_batched_tokens: Option<u32>,
    /// Whom https:// servers are trusted by; `None`: by the machine's authorities.
    pub ca_file: Option<PathBuf>,
    /// Bearer token of health checks.
    pub api_key: Option<String>,
    /// Time between two health checks.
    pub check_interval: Duration,
    /// Deadline of a health check.
    pub check_timeout: Duration,
    /// Deadline of a whole answer.
    pub answer: Duration,
}

/// Where a model's files are, and whose they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// Directory, or the tokenizer.json in it.
    pub path: PathBuf,
    /// The one model that they belong to.
    pub name: Option<String>,
}

impl ProxyConfig {
    /// Checks what needs no network. `events` is whether KV events are to be followed at all.
    pub(crate) fn validate(&self, events: bool) -> Result<ProxySettings, ConfigError> {
        if self.workers.is_empty() {
            return Err(ConfigError::new("--discovery-backend static needs --workers URL,…"));
        }
        let mut servers: Vec<StaticServer> = Vec::with_capacity(self.workers.len());
        for url in &self.workers {
            if servers.iter().any(|server| server.url == *url) {
                return Err(ConfigError::new(format!("--workers names {url} twice")));
            }
            servers.push(StaticServer { url: url.clone(), events: None });
        }
        if self.worker_ca_file.is_some() && !self.workers.iter().any(ServerUrl::is_tls) {
            return Err(ConfigError::new("--worker-ca-file needs an https:// URL among --workers"));
        }
        if let Some(first) = self.kv_events_endpoints.first() {
            if !events {
                return Err(ConfigError::new(
                    "--kv-events-endpoints and --no-router-kv-events contradict each other; drop one",
                ));
            }
            if self.model_path.is_none() {
                let server = &first.server;
                return Err(ConfigError::new(format!(
                    "--kv-events-endpoints for {server} needs --model-path DIR: events name tokens, not text"
                )));
            }
        }
        for EventsOf { server, source } in &self.kv_events_endpoints {
            let listed = servers.iter_mut().find(|listed| listed.url == *server);
            let Some(listed) = listed else {
                return Err(ConfigError::new(format!(
                    "--kv-events-endpoints names {server}, which --workers does not"
                )));
            };
            if listed.events.replace(source.clone()).is_some() {
                return Err(ConfigError::new(format!("--kv-events-endpoints names {server} twice")));
            }
        }
        Ok(ProxySettings { servers, model: self.model()?, ..self.plain() })
    }

    /// Refuses settings that are measured by what these servers do not tell, and nobody said.
    pub(crate) fn can_measure(&self, selection: &SelectionOptions, index: &IndexOptions) -> Result<(), ConfigError> {
        let blocks = (self.worker_kv_blocks.is_some(), "--worker-kv-blocks BLOCKS");
        let batch = (self.worker_max_batched_tokens.is_some(), "--worker-max-batched-tokens TOKENS");
        let lru = index.router_approximate_cache_policy == Some(CachePolicy::Lru);
        let measured = [
            (selection.router_queue_threshold.is_some(), "--router-queue-threshold", batch),
            (selection.active_prefill_tokens_threshold_frac.is_some(), "--active-prefill-tokens-threshold-frac", batch),
            (selection.active_decode_blocks_threshold.is_some(), "--active-decode-blocks-threshold", blocks),
            (lru, "--router-approximate-cache-policy lru", blocks),
        ];
        let lacks = |(given, _, (known, _)): &(bool, &str, (bool, &str))| *given && !known;
        measured.into_iter().find(lacks).map_or(Ok(()), |(_, flag, (_, needed))| {
            Err(ConfigError::new(format!("{flag} needs {needed} with --workers: these servers do not tell theirs")))
        })
    }

    /// What needs no check of its own.
    fn plain(&self) -> ProxySettings {
        ProxySettings {
            servers: Vec::new(),
            model: None,
            block_size: BlockSize::new(self.kv_cache_block_size).expect("its parser refuses 0"),
            total_blocks: self.worker_kv_blocks,
            max_batched_tokens: self.worker_max_batched_tokens,
            ca_file: self.worker_ca_file.clone(),
            api_key: self.worker_api_key.clone(),
            check_interval: self.worker_check_interval_secs,
            check_timeout: self.worker_check_timeout_secs,
            answer: self.answer_timeout_secs,
        }
    }

    fn model(&self) -> Result<Option<ModelSource>, ConfigError> {
        match (&self.model_path, &self.model_name) {
            (Some(path), name) => Ok(Some(ModelSource { path: path.clone(), name: name.clone() })),
            (None, Some(_)) => Err(ConfigError::new("--model-name needs --model-path DIR")),
            (None, None) => Ok(None),
        }
    }

    /// A flag that means nothing without servers, if one was given.
    pub(crate) fn stray(&self) -> Option<&'static str> {
        [
            (self.model_path.is_some(), "--model-path"),
            (self.model_name.is_some(), "--model-name"),
            (!self.kv_events_endpoints.is_empty(), "--kv-events-endpoints"),
            (self.worker_kv_blocks.is_some(), "--worker-kv-blocks"),
            (self.worker_max_batched_tokens.is_some(), "--worker-max-batched-tokens"),
            (self.worker_ca_file.is_some(), "--worker-ca-file"),
            (self.worker_api_key.is_some(), "--worker-api-key"),
        ]
        .into_iter()
        .find_map(|(given, flag)| given.then_some(flag))
    }
}
