//! What happens to own requests, on its way to the publisher: a bounded queue that never makes a request wait.
//!
//! It is filled under the lock of the load, so that the order of events is the order in which they happened. While nobody
//! listens it is not filled at all: the events of then are in the snapshot that whoever comes asks for first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use routing::{ReplicaChange, ReplicaEvent, RouterId};
use tokio::sync::mpsc;

use super::metrics::ReplicaMetrics;

/// Most events that wait: some seconds of a busy router. One holds its request's block hashes by reference.
pub(super) const CAPACITY: usize = 8192;

/// Where own events go in.
#[derive(Clone)]
pub(crate) struct Outbox {
    own: RouterId,
    events: mpsc::Sender<ReplicaEvent>,
    flags: Arc<Flags>,
    metrics: Arc<ReplicaMetrics>,
}

/// Where they come out.
pub(super) struct Receiver {
    events: mpsc::Receiver<ReplicaEvent>,
    flags: Arc<Flags>,
}

#[derive(Default)]
struct Flags {
    /// There are other routers.
    listened: AtomicBool,
    /// Events have been lost since this was looked at last.
    lost: AtomicBool,
    /// What runs at the others is counted here, as far as they can be reached.
    joined: AtomicBool,
}

/// How this router stands among the others, as the mesh sees it.
pub(super) struct Standing(Arc<Flags>);

impl Standing {
    pub(super) fn set_listened(&self, listened: bool) {
        self.0.listened.store(listened, Ordering::Relaxed);
    }

    pub(super) fn joined(&self) -> bool {
        self.0.joined.load(Ordering::Acquire)
    }

    pub(super) fn set_joined(&self) {
        self.0.joined.store(true, Ordering::Release);
    }
}

pub(super) fn channel(own: RouterId, metrics: Arc<ReplicaMetrics>) -> (Outbox, Receiver) {
    let (sender, events) = mpsc::channel(CAPACITY);
    let flags = Arc::<Flags>::default();
    (Outbox { own, events: sender, flags: flags.clone(), metrics }, Receiver { events, flags })
}

impl Outbox {
    /// Tells what happened to one own booking; `change` is asked only if anybody listens.
    pub(crate) fn tell(&self, request: &Arc<str>, change: impl FnOnce() -> Option<ReplicaChange>) {
        if !self.flags.listened.load(Ordering::Relaxed) {
            return;
        }
        let Some(change) = change() else { return };
        let event = ReplicaEvent { router: self.own, request: request.clone(), change };
        if self.events.try_send(event).is_err() {
            self.metrics.lost.inc();
            self.flags.lost.store(true, Ordering::Release);
        }
    }

    /// True once the requests of all routers that could be reached at the start are counted, or after a second.
    pub(crate) fn joined(&self) -> bool {
        self.flags.joined.load(Ordering::Acquire)
    }
}

impl Receiver {
    /// Adds up to `limit` events to `batch`; the number of them, 0 when no more will come. May be dropped and called again.
    pub(super) async fn recv_many(&mut self, batch: &mut Vec<ReplicaEvent>, limit: usize) -> usize {
        self.events.recv_many(batch, limit).await
    }

    /// Events that wait.
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether there is anybody to tell.
    pub(super) fn listened(&self) -> bool {
        self.flags.listened.load(Ordering::Relaxed)
    }

    /// Whether events were lost since the last call.
    pub(super) fn lost(&self) -> bool {
        self.flags.lost.swap(false, Ordering::AcqRel)
    }

    pub(super) fn standing(&self) -> Standing {
        Standing(self.flags.clone())
    }
}
