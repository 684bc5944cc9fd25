//! Health and metrics of a worker over HTTP, for probes and people. Requests never come this way.
//!
//! A connection carries one request and has little time for it. When there are too many the oldest goes, so that neither
//! silent connections nor a flood of them keep a probe waiting or use up the process's file descriptors.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Json};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use crate::drain::Drain;
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::registration::Identity;

/// Most connections at once.
const MAX_CONNECTIONS: usize = 64;
/// From accepting to the end of the request's headers.
const HEADERS: Duration = Duration::from_secs(5);
/// From accepting to the end of the answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Longest wait, at the end, for answers that are being written.
const FLUSH: Duration = Duration::from_secs(1);
/// Pause after a failed accept (out of file descriptors, for one).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the admin server tells.
pub struct Admin {
    name: String,
    instance_id: u64,
    boot_epoch: String,
    engine: Arc<dyn Engine>,
    metrics: Arc<Metrics>,
    drain: Arc<Drain>,
    registered: AtomicBool,
}

impl Admin {
    /// Not registered yet.
    pub fn new(
        name: &str,
        identity: &Identity,
        engine: Arc<dyn Engine>,
        metrics: Arc<Metrics>,
        drain: Arc<Drain>,
    ) -> Self {
        let (instance_id, boot_epoch) = (identity.instance_id, identity.boot_epoch.clone());
        Self {
            name: name.to_owned(),
            instance_id,
            boot_epoch,
            engine,
            metrics,
            drain,
            registered: AtomicBool::new(false),
        }
    }

    /// Routers can find the worker from now on.
    pub fn set_registered(&self) {
        self.registered.store(true, Ordering::Release);
    }

    fn phase(&self) -> Phase {
        match (self.drain.is_draining(), self.registered.load(Ordering::Acquire)) {
            (true, _) => Phase::Draining,
            (false, true) => Phase::Ready,
            (false, false) => Phase::Starting,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Starting,
    Ready,
    Draining,
}

#[derive(Serialize)]
struct Health<'a> {
    status: Phase,
    name: &'a str,
    instance_id: u64,
    boot_epoch: &'a str,
    in_flight: usize,
    running: usize,
    waiting: usize,
    active_blocks: usize,
    used_blocks: usize,
    total_blocks: usize,
}

/// Serves `/live`, `/ready`, `/health` and `/metrics` until the drain stops.
pub async fn serve(listener: TcpListener, admin: Arc<Admin>) {
    let drain = admin.drain.clone();
    let routes = axum::Router::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(admin);
    connections(listener, routes, drain).await;
}

/// The same for a process whose worker waits for an engine: it lives, and is not ready, until the drain stops.
pub async fn serve_waiting(listener: TcpListener, drain: Arc<Drain>) {
    let waiting = || async { (StatusCode::SERVICE_UNAVAILABLE, "starting: waiting for the engine\n") };
    let routes = axum::Router::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(waiting))
        .route("/health", get(waiting));
    connections(listener, routes, drain).await;
}

async fn connections(listener: TcpListener, routes: axum::Router, drain: Arc<Drain>) {
    let mut connections = JoinSet::new();
    let mut oldest_first: VecDeque<AbortHandle> = VecDeque::with_capacity(MAX_CONNECTIONS);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = drain.stopped() => break,
        };
        match accepted {
            Ok((socket, _)) => {
                oldest_first.retain(|connection| !connection.is_finished());
                if oldest_first.len() >= MAX_CONNECTIONS
                    && let Some(oldest) = oldest_first.pop_front()
                {
                    tracing::debug!(limit = MAX_CONNECTIONS, "too many admin connections; the oldest ends");
                    oldest.abort();
                }
                oldest_first.push_back(connections.spawn(answer(socket, routes.clone(), drain.clone())));
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed on the admin port");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    let flushed = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(FLUSH, flushed).await.is_err() {
        tracing::debug!("admin connections did not end in time");
    }
}

/// Serves one request.
async fn answer(socket: TcpStream, routes: axum::Router, drain: Arc<Drain>) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADERS).keep_alive(false);
    let mut connection = pin!(http.serve_connection(TokioIo::new(socket), TowerToHyperService::new(routes)));
    let served = tokio::time::timeout(ANSWER, async {
        tokio::select! {
            served = connection.as_mut() => return served,
            () = drain.stopped() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    });
    match served.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "an admin connection ended"),
        Err(_) => tracing::debug!(limit_s = ANSWER.as_secs(), "an admin connection took too long"),
    }
}

async fn ready(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    match admin.phase() {
        Phase::Ready => (StatusCode::OK, "ready\n"),
        Phase::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting: not registered yet\n"),
        Phase::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}

async fn health(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let load = admin.engine.load();
    let health = Health {
        status: admin.phase(),
        name: &admin.name,
        instance_id: admin.instance_id,
        boot_epoch: &admin.boot_epoch,
        in_flight: admin.drain.in_flight(),
        running: load.running,
        waiting: load.waiting,
        active_blocks: load.active_blocks,
        used_blocks: load.used_blocks,
        total_blocks: admin.engine.info().total_blocks,
    };
    Json(health).into_response()
}

async fn metrics(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], admin.metrics.encode(admin.engine.load()))
}
