//! The load as the exchange between routers sees it: what others booked goes in, what is booked here comes out.

use std::sync::Arc;
use std::time::Duration;

use routing::{ActiveLoad, Applied, ReplicaEvent, RouterId};

use super::Placement;
use crate::replicas::{Load, Tally};

impl Load for Placement {
    fn apply(&self, events: &[ReplicaEvent]) -> Tally {
        self.change(|load, now| {
            let mut tally = Tally::default();
            for event in events {
                match load.apply(event, now) {
                    Applied::Refused => tally.refused += 1,
                    Applied::Unknown => tally.unknown += 1,
                    _ => {}
                }
            }
            tally
        })
    }

    fn remove_router(&self, router: RouterId) -> Tally {
        self.change(|load, _| Tally { dropped: load.remove_router(router) as u64, ..Tally::default() })
    }

    fn expire(&self, after: Duration) -> Tally {
        self.change(|load, now| Tally { dropped: load.expire(now, after) as u64, ..Tally::default() })
    }

    fn own_bookings(&self) -> Vec<ReplicaEvent> {
        self.state.lock().load.own_bookings().collect()
    }

    fn own_growth(&self) -> Vec<(Arc<str>, usize)> {
        self.state.lock().load.own_growth().collect()
    }
}

impl Placement {
    /// Changes the load on behalf of other routers. Whoever waits for room may have it now.
    fn change(&self, with: impl FnOnce(&mut ActiveLoad, Duration) -> Tally) -> Tally {
        let now = self.elapsed();
        let mut state = self.state.lock();
        let tally = with(&mut state.load, now);
        state.lanes.wake();
        Tally { replicated: state.load.replicated_requests(), ..tally }
    }
}
