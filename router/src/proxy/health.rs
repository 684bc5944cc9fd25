//! The task that looks after one server: health, and the list of its models. One for each, so that a stuck one never delays
//! what is known of the others.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::line::LineError;
use super::server::{Health, Server, listed_models};

/// Failed checks in a row after which a server that answered before counts as down: one slow answer says nothing.
const FAILURES: u32 = 3;

/// First and longest pause after a check that failed.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Most bytes of a page that are read.
const PAGE: usize = 1 << 20;

/// How a server is checked.
#[derive(Clone, Debug)]
pub(super) struct Checks {
    /// Time between two checks.
    pub(super) interval: Duration,
    /// Deadline of one.
    pub(super) timeout: Duration,
    /// Bearer token.
    pub(super) key: Option<String>,
}

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error(transparent)]
    Line(#[from] LineError),
    #[error("{page} answers {status}")]
    Status { page: &'static str, status: u16 },
    #[error("/v1/models is no list of models: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("no answer to a health check in {0:?}")]
    Deadline(Duration),
}

/// Checks for ever.
pub(super) async fn run(server: Arc<Server>, checks: Checks) {
    let (mut failures, mut pause, mut has_health) = (0, BACKOFF.0, true);
    loop {
        let checked = match timeout(checks.timeout, check(&server, &checks, &mut has_health)).await {
            Ok(checked) => checked,
            Err(_) => Err(CheckError::Deadline(checks.timeout)),
        };
        match checked {
            Ok(()) => failures = 0,
            Err(error) => {
                failures += 1;
                tracing::debug!(worker = %server.name, failures, %error, "a health check failed");
                if failures >= FAILURES || server.status().health == Health::Unknown {
                    server.lost(error.to_string(), false);
                }
            }
        }
        server.sweep();
        let wait = if failures == 0 {
            pause = BACKOFF.0;
            checks.interval
        } else {
            let wait = pause.min(checks.interval);
            pause = (pause * 2).min(BACKOFF.1);
            wait
        };
        // A request that could not reach the server makes the next check come at once.
        let _ = timeout(wait, server.suspect.notified()).await;
    }
}

/// One check. `has_health` turns false when the server turns out to have no `/health`.
async fn check(server: &Server, checks: &Checks, has_health: &mut bool) -> Result<(), CheckError> {
    let key = checks.key.as_deref();
    if *has_health {
        match server.get("/health", key, PAGE).await?.0 {
            200..300 => {}
            404 | 405 | 501 => *has_health = false,
            status => return Err(CheckError::Status { page: "/health", status }),
        }
    }
    let (status, page) = server.get("/v1/models", key, PAGE).await?;
    if !(200..300).contains(&status) {
        return Err(CheckError::Status { page: "/v1/models", status });
    }
    server.found(listed_models(&page)?);
    Ok(())
}
