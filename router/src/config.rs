//! The router's flags, under Dynamo's names, and what they become once they are checked.

mod disaggregation;
mod selection;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use routing::{ConditionalDisagg, Mode};

use crate::discovery::Source;
use crate::http::FrontendConfig;
use crate::index::config::{IndexOptions, IndexSettings, Told};
use crate::proxy::config::ProxyConfig;
use crate::replicas::options::{ReplicaOptions, ReplicaSettings};
pub use disaggregation::DisaggregationOptions;
pub use selection::{QueueSettings, RouterMode, RouterQueuePolicy, Selection, SelectionOptions};

/// Moves of one stream from worker to worker, where nothing else is said: a rollout of a few workers may hit a long one each time.
const MIGRATION_LIMIT: u32 = 3;

/// Where workers are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiscoveryBackend {
    /// Objects of the Kubernetes API.
    Kubernetes,
    /// One file for each worker in a directory.
    File,
    /// The OpenAI servers of --workers.
    Static,
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
    /// How a worker is picked, and who waits
    #[command(flatten)]
    pub selection: SelectionOptions,
    /// Where workers are found [default: kubernetes, or static where --workers are given]
    #[arg(long, env = "DYN_DISCOVERY_BACKEND", value_enum)]
    pub discovery_backend: Option<DiscoveryBackend>,
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
    /// How often a stream whose worker is lost goes on at another one, and how many workers a request may lose; 0: a stream ends with
    /// an error [default: 3]
    #[arg(long, env = "DYN_MIGRATION_LIMIT", value_name = "MOVES")]
    pub migration_limit: Option<u32>,
    /// Which requests run on two workers
    #[command(flatten)]
    pub disaggregation: DisaggregationOptions,
    /// The KV index
    #[command(flatten)]
    pub index: IndexOptions,
    /// Other routers of the same workers
    #[command(flatten)]
    pub replicas: ReplicaOptions,
    /// Workers that are plain OpenAI servers
    #[command(flatten)]
    pub proxy: ProxyConfig,
    /// The HTTP frontend
    #[command(flatten)]
    pub frontend: FrontendConfig,
}

/// A contradiction or a value out of range: one line for a person.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// Settings that have been checked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How workers are picked, and who waits.
    pub selection: Selection,
    /// Where it is known what workers hold.
    pub index: IndexSettings,
    /// Where workers are found.
    pub source: Source,
    /// How load is shared with other routers, if it is.
    pub replicas: Option<ReplicaSettings>,
    /// Only workers registered under this Dynamo namespace.
    pub dynamo_namespace: Option<String>,
    /// How often a stream may go on at another worker.
    pub migration_limit: u32,
    /// Which requests stay whole although they could run on a prefill and a decode worker; `None`: none of them.
    pub conditional_disagg: Option<ConditionalDisagg>,
    /// How prefill workers are picked; `None`: as all are.
    pub prefill_mode: Option<Mode>,
    /// How long things may take.
    pub deadlines: Deadlines,
}

impl Settings {
    /// The defaults, with workers from `source`.
    pub fn new(source: Source) -> Self {
        Self {
            selection: Selection::default(),
            index: IndexSettings::default(),
            source,
            replicas: None,
            dynamo_namespace: None,
            migration_limit: MIGRATION_LIMIT,
            conditional_disagg: None,
            prefill_mode: None,
            deadlines: Deadlines::default(),
        }
    }
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
        let kv_events = self.selection.kv_events();
        let source = self.source(kv_events)?;
        let told = match &source {
            _ if self.selection.load_aware => Told::LoadAlone,
            _ if !kv_events => Told::ByNobody,
            Source::Static(proxy) if proxy.servers.iter().any(|server| server.events.is_none()) => Told::BySome,
            _ => Told::ByAll,
        };
        Ok(Settings {
            selection: self.selection.validate()?,
            index: self.index.validate(told)?,
            replicas: self.replicas.validate(&source)?,
            source,
            dynamo_namespace: self.dyn_namespace.clone(),
            migration_limit: self.migration_limit.unwrap_or(MIGRATION_LIMIT),
            conditional_disagg: self.disaggregation.validate()?,
            prefill_mode: self.disaggregation.prefill_mode()?,
            deadlines: Deadlines {
                connect: self.connect_timeout_secs,
                first_token: self.first_token_timeout_secs,
                token: self.token_timeout_secs,
            },
        })
    }

    fn source(&self, kv_events: bool) -> Result<Source, ConfigError> {
        let listed = !self.proxy.workers.is_empty();
        let backend = match (self.discovery_backend, listed) {
            (None, true) | (Some(DiscoveryBackend::Static), _) => {
                if self.discovery_dir.is_some() {
                    return Err(ConfigError::new("--workers and --discovery-dir contradict each other; drop one"));
                }
                if let Some(flag) = self.of_agents() {
                    return Err(ConfigError::new(format!(
                        "{flag} is about workers with an agent, and --workers are servers without; drop one"
                    )));
                }
                let servers = self.proxy.validate(kv_events)?;
                self.proxy.can_measure(&self.selection, &self.index)?;
                return Ok(Source::Static(servers.into()));
            }
            (Some(other), true) => {
                let other = if other == DiscoveryBackend::File { "file" } else { "kubernetes" };
                return Err(ConfigError::new(format!(
                    "--workers and --discovery-backend {other} contradict each other; drop one"
                )));
            }
            (other, false) => other.unwrap_or(DiscoveryBackend::Kubernetes),
        };
        if let Some(flag) = self.proxy.stray() {
            return Err(ConfigError::new(format!("{flag} needs --workers URL,…")));
        }
        match (backend, &self.discovery_dir) {
            (DiscoveryBackend::File, Some(directory)) => Ok(Source::File { directory: directory.clone() }),
            (DiscoveryBackend::File, None) => {
                Err(ConfigError::new("--discovery-backend file needs --discovery-dir DIR"))
            }
            (_, Some(_)) => {
                Err(ConfigError::new("--discovery-dir needs --discovery-backend file; add that, or drop it"))
            }
            (_, None) => {
                Ok(Source::Kubernetes { namespace: self.namespace.clone(), deployment: self.deployment.clone() })
            }
        }
    }

    /// A flag that was given and does nothing where requests go to OpenAI servers as they are.
    fn of_agents(&self) -> Option<&'static str> {
        let given = [
            (self.migration_limit.is_some(), "--migration-limit (DYN_MIGRATION_LIMIT)"),
            (self.disaggregation.router_prefill_mode.is_some(), "--router-prefill-mode (ARMATURE_ROUTER_PREFILL_MODE)"),
            (
                self.disaggregation.router_conditional_disagg,
                "--router-conditional-disagg (DYN_ROUTER_CONDITIONAL_DISAGG)",
            ),
        ];
        given.into_iter().find_map(|(given, flag)| given.then_some(flag))
    }
}

/// Seconds, with a fraction; above zero.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
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
        assert_eq!((settings.selection, settings.index.events), (Selection::default(), true));
        assert_eq!((settings.deadlines, settings.migration_limit), (Deadlines::default(), 3));
        assert!(matches!(settings.source, Source::Kubernetes { .. }));
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
        for backend in [&[] as &[&str], &["--discovery-backend=kubernetes"]] {
            assert_eq!(
                wrong(&[backend, &["--discovery-dir=d"]].concat()),
                "--discovery-dir needs --discovery-backend file; add that, or drop it"
            );
        }
        for flag in ["--migration-limit=1", "--router-prefill-mode=kv", "--router-conditional-disagg"] {
            let error = wrong(&["--workers=http://a:1", flag]);
            let name = flag.split('=').next().expect("a name");
            assert!(error.starts_with(name) && error.contains("--workers"), "{error}");
        }
        assert!(wrong(&["--connect-timeout-secs", "0"]).contains("must be above 0"));
    }

    #[test]
    fn workers_are_a_static_list_unless_something_else_is_asked_for() {
        let servers = |flags: &[&str]| match settings(flags).map(|settings| settings.source) {
            Ok(Source::Static(proxy)) => proxy.servers.iter().map(|server| server.url.to_string()).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        let expected = ["http://a:8000", "http://b:8000"];
        assert_eq!(servers(&["--workers", "http://a:8000,http://b:8000/v1"]), expected);
        assert_eq!(servers(&["--discovery-backend=static", "--workers=http://a:8000", "--workers=b:8000"]), expected);
        let wrong = |flags: &[&str]| settings(flags).map(|_| ()).expect_err("invalid");
        assert_eq!(
            wrong(&["--workers=a:1", "--discovery-backend=file"]),
            "--workers and --discovery-backend file contradict each other; drop one"
        );
        assert_eq!(
            wrong(&["--workers=a:1", "--discovery-dir=d"]),
            "--workers and --discovery-dir contradict each other; drop one"
        );
        assert_eq!(wrong(&["--discovery-backend=static"]), "--discovery-backend static needs --workers URL,…");
        assert_eq!(wrong(&["--workers=a:1,http://a:1/v1"]), "--workers names http://a:1 twice");
        assert_eq!(wrong(&["--model-path=d"]), "--model-path needs --workers URL,…");
        assert_eq!(wrong(&["--workers=a:1", "--model-name=m"]), "--model-name needs --model-path DIR");
        assert!(wrong(&["--workers=http://a:1", "--worker-ca-file=f"]).contains("needs an https:// URL"));
    }

    #[test]
    fn by_load_alone_nothing_is_guessed() {
        let index = |flags: &[&str]| settings(flags).expect("valid").index;
        for flags in [&["--load-aware"][..], &["--load-aware", "--workers=a:1"]] {
            assert_eq!((index(flags).events, index(flags).guesses), (false, None));
        }
        assert!(index(&["--no-router-kv-events"]).guesses.is_some());
    }

    #[test]
    fn what_servers_do_not_tell_has_to_be_given() {
        let threshold = "--router-queue-threshold=1";
        let with = |flags: &[&str]| settings(&[&["--workers=a:1"], flags].concat());
        for (flag, needed) in [
            (threshold, "--worker-max-batched-tokens"),
            ("--active-prefill-tokens-threshold-frac=2", "--worker-max-batched-tokens"),
            ("--active-decode-blocks-threshold=0.5", "--worker-kv-blocks"),
            ("--router-approximate-cache-policy=lru", "--worker-kv-blocks"),
        ] {
            let error = with(&[flag]).expect_err("refused");
            let name = flag.split('=').next().unwrap_or(flag);
            for part in [name, needed, "--workers"] {
                assert!(error.contains(part), "{error}");
            }
            with(&[flag, &format!("{needed}=100")]).unwrap_or_else(|error| panic!("{error}"));
        }
        with(&["--active-prefill-tokens-threshold=100"]).expect("a number of tokens needs nothing");
        let stray = settings(&["--worker-kv-blocks=5"]).expect_err("refused");
        assert_eq!(stray, "--worker-kv-blocks needs --workers URL,…");
    }

    #[test]
    fn kv_events_need_a_server_and_a_tokenizer() {
        let events = "--kv-events-endpoints=http://a:1=tcp://a:5557;replay=tcp://a:5558";
        let with = |flags: &[&str]| settings(&[&["--workers=a:1,b:1", events], flags].concat());
        let Ok(Source::Static(proxy)) = with(&["--model-path=d"]).map(|settings| settings.source) else { panic!() };
        assert_eq!(proxy.servers[0].events.as_ref().map(|events| events.address.as_str()), Some("tcp://a:5557"));
        assert!(proxy.servers[1].events.is_none());
        let wrong = |flags: &[&str]| with(flags).map(|_| ()).expect_err("invalid");
        assert!(wrong(&[]).contains("needs --model-path DIR"));
        assert_eq!(
            wrong(&["--model-path=d", "--no-router-kv-events"]),
            "--kv-events-endpoints and --no-router-kv-events contradict each other; drop one"
        );
        assert_eq!(
            wrong(&["--model-path=d", "--kv-events-endpoints=c:1=tcp://c:2"]),
            "--kv-events-endpoints names http://c:1, which --workers does not"
        );
    }
}
