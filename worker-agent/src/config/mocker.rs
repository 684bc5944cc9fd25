//! Flags of the mocker engine. They mean nothing to other engines.

use clap::Args;

use super::{Config, ConfigError, DiscoveryBackend, TransferConfig};
use crate::engine::mocker::MockerOptions;
use crate::engine::mocker::timing::{Profile, TimingModel};

/// Flags of the mocker.
#[derive(Args, Clone, Debug)]
pub struct MockerConfig {
    /// Mocker: how many times faster than the model it runs; 0: its steps take no time
    #[arg(long, alias = "speedup-ratio", default_value_t = 1.0)]
    pub mocker_speedup_ratio: f64,
    /// Mocker: whose times it imitates
    #[arg(long, value_enum, default_value_t)]
    pub mocker_profile: Profile,
    /// Mocker: time of every step, in milliseconds [default: the profile's, as for all times]
    #[arg(long)]
    pub mocker_base_ms: Option<f64>,
    /// Mocker: time of a prompt token, in microseconds
    #[arg(long)]
    pub mocker_prefill_token_us: Option<f64>,
    /// Mocker: time of a prompt token for each token it attends to, in nanoseconds
    #[arg(long)]
    pub mocker_attention_pair_ns: Option<f64>,
    /// Mocker: time of a decoding sequence, in microseconds
    #[arg(long)]
    pub mocker_decode_sequence_us: Option<f64>,
    /// Mocker: time of reading a decoding sequence's KV, in nanoseconds for each of its tokens
    #[arg(long)]
    pub mocker_kv_token_ns: Option<f64>,
    /// Mocker: most tokens of prompt and answer together
    #[arg(long, default_value_t = 131_072)]
    pub mocker_context_length: usize,
    /// Mocker: mean length of answers that may end by themselves, in tokens [default: only limits end them]
    #[arg(long)]
    pub mocker_answer_tokens: Option<f64>,
    /// Mocker: workers in this process, named NAME-0 and so on; more than one take free ports
    #[arg(long, default_value_t = 1)]
    pub mocker_workers: usize,
}

/// Speed-ups between these keep every wait within what a timer can do.
const SPEEDUPS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;
/// Most workers of a process: each has four ports.
const MAX_WORKERS: usize = 10_000;

impl MockerConfig {
    /// What the flags say.
    pub fn options(&self) -> MockerOptions {
        let profile = self.mocker_profile.timing();
        let ns = |given: Option<f64>, unit: f64, default: f64| given.map_or(default, |given| given * unit);
        MockerOptions {
            timing: TimingModel {
                base_ns: ns(self.mocker_base_ms, 1e6, profile.base_ns),
                prefill_token_ns: ns(self.mocker_prefill_token_us, 1e3, profile.prefill_token_ns),
                attention_pair_ns: ns(self.mocker_attention_pair_ns, 1.0, profile.attention_pair_ns),
                decode_sequence_ns: ns(self.mocker_decode_sequence_us, 1e3, profile.decode_sequence_ns),
                kv_token_ns: ns(self.mocker_kv_token_ns, 1.0, profile.kv_token_ns),
            },
            speedup_ratio: self.mocker_speedup_ratio,
            context_length: self.mocker_context_length,
            answer_tokens: self.mocker_answer_tokens,
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let invalid =
            |flag, value: &dyn ToString, rule| Err(ConfigError::Invalid { flag, value: value.to_string(), rule });
        let times = [
            ("--mocker-base-ms", self.mocker_base_ms),
            ("--mocker-prefill-token-us", self.mocker_prefill_token_us),
            ("--mocker-attention-pair-ns", self.mocker_attention_pair_ns),
            ("--mocker-decode-sequence-us", self.mocker_decode_sequence_us),
            ("--mocker-kv-token-ns", self.mocker_kv_token_ns),
        ];
        for (flag, value) in times.into_iter().filter_map(|(flag, value)| Some((flag, value?))) {
            if !(0.0..=1e9).contains(&value) {
                return invalid(flag, &value, "must be from 0 to 1000000000");
            }
        }
        let speedup = self.mocker_speedup_ratio;
        if speedup != 0.0 && !SPEEDUPS.contains(&speedup) {
            return invalid("--mocker-speedup-ratio", &speedup, "must be 0 or from 0.001 to 1000000");
        }
        if self.mocker_context_length < 2 {
            return invalid("--mocker-context-length", &self.mocker_context_length, "must be at least 2");
        }
        if let Some(mean) = self.mocker_answer_tokens
            && !(mean.is_finite() && mean >= 1.0)
        {
            return invalid("--mocker-answer-tokens", &mean, "must be at least 1");
        }
        match self.mocker_workers {
            1..=MAX_WORKERS => Ok(()),
            workers => invalid("--mocker-workers", &workers, "must be from 1 to 10000"),
        }
    }
}

impl Config {
    /// One configuration for each worker of the process. In Kubernetes a worker is a pod: there is only one.
    pub fn mockers(&self) -> Result<Vec<Config>, ConfigError> {
        let count = self.mocker.mocker_workers;
        if count == 1 {
            return Ok(vec![self.clone()]);
        }
        if self.discovery_backend == DiscoveryBackend::Kubernetes {
            return Err(ConfigError::Contradiction("--mocker-workers", "--discovery-backend kubernetes"));
        }
        let one = |number| Config {
            name: format!("{}-{number}", self.name),
            port: 0,
            event_port: 0,
            admin_port: 0,
            transfer: TransferConfig { transfer_port: Some(0), ..self.transfer.clone() },
            ..self.clone()
        };
        Ok((0..count).map(one).collect())
    }
}
