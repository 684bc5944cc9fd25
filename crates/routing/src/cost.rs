//! The cost of running a request on a worker; lower wins.
//!
//! ```text
//! adjusted_prefill = max(prefill_blocks - overlap_score_credit  * device_overlap
//!                                       - host_cache_hit_weight * host_overlap
//!                                       - disk_cache_hit_weight * disk_overlap
//!                                       - shared_cache_multiplier * shared_beyond, 0)
//! cost = prefill_load_scale * adjusted_prefill + decode_blocks
//! ```
//! Source: the router design document this project implements; the defaults are Dynamo's.

use kv_index::TierBlocks;

/// Weights of the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostConfig {
    /// Credit for a prefix block in device memory, 0 to 1: more favours reuse (TTFT), less favours even load (ITL).
    pub overlap_score_credit: f64,
    /// Credit for a prefix block in host memory, ≥ 0.
    pub host_cache_hit_weight: f64,
    /// Credit for a prefix block on disk, ≥ 0.
    pub disk_cache_hit_weight: f64,
    /// Credit for a block of a shared pool beyond what the worker holds itself, ≥ 0.
    pub shared_cache_multiplier: f64,
    /// Factor on the prompt side, ≥ 0.
    pub prefill_load_scale: f64,
    /// 0: the lowest cost wins; above: softmax sampling over normalised costs, flatter as it rises.
    pub temperature: f64,
}

impl Default for CostConfig {
    fn default() -> Self {
        Self {
            overlap_score_credit: 1.0,
            host_cache_hit_weight: 0.75,
            disk_cache_hit_weight: 0.25,
            shared_cache_multiplier: 0.0,
            prefill_load_scale: 1.0,
            temperature: 0.0,
        }
    }
}

/// A weight outside its range.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[error("{name} must be {range}, not {value}")]
pub struct CostConfigError {
    /// The field.
    pub name: &'static str,
    /// What is allowed.
    pub range: &'static str,
    /// What was given.
    pub value: f64,
}

impl CostConfig {
    /// Refuses weights outside their ranges.
    pub fn validate(&self) -> Result<(), CostConfigError> {
        let credit = self.overlap_score_credit;
        if !(0.0..=1.0).contains(&credit) {
            return Err(CostConfigError { name: "overlap_score_credit", range: "from 0 to 1", value: credit });
        }
        let rest = [
            ("host_cache_hit_weight", self.host_cache_hit_weight),
            ("disk_cache_hit_weight", self.disk_cache_hit_weight),
            ("shared_cache_multiplier", self.shared_cache_multiplier),
            ("prefill_load_scale", self.prefill_load_scale),
            ("temperature", self.temperature),
        ];
        match rest.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((name, value)) => Err(CostConfigError { name, range: "a number of at least 0", value }),
            None => Ok(()),
        }
    }
}

/// Every term of one worker's cost, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// Active prompt tokens of the worker plus the request's, over the block size.
    pub prefill_blocks: f64,
    /// What the worker holds of the prompt.
    pub overlap: TierBlocks,
    /// What that takes off the prefill.
    pub credits: f64,
    /// Prefill after credits, ≥ 0.
    pub adjusted_prefill_blocks: f64,
    /// Blocks in use on the worker if the request ran there.
    pub decode_blocks: f64,
    /// The sum that is compared.
    pub cost: f64,
}

impl Terms {
    /// Evaluates the formula.
    pub fn new(config: &CostConfig, prefill_blocks: f64, overlap: TierBlocks, decode_blocks: f64) -> Self {
        let credits = config.overlap_score_credit * f64::from(overlap.device)
            + config.host_cache_hit_weight * f64::from(overlap.host)
            + config.disk_cache_hit_weight * f64::from(overlap.disk)
            + config.shared_cache_multiplier * f64::from(overlap.shared);
        let adjusted_prefill_blocks = (prefill_blocks - credits).max(0.0);
        let cost = config.prefill_load_scale * adjusted_prefill_blocks + decode_blocks;
        Self { prefill_blocks, overlap, credits, adjusted_prefill_blocks, decode_blocks, cost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(device: u32) -> TierBlocks {
        TierBlocks { device, ..TierBlocks::default() }
    }

    #[test]
    fn the_documents_own_example() {
        let config = CostConfig::default();
        let costs =
            [(2, 10.0), (5, 5.0), (8, 9.0)].map(|(o, decode)| Terms::new(&config, 10.0, device(o), decode).cost);
        assert_eq!(costs, [18.0, 10.0, 11.0]);
    }

    #[test]
    fn every_tier_has_its_own_credit_and_prefill_never_turns_negative() {
        let config = CostConfig { shared_cache_multiplier: 0.5, prefill_load_scale: 2.0, ..CostConfig::default() };
        let overlap = TierBlocks { device: 3, host: 4, disk: 8, shared: 2 };
        let terms = Terms::new(&config, 12.0, overlap, 7.0);
        assert_eq!(terms.credits, 3.0 + 3.0 + 2.0 + 1.0);
        assert_eq!((terms.adjusted_prefill_blocks, terms.cost), (3.0, 13.0));
        assert_eq!(Terms::new(&config, 5.0, overlap, 7.0).cost, 7.0);
    }

    #[test]
    fn weights_outside_their_range_are_named() {
        let bad = CostConfig { overlap_score_credit: 1.5, ..CostConfig::default() };
        assert_eq!(bad.validate().unwrap_err().to_string(), "overlap_score_credit must be from 0 to 1, not 1.5");
        let bad = CostConfig { temperature: f64::NAN, ..CostConfig::default() };
        assert_eq!(bad.validate().unwrap_err().name, "temperature");
        assert_eq!(CostConfig::default().validate(), Ok(()));
    }
}
