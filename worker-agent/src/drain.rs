//! From serving to gone: new requests are refused, running ones finish, then connections end.

use std::sync::OnceLock;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The place of one running request; dropping it ends the request in the drain's eyes.
pub type Admitted = TaskTrackerToken;

/// How far a worker is on its way out. Shared by all its servers.
#[derive(Debug, Default)]
pub struct Drain {
    draining: CancellationToken,
    stopped: CancellationToken,
    requests: TaskTracker,
    cut_short: OnceLock<String>,
}

/// Requests that were still running when the drain's time was up.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0} requests were still running after {seconds} s of drain", seconds = .1.as_secs())]
pub struct DrainTimeout(pub usize, pub Duration);

impl Drain {
    /// A place for a new request; `None` while draining.
    pub fn admit(&self) -> Option<Admitted> {
        // Counted before the check: whoever is let in is seen by the wait that follows `begin`.
        let admitted = self.requests.token();
        (!self.is_draining()).then_some(admitted)
    }

    /// Requests running now.
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Refuses new requests from now on.
    pub fn begin(&self) {
        self.draining.cancel();
        self.requests.close();
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Waits for [`Self::begin`].
    pub fn begun(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    /// Waits until no request runs, at most `limit`. Only after [`Self::begin`].
    pub async fn finished(&self, limit: Duration) -> Result<(), DrainTimeout> {
        let waited = tokio::time::timeout(limit, self.requests.wait()).await;
        waited.map_err(|_| DrainTimeout(self.in_flight(), limit))
    }

    /// Says why requests that still run are failed by the [`Self::stop`] that follows.
    pub fn cut_short(&self, why: String) {
        self.cut_short.get_or_init(|| why);
    }

    /// What requests that run when it stops are told.
    pub fn why_cut_short(&self) -> &str {
        self.cut_short.get().map_or("the worker is shutting down", String::as_str)
    }

    /// Ends all servers: what is written already is flushed, and connections close.
    pub fn stop(&self) {
        self.begin();
        self.stopped.cancel();
    }

    /// Waits for [`Self::stop`].
    pub fn stopped(&self) -> WaitForCancellationFuture<'_> {
        self.stopped.cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn running_requests_finish_and_new_ones_are_refused() {
        let drain = Drain::default();
        let running = drain.admit().expect("open");
        drain.begin();
        assert!(drain.admit().is_none());
        assert_eq!(drain.finished(Duration::ZERO).await, Err(DrainTimeout(1, Duration::ZERO)));
        drop(running);
        assert_eq!(drain.finished(Duration::from_secs(5)).await, Ok(()));
    }
}
