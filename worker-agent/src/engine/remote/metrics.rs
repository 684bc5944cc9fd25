//! What is counted of an engine that is a server beside the agent.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Why.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// The counters; they outlive the engine, so that its losses can be counted.
#[derive(Clone, Debug, Default)]
pub struct RemoteMetrics {
    /// Times the server was lost.
    pub lost: Counter,
    /// Times it was lost because it computed nothing, although it answered.
    pub hung: Counter,
    /// Checks of the server that failed.
    pub failed_checks: Counter,
    /// Times that numbers of KV events were missing.
    pub event_gaps: Counter,
    /// Times that it sent past events again.
    pub event_replays: Counter,
    /// Times that all that was known of its blocks was void.
    pub event_resyncs: Counter,
    /// Requests whose KV another server had, and that were computed here all the same.
    pub kv_fallbacks: Counter,
    refused: Family<ReasonLabel, Counter>,
}

impl RemoteMetrics {
    /// Event messages, and events, that were of no use for this reason.
    pub fn refused(&self, reason: &'static str) -> Counter {
        self.refused.get_or_create(&ReasonLabel { reason }).clone()
    }

    /// Makes them part of a registry.
    pub fn register(&self, registry: &mut Registry) {
        let mut counter = |name: &str, help: &str, counter: &Counter| registry.register(name, help, counter.clone());
        counter("engine_losses", "Times the engine's server was lost", &self.lost);
        counter("engine_hangs", "Times the engine's server answered and computed nothing", &self.hung);
        counter("engine_checks_failed", "Checks of the engine's server that failed", &self.failed_checks);
        counter("engine_event_gaps", "Gaps in the numbering of the engine's KV events", &self.event_gaps);
        counter("engine_event_replays", "Times the engine sent past KV events again", &self.event_replays);
        counter(
            "engine_event_resyncs",
            "Times all that was known of the engine's blocks was void",
            &self.event_resyncs,
        );
        counter(
            "engine_kv_fallbacks",
            "Prompts computed here although another server had their KV",
            &self.kv_fallbacks,
        );
        let help = "KV events of the engine that could not be used";
        registry.register("engine_events_refused", help, self.refused.clone());
    }
}
