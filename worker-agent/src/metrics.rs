//! What a worker counts. Gauges are read from the engine when somebody asks; the rest is counted where it happens.

use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::engine::{EngineInfo, EngineLoad};
use crate::transfer::metrics::TransferMetrics;

/// How a request ended, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written as the variants are named")]
pub enum Ending {
    /// A token that ends answers.
    eos,
    /// The token limit.
    length,
    /// A stop string.
    stop_string,
    /// A stop token.
    stop_token,
    /// The prompt is computed; another worker goes on with it.
    prefilled,
    /// The router gave the stream up, or its connection was lost.
    cancelled,
    /// The request's deadline passed.
    deadline,
    /// The engine failed it.
    failed,
    /// Refused: it can never work.
    invalid,
    /// Refused: the engine's queue is full.
    overloaded,
    /// The worker drains: refused, or cut short when the drain's time was up.
    draining,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndingLabel {
    reason: Ending,
}

/// All metrics of a worker, and the registry that writes them.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<EndingLabel, Counter>,
    running: Gauge,
    waiting: Gauge,
    active_blocks: Gauge,
    used_blocks: Gauge,
    pending_prefill_tokens: Gauge,
    /// Prompt tokens of finished requests.
    pub prompt_tokens: Counter,
    /// Of those, tokens whose KV was reused.
    pub reused_tokens: Counter,
    /// Tokens generated and handed to a connection.
    pub generation_tokens: Counter,
    /// Seconds from a request's arrival to its first token.
    pub time_to_first_token: Histogram,
    /// Seconds from a request's arrival to its end.
    pub request_duration: Histogram,
    /// KV events published.
    pub events_published: Counter,
    /// KV queries answered with the whole state.
    pub dumps: Counter,
    /// Router connections.
    pub connections: Gauge,
    /// Times a stream had tokens and no credit.
    pub credit_stalls: Counter,
    /// KV blocks that travel between workers.
    pub transfer: TransferMetrics,
}

/// Bounds of the latency histograms in seconds, as serving engines use them.
const SECONDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

impl Metrics {
    /// All zero, with the fixed properties of `engine`.
    pub fn new(engine: &EngineInfo) -> Self {
        let mut registry = Registry::with_prefix("armature_worker");
        let total = gauge(&mut registry, "kv_blocks_total", "KV blocks in the arena");
        total.set(engine.total_blocks as i64);
        let requests = Family::default();
        registry.register("requests", "Requests by how they ended", requests.clone());
        let (time_to_first_token, request_duration) = (Histogram::new(SECONDS), Histogram::new(SECONDS));
        let help = "From a request's arrival to its first token";
        registry.register("time_to_first_token_seconds", help, time_to_first_token.clone());
        registry.register("request_duration_seconds", "From a request's arrival to its end", request_duration.clone());
        let transfer = TransferMetrics::new(&mut registry);
        let r = &mut registry;
        Self {
            requests,
            running: gauge(r, "requests_running", "Sequences in the running batch"),
            waiting: gauge(r, "requests_waiting", "Requests waiting for a place or for blocks"),
            active_blocks: gauge(r, "kv_blocks_active", "KV blocks held by running sequences, leases and transfers"),
            used_blocks: gauge(r, "kv_blocks_used", "KV blocks referenced or cached"),
            pending_prefill_tokens: gauge(r, "prefill_tokens_pending", "Prompt tokens admitted and not yet computed"),
            prompt_tokens: counter(r, "prompt_tokens", "Prompt tokens of finished requests"),
            reused_tokens: counter(r, "prompt_tokens_reused", "Prompt tokens whose KV was reused"),
            generation_tokens: counter(r, "generation_tokens", "Tokens generated"),
            time_to_first_token,
            request_duration,
            events_published: counter(r, "kv_events_published", "KV events published"),
            dumps: counter(r, "kv_dumps", "KV queries answered with the whole state"),
            connections: gauge(r, "router_connections", "Router connections"),
            credit_stalls: counter(r, "stream_credit_stalls", "Times a stream had tokens and no credit"),
            transfer,
            registry,
        }
    }

    /// Where an engine adds what only its kind counts.
    pub fn registry_mut(&mut self) -> &mut Registry {
        &mut self.registry
    }

    /// Counts one request by how it ended.
    pub fn request_ended(&self, reason: Ending) {
        self.requests.get_or_create(&EndingLabel { reason }).inc();
    }

    /// Everything in the OpenMetrics text format, with the gauges of `load`.
    pub fn encode(&self, load: EngineLoad) -> String {
        self.running.set(load.running as i64);
        self.waiting.set(load.waiting as i64);
        self.active_blocks.set(load.active_blocks as i64);
        self.used_blocks.set(load.used_blocks as i64);
        self.pending_prefill_tokens.set(load.pending_prefill_tokens as i64);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a String takes any text");
        text
    }
}

/// Adds one observation to a latency histogram.
pub fn observe(histogram: &Histogram, time: Duration) {
    histogram.observe(time.as_secs_f64());
}

pub(crate) fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    let gauge = Gauge::default();
    registry.register(name, help, gauge.clone());
    gauge
}

pub(crate) fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}
