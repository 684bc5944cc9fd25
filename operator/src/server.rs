//! `/healthz`, `/readyz` and `/metrics`.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::election::api::Standing;
use crate::metrics::Metrics;

/// Serves until `shutdown`. Ready means in touch with the API server; a waiting candidate is ready too.
pub async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    standing: watch::Receiver<Standing>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let ready = move || {
        let in_touch = standing.borrow().in_touch;
        async move {
            match in_touch {
                true => (StatusCode::OK, "ok\n"),
                false => (StatusCode::SERVICE_UNAVAILABLE, "no answer from the API server\n"),
            }
        }
    };
    let metrics = move || {
        let text = metrics.text();
        async move { ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text) }
    };
    let routes = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics));
    axum::serve(listener, routes).with_graceful_shutdown(shutdown.cancelled_owned()).await
}
