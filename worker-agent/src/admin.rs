//! Health and metrics of a worker over HTTP, for probes and people. Requests never come this way.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Json};
use axum::routing::get;
use serde::Serialize;
use tokio::net::TcpListener;

use crate::drain::Drain;
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::registration::Identity;

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
pub async fn serve(listener: TcpListener, admin: Arc<Admin>) -> io::Result<()> {
    let drain = admin.drain.clone();
    let routes = axum::Router::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(admin);
    axum::serve(listener, routes).with_graceful_shutdown(async move { drain.stopped().await }).await
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
