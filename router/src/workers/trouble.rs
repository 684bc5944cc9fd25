//! What can be wrong with a worker's KV events so that the index is blind for it, and the watch for events that never come: the same
//! for workers with an agent and for OpenAI servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::metrics::{CoreMetrics, ReasonLabels};

/// Requests in a row that computed new blocks, and of which no event told.
const UNTOLD: u32 = 16;

/// Why a worker's KV events are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Its card says that it hashes blocks otherwise than this router.
    Hashes,
    /// Its blocks are of another size than those of its model's other workers.
    BlockSize,
    /// It reuses blocks that its events never announced.
    Reuse,
    /// It announces events and computes blocks, but no event comes.
    Silence,
}

impl Trouble {
    const ALL: [Self; 4] = [Self::Hashes, Self::BlockSize, Self::Reuse, Self::Silence];

    /// As metrics and pages name it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Hashes => "block hashes differ",
            Self::BlockSize => "block size differs",
            Self::Reuse => "reuse that was not announced",
            Self::Silence => "no events",
        }
    }

    /// Shows those of all workers.
    pub(crate) fn show(troubles: &[Self], metrics: &CoreMetrics) {
        metrics.workers_event_mismatch.set(troubles.len() as i64);
        for trouble in Self::ALL {
            let count = troubles.iter().filter(|other| **other == trouble).count();
            let labels = ReasonLabels { reason: trouble.as_str() };
            metrics.workers_event_trouble.get_or_create(&labels).set(count as i64);
        }
    }
}

/// Notices that a worker which announces events sends none. Its counters are touched once a request.
pub(crate) struct Silence {
    /// Requests that computed new blocks since the last event.
    untold: AtomicU32,
    /// When the first of them did, in milliseconds since `origin`.
    since_ms: AtomicU64,
    silent: AtomicBool,
    /// How long events may be on their way.
    patience: Duration,
    origin: Instant,
    changed: Arc<Notify>,
}

impl Silence {
    /// It is noticed after `patience`; `changed` is notified when it begins or ends.
    pub(crate) fn new(patience: Duration, changed: Arc<Notify>) -> Self {
        let (untold, since_ms, silent) = Default::default();
        Self { untold, since_ms, silent, patience, origin: Instant::now(), changed }
    }

    /// A request computed blocks that were not in the cache. True when the silence is noticed just now.
    pub(crate) fn computed(&self) -> bool {
        self.computed_at(self.origin.elapsed())
    }

    fn computed_at(&self, now: Duration) -> bool {
        let now_ms = now.as_millis() as u64;
        let untold = self.untold.fetch_add(1, Relaxed);
        if untold == 0 {
            self.since_ms.store(now_ms, Relaxed);
        }
        let long = now_ms.saturating_sub(self.since_ms.load(Relaxed)) >= self.patience.as_millis() as u64;
        let noticed = untold + 1 >= UNTOLD && long && !self.silent.swap(true, Relaxed);
        if noticed {
            self.changed.notify_one();
        }
        noticed
    }

    /// Events came.
    pub(crate) fn heard(&self) {
        if self.untold.load(Relaxed) > 0 {
            self.untold.store(0, Relaxed);
        }
        if self.silent.load(Relaxed) && self.silent.swap(false, Relaxed) {
            self.changed.notify_one();
        }
    }

    /// Whether events are missed.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_requests_over_some_time_without_an_event_are_noticed_once() {
        let silence = Silence::new(Duration::from_secs(10), Arc::default());
        let seconds = Duration::from_secs;
        assert!((0..100).all(|_| !silence.computed_at(seconds(1))), "events may be on their way");
        assert!(silence.computed_at(seconds(11)) && silence.is_silent());
        assert!(!silence.computed_at(seconds(12)), "noticed once");
        silence.heard();
        assert!(!silence.is_silent());
        assert!((0..UNTOLD - 1).all(|at| !silence.computed_at(seconds(u64::from(at) * 60))), "too few");
        silence.heard();
        assert!((0..1000).all(|at| {
            silence.heard();
            !silence.computed_at(seconds(at * 60))
        }));
    }
}
