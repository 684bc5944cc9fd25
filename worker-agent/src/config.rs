//! Settings of a worker: flags with environment fallbacks, and the check that turns them into [`Settings`].
//!
//! Everything is checked here, before any port is bound; nothing here opens a file or a connection, but for a look whether NIXL's
//! library is there. Flags of the engine are only carried: whoever opens the engine reads them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::engine::builtin::compute::{Compute, NotBuilt};

mod mocker;
mod remote;
mod tiers;
mod transfer;

pub use mocker::MockerConfig;
pub use remote::{RemoteConfig, RemoteSettings, ServerKind};
pub use tiers::TierConfig;
pub use transfer::{TransferConfig, TransferSettings};

/// Flags of a worker.
#[derive(Args, Clone, Debug)]
pub struct Config {
    /// Name of this worker, unique in its namespace; in Kubernetes the pod's name
    #[arg(long, env = "POD_NAME")]
    pub name: String,
    /// Namespace of the deployment in discovery
    #[arg(long, env = "DYN_NAMESPACE", default_value = "default")]
    pub namespace: String,
    /// Component in discovery [default: `prefill` for that role, else `backend`]
    #[arg(long)]
    pub component: Option<String>,
    /// What this worker does for a request
    #[arg(long, value_enum, default_value_t = Role::Aggregated)]
    pub role: Role,
    /// What clients put into "model" [default: the name inside the model file]
    #[arg(long)]
    pub model_name: Option<String>,
    /// Host or address that routers reach this worker by
    #[arg(long, env = "POD_IP", default_value = "127.0.0.1")]
    pub host: String,
    /// Address to listen on [default: loopback if --host is, else all]
    #[arg(long)]
    pub bind: Option<IpAddr>,
    /// Port of the request plane; 0 takes a free one
    #[arg(long, default_value_t = 9000)]
    pub port: u16,
    /// Port of KV events (ZeroMQ); 0 takes a free one
    #[arg(long, default_value_t = 9001)]
    pub event_port: u16,
    /// Port of health and metrics; 0 takes a free one
    #[arg(long, default_value_t = 9090)]
    pub admin_port: u16,
    /// Where this worker makes itself known
    #[arg(long, env = "DYN_DISCOVERY_BACKEND", value_enum, default_value_t = DiscoveryBackend::Kubernetes)]
    pub discovery_backend: DiscoveryBackend,
    /// Directory of file discovery
    #[arg(long, env = "DYN_FILE_KV")]
    pub discovery_dir: Option<PathBuf>,
    /// UID of this pod
    #[arg(long, env = "POD_UID", hide = true)]
    pub pod_uid: Option<String>,
    /// Kubernetes namespace of this pod
    #[arg(long, env = "POD_NAMESPACE", hide = true)]
    pub pod_namespace: Option<String>,
    /// Longest wait for running requests at shutdown, in seconds
    #[arg(long, default_value_t = 30)]
    pub drain_s_max: u64,
    /// What computes
    #[arg(long, value_enum, default_value_t = EngineKind::BuiltIn)]
    pub engine: EngineKind,
    /// What the built-in engine computes on: cpu, or cuda or cuda:NUMBER where this program was built for it (candle-cpu: what a
    /// GPU would compute, on the processor)
    #[arg(long, default_value_t = Compute::Cpu)]
    pub device: Compute,
    /// Tokens per KV block: 16, 32 or 64
    #[arg(long, default_value_t = 16)]
    pub block_size: u32,
    /// KV blocks in the arena; one takes layers × KV heads × head size × block size × 4 bytes (360 KiB with the default model)
    #[arg(long, default_value_t = 4096)]
    pub kv_blocks: usize,
    /// Threads that compute [default: one per core]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Most sequences in one engine step
    #[arg(long, default_value_t = 32)]
    pub max_num_seqs: usize,
    /// Most tokens in one engine step
    #[arg(long, default_value_t = 512)]
    pub max_num_batched_tokens: usize,
    /// Revision of the pod template
    #[arg(long, default_value = "")]
    pub revision: String,
    /// Free labels for filters, as key=value; may be repeated
    #[arg(long = "labels", value_name = "KEY=VALUE", value_delimiter = ',')]
    pub labels: Vec<String>,
    /// KV transfer
    #[command(flatten)]
    pub transfer: TransferConfig,
    /// KV blocks below the arena
    #[command(flatten)]
    pub tiers: TierConfig,
    /// The mocker
    #[command(flatten)]
    pub mocker: MockerConfig,
    /// A server beside this worker
    #[command(flatten)]
    pub remote: RemoteConfig,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// The model, on the CPU.
    BuiltIn,
    /// Nothing: the built-in engine's scheduler and blocks with a timing model. For tests and benchmarks.
    Mocker,
    /// An unmodified vLLM server beside this worker.
    Vllm,
    /// An unmodified SGLang server beside this worker. Not tested with the real engine.
    Sglang,
    /// An unmodified trtllm-serve beside this worker. Not tested with the real engine.
    #[value(name = "tensorrt-llm")]
    TensorRtLlm,
}

/// What a worker does for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Prefill and decode.
    Aggregated,
    /// Computes prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl Role {
    /// As a model card has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Where workers make themselves known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiscoveryBackend {
    /// A JSON file per worker in a directory.
    File,
    /// A `DynamoWorkerMetadata` object per worker.
    Kubernetes,
}

/// Checked settings of the agent.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Unique in the namespace; a valid file and object name.
    pub name: String,
    /// Namespace in discovery.
    pub namespace: String,
    /// Component in discovery.
    pub component: String,
    /// Role.
    pub role: Role,
    /// Host that routers connect to; an IPv6 address without brackets.
    pub host: String,
    /// Listening addresses.
    pub bind: BindAddresses,
    /// Discovery.
    pub discovery: Discovery,
    /// Longest wait for running requests at shutdown.
    pub drain_max: Duration,
    /// Revision of the pod template.
    pub revision: String,
    /// Workers exchange KV only with those of the same one.
    pub kv_revision: String,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// KV transfer.
    pub transfer: TransferSettings,
}

impl Settings {
    /// How others reach one of the worker's ports.
    pub fn address(&self, port: u16) -> String {
        let host = &self.host;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

/// Where the servers listen.
#[derive(Clone, Copy, Debug)]
pub struct BindAddresses {
    /// Request plane.
    pub request: SocketAddr,
    /// KV events.
    pub events: SocketAddr,
    /// Health and metrics.
    pub admin: SocketAddr,
    /// KV transfer.
    pub transfer: SocketAddr,
}

/// A discovery backend with what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// Files in this directory.
    File(PathBuf),
    /// An object owned by this pod.
    Kubernetes(Pod),
}

/// The pod that this process runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// UID.
    pub uid: String,
}

/// Why settings are refused: one line for the person who wrote them.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A value that cannot work.
    #[error("{flag} {value:?}: {rule}")]
    Invalid {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// Something that another setting needs.
    #[error("{by} needs {flag}")]
    Missing {
        /// The flag or variable that is missing.
        flag: &'static str,
        /// What needs it.
        by: &'static str,
    },
    /// Two settings that exclude each other.
    #[error("{0} and {1} contradict each other; drop one")]
    Contradiction(&'static str, &'static str),
    /// Something that this program was built without.
    #[error(transparent)]
    NotBuilt(#[from] NotBuilt),
}

impl Config {
    /// Checks everything that can be checked without opening anything.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        self.check_names()?;
        self.check_engine()?;
        let host = self.host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let default_component = if self.role == Role::Prefill { "prefill" } else { "backend" };
        Ok(Settings {
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            component: self.component.clone().unwrap_or_else(|| default_component.to_owned()),
            role: self.role,
            bind: self.bind_addresses(&host)?,
            host,
            discovery: self.discovery()?,
            drain_max: Duration::from_secs(self.drain_s_max),
            revision: self.revision.clone(),
            kv_revision: self.transfer.kv_revision.as_ref().unwrap_or(&self.revision).clone(),
            labels: self.labels()?,
            transfer: self.transfer_settings()?,
        })
    }

    fn check_names(&self) -> Result<(), ConfigError> {
        let rule = "must be 1 to 253 letters, digits, '-', '_' or '.', and start with a letter or digit";
        let named = [
            ("--name", Some(&self.name)),
            ("--namespace", Some(&self.namespace)),
            ("--component", self.component.as_ref()),
        ];
        for (flag, value) in named {
            if let Some(value) = value.filter(|value| !is_name(value)) {
                return Err(ConfigError::Invalid { flag, value: value.clone(), rule });
            }
        }
        match &self.model_name {
            Some(name) if name.trim().is_empty() => {
                Err(ConfigError::Invalid { flag: "--model-name", value: name.clone(), rule: "must not be empty" })
            }
            _ => Ok(()),
        }
    }

    fn check_engine(&self) -> Result<(), ConfigError> {
        if ![16, 32, 64].contains(&self.block_size) {
            let value = self.block_size.to_string();
            return Err(ConfigError::Invalid { flag: "--block-size", value, rule: "must be 16, 32 or 64" });
        }
        let counts = [
            ("--kv-blocks", Some(self.kv_blocks)),
            ("--threads", self.threads),
            ("--max-num-seqs", Some(self.max_num_seqs)),
            ("--max-num-batched-tokens", Some(self.max_num_batched_tokens)),
        ];
        for (flag, value) in counts {
            if value == Some(0) {
                return Err(ConfigError::Invalid { flag, value: "0".into(), rule: "must be at least 1" });
            }
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let value = self.max_num_batched_tokens.to_string();
            let rule = "must be at least --max-num-seqs: each running sequence takes one token of a step";
            return Err(ConfigError::Invalid { flag: "--max-num-batched-tokens", value, rule });
        }
        if self.device != Compute::Cpu && self.engine != EngineKind::BuiltIn {
            return Err(ConfigError::Missing { flag: "--engine built-in", by: "--device" });
        }
        self.device.check()?;
        self.tiers()?;
        self.mocker.check()?;
        self.check_remote()
    }

    fn bind_addresses(&self, host: &str) -> Result<BindAddresses, ConfigError> {
        let address = host.parse::<IpAddr>().ok();
        let unusable =
            host.is_empty() || host.contains(['/', ' ', '[', ']']) || (host.contains(':') && address.is_none());
        if unusable || address.is_some_and(|address| address.is_unspecified()) {
            let rule = "must be a host or address that routers can connect to, without a port";
            return Err(ConfigError::Invalid { flag: "--host", value: self.host.clone(), rule });
        }
        let loopback = address.is_some_and(|address| address.is_loopback()) || host == "localhost";
        let ip = self.bind.unwrap_or(match address {
            Some(address) if loopback => address,
            None if loopback => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        });
        let ports = [
            ("--port", self.port),
            ("--event-port", self.event_port),
            ("--admin-port", self.admin_port),
            ("--transfer-port", self.transfer_port()),
        ];
        for (index, &(flag, port)) in ports.iter().enumerate() {
            if port != 0 && ports[..index].iter().any(|other| other.1 == port) {
                let rule = "is another port of this worker already";
                return Err(ConfigError::Invalid { flag, value: port.to_string(), rule });
            }
        }
        let [request, events, admin, transfer] = ports.map(|(_, port)| SocketAddr::new(ip, port));
        Ok(BindAddresses { request, events, admin, transfer })
    }

    fn discovery(&self) -> Result<Discovery, ConfigError> {
        match self.discovery_backend {
            DiscoveryBackend::File => {
                let by = "--discovery-backend file";
                let dir = self.discovery_dir.clone().ok_or(ConfigError::Missing { flag: "--discovery-dir", by })?;
                Ok(Discovery::File(dir))
            }
            DiscoveryBackend::Kubernetes if self.discovery_dir.is_some() => {
                Err(ConfigError::Contradiction("--discovery-backend kubernetes", "--discovery-dir"))
            }
            DiscoveryBackend::Kubernetes => {
                let by = "--discovery-backend kubernetes (outside a pod use --discovery-backend file)";
                let uid = self.pod_uid.clone().ok_or(ConfigError::Missing { flag: "POD_UID", by })?;
                let namespace = self.pod_namespace.clone().ok_or(ConfigError::Missing { flag: "POD_NAMESPACE", by })?;
                Ok(Discovery::Kubernetes(Pod { name: self.name.clone(), namespace, uid }))
            }
        }
    }

    fn labels(&self) -> Result<BTreeMap<String, String>, ConfigError> {
        let mut labels = BTreeMap::new();
        for label in &self.labels {
            let invalid = |rule| ConfigError::Invalid { flag: "--labels", value: label.clone(), rule };
            let (key, value) = label.split_once('=').ok_or_else(|| invalid("must be key=value"))?;
            if key.is_empty() {
                return Err(invalid("must have a key before '='"));
            }
            if labels.insert(key.to_owned(), value.to_owned()).is_some() {
                return Err(invalid("gives a key twice"));
            }
        }
        Ok(labels)
    }
}

fn is_name(text: &str) -> bool {
    let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    text.len() <= 253 && text.bytes().all(valid) && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests;
