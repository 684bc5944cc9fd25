//! Metrics of the frontend, all `armature_frontend_…`, and the guard that records one request.
//!
//! The label `model` only takes names of models that workers serve, so the number of series is bounded by the
//! cluster, not by what clients send; requests for anything else have an empty one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLock;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::openai::Endpoint;
use crate::stream::encode::Usage;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    model: String,
    endpoint: &'static str,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
}

type Histograms = Family<ModelLabels, Histogram, fn() -> Histogram>;

/// Metrics of the frontend.
pub struct FrontendMetrics {
    requests: Family<RequestLabels, Counter>,
    inflight: Gauge,
    connections: Gauge,
    pub(super) preprocessing_bytes: Gauge,
    pub(super) preprocessing_jobs: Gauge,
    disconnected: Family<ModelLabels, Counter>,
    time_to_first_token: Histograms,
    inter_token_latency: Histograms,
    request_duration: Histograms,
    input_tokens: Histograms,
    output_tokens: Histograms,
    output_tokens_total: Family<ModelLabels, Counter>,
    cached_tokens_total: Family<ModelLabels, Counter>,
    by_model: RwLock<HashMap<String, Arc<ModelMetrics>>>,
}

/// Handles of one model's series, so that a token costs no look-up by label.
struct ModelMetrics {
    disconnected: Counter,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    request_duration: Histogram,
    input_tokens: Histogram,
    output_tokens: Histogram,
    output_tokens_total: Counter,
    cached_tokens_total: Counter,
}

/// 1 ms to 60 s.
fn latency() -> Histogram {
    Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0])
}

/// 0.5 ms to 2 s.
fn token_latency() -> Histogram {
    Histogram::new([0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0])
}

/// 5 ms to 10 min.
fn duration() -> Histogram {
    Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0])
}

/// 16 tokens to 1M, by fours.
fn token_count() -> Histogram {
    Histogram::new((2..=10).map(|power| f64::from(4u32.pow(power))))
}

impl Default for FrontendMetrics {
    fn default() -> FrontendMetrics {
        let family = |constructor: fn() -> Histogram| Histograms::new_with_constructor(constructor);
        FrontendMetrics {
            requests: Family::default(),
            inflight: Gauge::default(),
            connections: Gauge::default(),
            preprocessing_bytes: Gauge::default(),
            preprocessing_jobs: Gauge::default(),
            disconnected: Family::default(),
            time_to_first_token: family(latency),
            inter_token_latency: family(token_latency),
            request_duration: family(duration),
            input_tokens: family(token_count),
            output_tokens: family(token_count),
            output_tokens_total: Family::default(),
            cached_tokens_total: Family::default(),
            by_model: RwLock::default(),
        }
    }
}

impl FrontendMetrics {
    /// Adds every metric to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let frontend = registry.sub_registry_with_prefix("armature_frontend");
        frontend.register("requests", "Requests answered, by outcome", self.requests.clone());
        frontend.register("inflight_requests", "Requests being served", self.inflight.clone());
        frontend.register("connections", "Open connections", self.connections.clone());
        let bytes = self.preprocessing_bytes.clone();
        frontend.register("preprocessing_bytes", "Bytes of request bodies being read and tokenized", bytes);
        let jobs = self.preprocessing_jobs.clone();
        frontend.register("preprocessing_jobs", "Large requests being tokenized", jobs);
        let disconnected = self.disconnected.clone();
        frontend.register("disconnected_clients", "Requests whose client left before the end", disconnected);
        let ttft = self.time_to_first_token.clone();
        frontend.register_with_unit("time_to_first_token", "Request to first token", Unit::Seconds, ttft);
        let itl = self.inter_token_latency.clone();
        frontend.register_with_unit("inter_token_latency", "Time between tokens", Unit::Seconds, itl);
        let duration = self.request_duration.clone();
        frontend.register_with_unit("request_duration", "Request to end of the answer", Unit::Seconds, duration);
        frontend.register("input_sequence_tokens", "Tokens of a request's prompts", self.input_tokens.clone());
        frontend.register("output_sequence_tokens", "Tokens of a request's answers", self.output_tokens.clone());
        frontend.register("output_tokens", "Tokens of all answers", self.output_tokens_total.clone());
        let cached = self.cached_tokens_total.clone();
        frontend.register("cached_tokens", "Prompt tokens whose KV workers reused", cached);
    }

    /// Counts a connection for as long as the result lives.
    pub(super) fn connection(&self) -> ConnectionGuard {
        self.connections.inc();
        ConnectionGuard(self.connections.clone())
    }

    fn model(&self, name: &str) -> Arc<ModelMetrics> {
        if let Some(metrics) = self.by_model.read().get(name) {
            return metrics.clone();
        }
        let labels = ModelLabels { model: name.to_owned() };
        let metrics = Arc::new(ModelMetrics {
            disconnected: self.disconnected.get_or_create_owned(&labels),
            time_to_first_token: self.time_to_first_token.get_or_create_owned(&labels),
            inter_token_latency: self.inter_token_latency.get_or_create_owned(&labels),
            request_duration: self.request_duration.get_or_create_owned(&labels),
            input_tokens: self.input_tokens.get_or_create_owned(&labels),
            output_tokens: self.output_tokens.get_or_create_owned(&labels),
            output_tokens_total: self.output_tokens_total.get_or_create_owned(&labels),
            cached_tokens_total: self.cached_tokens_total.get_or_create_owned(&labels),
        });
        self.by_model.write().entry(name.to_owned()).or_insert(metrics).clone()
    }
}

/// Counts an open connection until dropped.
pub(super) struct ConnectionGuard(Gauge);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Records one request; one that is dropped before [`RequestGuard::finish`] had its client leave.
pub struct RequestGuard {
    metrics: Arc<FrontendMetrics>,
    endpoint: Endpoint,
    model: Option<(String, Arc<ModelMetrics>)>,
    started: Instant,
    last_token: Option<Instant>,
    tokens: usize,
    outcome: Option<&'static str>,
}

impl RequestGuard {
    /// A request begins.
    pub fn new(metrics: Arc<FrontendMetrics>, endpoint: Endpoint) -> RequestGuard {
        metrics.inflight.inc();
        let started = Instant::now();
        RequestGuard { metrics, endpoint, model: None, started, last_token: None, tokens: 0, outcome: None }
    }

    /// It is for this model, which workers serve, and has so many prompt tokens.
    pub fn admitted(&mut self, model: &str, prompt_tokens: usize) {
        let metrics = self.metrics.model(model);
        metrics.input_tokens.observe(prompt_tokens as f64);
        self.model = Some((model.to_owned(), metrics));
    }

    /// So many tokens came.
    pub fn tokens(&mut self, count: usize) {
        let (true, Some((_, model))) = (count > 0, &self.model) else { return };
        let now = Instant::now();
        match self.last_token {
            None => model.time_to_first_token.observe((now - self.started).as_secs_f64()),
            Some(last) => model.inter_token_latency.observe((now - last).as_secs_f64() / count as f64),
        }
        self.last_token = Some(now);
        self.tokens += count;
    }

    /// So many tokens came in one piece: it tells nothing of when each was ready.
    pub fn whole(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// The answer is complete.
    pub fn usage(&mut self, usage: &Usage) {
        if let Some((_, model)) = &self.model {
            model.cached_tokens_total.inc_by(usage.cached_tokens as u64);
        }
    }

    /// The request ended like this; later calls change nothing.
    pub fn finish(&mut self, outcome: &'static str) {
        self.outcome.get_or_insert(outcome);
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.metrics.inflight.dec();
        let status = self.outcome.unwrap_or("client_closed");
        let model = self.model.as_ref().map_or(String::new(), |(name, _)| name.clone());
        let labels = RequestLabels { model, endpoint: self.endpoint.label(), status };
        self.metrics.requests.get_or_create(&labels).inc();
        let Some((_, model)) = &self.model else { return };
        model.request_duration.observe(self.started.elapsed().as_secs_f64());
        model.output_tokens.observe(self.tokens as f64);
        model.output_tokens_total.inc_by(self.tokens as u64);
        if self.outcome.is_none() {
            model.disconnected.inc();
        }
    }
}
