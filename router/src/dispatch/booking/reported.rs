//! What workers report of their load, kept for as long as their lives and their reports last.

use std::sync::Arc;
use std::time::Duration;

use kv_index::WorkerRank;
use routing::Reported;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Placement;

/// How often reports of workers that have fallen silent are looked for.
const TICK: Duration = Duration::from_secs(1);

impl Placement {
    /// A worker tells how busy one of its ranks is; void once its `life` has ended. Whoever ends a life cancels it before the
    /// worker is removed here, so that no report outlives it.
    pub(crate) fn reported(&self, rank: WorkerRank, reported: Reported, life: &CancellationToken) {
        let now = self.elapsed();
        let mut state = self.state.lock();
        if !life.is_cancelled() {
            state.load.report(rank, reported, now);
        }
    }

    /// Drops reports that have become old, for ever. A router needs it whether or not there are others.
    pub(crate) async fn forget_silent(self: Arc<Self>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let now = self.elapsed();
            self.state.lock().load.expire_reports(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_index::WorkerId;
    use prometheus_client::metrics::gauge::Gauge;
    use routing::RouterId;

    use super::*;
    use crate::config::Selection;

    #[test]
    fn a_report_ends_with_the_life_that_it_is_of() {
        let placement = Placement::new(&Selection::default(), RouterId(1), Gauge::default());
        let rank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };
        let busy = Reported { running_requests: Some(3), ..Reported::default() };
        let known = || placement.state.lock().load.reported(rank);
        let life = CancellationToken::new();
        placement.reported(rank, busy, &life);
        assert_eq!(known(), Some(busy));
        life.cancel();
        placement.remove_worker(rank.worker);
        placement.reported(rank, busy, &life);
        assert_eq!(known(), None, "it was on its way when the worker left");
        placement.reported(rank, busy, &CancellationToken::new());
        assert_eq!(known(), Some(busy), "the next life under the same id");
    }
}
