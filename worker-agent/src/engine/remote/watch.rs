//! Whether the server is there: waits for one that starts, and tells when one is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::Shared;
use super::http::{HttpError, Server};

/// Time between two checks while all is well; the load is asked for with each.
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

/// Checks until the server is lost.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut failures = 0;
    loop {
        match check(&shared.server, &shared).await {
            Ok(()) => failures = 0,
            Err(error) => {
                // Where nobody listens, nobody is busy.
                failures += if matches!(error, HttpError::Refused) { 2 } else { 1 };
                shared.metrics.failed_checks.inc();
                tracing::debug!(failures, %error, "a check of the engine failed");
                if failures >= FAILURES {
                    shared.metrics.lost.inc();
                    return shared.lose(error.to_string());
                }
            }
        }
        let pause = if failures == 0 { CHECK } else { AGAIN };
        // A request that could not reach the server makes the next check come at once.
        let _ = timeout(pause, shared.suspect.notified()).await;
    }
}

/// One check.
async fn check(server: &Server, shared: &Shared) -> Result<(), HttpError> {
    server.page(shared.dialect.health_path()).await?;
    let page = server.page(shared.dialect.load_path()).await?;
    shared.load.said(shared.dialect.load(&String::from_utf8_lossy(&page)));
    Ok(())
}
