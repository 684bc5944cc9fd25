//! Metrics of the exchange between routers, all `armature_router_replica_…`.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::metrics::ReasonLabels;
use zmtp::PublisherCounters;

/// What was told and heard.
#[derive(Default)]
pub struct ReplicaMetrics {
    /// Own events sent, once for all peers.
    pub sent: Counter,
    /// Own events lost because the queue was full.
    pub lost: Counter,
    /// Events of peers that were applied.
    pub received: Counter,
    /// Messages and events of peers that could not be used, by reason.
    pub refused: Family<ReasonLabels, Counter>,
    /// Gaps in the numbers of peers' messages.
    pub gaps: Counter,
    /// Snapshots, by what was done with them.
    pub snapshots: Family<ReasonLabels, Counter>,
    /// Bookings of peers dropped without being freed, by reason.
    pub dropped: Family<ReasonLabels, Counter>,
    /// Routers heard from now.
    pub peers: Gauge,
    /// Requests of other routers counted here now.
    pub requests: Gauge,
    /// How full the queue of own events is, 0 to 1.
    pub queue: Gauge<f64, AtomicU64>,
    /// What readers of this router did not get.
    pub(crate) socket: PublisherCounters,
}

impl ReplicaMetrics {
    /// Adds them to a registry.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("armature_router_replica");
        let metrics = Self::default();
        registry.register("events_sent", "Own load events told to other routers", metrics.sent.clone());
        registry.register("events_lost", "Own load events lost because the queue was full", metrics.lost.clone());
        registry.register("events_received", "Load events of other routers applied", metrics.received.clone());
        registry.register(
            "events_refused",
            "Messages and load events of other routers that could not be used",
            metrics.refused.clone(),
        );
        registry.register("event_gaps", "Gaps in the numbers of other routers' messages", metrics.gaps.clone());
        registry.register(
            "snapshots",
            "Snapshots of running requests sent to and taken from other routers",
            metrics.snapshots.clone(),
        );
        registry.register(
            "requests_dropped",
            "Requests of other routers dropped without being freed",
            metrics.dropped.clone(),
        );
        registry.register("peers", "Other routers heard from", metrics.peers.clone());
        registry.register("requests", "Requests of other routers counted in the load", metrics.requests.clone());
        registry.register(
            "messages_dropped",
            "Messages to another router that were dropped because too many bytes wait for it",
            metrics.socket.dropped.clone(),
        );
        registry.register(
            "readers_refused",
            "Connections to --sync-port that were turned away because there are too many",
            metrics.socket.refused.clone(),
        );
        registry.register("send_queue_ratio", "How full the queue of own load events is", metrics.queue.clone());
        metrics
    }

    pub(super) fn refuse(&self, reason: &'static str) {
        self.refused.get_or_create(&ReasonLabels { reason }).inc();
    }
}
