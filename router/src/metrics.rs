//! Metrics of the router's core, all `armature_router_…`: decisions, events, recoveries, workers.
//!
//! Every series here has a fixed or small set of labels; nothing is labelled by worker, so nothing has to be dropped with one.

use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Labels of `decisions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DecisionLabels {
    /// How workers are picked: the flag's value.
    pub mode: &'static str,
}

/// A reason, from a fixed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    /// Which.
    pub reason: &'static str,
}

/// Metrics of routing and of the cluster view.
pub struct CoreMetrics {
    /// When they began.
    pub started: Instant,
    /// Workers chosen, by mode.
    pub decisions: Family<DecisionLabels, Counter>,
    /// Attempts that went on to another worker, by reason.
    pub retries: Family<ReasonLabels, Counter>,
    /// Streams that went on at another worker after their own was lost, by reason.
    pub migrations: Family<ReasonLabels, Counter>,
    /// Streams that ended with their worker, by the reason that they would have moved for.
    pub migrations_refused: Family<ReasonLabels, Counter>,
    /// Prompts that prefill workers were there for, by what became of them.
    pub prefills: Family<ReasonLabels, Counter>,
    /// Prefix blocks that the chosen worker was expected to reuse, for each request.
    pub overlap_blocks: Histogram,
    /// KV events that changed the index or were looked at for it.
    pub events_applied: Counter,
    /// Events that came twice.
    pub events_duplicate: Counter,
    /// Messages that could not be read, or came from another worker than expected, by reason.
    pub events_refused: Family<ReasonLabels, Counter>,
    /// Gaps seen in the numbering of events.
    pub event_gaps: Counter,
    /// Recoveries that ended well, by what they fetched.
    pub recoveries: Family<ReasonLabels, Counter>,
    /// Recoveries that failed and are tried again.
    pub recovery_failures: Counter,
    /// Live events held back by recoveries now.
    pub events_held: Gauge,
    /// Distinct prefixes in the index.
    pub index_blocks: Gauge,
    /// Memory of the index, in bytes; that of guesses apart.
    pub index_bytes: Gauge,
    /// Distinct prefixes that workers are guessed to hold.
    pub index_guessed_blocks: Gauge,
    /// Memory of those guesses, in bytes.
    pub index_guessed_bytes: Gauge,
    /// Blocks that the index forgot for want of memory.
    pub index_evicted_blocks: Gauge,
    /// Jobs that wait for an event thread, as the last one to be sent saw it.
    pub index_queue: Gauge,
    /// Blocks compared between the index and the workers, by who was found to hold them.
    pub index_checked: Family<ReasonLabels, Counter>,
    /// Of those, blocks that the other one does not hold.
    pub index_wrong: Family<ReasonLabels, Counter>,
    /// Comparisons, by how they ended.
    pub index_checks: Family<ReasonLabels, Counter>,
    /// Dumps that were asked for because a comparison showed a mistake.
    pub index_repairs: Counter,
    /// 1 while prompts repeat and the index never knows any of their blocks.
    pub index_no_hits: Gauge,
    /// Workers in the view.
    pub workers_known: Gauge,
    /// Workers that a request could go to.
    pub workers_routable: Gauge,
    /// Workers whose events are unusable: another block size, or hashes that match nothing they reuse.
    pub workers_event_mismatch: Gauge,
    /// The same, by what is wrong with their events.
    pub workers_event_trouble: Family<ReasonLabels, Gauge>,
    /// Requests on workers now.
    pub in_flight: Gauge,
    /// Requests that wait for a worker with room now.
    pub queue_waiting: Gauge,
    /// How long requests waited that were placed, in seconds.
    pub queue_wait: Histogram,
    /// Requests that waited no more, or were not let in, by reason.
    pub queue_left: Family<ReasonLabels, Counter>,
}

impl CoreMetrics {
    /// Adds them to a registry.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("armature_router");
        // 1 to 32768 blocks, and one bucket for none.
        let overlap_blocks = Histogram::new(std::iter::once(0.0).chain(exponential_buckets(1.0, 2.0, 16)));
        let core = Self {
            started: Instant::now(),
            decisions: Family::default(),
            retries: Family::default(),
            migrations: Family::default(),
            migrations_refused: Family::default(),
            prefills: Family::default(),
            overlap_blocks,
            events_applied: Counter::default(),
            events_duplicate: Counter::default(),
            events_refused: Family::default(),
            event_gaps: Counter::default(),
            recoveries: Family::default(),
            recovery_failures: Counter::default(),
            events_held: Gauge::default(),
            index_blocks: Gauge::default(),
            index_bytes: Gauge::default(),
            index_guessed_blocks: Gauge::default(),
            index_guessed_bytes: Gauge::default(),
            index_evicted_blocks: Gauge::default(),
            index_queue: Gauge::default(),
            index_checked: Family::default(),
            index_wrong: Family::default(),
            index_checks: Family::default(),
            index_repairs: Counter::default(),
            index_no_hits: Gauge::default(),
            workers_known: Gauge::default(),
            workers_routable: Gauge::default(),
            workers_event_mismatch: Gauge::default(),
            workers_event_trouble: Family::default(),
            in_flight: Gauge::default(),
            queue_waiting: Gauge::default(),
            // 1 ms to 131 s.
            queue_wait: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            queue_left: Family::default(),
        };
        registry.register("decisions", "Workers chosen, by mode", core.decisions.clone());
        registry.register("retries", "Attempts that went on to another worker", core.retries.clone());
        registry.register(
            "migrations",
            "Streams that went on at another worker: theirs was lost, draining, or its engine failed",
            core.migrations.clone(),
        );
        registry.register(
            "migrations_refused",
            "Streams that ended with their worker: over a limit, or no other worker took them",
            core.migrations_refused.clone(),
        );
        registry.register(
            "prefills",
            "Prompts that prefill workers were there for, by what became of them: remote, or why not",
            core.prefills.clone(),
        );
        registry.register(
            "overlap_blocks",
            "Prefix blocks the chosen worker was expected to reuse",
            core.overlap_blocks.clone(),
        );
        registry.register("kv_events_applied", "KV events applied to the index", core.events_applied.clone());
        registry.register("kv_events_duplicate", "KV events that came twice", core.events_duplicate.clone());
        registry.register("kv_events_refused", "Event messages that could not be used", core.events_refused.clone());
        registry.register("kv_event_gaps", "Gaps in the numbering of KV events", core.event_gaps.clone());
        registry.register(
            "kv_recoveries",
            "Recoveries of a worker's KV state, by what they fetched",
            core.recoveries.clone(),
        );
        registry.register(
            "kv_recovery_failures",
            "Recoveries that failed and are tried again",
            core.recovery_failures.clone(),
        );
        registry.register("kv_events_held", "Live KV events held back by recoveries", core.events_held.clone());
        registry.register("index_blocks", "Distinct prefixes in the KV index", core.index_blocks.clone());
        registry.register(
            "index_bytes",
            "Memory of the KV index, in bytes, without that of guesses",
            core.index_bytes.clone(),
        );
        registry.register(
            "index_guessed_blocks",
            "Distinct prefixes that workers are taken to hold without KV events: approximate mode and --router-predicted-ttl-secs",
            core.index_guessed_blocks.clone(),
        );
        registry.register("index_guessed_bytes", "Memory of those guesses, in bytes", core.index_guessed_bytes.clone());
        registry.register(
            "index_evicted_blocks",
            "Blocks that the KV index forgot for want of memory",
            core.index_evicted_blocks.clone(),
        );
        registry.register("index_queue", "Jobs that wait for an event thread", core.index_queue.clone());
        core.register_truth(registry);
        registry.register("workers_known", "Workers in the discovery view", core.workers_known.clone());
        registry.register("workers_routable", "Workers that a request could go to", core.workers_routable.clone());
        registry.register(
            "workers_event_mismatch",
            "Workers whose KV events are unusable",
            core.workers_event_mismatch.clone(),
        );
        registry.register("requests_in_flight", "Requests on workers", core.in_flight.clone());
        registry.register("queue_requests", "Requests that wait for a worker with room", core.queue_waiting.clone());
        registry.register(
            "queue_wait_seconds",
            "How long requests waited that found a worker",
            core.queue_wait.clone(),
        );
        registry.register(
            "queue_left",
            "Requests that wait no more: placed, deadline, gone; or full, not let in",
            core.queue_left.clone(),
        );
        core
    }

    /// What says whether the index is right.
    fn register_truth(&self, registry: &mut Registry) {
        registry.register(
            "index_checked_blocks",
            "Blocks compared, by who was found to hold them: the index or the worker",
            self.index_checked.clone(),
        );
        registry.register(
            "index_wrong_blocks",
            "Blocks that the index (the worker) holds and the worker (the index) does not",
            self.index_wrong.clone(),
        );
        registry.register(
            "index_checks",
            "Comparisons of a worker with the index, by their end",
            self.index_checks.clone(),
        );
        registry.register("index_repairs", "Dumps asked for after a comparison failed", self.index_repairs.clone());
        registry.register(
            "index_no_hits",
            "1 while prompts begin like earlier ones and no block of them is ever known",
            self.index_no_hits.clone(),
        );
        registry.register(
            "workers_event_trouble",
            "Workers whose KV events are unusable, by reason",
            self.workers_event_trouble.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_one_prefix_and_their_labels() {
        let mut registry = Registry::default();
        let core = CoreMetrics::register(&mut registry);
        core.decisions.get_or_create(&DecisionLabels { mode: "round-robin" }).inc();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a String takes it");
        assert!(text.contains("armature_router_decisions_total{mode=\"round-robin\"} 1"), "{text}");
    }
}
