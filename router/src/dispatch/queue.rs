//! Requests that wait because every worker that could take them has as many prompt tokens as it may.
//!
//! Each waits in its own task, in a lane of its model and of the roles that could take it. When room may have come up, those at the front are woken and try
//! again; whoever leaves, placed or not, wakes the next. So nobody decides for anybody else, and a client that goes away only
//! takes its place with it. The number of those that wait is bounded, and so is each wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use routing::{Request, Roles, Ticket, WaitQueue, Waiting};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, sleep_until};

use super::booking::Placement;
use super::stage;
use crate::backend::DispatchError;
use crate::config::QueueSettings;
use crate::metrics::{CoreMetrics, ReasonLabels};

/// Most that are woken at once in a lane. One is enough unless it may only go to certain workers, where others have room.
const FRONT: usize = 16;

/// What the wait of a request depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rank {
    pub(super) strict_priority: i32,
    pub(super) priority: f64,
    pub(super) uncached_tokens: usize,
    /// It may only go to certain workers.
    pub(super) constrained: bool,
}

struct Waiter {
    wake: Arc<Notify>,
    constrained: bool,
}

/// Who waits for the same workers: the requests for a model, and those for the prompt alone apart from the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Lane {
    model: String,
    roles: Roles,
}

/// Everybody who waits.
pub(super) struct Lanes {
    settings: QueueSettings,
    /// None is empty.
    lanes: HashMap<Lane, WaitQueue<Waiter>>,
    waiting: usize,
}

impl Lanes {
    pub(super) fn new(settings: QueueSettings) -> Self {
        Self { settings, lanes: HashMap::new(), waiting: 0 }
    }

    /// Whether a request has to let others go first: those that were there before it, or, when it waits itself, those in front
    /// of it. One that has begun lets nobody go first.
    pub(super) fn is_blocked(&self, request: &Request<'_>, own: Option<Ticket>) -> bool {
        if self.lanes.is_empty() || request.begun {
            return false;
        }
        let lane = Lane { model: request.model.to_owned(), roles: request.roles };
        let Some(lane) = self.lanes.get(&lane) else { return false };
        own.is_none_or(|own| front(lane).all(|(ticket, _)| ticket != own))
    }

    /// Wakes those who may be next.
    pub(super) fn wake(&self) {
        for lane in self.lanes.values() {
            front(lane).for_each(|(_, waiter)| waiter.wake.notify_one());
        }
    }

    fn join(&mut self, lane: &Lane, waiting: Waiting, waiter: Waiter) -> Option<Ticket> {
        if self.waiting >= self.settings.limit {
            return None;
        }
        let QueueSettings { policy, limit, .. } = self.settings;
        let lane = self.lanes.entry(lane.clone()).or_insert_with(|| WaitQueue::new(policy, limit));
        let ticket = lane.push(waiting, waiter).ok()?;
        self.waiting += 1;
        Some(ticket)
    }

    fn leave(&mut self, lane: &Lane, ticket: Ticket) {
        let Some(queue) = self.lanes.get_mut(lane) else { return };
        self.waiting -= usize::from(queue.remove(ticket).is_some());
        if queue.is_empty() {
            self.lanes.remove(lane);
        }
    }
}

/// Those at the front of a lane: up to the first that could go to any worker, since where it finds no room nobody does.
fn front(lane: &WaitQueue<Waiter>) -> impl Iterator<Item = (Ticket, &Waiter)> {
    let free = lane.iter().take(FRONT).position(|(_, waiter)| !waiter.constrained);
    lane.iter().take(free.map_or(FRONT, |at| at + 1))
}

/// A place in the queue; dropping it gives it up.
pub(super) struct Place {
    placement: Arc<Placement>,
    metrics: Arc<CoreMetrics>,
    lane: Lane,
    ticket: Ticket,
    wake: Arc<Notify>,
    since: Instant,
    timeout: Duration,
    /// How it ends.
    outcome: &'static str,
}

impl Placement {
    /// Lets a request wait.
    pub(super) fn queue(
        self: &Arc<Self>,
        request: &Request<'_>,
        rank: Rank,
        metrics: &Arc<CoreMetrics>,
    ) -> Result<Place, DispatchError> {
        let wake = Arc::<Notify>::default();
        // Room may have come up since it was found that there is none.
        wake.notify_one();
        let since = Instant::now();
        let mut state = self.state.lock();
        let QueueSettings { timeout, limit, .. } = state.lanes.settings;
        let arrival = self.elapsed();
        let waiting = Waiting {
            strict_priority: rank.strict_priority,
            priority: rank.priority,
            arrival,
            uncached_tokens: rank.uncached_tokens,
            deadline: arrival + timeout,
        };
        let waiter = Waiter { wake: wake.clone(), constrained: rank.constrained };
        let lane = Lane { model: request.model.to_owned(), roles: request.roles };
        let Some(ticket) = state.lanes.join(&lane, waiting, waiter) else {
            metrics.queue_left.get_or_create(&ReasonLabels { reason: "full" }).inc();
            return Err(DispatchError::Overloaded(format!("{limit} requests wait already")));
        };
        metrics.queue_waiting.set(state.lanes.waiting as i64);
        drop(state);
        let (placement, metrics) = (self.clone(), metrics.clone());
        Ok(Place { placement, metrics, lane, ticket, wake, since, timeout, outcome: "gone" })
    }
}

impl Place {
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Waits until it is worth while to try again. `published`: the workers are others than when the last try began.
    pub(super) async fn turn(&mut self, published: Notified<'_>) -> Result<(), DispatchError> {
        tokio::select! {
            () = self.wake.notified() => Ok(()),
            () = published => Ok(()),
            () = sleep_until(self.since + self.timeout) => {
                self.outcome = "deadline";
                Err(DispatchError::Deadline { stage: stage::QUEUED, seconds: self.timeout.as_secs() })
            }
        }
    }

    /// The request goes to a worker.
    pub(super) fn served(&mut self) {
        self.outcome = "placed";
        self.metrics.queue_wait.observe(self.since.elapsed().as_secs_f64());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.placement.state.lock();
        state.lanes.leave(&self.lane, self.ticket);
        state.lanes.wake();
        self.metrics.queue_waiting.set(state.lanes.waiting as i64);
        drop(state);
        self.metrics.queue_left.get_or_create(&ReasonLabels { reason: self.outcome }).inc();
    }
}
