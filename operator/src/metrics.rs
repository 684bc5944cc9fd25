//! The operator's own metrics, in one registry.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Labels of one reconcile.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reconcile {
    /// Kind of the object.
    pub controller: String,
    /// `ok`, or the reason of the error.
    pub result: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Controller {
    controller: String,
}

/// Handles of the metrics; clones share them.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    reconciles: Family<Reconcile, Counter>,
    seconds: Family<Controller, Histogram>,
    leader: Gauge<i64, AtomicI64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("armature_operator");
        let reconciles = Family::default();
        let seconds = Family::<Controller, Histogram>::new_with_constructor(reconcile_histogram);
        let leader = Gauge::default();
        registry.register("reconciles", "Reconciles by kind and result", reconciles.clone());
        registry.register("reconcile_seconds", "Time of one reconcile", seconds.clone());
        registry.register("leader", "1 while this operator holds the Lease", leader.clone());
        Self { registry: Arc::new(registry), reconciles, seconds, leader }
    }
}

/// 1 ms × 2^0 … 2^14: up to the deadline of a call, 15 s.
fn reconcile_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

impl Metrics {
    /// Counts one reconcile.
    pub fn reconciled(&self, reconcile: Reconcile, took: Duration) {
        let controller = Controller { controller: reconcile.controller.clone() };
        self.seconds.get_or_create(&controller).observe(took.as_secs_f64());
        self.reconciles.get_or_create(&reconcile).inc();
    }

    /// Notes whether this operator leads.
    pub fn leads(&self, leads: bool) {
        self.leader.set(leads.into());
    }

    /// OpenMetrics text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a String cannot fail.
        encode(&mut text, &self.registry).expect("a String takes everything");
        text
    }
}
