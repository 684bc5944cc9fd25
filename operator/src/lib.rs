//! The operator: turns `ModelDeployment` objects into routers, worker pools and a Service, and says how they are doing.
//!
//! One of several operators is active, elected by a Lease. It never handles requests: routers and workers go on without it.

pub mod apply;
pub mod build;
pub mod config;
pub mod context;
mod controllers;
pub mod deployment;
pub mod election;
pub mod error;
pub mod metrics;
pub mod pool;
pub mod registration;
mod server;
pub mod status;
pub mod validate;

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use config::{Config, Settings};
use context::Context;
use election::Election;
use election::api::Standing;
use metrics::Metrics;

/// Longest wait for a connection to the API server.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest silence of the API server in the middle of an answer. Watches end after 60 s by themselves; one whose server died before
/// it answered would never end otherwise.
const READ: Duration = Duration::from_secs(70);
/// Longest wait for running reconciles, the Lease and open connections at the end.
const END_DEADLINE: Duration = Duration::from_secs(10);

/// Why the operator ended.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// There is no usable configuration of a cluster: not in a pod, and this is what is wrong with the kubeconfig.
    #[error("no Kubernetes cluster: this is no pod, and {0}; set KUBECONFIG, or see the cluster-less `armature up`")]
    Config(String),
    /// A client cannot be made from it.
    #[error("Kubernetes client: {0}")]
    Client(#[from] kube::Error),
}

/// Runs until `shutdown`: takes part in the election, reconciles while elected, serves health and metrics on `listener`.
///
/// The cluster is the one of `KUBECONFIG`, or that of the pod. When leadership is lost, all that runs is dropped at once, since
/// another may act by now, and the operator is a candidate again. It does not end: while the API server is away the kubelet
/// would restart it after longer and longer pauses.
pub async fn run(config: Config, listener: TcpListener, shutdown: CancellationToken) -> Result<(), OperatorError> {
    // Its source is the kubeconfig's error; its own text adds only that the variables of a pod are missing.
    let mut cluster = kube::Config::infer().await.map_err(|error| {
        OperatorError::Config(std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))
    })?;
    cluster.connect_timeout = Some(CONNECT);
    cluster.read_timeout = Some(READ);
    let client = Client::try_from(cluster)?;
    run_with(client, config, listener, shutdown).await
}

/// [`run`] with a client of the caller.
pub async fn run_with(
    client: Client,
    config: Config,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> Result<(), OperatorError> {
    let metrics = Metrics::default();
    let (standing, mut seen) = watch::channel(Standing::default());
    let (tasks, end) = (TaskTracker::new(), CancellationToken::new());
    let election = Election::new(config.identity.clone(), config.lease_duration());
    tasks.spawn(election::api::take_part(
        client.clone(),
        config.lease_namespace.clone(),
        config.lease_name.clone(),
        election,
        standing,
        end.clone(),
    ));
    tasks.spawn(server::serve(listener, metrics.clone(), config.lease_name.clone(), seen.clone(), end.clone()));
    tasks.close();

    let context = Arc::new(Context::new(client, config.settings(), metrics.clone(), config.identity.clone()));
    while !shutdown.is_cancelled() {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = elected(&mut seen) => {
                tracing::info!(identity = config.identity, "elected");
                metrics.leads(true);
                lead(context.clone(), &config, &mut seen, &shutdown).await;
                metrics.leads(false);
            }
        }
    }
    end.cancel();
    if tokio::time::timeout(END_DEADLINE, tasks.wait()).await.is_err() {
        tracing::warn!("connections or the Lease did not end within {} s", END_DEADLINE.as_secs());
    }
    Ok(())
}

/// Runs the controllers for one term.
async fn lead(
    context: Arc<Context>,
    config: &Config,
    seen: &mut watch::Receiver<Standing>,
    shutdown: &CancellationToken,
) {
    let controllers = controllers::run(context, config.namespace.as_deref(), shutdown.clone());
    let ended = async {
        shutdown.cancelled().await;
        tokio::time::sleep(END_DEADLINE).await;
    };
    tokio::select! {
        () = controllers => {}
        () = ended => tracing::warn!("reconciles did not end within {} s", END_DEADLINE.as_secs()),
        // Whatever runs is dropped at once.
        _ = seen.wait_for(|standing| !standing.leads) => {
            tracing::warn!(lease = config.lease_name, "lost the Lease; a candidate again");
        }
    }
}

async fn elected(seen: &mut watch::Receiver<Standing>) {
    if seen.wait_for(|standing| standing.leads).await.is_err() {
        // The election task ends only at our own end.
        std::future::pending::<()>().await;
    }
}
