//! The router's flags, under Dynamo's names, and what they become once they are checked.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use routing::{CostConfig, Mode};

use crate::discovery::Source;
use crate::http::FrontendConfig;

/// How a worker is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum RouterMode {
    /// Lowest cost: cached prefix and load.
    #[default]
    Kv,
    /// Each worker in turn.
    RoundRobin,
    /// Any worker.
    Random,
}

/// Where workers are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DiscoveryBackend {
    /// Objects of the Kubernetes API.
    #[default]
    Kubernetes,
    /// One file for each worker in a directory.
    File,
}

/// Flags of the router.
#[derive(Clone, Debug, Args)]
pub struct Config {
    /// Address the HTTP server listens on
    #[arg(long, env = "DYN_HTTP_HOST", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    pub http_host: IpAddr,
    /// Port the HTTP server listens on
    #[arg(long, env = "DYN_HTTP_PORT", default_value_t = 8000)]
    pub http_port: u16,
    /// How a worker is picked
    #[arg(long, env = "DYN_ROUTER_MODE", value_enum, default_value_t)]
    pub router_mode: RouterMode,
    /// Credit for prefix blocks in device memory, 0 to 1; more favours reuse, less favours even load
    #[arg(long, env = "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", default_value_t = CostConfig::default().overlap_score_credit)]
    pub router_kv_overlap_score_credit: f64,
    /// Credit for prefix blocks in host memory
    #[arg(long, env = "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", default_value_t = CostConfig::default().host_cache_hit_weight)]
    pub router_host_cache_hit_weight: f64,
    /// Credit for prefix blocks on disk
    #[arg(long, env = "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", default_value_t = CostConfig::default().disk_cache_hit_weight)]
    pub router_disk_cache_hit_weight: f64,
    /// Credit for blocks of a shared pool beyond what the worker holds
    #[arg(long, env = "DYN_SHARED_CACHE_MULTIPLIER", default_value_t = CostConfig::default().shared_cache_multiplier)]
    pub shared_cache_multiplier: f64,
    /// Factor on the prompt side of the cost
    #[arg(long, env = "DYN_ROUTER_PREFILL_LOAD_SCALE", default_value_t = CostConfig::default().prefill_load_scale)]
    pub router_prefill_load_scale: f64,
    /// 0 picks the lowest cost; above, workers are sampled by softmax over their costs
    #[arg(long, env = "DYN_ROUTER_TEMPERATURE", default_value_t = CostConfig::default().temperature)]
    pub router_temperature: f64,
    /// Follow the workers' KV events
    #[arg(
        long, env = "DYN_ROUTER_USE_KV_EVENTS", default_value = "true", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_kv_events: bool,
    /// Route by load alone
    #[arg(long)]
    pub no_router_kv_events: bool,
    /// Where workers are found
    #[arg(long, env = "DYN_DISCOVERY_BACKEND", value_enum, default_value_t)]
    pub discovery_backend: DiscoveryBackend,
    /// Directory of file discovery
    #[arg(long, env = "DYN_FILE_KV", value_name = "DIR")]
    pub discovery_dir: Option<PathBuf>,
    /// Kubernetes namespace of the workers [default: the router's own]
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,
    /// Only workers of this ModelDeployment
    #[arg(long, env = "ARMATURE_DEPLOYMENT", value_name = "NAME")]
    pub deployment: Option<String>,
    /// Only workers registered under this Dynamo namespace [default: any]
    #[arg(long, env = "DYN_NAMESPACE", value_name = "NAME")]
    pub dyn_namespace: Option<String>,
    /// Deadline of connecting to a worker, in seconds
    #[arg(long, env = "ARMATURE_CONNECT_TIMEOUT_SECS", default_value = "2", value_parser = seconds)]
    pub connect_timeout_secs: Duration,
    /// Deadline of a request's first token, in seconds
    #[arg(long, env = "ARMATURE_FIRST_TOKEN_TIMEOUT_SECS", default_value = "300", value_parser = seconds)]
    pub first_token_timeout_secs: Duration,
    /// Longest silence between two tokens of a request, in seconds
    #[arg(long, env = "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", default_value = "120", value_parser = seconds)]
    pub token_timeout_secs: Duration,
    /// The HTTP frontend
    #[command(flatten)]
    pub frontend: FrontendConfig,
}

/// A contradiction or a value out of range: one line for a person.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct ConfigError(String);

/// Settings that have been checked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How workers are picked.
    pub mode: Mode,
    /// Weights of the cost; valid.
    pub cost: CostConfig,
    /// Follow KV events.
    pub kv_events: bool,
    /// Where workers are found.
    pub source: Source,
    /// Only workers registered under this Dynamo namespace.
    pub dynamo_namespace: Option<String>,
    /// How long things may take.
    pub deadlines: Deadlines,
}

/// How long each stage of a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// TCP connect and handshake with a worker.
    pub connect: Duration,
    /// From sending a request to its first token.
    pub first_token: Duration,
    /// Between two tokens.
    pub token: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let connect = Duration::from_secs(2);
        Self { connect, first_token: Duration::from_secs(300), token: Duration::from_secs(120) }
    }
}

impl Config {
    /// Checks everything that can be checked without touching the network.
    pub fn validate(&self) -> Result<Settings, ConfigError> {
        let cost = CostConfig {
            overlap_score_credit: self.router_kv_overlap_score_credit,
            host_cache_hit_weight: self.router_host_cache_hit_weight,
            disk_cache_hit_weight: self.router_disk_cache_hit_weight,
            shared_cache_multiplier: self.shared_cache_multiplier,
            prefill_load_scale: self.router_prefill_load_scale,
            temperature: self.router_temperature,
        };
        cost.validate().map_err(|error| ConfigError(format!("{} {}", flag_of(error.name), tail(&error))))?;
        let mode = match self.router_mode {
            RouterMode::Kv => Mode::Kv,
            RouterMode::RoundRobin => Mode::RoundRobin,
            RouterMode::Random => Mode::Random,
        };
        let source = match (self.discovery_backend, &self.discovery_dir) {
            (DiscoveryBackend::File, Some(directory)) => Source::File { directory: directory.clone() },
            (DiscoveryBackend::File, None) => {
                return Err(ConfigError("--discovery-backend file needs --discovery-dir DIR".into()));
            }
            (DiscoveryBackend::Kubernetes, _) => {
                Source::Kubernetes { namespace: self.namespace.clone(), deployment: self.deployment.clone() }
            }
        };
        Ok(Settings {
            mode,
            cost,
            kv_events: self.router_kv_events && !self.no_router_kv_events,
            source,
            dynamo_namespace: self.dyn_namespace.clone(),
            deadlines: Deadlines {
                connect: self.connect_timeout_secs,
                first_token: self.first_token_timeout_secs,
                token: self.token_timeout_secs,
            },
        })
    }
}

/// The flag behind a weight.
fn flag_of(name: &str) -> &'static str {
    match name {
        "overlap_score_credit" => "--router-kv-overlap-score-credit",
        "host_cache_hit_weight" => "--router-host-cache-hit-weight",
        "disk_cache_hit_weight" => "--router-disk-cache-hit-weight",
        "shared_cache_multiplier" => "--shared-cache-multiplier",
        "prefill_load_scale" => "--router-prefill-load-scale",
        _ => "--router-temperature",
    }
}

fn tail(error: &routing::CostConfigError) -> String {
    format!("must be {}, not {}", error.range, error.value)
}

/// Seconds, with a fraction; above zero.
fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(number) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("must be above 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        config: Config,
    }

    fn settings(flags: &[&str]) -> Result<Settings, String> {
        let command = Command::try_parse_from([&["router"], flags].concat()).map_err(|e| e.to_string())?;
        command.config.validate().map_err(|e| e.to_string())
    }

    #[test]
    fn the_defaults_are_kv_mode_over_kubernetes() {
        let settings = settings(&[]).expect("valid");
        assert_eq!((settings.mode, settings.kv_events), (Mode::Kv, true));
        assert_eq!(settings.cost, CostConfig::default());
        assert_eq!(settings.deadlines, Deadlines::default());
        assert!(matches!(settings.source, Source::Kubernetes { .. }));
    }

    #[test]
    fn events_can_be_turned_off_both_ways() {
        assert!(!settings(&["--no-router-kv-events"]).expect("valid").kv_events);
        assert!(!settings(&["--router-kv-events=false"]).expect("valid").kv_events);
        assert!(settings(&["--router-kv-events"]).expect("valid").kv_events);
    }

    #[test]
    fn mistakes_are_one_line_that_names_the_flag() {
        let wrong = |flags: &[&str]| settings(flags).map(|_| ()).expect_err("invalid");
        assert_eq!(
            wrong(&["--router-kv-overlap-score-credit", "2"]),
            "--router-kv-overlap-score-credit must be from 0 to 1, not 2"
        );
        assert_eq!(wrong(&["--router-temperature=-1"]), "--router-temperature must be a number of at least 0, not -1");
        assert_eq!(wrong(&["--discovery-backend", "file"]), "--discovery-backend file needs --discovery-dir DIR");
        assert!(wrong(&["--connect-timeout-secs", "0"]).contains("must be above 0"));
    }
}
