//! What the tiers count, for the worker's metrics.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::catalog::{DiskFaults, Sizes, TierCounts, TierUsage};

/// A tier below the arena, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written as the variants are named")]
pub enum TierName {
    /// Host memory.
    host,
    /// Disk.
    disk,
}

/// How the disk failed, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written as the variants are named")]
pub enum DiskFault {
    /// No space.
    full,
    /// Another failure of a write.
    write,
    /// A failure of a read.
    read,
    /// A block was not what had been written.
    damaged,
    /// A read took too long.
    late,
    /// The disk's thread ended by itself.
    stopped,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    tier: TierName,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabel {
    reason: DiskFault,
}

/// Bounds of the histogram in seconds: from one block in memory to the longest wait.
const SECONDS: [f64; 12] = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0];

/// Metrics of the tiers of one engine. Clones share them.
#[derive(Clone, Debug)]
pub struct TierMetrics {
    blocks: Family<TierLabel, Gauge>,
    blocks_limit: Family<TierLabel, Gauge>,
    bytes: Family<TierLabel, Gauge>,
    bytes_limit: Family<TierLabel, Gauge>,
    offloaded: Family<TierLabel, Counter>,
    onboarded: Family<TierLabel, Counter>,
    dropped: Family<TierLabel, Counter>,
    faults: Family<FaultLabel, Counter>,
    seconds: Histogram,
}

impl Default for TierMetrics {
    fn default() -> Self {
        Self {
            blocks: Family::default(),
            blocks_limit: Family::default(),
            bytes: Family::default(),
            bytes_limit: Family::default(),
            offloaded: Family::default(),
            onboarded: Family::default(),
            dropped: Family::default(),
            faults: Family::default(),
            seconds: Histogram::new(SECONDS),
        }
    }
}

impl TierMetrics {
    /// Makes them part of a worker's metrics.
    pub fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("kv_tier_blocks", "KV blocks in a tier below the arena", &self.blocks),
            ("kv_tier_blocks_limit", "KV blocks that a tier below the arena has room for", &self.blocks_limit),
            ("kv_tier_bytes", "Bytes of KV blocks in a tier below the arena", &self.bytes),
            ("kv_tier_bytes_limit", "Bytes of KV blocks that a tier below the arena has room for", &self.bytes_limit),
        ];
        for (name, help, family) in gauges {
            registry.register(name, help, family.clone());
        }
        let counters = [
            ("kv_tier_offloaded_blocks", "KV blocks that came into a tier from above", &self.offloaded),
            ("kv_tier_onboarded_blocks", "KV blocks copied from a tier into the arena for a request", &self.onboarded),
            (
                "kv_tier_dropped_blocks",
                "KV blocks lost because a tier's queue was full or its disk failed",
                &self.dropped,
            ),
        ];
        for (name, help, family) in counters {
            registry.register(name, help, family.clone());
        }
        registry.register("kv_disk_errors", "Failures of the disk tier", self.faults.clone());
        let help = "From a sequence's first block from a tier until it waited for no more";
        registry.register("kv_onboard_seconds", help, self.seconds.clone());
    }

    /// Sets the limits.
    pub fn set_limits(&self, sizes: Sizes, block_bytes: usize) {
        for (tier, blocks) in [(TierName::host, sizes.host), (TierName::disk, sizes.disk)] {
            self.blocks_limit.get_or_create(&TierLabel { tier }).set(blocks as i64);
            self.bytes_limit.get_or_create(&TierLabel { tier }).set((blocks * block_bytes) as i64);
        }
    }

    /// Takes over what has changed between two snapshots.
    pub fn update(&self, before: &TierUsage, now: &TierUsage, block_bytes: usize) {
        let tiers = [
            (TierName::host, now.host_blocks, before.host, now.host),
            (TierName::disk, now.disk_blocks, before.disk, now.disk),
        ];
        for (tier, blocks, before, now) in tiers {
            let label = TierLabel { tier };
            self.blocks.get_or_create(&label).set(blocks as i64);
            self.bytes.get_or_create(&label).set((blocks * block_bytes) as i64);
            let counts = |counts: TierCounts| [counts.offloaded, counts.onboarded, counts.dropped];
            let families = [&self.offloaded, &self.onboarded, &self.dropped];
            for ((family, before), now) in families.into_iter().zip(counts(before)).zip(counts(now)) {
                family.get_or_create(&label).inc_by(now - before);
            }
        }
        let faults = |faults: DiskFaults| {
            let DiskFaults { full, write, read, damaged, late, stopped } = faults;
            [
                (DiskFault::full, full),
                (DiskFault::write, write),
                (DiskFault::read, read),
                (DiskFault::damaged, damaged),
                (DiskFault::late, late),
                (DiskFault::stopped, stopped),
            ]
        };
        for ((reason, before), (_, now)) in faults(before.faults).into_iter().zip(faults(now.faults)) {
            if now > before {
                self.faults.get_or_create(&FaultLabel { reason }).inc_by(now - before);
            }
        }
    }

    /// A sequence has waited so long for blocks that came.
    pub fn onboarded(&self, seconds: f64) {
        self.seconds.observe(seconds);
    }

    /// Blocks copied from a tier into the arena so far.
    pub fn onboarded_blocks(&self, tier: TierName) -> u64 {
        self.onboarded.get_or_create(&TierLabel { tier }).get()
    }

    /// Failures of the disk so far.
    pub fn faults(&self, reason: DiskFault) -> u64 {
        self.faults.get_or_create(&FaultLabel { reason }).get()
    }
}
