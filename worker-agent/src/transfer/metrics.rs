//! What is counted of leases and transfers.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::metrics::{counter, gauge};

/// Why a transfer failed, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written as the variants are named")]
pub enum Failure {
    /// The parameters are not for this worker or this prompt.
    params,
    /// Another model, layout or revision.
    layout,
    /// No blocks are free here.
    no_blocks,
    /// The other worker could not be connected to.
    connect,
    /// The connection broke.
    lost,
    /// A stage took too long.
    timeout,
    /// The lease had ended.
    lease_gone,
    /// The other worker refused for another reason.
    refused,
    /// A block came damaged.
    checksum,
    /// The other side does not keep to the protocol.
    protocol,
    /// Nobody waited any more.
    cancelled,
    /// This worker's engine has stopped, or is stuck in a step.
    stopped,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabel {
    reason: Failure,
}

/// How blocks travelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabel {
    transport: &'static str,
}

/// Bounds of the histogram in seconds: from one block on one machine to the longest fetch.
const SECONDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Counts of one worker. Clones share them.
#[derive(Clone, Debug)]
pub struct TransferMetrics {
    failures: Family<FailureLabel, Counter>,
    /// Leases held now.
    pub leases: Gauge,
    /// Blocks under leases now; one under two counts once.
    pub leased_blocks: Gauge,
    /// Blocks reserved for transfers to this worker now.
    pub reserved_blocks: Gauge,
    /// Leases that ended because nobody fetched.
    pub leases_expired: Counter,
    sent_bytes: Family<TransportLabel, Counter>,
    received_bytes: Family<TransportLabel, Counter>,
    /// Blocks received and verified.
    pub received_blocks: Counter,
    /// Fetches that ended because the request was cancelled.
    pub cancelled: Counter,
    /// Seconds from a request's arrival until its blocks were here, or had failed to come.
    pub seconds: Histogram,
}

impl TransferMetrics {
    /// All zero, registered.
    pub fn new(registry: &mut Registry) -> Self {
        let (failures, seconds) = (Family::default(), Histogram::new(SECONDS));
        let (sent_bytes, received_bytes) = (Family::default(), Family::default());
        let help = "Bytes of KV blocks handed to other workers, by transport";
        registry.register("kv_transfer_sent_bytes", help, sent_bytes.clone());
        registry.register(
            "kv_transfer_received_bytes",
            "Bytes of KV blocks fetched, by transport",
            received_bytes.clone(),
        );
        let help = "KV transfers to this worker that failed, by reason: the prompt was computed instead";
        registry.register("kv_transfer_failures", help, failures.clone());
        let help = "From a request's arrival until its blocks were here or had failed to come";
        registry.register("kv_transfer_seconds", help, seconds.clone());
        Self {
            failures,
            seconds,
            leases: gauge(registry, "kv_leases", "Prompts whose KV blocks wait to be fetched by other workers"),
            leased_blocks: gauge(registry, "kv_leased_blocks", "KV blocks that wait to be fetched by other workers"),
            reserved_blocks: gauge(registry, "kv_reserved_blocks", "KV blocks that wait for their content to come"),
            leases_expired: counter(registry, "kv_leases_expired", "Leases that ended because nobody fetched"),
            sent_bytes,
            received_bytes,
            received_blocks: counter(registry, "kv_transfer_received_blocks", "KV blocks fetched from other workers"),
            cancelled: counter(registry, "kv_transfers_cancelled", "KV transfers given up with their request"),
        }
    }

    /// Bytes of blocks handed out over a transport.
    pub fn sent_bytes(&self, transport: &'static str) -> Counter {
        self.sent_bytes.get_or_create_owned(&TransportLabel { transport })
    }

    /// Bytes of blocks that came over a transport and were verified.
    pub fn received_bytes(&self, transport: &'static str) -> Counter {
        self.received_bytes.get_or_create_owned(&TransportLabel { transport })
    }

    pub(super) fn failed(&self, reason: Failure) {
        self.failures.get_or_create(&FailureLabel { reason }).inc();
    }

    /// How often transfers failed for this reason.
    pub fn failures(&self, reason: Failure) -> u64 {
        self.failures.get_or_create(&FailureLabel { reason }).get()
    }
}
