//! `/healthz`, `/readyz` and `/metrics`.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::election::api::Standing;
use crate::metrics::Metrics;

/// Serves until `shutdown`. Ready means in touch with the API server and the Lease of this name there; a waiting candidate
/// is ready too.
pub async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    lease: String,
    standing: watch::Receiver<Standing>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let ready = move || {
        let answer = readiness(*standing.borrow(), &lease);
        async move { answer }
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

fn readiness(standing: Standing, lease: &str) -> (StatusCode, String) {
    let no = StatusCode::SERVICE_UNAVAILABLE;
    match standing {
        Standing { in_touch: false, .. } => (no, "no answer from the API server\n".into()),
        Standing { lease_missing: true, .. } => (no, format!("Lease {lease} is missing; run helm upgrade\n")),
        _ => (StatusCode::OK, "ok\n".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_names_what_is_missing() {
        let answer = |in_touch, lease_missing| {
            let (status, text) = readiness(Standing { leads: false, in_touch, lease_missing }, "armature");
            (status.as_u16(), text)
        };
        assert_eq!(answer(true, false), (200, "ok\n".into()));
        assert_eq!(answer(true, true), (503, "Lease armature is missing; run helm upgrade\n".into()));
        assert_eq!(answer(false, false), (503, "no answer from the API server\n".into()));
        assert_eq!(answer(false, true), (503, "no answer from the API server\n".into()));
    }
}
