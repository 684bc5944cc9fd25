//! The router as a whole: wires discovery, workers, dispatch and the HTTP frontend, and waits for the end.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, Settings};
use crate::discovery::{self, DiscoveryError, Source};
use crate::dispatch::Dispatcher;
use crate::http::{self, metrics::FrontendMetrics};
use crate::metrics::CoreMetrics;
use crate::proxy::Proxy;
use crate::replicas::{self, ReplicaError, Replicas};
use crate::workers::{self, Cluster};

/// Why a router could not start.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// Settings that contradict each other or are out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Discovery has no source to look at.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
    /// The other routers cannot be told or heard.
    #[error(transparent)]
    Replicas(#[from] ReplicaError),
}

/// The router without its frontend: discovery, workers, index and dispatch.
pub struct Core {
    backend: Arc<Dispatcher>,
    workers: JoinHandle<()>,
    replicas: Option<replicas::Running>,
    stop: CancellationToken,
}

impl Core {
    /// Starts looking for workers. Returns before any is known.
    pub async fn start(settings: &Settings, registry: &mut Registry) -> Result<Self, RouterError> {
        let metrics = Arc::new(CoreMetrics::register(registry));
        let cluster = Arc::new(Cluster::new(&settings.index, settings.deadlines, metrics));
        let stop = CancellationToken::new();
        // What has been started ends with a start that fails.
        let guard = stop.clone().drop_guard();
        let mut dispatcher = Dispatcher::new(cluster.clone(), settings);
        // Told and heard before the first request can be booked.
        let replicas = match &settings.replicas {
            Some(settings) => {
                let (others, replicas) = Replicas::bind(cluster.own, settings.clone(), registry).await?;
                dispatcher.placement().share(others);
                Some(replicas.start(dispatcher.placement().clone(), stop.clone()).await?)
            }
            None => None,
        };
        let silent = dispatcher.placement().clone().forget_silent();
        tokio::spawn(stop.clone().run_until_cancelled_owned(silent));
        let workers = match &settings.source {
            Source::Static(servers) => {
                let placement = dispatcher.placement().clone();
                let proxy = Proxy::start(cluster, placement, settings, servers.clone(), &stop).await;
                let proxy = proxy.map_err(DiscoveryError::from)?;
                dispatcher.set_proxy(proxy.clone());
                tokio::spawn(proxy.run(stop.clone()))
            }
            source => {
                let view = discovery::start(source.clone(), settings.dynamo_namespace.clone(), stop.clone()).await?;
                tokio::spawn(workers::run(cluster, dispatcher.placement().clone(), view, stop.clone()))
            }
        };
        let backend = Arc::new(dispatcher);
        guard.disarm();
        Ok(Self { backend, workers, replicas, stop })
    }

    /// What serves requests.
    pub fn backend(&self) -> &Arc<Dispatcher> {
        &self.backend
    }

    /// Forgets all workers. Requests that still run end first.
    pub async fn stop(self) {
        self.stop.cancel();
        // It ends at its next turn; a panic in it has been reported already.
        let _ = self.workers.await;
        if let Some(replicas) = self.replicas {
            replicas.ended().await;
        }
    }
}

/// Serves on `listener` until `shutdown`, then drains. It listens from the start; `/ready` says no until discovery has
/// delivered its first view, and the requests of other routers are counted.
pub async fn run(config: Config, listener: TcpListener, shutdown: CancellationToken) -> Result<(), RouterError> {
    let settings = config.validate()?;
    let mut registry = Registry::default();
    let frontend = Arc::new(FrontendMetrics::default());
    frontend.register(&mut registry);
    // The core outlives the frontend: requests that are being drained still need their workers.
    let core = Core::start(&settings, &mut registry).await?;
    tracing::info!(
        address = %listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string()),
        mode = settings.selection.selector.mode.as_str(),
        discovery = %settings.source,
        "listening"
    );
    http::serve(listener, core.backend().clone(), config.frontend, frontend, Arc::new(registry), shutdown).await;
    core.stop().await;
    Ok(())
}
