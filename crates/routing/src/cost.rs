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

use crate::setting::{self, SettingError};

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

impl CostConfig {
    /// Refuses weights outside their ranges.
    pub fn validate(&self) -> Result<(), SettingError> {
        setting::share("overlap_score_credit", self.overlap_score_credit)?;
        setting::not_negative("host_cache_hit_weight", self.host_cache_hit_weight)?;
        setting::not_negative("disk_cache_hit_weight", self.disk_cache_hit_weight)?;
        setting::not_negative("shared_cache_multiplier", self.shared_cache_multiplier)?;
        setting::not_negative("prefill_load_scale", self.prefill_load_scale)?;
        setting::not_negative("temperature", self.temperature)
    }
}

/// What one request wants of the weights; what it does not name stays as configured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostOverrides {
    /// See [`CostConfig::overlap_score_credit`].
    pub overlap_score_credit: Option<f64>,
    /// See [`CostConfig::host_cache_hit_weight`].
    pub host_cache_hit_weight: Option<f64>,
    /// See [`CostConfig::disk_cache_hit_weight`].
    pub disk_cache_hit_weight: Option<f64>,
    /// See [`CostConfig::shared_cache_multiplier`].
    pub shared_cache_multiplier: Option<f64>,
    /// See [`CostConfig::prefill_load_scale`].
    pub prefill_load_scale: Option<f64>,
    /// See [`CostConfig::temperature`].
    pub temperature: Option<f64>,
}

impl CostOverrides {
    /// Whether nothing is overridden.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The weights of the request; checked as the settings are.
    pub fn apply(&self, config: &CostConfig) -> Result<CostConfig, SettingError> {
        let own = CostConfig {
            overlap_score_credit: self.overlap_score_credit.unwrap_or(config.overlap_score_credit),
            host_cache_hit_weight: self.host_cache_hit_weight.unwrap_or(config.host_cache_hit_weight),
            disk_cache_hit_weight: self.disk_cache_hit_weight.unwrap_or(config.disk_cache_hit_weight),
            shared_cache_multiplier: self.shared_cache_multiplier.unwrap_or(config.shared_cache_multiplier),
            prefill_load_scale: self.prefill_load_scale.unwrap_or(config.prefill_load_scale),
            temperature: self.temperature.unwrap_or(config.temperature),
        };
        own.validate().map(|()| own)
    }
}

/// What the blocks of each tier take off the prefill, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Credits {
    /// For blocks in device memory.
    pub device: f64,
    /// For blocks in host memory.
    pub host: f64,
    /// For blocks on disk.
    pub disk: f64,
    /// For blocks of a shared pool beyond those.
    pub shared: f64,
}

impl Credits {
    /// Their sum.
    pub fn total(&self) -> f64 {
        self.device + self.host + self.disk + self.shared
    }
}

/// Every term of one worker's cost, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// Active prompt tokens of the worker plus the request's, over the block size.
    pub prefill_blocks: f64,
    /// What the worker holds of the prompt.
    pub overlap: TierBlocks,
    /// Blocks that it would find in a pool which the workers of its model share: those of its own prefix that it holds nowhere
    /// else, and those that come after that.
    pub shared_beyond: u32,
    /// What all that takes off the prefill.
    pub credits: Credits,
    /// Prefill after credits, ≥ 0.
    pub adjusted_prefill_blocks: f64,
    /// Blocks in use on the worker if the request ran there.
    pub decode_blocks: f64,
    /// The sum that is compared.
    pub cost: f64,
}

impl Terms {
    /// Evaluates the formula.
    #[inline]
    pub fn new(
        config: &CostConfig,
        prefill_blocks: f64,
        overlap: TierBlocks,
        shared_beyond: u32,
        decode_blocks: f64,
    ) -> Self {
        let credits = Credits {
            device: config.overlap_score_credit * f64::from(overlap.device),
            host: config.host_cache_hit_weight * f64::from(overlap.host),
            disk: config.disk_cache_hit_weight * f64::from(overlap.disk),
            shared: config.shared_cache_multiplier * f64::from(shared_beyond),
        };
        let adjusted_prefill_blocks = (prefill_blocks - credits.total()).max(0.0);
        let cost = config.prefill_load_scale * adjusted_prefill_blocks + decode_blocks;
        Self { prefill_blocks, overlap, shared_beyond, credits, adjusted_prefill_blocks, decode_blocks, cost }
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
            [(2, 10.0), (5, 5.0), (8, 9.0)].map(|(o, decode)| Terms::new(&config, 10.0, device(o), 0, decode).cost);
        assert_eq!(costs, [18.0, 10.0, 11.0]);
    }

    #[test]
    fn every_tier_has_its_own_credit_and_prefill_never_turns_negative() {
        let config = CostConfig { shared_cache_multiplier: 0.5, prefill_load_scale: 2.0, ..CostConfig::default() };
        let overlap = TierBlocks { device: 3, host: 4, disk: 8, shared: 2 };
        let terms = Terms::new(&config, 12.0, overlap, 2, 7.0);
        assert_eq!(terms.credits, Credits { device: 3.0, host: 3.0, disk: 2.0, shared: 1.0 });
        assert_eq!((terms.adjusted_prefill_blocks, terms.cost), (3.0, 13.0));
        assert_eq!(Terms::new(&config, 5.0, overlap, 2, 7.0).cost, 7.0);
    }

    #[test]
    fn weights_outside_their_range_are_named() {
        let bad = CostConfig { overlap_score_credit: 1.5, ..CostConfig::default() };
        assert_eq!(bad.validate().unwrap_err().to_string(), "overlap_score_credit must be from 0 to 1, not 1.5");
        let bad = CostConfig { temperature: f64::NAN, ..CostConfig::default() };
        assert_eq!(bad.validate().unwrap_err().name, "temperature");
        assert_eq!(CostConfig::default().validate(), Ok(()));
    }

    #[test]
    fn a_request_overrides_what_it_names_within_the_same_ranges() {
        let config = CostConfig { prefill_load_scale: 3.0, ..CostConfig::default() };
        let overrides = CostOverrides { temperature: Some(0.5), overlap_score_credit: Some(0.0), ..Default::default() };
        let own = overrides.apply(&config).expect("valid");
        assert_eq!((own.temperature, own.overlap_score_credit, own.prefill_load_scale), (0.5, 0.0, 3.0));
        assert!(!overrides.is_empty() && CostOverrides::default().is_empty());
        assert_eq!(CostOverrides::default().apply(&config), Ok(config));
        let bad = CostOverrides { host_cache_hit_weight: Some(-1.0), ..Default::default() };
        assert_eq!(bad.apply(&config).unwrap_err().name, "host_cache_hit_weight");
    }
}
