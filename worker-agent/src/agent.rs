//! The agent's life: bind, serve, register; then drain, deregister, stop.
//!
//! Wires the parts and orders their starts and ends; each part's work is its own.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_index::local::{LocalIndexer, RingLimits};
use protocol::metadata::WorkerMetadata;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::accelerators;
use crate::admin::{self, Admin};
use crate::config::{Config, ConfigError, Settings};
use crate::drain::Drain;
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::publisher::{self, Publisher, PublisherError};
use crate::registration::{self, Description, Entry, Identity, RegistrationError};
use crate::request_plane::{self, Service};
use crate::transfer;

/// Longest time the servers may take to end once they are told to.
const STOP: Duration = Duration::from_secs(5);

/// What routers must know of the model beside the engine's own properties.
#[derive(Clone, Debug, Default)]
pub struct ModelInfo {
    /// What clients put into `model`.
    pub name: String,
    /// Files that routers fetch, by the names in `protocol::metadata::artifact`.
    pub files: BTreeMap<String, Bytes>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Token put before a completion prompt, where the model wants one.
    pub bos_token_id: Option<u32>,
}

/// The bound ports of an agent.
#[derive(Debug)]
pub struct Listeners {
    /// Request plane.
    pub request: TcpListener,
    /// KV events.
    pub events: TcpListener,
    /// Health and metrics.
    pub admin: TcpListener,
    /// KV transfer.
    pub transfer: TcpListener,
}

/// Why an agent could not start, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Bad settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A port is in use.
    #[error("port {port} on {ip} is in use; choose another with {flag}", port = .address.port(), ip = .address.ip())]
    PortInUse {
        /// Where.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// A port cannot be listened on.
    #[error("listening on {address} ({flag}): {source}")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// KV transfer does not start.
    #[error("KV transfer: {0}")]
    Transfer(std::io::Error),
    /// A bound listener does not work.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
    /// Somebody else has the engine's event stream.
    #[error("the engine's events are taken already")]
    EventsTaken,
    /// Events cannot be published.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
    /// The worker cannot be made known.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// A part ended although nobody asked it to.
    #[error("the {0} ended unexpectedly")]
    Ended(&'static str),
}

impl Listeners {
    /// Binds what the settings say; port 0 takes a free one.
    pub async fn bind(settings: &Settings) -> Result<Self, AgentError> {
        let addresses = settings.bind;
        Ok(Self {
            request: bind(addresses.request, "--port").await?,
            events: bind(addresses.events, "--event-port").await?,
            admin: bind(addresses.admin, "--admin-port").await?,
            transfer: bind(addresses.transfer, "--transfer-port").await?,
        })
    }
}

async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, AgentError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => AgentError::PortInUse { address, flag },
        _ => AgentError::Bind { address, flag, source },
    })
}

/// Runs an agent around `engine` until `shutdown`, then drains it; returns when everything has ended.
///
/// The settings are checked first; callers that bind the listeners themselves check them before that, too. An error after
/// the start also drains what runs.
pub async fn run(
    config: Config,
    engine: Arc<dyn Engine>,
    model: ModelInfo,
    listeners: Listeners,
    shutdown: CancellationToken,
) -> Result<(), AgentError> {
    let settings = config.settings()?;
    let mut agent = Agent::start(&settings, engine, model, listeners).await?;
    let ended = tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        ended = agent.parts.join_next() => Err(early_end(ended)),
    };
    if let Err(error) = &ended {
        tracing::error!(%error, "the agent cannot go on");
    }
    agent.stop(settings.drain_max).await;
    ended
}

/// How a part ended: its name and result.
type Part = (&'static str, Result<(), AgentError>);

fn early_end(joined: Option<Result<Part, tokio::task::JoinError>>) -> AgentError {
    match joined {
        Some(Ok((_, Err(error)))) => error,
        Some(Ok((name, Ok(())))) => AgentError::Ended(name),
        Some(Err(_)) | None => AgentError::Ended("agent's part"),
    }
}

/// The running parts.
struct Agent {
    name: String,
    parts: JoinSet<Part>,
    drain: Arc<Drain>,
    engine: Arc<dyn Engine>,
    metadata: watch::Sender<WorkerMetadata>,
    draining_metadata: WorkerMetadata,
    deregister: CancellationToken,
}

impl Agent {
    async fn start(
        settings: &Settings,
        engine: Arc<dyn Engine>,
        model: ModelInfo,
        listeners: Listeners,
    ) -> Result<Self, AgentError> {
        let publisher = Publisher::bind(listeners.events.into_std()?).await?;
        let events = engine.take_events().ok_or(AgentError::EventsTaken)?;
        let identity = Identity::new(settings);
        let ports = (listeners.request.local_addr()?.port(), publisher.port());
        let admin_address = listeners.admin.local_addr()?;
        let (kv_layout, tier_blocks) = (engine.kv_layout(), engine.tier_blocks());
        let devices = accelerators::inventory();
        let describe = |draining| {
            let (identity, engine, model) = (&identity, engine.info(), &model);
            let kv_layout = kv_layout.as_deref();
            Description { settings, identity, engine, model, kv_layout, tier_blocks, ports, draining, devices }
                .metadata()
        };
        let (metadata, metadata_receiver) = watch::channel(describe(false));
        let draining_metadata = describe(true);
        let entry = Entry::open(settings, &identity).await?;

        let mut metrics = Metrics::new(engine.info());
        engine.register(metrics.registry_mut());
        accelerators::register(devices, metrics.registry_mut());
        let (drain, metrics) = (Arc::new(Drain::default()), Arc::new(metrics));
        let (engine, transfer) = with_transfers(engine, settings, &identity, listeners.transfer, &metrics)?;
        let indexer = Arc::new(Mutex::new(LocalIndexer::new(0, RingLimits::default())));
        let admin = Arc::new(Admin::new(&settings.name, &identity, engine.clone(), metrics.clone(), drain.clone()));
        let source = publisher::Source {
            instance_id: identity.instance_id,
            engine: engine.clone(),
            indexer: indexer.clone(),
            metrics: metrics.clone(),
            drain: drain.clone(),
        };
        tracing::info!(
            name = settings.name,
            instance_id = identity.instance_id,
            boot_epoch = identity.boot_epoch,
            model = model.name,
            port = ports.0,
            event_port = ports.1,
            "worker starts"
        );
        let service = Arc::new(Service::new(identity, engine.clone(), indexer, model.files, metrics, drain.clone()));
        let mut parts = JoinSet::new();
        spawn(&mut parts, "event publisher", async { Ok(publisher.run(source, events).await?) });
        spawn(&mut parts, "request plane", async {
            request_plane::serve(listeners.request, service).await;
            Ok(())
        });
        if let Some(server) = transfer {
            let drain = drain.clone();
            spawn(&mut parts, "KV transfer server", async {
                transfer::serve(server, drain).await;
                Ok(())
            });
        }
        spawn(&mut parts, "admin server", {
            let admin = admin.clone();
            async {
                admin::serve(listeners.admin, admin).await;
                Ok(())
            }
        });
        let deregister = CancellationToken::new();
        let (stop, name) = (deregister.clone(), settings.name.clone());
        spawn(&mut parts, "registration", async move {
            let registered = move || {
                admin.set_registered();
                tracing::info!(name, metrics = %format_args!("http://{admin_address}/metrics"), "registered, ready for requests");
            };
            Ok(registration::hold(entry, metadata_receiver, registered, stop).await?)
        });
        Ok(Self { name: settings.name.clone(), parts, drain, engine, metadata, draining_metadata, deregister })
    }

    /// Drains, deregisters and ends all parts, in this order.
    async fn stop(mut self, drain_max: Duration) {
        tracing::info!(in_flight = self.drain.in_flight(), "draining");
        let until = Instant::now() + drain_max;
        self.metadata.send_replace(self.draining_metadata);
        self.drain.begin();
        if let Err(timeout) = self.drain.finished(drain_max).await {
            tracing::warn!(error = %timeout, "drain cut short");
            self.drain.cut_short(format!(
                "worker {} is shutting down; its drain deadline of {} s passed",
                self.name,
                drain_max.as_secs()
            ));
        }
        // Prompts computed here whose answers go on elsewhere.
        if timeout_at(until, self.engine.unleased()).await.is_err() {
            let leases = self.engine.leases();
            tracing::warn!(leases, limit_s = drain_max.as_secs(), "KV blocks were not fetched before the end");
        }
        self.deregister.cancel();
        self.drain.stop();
        let ended = tokio::time::timeout(STOP, async {
            while let Some(joined) = self.parts.join_next().await {
                match joined {
                    Ok((name, Err(error))) => tracing::warn!(part = name, %error, "ended with an error"),
                    Ok((name, Ok(()))) => tracing::debug!(part = name, "ended"),
                    Err(error) => tracing::error!(%error, "a part panicked"),
                }
            }
        });
        if ended.await.is_err() {
            tracing::warn!(limit_s = STOP.as_secs(), "parts did not end in time; they are cut off");
            self.parts.shutdown().await;
        }
        tracing::info!("stopped");
    }
}

/// Lets an engine whose blocks can be moved exchange them with other workers; others stay as they are.
fn with_transfers(
    engine: Arc<dyn Engine>,
    settings: &Settings,
    identity: &Identity,
    listener: TcpListener,
    metrics: &Metrics,
) -> Result<(Arc<dyn Engine>, Option<transfer::Server>), AgentError> {
    let Some(exchange) = engine.exchange() else { return Ok((engine, None)) };
    let options = transfer::Options {
        address: settings.address(listener.local_addr()?.port()),
        transports: settings.transfer.transports,
        boot_epoch: identity.boot_epoch.clone(),
        revision: settings.kv_revision.clone(),
        lease: settings.transfer.lease,
        timeout: settings.transfer.timeout,
    };
    let opened = transfer::open(engine, exchange, options, listener, metrics.transfer.clone());
    let (engine, server) = opened.map_err(AgentError::Transfer)?;
    Ok((Arc::new(engine), Some(server)))
}

fn spawn(
    parts: &mut JoinSet<Part>,
    name: &'static str,
    part: impl Future<Output = Result<(), AgentError>> + Send + 'static,
) {
    parts.spawn(async move { (name, part.await) });
}
