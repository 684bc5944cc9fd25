//! Whether the server is there and gets anywhere: waits for one that starts, and tells when one is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::http::HttpError;
use super::{Loss, Shared};

/// Time between two checks while all is well, and between two looks at the load.
const CHECK: Duration = Duration::from_secs(1);
/// Pause after a check that failed.
const AGAIN: Duration = Duration::from_millis(200);
/// Failed checks in a row after which the server is lost: one slow answer says nothing.
const FAILURES: u32 = 3;
/// Pause between two looks at a server that starts.
const START: Duration = Duration::from_millis(500);
/// How often it is said that one waits.
const SAY: Duration = Duration::from_secs(10);

/// A server that did not become ready in time.
#[derive(Debug, thiserror::Error)]
#[error("the engine at {url} was not ready after {} s: {last}", limit.as_secs())]
pub struct NotReady {
    /// Where.
    pub url: String,
    /// How long it was waited for.
    pub limit: Duration,
    /// What the last look said.
    pub last: String,
}

/// Looks until `look` succeeds, at most `limit`.
pub(super) async fn wait_until_ready<T, E: std::fmt::Display, F: Future<Output = Result<T, E>>>(
    url: &str,
    limit: Duration,
    mut look: impl FnMut() -> F,
) -> Result<T, NotReady> {
    let (begin, mut said) = (Instant::now(), Instant::now());
    loop {
        let last = match look().await {
            Ok(found) => {
                tracing::info!(url, waited_s = begin.elapsed().as_secs(), "the engine is ready");
                return Ok(found);
            }
            Err(error) => error.to_string(),
        };
        if begin.elapsed() + START > limit {
            return Err(NotReady { url: url.to_owned(), limit, last });
        }
        if said.elapsed() >= SAY {
            said = Instant::now();
            tracing::info!(url, waited_s = begin.elapsed().as_secs(), last, "waiting for the engine");
        }
        sleep(START).await;
    }
}

/// Watches until the server is lost: it is not there any more, or hangs.
pub(super) async fn run(shared: Arc<Shared>) {
    let loss = tokio::select! {
        loss = gone(&shared) => loss,
        loss = hangs(&shared) => loss,
    };
    shared.metrics.lost.inc();
    shared.lose(loss);
}

/// Until the server does not say any more that it is well. Pages that take long say nothing about that.
async fn gone(shared: &Shared) -> Loss {
    let mut failures = 0;
    loop {
        match shared.server.page(shared.dialect.health_path()).await {
            Ok(_) => failures = 0,
            Err(error) => {
                // Where nobody listens, nobody is busy.
                failures += if matches!(error, HttpError::Refused) { 2 } else { 1 };
                shared.metrics.failed_checks.inc();
                tracing::debug!(failures, %error, "a check of the engine failed");
                if failures >= FAILURES {
                    return Loss::Gone(error.to_string());
                }
            }
        }
        let pause = if failures == 0 { CHECK } else { AGAIN };
        // A request that could not reach the server makes the next check come at once.
        let _ = timeout(pause, shared.suspect.notified()).await;
    }
}

/// Follows the load until requests get nowhere.
async fn hangs(shared: &Shared) -> Loss {
    let limit = shared.stall_max;
    loop {
        match shared.server.page(shared.dialect.load_path()).await {
            Ok(page) => {
                let busy = shared.dialect.load(&String::from_utf8_lossy(&page));
                shared.load.said(busy);
                shared.pulse.page(busy.figures(), std::time::Instant::now());
            }
            Err(error) => {
                shared.pulse.no_page();
                shared.metrics.failed_checks.inc();
                tracing::debug!(%error, "the engine does not tell its load");
            }
        }
        if let Some(requests) = shared.pulse.hangs(limit) {
            shared.metrics.hung.inc();
            return Loss::Hung { limit, requests };
        }
        sleep(CHECK).await;
    }
}
