//! The router as a whole: wires discovery, workers, dispatch and the HTTP frontend, and waits for the end.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, Settings};
use crate::discovery::{self, DiscoveryError};
use crate::dispatch::Dispatcher;
use crate::http::{self, metrics::FrontendMetrics};
use crate::metrics::CoreMetrics;
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
}

/// The router without its frontend: discovery, workers, index and dispatch.
pub struct Core {
    backend: Arc<Dispatcher>,
    workers: JoinHandle<()>,
    stop: CancellationToken,
}

impl Core {
    /// Starts looking for workers. Returns before any is known.
    pub async fn start(settings: &Settings, registry: &mut Registry) -> Result<Self, DiscoveryError> {
        let metrics = Arc::new(CoreMetrics::register(registry));
        let cluster = Arc::new(Cluster::new(settings.kv_events, settings.deadlines, metrics));
        let stop = CancellationToken::new();
        let view = discovery::start(settings.source.clone(), settings.dynamo_namespace.clone(), stop.clone()).await?;
        let backend = Arc::new(Dispatcher::new(cluster.clone(), settings));
        let workers = tokio::spawn(workers::run(cluster, view, stop.clone()));
        Ok(Self { backend, workers, stop })
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
    }
}

/// Serves on `listener` until `shutdown`, then drains. It listens from the start; `/ready` says no until discovery has
/// delivered its first view.
pub async fn run(config: Config, listener: TcpListener, shutdown: CancellationToken) -> Result<(), RouterError> {
    let settings = config.validate()?;
    let mut registry = Registry::default();
    let frontend = Arc::new(FrontendMetrics::default());
    frontend.register(&mut registry);
    // The core outlives the frontend: requests that are being drained still need their workers.
    let core = Core::start(&settings, &mut registry).await?;
    http::serve(listener, core.backend().clone(), config.frontend, frontend, Arc::new(registry), shutdown).await;
    core.stop().await;
    Ok(())
}
