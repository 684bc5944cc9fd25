//! Everything heard from other routers, applied to the load; and which of them are asked for snapshots.
//!
//! One owner, no socket: messages and the time go in, the load changes, and requests for snapshots come out, ours in what
//! the status messages say and theirs in a queue to the publisher. A router that has been silent for [`GRACE`] is gone, and
//! its requests with it: they end at the workers when their connections do.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use protocol::replica_sync::{RouterStatus, Snapshot, SnapshotRequest};
use routing::{ReplicaChange, ReplicaEvent, RouterId};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::metrics::ReplicaMetrics;
use super::peer::{Peer, Verdict};
use super::{Load, MAX_ROUTERS, Tally};
use crate::metrics::ReasonLabels;

/// Silence after which a router is gone: long enough for a connection to be made anew.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// How often bookings without progress are looked for.
const EXPIRY_CHECK: Duration = Duration::from_secs(1);

/// Snapshots asked of this router that wait to be sent; more are asked for again.
const ASKS: usize = 64;

/// Most events and prompt blocks applied under one lock: decisions wait for no more than that, some 100 µs.
const RUN: (usize, usize) = (64, 1024);

/// A message of another router.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) from: RouterId,
    pub(super) body: Body,
}

/// What it says.
#[derive(Clone, Debug)]
pub(super) enum Body {
    /// What happened to its requests.
    Events { sequence: u64, events: Vec<ReplicaEvent> },
    /// How far its requests have grown.
    Growth(Vec<ReplicaEvent>),
    /// It lives.
    Status(RouterStatus),
    /// What runs there; the snapshot's own events are taken out of it.
    Snapshot(Snapshot, Vec<ReplicaEvent>),
}

/// A snapshot that another router asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) asker: RouterId,
    pub(super) nonce: u64,
}

/// The other routers.
pub(super) struct Hub {
    own: RouterId,
    load: Arc<dyn Load>,
    metrics: Arc<ReplicaMetrics>,
    expiry: Duration,
    expired: Option<Instant>,
    peers: HashMap<RouterId, Peer>,
    wants: watch::Sender<Vec<SnapshotRequest>>,
    asks: mpsc::Sender<Ask>,
    nonces: u64,
}

impl Hub {
    /// A hub; the snapshots that are wanted of others, and those that others want.
    pub(super) fn new(
        own: RouterId,
        load: Arc<dyn Load>,
        metrics: Arc<ReplicaMetrics>,
        expiry: Duration,
    ) -> (Self, watch::Receiver<Vec<SnapshotRequest>>, mpsc::Receiver<Ask>) {
        let (wants, wanted) = watch::channel(Vec::new());
        let (asks, asked) = mpsc::channel(ASKS);
        let hub = Self { own, load, metrics, expiry, expired: None, peers: HashMap::new(), wants, asks, nonces: 0 };
        (hub, wanted, asked)
    }

    /// Whether all that runs at a router is counted here.
    pub(super) fn joined(&self, router: RouterId) -> bool {
        self.peers.get(&router).is_some_and(Peer::joined)
    }

    /// Whether anything was heard of a router lately.
    pub(super) fn knows(&self, router: RouterId) -> bool {
        self.peers.contains_key(&router)
    }

    /// A message came.
    pub(super) fn take(&mut self, message: Message, now: Instant) {
        let Message { from, body } = message;
        if !self.peers.contains_key(&from) {
            if self.peers.len() >= MAX_ROUTERS {
                self.metrics.refuse("too many routers");
                return;
            }
            tracing::info!(router = shown(from), "another router shares its load");
            let nonce = self.nonce();
            self.peers.insert(from, Peer::new(from, now, nonce));
            self.metrics.peers.set(self.peers.len() as i64);
        }
        let Some(peer) = self.peers.get_mut(&from) else { return };
        peer.touch(now);
        match body {
            Body::Events { sequence, events } => {
                let verdict = peer.events(sequence, &events);
                match verdict {
                    Verdict::Old => self.metrics.refuse("old"),
                    Verdict::Gap => self.missed(from, now),
                    Verdict::Next => {}
                }
                if verdict != Verdict::Old {
                    self.apply(&events);
                }
            }
            Body::Growth(events) => {
                let unknown = self.apply(&events);
                if unknown && self.peers.get_mut(&from).is_some_and(|peer| peer.forgot(now)) {
                    self.want(from, now);
                }
            }
            Body::Status(status) => {
                if peer.status(status.next_sequence) {
                    self.missed(from, now);
                }
                self.asked(from, &status.wants, now);
            }
            Body::Snapshot(snapshot, events) => {
                if let Some(events) = peer.snapshot(snapshot, events) {
                    self.metrics.snapshots.get_or_create(&ReasonLabels { reason: "received" }).inc();
                    self.apply(&events);
                }
            }
        }
        self.publish_wants();
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        let silent = self.peers.iter().filter(|(_, peer)| peer.silent_for(now) >= GRACE);
        for router in silent.map(|(router, _)| *router).collect::<Vec<_>>() {
            self.gone(router);
        }
        let overdue = self.peers.iter().filter(|(_, peer)| peer.overdue(now)).map(|(router, _)| *router);
        for router in overdue.collect::<Vec<_>>() {
            let nonce = self.nonce();
            if let Some(peer) = self.peers.get_mut(&router) {
                peer.ask(now, nonce);
            }
        }
        if self.expired.is_none_or(|last| now.saturating_duration_since(last) >= EXPIRY_CHECK) {
            self.expired = Some(now);
            let tally = self.load.expire(self.expiry);
            self.count(tally, "expired");
        }
        self.publish_wants();
    }

    /// A router is no more: so are its requests.
    pub(super) fn gone(&mut self, router: RouterId) {
        if self.peers.remove(&router).is_none() {
            return;
        }
        self.metrics.peers.set(self.peers.len() as i64);
        let tally = self.load.remove_router(router);
        tracing::info!(router = shown(router), requests = tally.dropped, "another router is gone");
        self.count(tally, "router gone");
    }

    /// Messages of a router are missing.
    fn missed(&mut self, router: RouterId, now: Instant) {
        self.metrics.gaps.inc();
        self.want(router, now);
    }

    fn want(&mut self, router: RouterId, now: Instant) {
        let nonce = self.nonce();
        if let Some(peer) = self.peers.get_mut(&router) {
            peer.missed(now, nonce);
        }
    }

    fn asked(&mut self, asker: RouterId, wants: &[SnapshotRequest], now: Instant) {
        let Some(peer) = self.peers.get_mut(&asker) else { return };
        let ours = wants.iter().find(|want| want.router_id == self.own.0);
        let (Some(want), Ok(place)) = (ours, self.asks.try_reserve()) else { return };
        if peer.answer(want.nonce, now) {
            place.send(Ask { asker, nonce: want.nonce });
        }
    }

    /// True when some are of bookings that should be known and are not.
    fn apply(&self, events: &[ReplicaEvent]) -> bool {
        let (mut from, mut blocks, mut unknown) = (0, 0, false);
        for (at, event) in events.iter().enumerate() {
            if at - from >= RUN.0 || blocks >= RUN.1 {
                unknown |= self.apply_run(&events[from..at]);
                (from, blocks) = (at, 0);
            }
            if let ReplicaChange::Add(state) = &event.change {
                blocks += state.prompt.blocks.len();
            }
        }
        unknown | self.apply_run(&events[from..])
    }

    fn apply_run(&self, events: &[ReplicaEvent]) -> bool {
        if events.is_empty() {
            return false;
        }
        let tally = self.load.apply(events);
        self.metrics.received.inc_by(events.len() as u64 - tally.refused);
        if tally.refused > 0 {
            self.metrics.refused.get_or_create(&ReasonLabels { reason: "full" }).inc_by(tally.refused);
        }
        self.metrics.requests.set(tally.replicated as i64);
        tally.unknown > 0
    }

    fn count(&self, tally: Tally, reason: &'static str) {
        if tally.dropped > 0 {
            self.metrics.dropped.get_or_create(&ReasonLabels { reason }).inc_by(tally.dropped);
        }
        self.metrics.requests.set(tally.replicated as i64);
    }

    fn nonce(&mut self) -> u64 {
        self.nonces += 1;
        self.nonces
    }

    fn publish_wants(&self) {
        let mut wants: Vec<SnapshotRequest> = self.peers.values().filter_map(Peer::wanted).collect();
        wants.sort_unstable_by_key(|want| want.router_id);
        self.wants.send_if_modified(|last| {
            let changed = *last != wants;
            *last = wants;
            changed
        });
    }
}

/// As routers name themselves in discovery.
pub(super) fn shown(router: RouterId) -> String {
    format!("{:016x}", router.0)
}
