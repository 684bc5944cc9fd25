//! Flags of the exchange between routers, and what they become once they are checked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::BoolishValueParser;

use crate::config::{ConfigError, seconds};
use crate::discovery::Source;

/// Name of the port in a Service of routers.
pub const SYNC_PORT_NAME: &str = "sync";

/// Port where routers must find each other by an agreed one: in Kubernetes, and in a list.
pub const SYNC_PORT: u16 = 9002;

/// Flags.
#[derive(Clone, Debug, Args)]
pub struct ReplicaOptions {
    /// Share the active load with the other routers [default: where --router-service or --router-peers says who they are]
    #[arg(
        long, env = "DYN_ROUTER_REPLICA_SYNC", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_replica_sync: Option<bool>,
    /// Count own requests only
    #[arg(long)]
    pub no_router_replica_sync: bool,
    /// Other routers, as host:port of their --sync-port; this one may be among them
    #[arg(long, env = "ARMATURE_ROUTER_PEERS", value_name = "HOST:PORT,…", value_delimiter = ',')]
    pub router_peers: Vec<String>,
    /// Headless Service behind which all routers are found; set by the operator
    #[arg(long, env = "ARMATURE_ROUTER_SERVICE", value_name = "NAME")]
    pub router_service: Option<String>,
    /// Port that other routers read from; 0 takes a free one [default: a free one with file discovery, else 9002]
    #[arg(long, env = "ARMATURE_SYNC_PORT", value_name = "PORT")]
    pub sync_port: Option<u16>,
    /// Host or address that other routers reach this one by, with file discovery
    #[arg(long, env = "POD_IP", value_name = "HOST", default_value = "127.0.0.1")]
    pub sync_host: String,
    /// Time without progress after which a request of another router counts no more, in seconds
    #[arg(long, env = "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub active_request_expiry_secs: Duration,
}

/// Where the other routers are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerSource {
    /// At these addresses, `host:port`.
    Listed(Vec<String>),
    /// In files below `routers` in this directory.
    Directory(PathBuf),
    /// Behind a headless Service.
    Service {
        /// Its name.
        name: String,
        /// Its namespace; `None` is the router's own.
        namespace: Option<String>,
    },
}

/// Settings that have been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSettings {
    /// Where the others are.
    pub peers: PeerSource,
    /// Where this router listens; port 0 is any.
    pub bind: SocketAddr,
    /// Host by which the others reach it.
    pub host: String,
    /// How long a request of another router counts without progress.
    pub expiry: Duration,
}

impl ReplicaSettings {
    /// `host:port` by which others reach this router, which listens on `port`.
    pub(super) fn advertised(&self, port: u16) -> String {
        if self.host.contains(':') && !self.host.starts_with('[') {
            format!("[{}]:{port}", self.host)
        } else {
            format!("{}:{port}", self.host)
        }
    }
}

impl ReplicaOptions {
    /// `None` when the routers do not share their load.
    pub(crate) fn validate(&self, source: &Source) -> Result<Option<ReplicaSettings>, ConfigError> {
        if self.router_service.is_some() && !self.router_peers.is_empty() {
            return Err(ConfigError::new("--router-service and --router-peers contradict each other; drop one"));
        }
        let asked = self.router_replica_sync.filter(|_| !self.no_router_replica_sync);
        let named = self.router_service.is_some() || !self.router_peers.is_empty();
        if self.no_router_replica_sync || !asked.unwrap_or(named) {
            return Ok(None);
        }
        let peers = self.peers(source)?;
        let free = matches!(peers, PeerSource::Directory(_));
        let port = self.sync_port.unwrap_or(if free { 0 } else { SYNC_PORT });
        let bind = SocketAddr::new(bind_address(&self.sync_host, free), port);
        let expiry = self.active_request_expiry_secs;
        Ok(Some(ReplicaSettings { peers, bind, host: self.sync_host.clone(), expiry }))
    }

    fn peers(&self, source: &Source) -> Result<PeerSource, ConfigError> {
        if !self.router_peers.is_empty() {
            for peer in &self.router_peers {
                let port = peer
                    .rsplit_once(':')
                    .and_then(|(host, port)| port.parse::<u16>().ok().filter(|_| !host.is_empty()));
                if port.is_none_or(|port| port == 0) {
                    return Err(ConfigError::new(format!("--router-peers needs HOST:PORT, not {peer:?}")));
                }
            }
            return Ok(PeerSource::Listed(self.router_peers.clone()));
        }
        match (source, &self.router_service) {
            (Source::Kubernetes { namespace, .. }, Some(name)) => {
                Ok(PeerSource::Service { name: name.clone(), namespace: namespace.clone() })
            }
            (_, Some(_)) => Err(ConfigError::new("--router-service needs --discovery-backend kubernetes")),
            (Source::File { directory }, None) => Ok(PeerSource::Directory(directory.clone())),
            (_, None) => {
                Err(ConfigError::new("--router-replica-sync needs --router-service NAME or --router-peers HOST:PORT,…"))
            }
        }
    }
}

/// Loopback if this router is only reached over it, else all addresses.
fn bind_address(host: &str, local: bool) -> IpAddr {
    match host.parse::<IpAddr>() {
        Ok(address) if address.is_loopback() && local => address,
        Ok(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: ReplicaOptions,
    }

    fn settings(source: &Source, flags: &[&str]) -> Result<Option<ReplicaSettings>, String> {
        let command = Command::try_parse_from([&["router"], flags].concat()).map_err(|e| e.to_string())?;
        command.options.validate(source).map_err(|e| e.to_string())
    }

    fn file() -> Source {
        Source::File { directory: "d".into() }
    }

    fn kubernetes() -> Source {
        Source::Kubernetes { namespace: Some("ns".into()), deployment: None }
    }

    #[test]
    fn it_is_on_where_the_peers_are_named_and_else_where_asked_for() {
        let on = |source, flags: &[&str]| settings(&source, flags).expect("valid").map(|settings| settings.peers);
        assert_eq!(on(kubernetes(), &[]), None);
        assert_eq!(on(file(), &[]), None);
        let service = PeerSource::Service { name: "chat-router".into(), namespace: Some("ns".into()) };
        assert_eq!(on(kubernetes(), &["--router-service=chat-router"]), Some(service));
        assert_eq!(on(kubernetes(), &["--router-service=chat-router", "--no-router-replica-sync"]), None);
        assert_eq!(on(kubernetes(), &["--router-service=chat-router", "--router-replica-sync=false"]), None);
        assert_eq!(on(file(), &["--router-replica-sync"]), Some(PeerSource::Directory("d".into())));
        let listed = PeerSource::Listed(vec!["a:1".into(), "[::1]:2".into()]);
        assert_eq!(on(file(), &["--router-peers=a:1,[::1]:2"]), Some(listed));
    }

    #[test]
    fn the_port_is_fixed_where_nobody_could_be_told_another() {
        let bound = |source, flags: &[&str]| settings(&source, flags).expect("valid").expect("on").bind.to_string();
        assert_eq!(bound(file(), &["--router-replica-sync"]), "127.0.0.1:0");
        assert_eq!(bound(file(), &["--router-replica-sync", "--sync-host=node-1"]), "0.0.0.0:0");
        assert_eq!(bound(kubernetes(), &["--router-service=s"]), "0.0.0.0:9002");
        assert_eq!(bound(kubernetes(), &["--router-service=s", "--sync-host=fd00::1", "--sync-port=7"]), "[::]:7");
        let on = settings(&file(), &["--router-replica-sync", "--sync-host=fd00::1"]).expect("valid").expect("on");
        assert_eq!(on.advertised(7), "[fd00::1]:7");
    }

    #[test]
    fn contradictions_name_both_flags() {
        let wrong = |source, flags: &[&str]| settings(&source, flags).expect_err("invalid");
        assert_eq!(
            wrong(kubernetes(), &["--router-service=s", "--router-peers=a:1"]),
            "--router-service and --router-peers contradict each other; drop one"
        );
        assert_eq!(wrong(file(), &["--router-service=s"]), "--router-service needs --discovery-backend kubernetes");
        assert!(wrong(kubernetes(), &["--router-replica-sync"]).contains("needs --router-service"));
        assert!(wrong(file(), &["--router-peers=a"]).contains("not \"a\""));
    }
}
