//! The HTTP server: accept loop, connection limits, drain. What is served is in the modules below.
//!
//! Connections are accepted by our own loop, because of `TCP_NODELAY`, the connection limit, the header timeout and a
//! drain that ends. HTTP/1 and HTTP/2 without TLS share the port.

mod admission;
mod body;
mod connection;
mod explain;
mod forward;
mod generate;
mod listener;
pub mod metrics;
mod pace;
mod pages;
mod routes;
mod socket;
mod status;

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::again::Again;
use crate::backend::Backend;
use admission::Admission;
use listener::Listener;
use metrics::FrontendMetrics;
use routes::Frontend;

/// Settings of the frontend.
#[derive(Clone, Debug, clap::Args)]
pub struct FrontendConfig {
    /// Largest request body, in bytes
    #[arg(long, env = "ARMATURE_BODY_LIMIT_BYTES", default_value_t = FrontendConfig::default().body_limit_bytes)]
    pub body_limit_bytes: usize,

    /// Most values and names in a request's JSON, each token id of a prompt among them
    #[arg(long, env = "ARMATURE_MAX_JSON_VALUES", default_value_t = FrontendConfig::default().max_json_values,
        value_parser = at_least_one)]
    pub max_json_values: usize,

    /// Most answers of one request: prompts times `n`
    #[arg(long, env = "ARMATURE_MAX_CHOICES", default_value_t = FrontendConfig::default().max_choices,
        value_parser = at_least_one)]
    pub max_choices: usize,

    /// Silence on a stream after which a comment is sent, in milliseconds; also the longest that a stream's head
    /// waits for the first token
    #[arg(long, env = "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", default_value_t = FrontendConfig::default().keep_alive_ms,
        value_parser = clap::value_parser!(u64).range(10..))]
    pub keep_alive_ms: u64,

    /// Time for a request's head to arrive, in seconds; idle connections are closed after it too
    #[arg(long, env = "ARMATURE_HEADER_TIMEOUT_S", default_value_t = FrontendConfig::default().header_timeout_s,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub header_timeout_s: u64,

    /// Time for a request's body to arrive, in seconds
    #[arg(long, env = "ARMATURE_BODY_TIMEOUT_S", default_value_t = FrontendConfig::default().body_timeout_s,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub body_timeout_s: u64,

    /// Time without progress after which a response that its client does not read is given up, in seconds
    #[arg(long, env = "ARMATURE_WRITE_TIMEOUT_S", default_value_t = FrontendConfig::default().write_timeout_s,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub write_timeout_s: u64,

    /// Most bytes of request bodies being read and tokenized, with what is made of them; further requests are refused
    /// with 429
    #[arg(long, env = "ARMATURE_PREPROCESS_BYTES", default_value_t = FrontendConfig::default().preprocess_bytes,
        value_parser = at_least_one)]
    pub preprocess_bytes: usize,

    /// Most large requests being tokenized; further ones are refused with 429
    #[arg(long, env = "ARMATURE_PREPROCESS_JOBS", default_value_t = FrontendConfig::default().preprocess_jobs,
        value_parser = at_least_one)]
    pub preprocess_jobs: usize,

    /// Most open connections; further ones wait in the listener's queue. The limit on open files may allow fewer
    #[arg(long, env = "ARMATURE_MAX_CONNECTIONS", default_value_t = FrontendConfig::default().max_connections,
        value_parser = at_least_one)]
    pub max_connections: usize,

    /// Time for open requests to finish at shutdown, in seconds; then their streams end with an error
    #[arg(long, env = "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", default_value_t = FrontendConfig::default().drain_timeout_s)]
    pub drain_timeout_s: u64,
}

impl Default for FrontendConfig {
    fn default() -> FrontendConfig {
        FrontendConfig {
            body_limit_bytes: 32 << 20,
            max_json_values: 262_144,
            max_choices: 128,
            keep_alive_ms: 10_000,
            header_timeout_s: 60,
            body_timeout_s: 60,
            write_timeout_s: 60,
            preprocess_bytes: 512 << 20,
            preprocess_jobs: 64,
            max_connections: 16_384,
            drain_timeout_s: 30,
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}

/// Time for streams to deliver their error event after the drain has run out.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves until `shutdown`, then stops accepting, lets open requests finish for `drain_timeout_s`, and returns.
pub async fn serve<B: Backend>(
    listener: TcpListener,
    backend: Arc<B>,
    config: FrontendConfig,
    metrics: Arc<FrontendMetrics>,
    registry: Arc<Registry>,
    shutdown: CancellationToken,
) {
    let drain = Duration::from_secs(config.drain_timeout_s);
    let abort = CancellationToken::new();
    let kill = CancellationToken::new();
    let permits = Arc::new(Semaphore::new(listener::connections(config.max_connections)));
    let mut listener = Listener::new(listener);
    let builder = connection::builder(&config);
    let admission = Admission::new(&config, &metrics);
    let (draining, abort_requests) = (shutdown.clone(), abort.clone());
    let frontend =
        Arc::new(Frontend { backend, config, admission, metrics, registry, draining, abort: abort_requests });
    let connections = TaskTracker::new();
    let accepting = async {
        loop {
            let permit = permits.clone().acquire_owned().await.expect("the semaphore is never closed");
            let stream = listener.accept().await;
            let (frontend, builder) = (frontend.clone(), builder.clone());
            let (shutdown, kill) = (shutdown.clone(), kill.clone());
            connections.spawn(Again::new(async move {
                connection::serve(stream, frontend, builder, shutdown, kill).await;
                drop(permit);
            }));
        }
    };
    tokio::select! {
        () = accepting => {}
        () = shutdown.cancelled() => {}
    }
    drop(listener);
    connections.close();
    tracing::info!(connections = connections.len(), "draining");
    if tokio::time::timeout(drain, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "drain timeout passed; ending the open requests");
        abort.cancel();
        if tokio::time::timeout(LAST_WORDS, connections.wait()).await.is_err() {
            kill.cancel();
            connections.wait().await;
        }
    }
}
