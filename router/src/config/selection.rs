//! Flags of selection, and what they become: how a worker is picked, what counts as load, who is busy, who waits.

use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use routing::{BusyThresholds, CostConfig, LoadConfig, Mode, QueuePolicy, SelectorConfig, SettingError};

use super::{ConfigError, seconds};

/// How a worker is picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RouterMode {
    /// Lowest cost: cached prefix and load.
    Kv,
    /// Each worker in turn.
    RoundRobin,
    /// Any worker.
    Random,
    /// Of two workers taken at random, the one with fewer requests.
    PowerOfTwo,
    /// The worker with the fewest requests.
    LeastLoaded,
    /// The worker that the request names.
    Direct,
}

impl From<RouterMode> for Mode {
    fn from(mode: RouterMode) -> Self {
        match mode {
            RouterMode::Kv => Self::Kv,
            RouterMode::RoundRobin => Self::RoundRobin,
            RouterMode::Random => Self::Random,
            RouterMode::PowerOfTwo => Self::PowerOfTwo,
            RouterMode::LeastLoaded => Self::LeastLoaded,
            RouterMode::Direct => Self::Direct,
        }
    }
}

/// Which request of those that wait goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RouterQueuePolicy {
    /// The one that came first.
    Fcfs,
    /// The one with the most priority for the fewest uncached tokens.
    Wspt,
    /// The one that came last.
    Lcfs,
}

/// Flags.
#[derive(Clone, Debug, Args)]
pub struct SelectionOptions {
    /// How a worker is picked [default: kv]
    #[arg(long, env = "DYN_ROUTER_MODE", value_enum)]
    pub router_mode: Option<RouterMode>,
    /// By load alone: kv mode without KV events, credit for device memory or assumed reuse
    #[arg(
        long, env = "DYN_ROUTER_LOAD_AWARE", default_value = "false", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub load_aware: bool,
    /// Credit for prefix blocks in device memory, 0 to 1; more favours reuse, less favours even load [default: 1]
    #[arg(long, env = "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", value_name = "CREDIT")]
    pub router_kv_overlap_score_credit: Option<f64>,
    /// Credit for prefix blocks in host memory
    #[arg(long, env = "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", default_value_t = CostConfig::default().host_cache_hit_weight)]
    pub router_host_cache_hit_weight: f64,
    /// Credit for prefix blocks on disk
    #[arg(long, env = "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", default_value_t = CostConfig::default().disk_cache_hit_weight)]
    pub router_disk_cache_hit_weight: f64,
    /// Credit for blocks of a shared pool beyond what the worker holds
    #[arg(long, env = "DYN_SHARED_CACHE_MULTIPLIER", default_value_t = CostConfig::default().shared_cache_multiplier)]
    pub shared_cache_multiplier: f64,
    /// Factor on the prompt side of the cost
    #[arg(long, env = "DYN_ROUTER_PREFILL_LOAD_SCALE", default_value_t = CostConfig::default().prefill_load_scale)]
    pub router_prefill_load_scale: f64,
    /// 0 picks the lowest cost; above, workers are sampled by softmax over their costs
    #[arg(long, env = "DYN_ROUTER_TEMPERATURE", default_value_t = CostConfig::default().temperature)]
    pub router_temperature: f64,
    /// Follow the workers' KV events [default: true]
    #[arg(
        long, env = "DYN_ROUTER_USE_KV_EVENTS", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_kv_events: Option<bool>,
    /// Do not follow KV events
    #[arg(long)]
    pub no_router_kv_events: bool,
    /// Count the KV blocks of running requests as load [default: true]
    #[arg(
        long, env = "DYN_ROUTER_TRACK_ACTIVE_BLOCKS", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_track_active_blocks: Option<bool>,
    /// Do not count the KV blocks of running requests
    #[arg(long)]
    pub no_router_track_active_blocks: bool,
    /// Count the KV blocks that requests generate, too [default: true]
    #[arg(
        long, env = "DYN_ROUTER_TRACK_OUTPUT_BLOCKS", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_track_output_blocks: Option<bool>,
    /// Count the KV blocks of prompts only
    #[arg(long)]
    pub no_router_track_output_blocks: bool,
    /// Count KV blocks that requests on a worker have in common once [default: true]
    #[arg(
        long, env = "DYN_ROUTER_ASSUME_KV_REUSE", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_assume_kv_reuse: Option<bool>,
    /// Count every request's KV blocks alone
    #[arg(long)]
    pub no_router_assume_kv_reuse: bool,
    /// Count prompt tokens that are not computed yet as load [default: true]
    #[arg(
        long, env = "DYN_ROUTER_TRACK_PREFILL_TOKENS", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_track_prefill_tokens: Option<bool>,
    /// Do not count prompt tokens that are not computed yet
    #[arg(long)]
    pub no_router_track_prefill_tokens: bool,
    /// Share of a worker's KV blocks in use above which it gets no more requests, 0 to 1 [default: none]
    #[arg(long, env = "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", value_name = "SHARE")]
    pub active_decode_blocks_threshold: Option<f64>,
    /// Prompt tokens not computed yet above which a worker gets no more requests [default: none]
    #[arg(long, env = "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", value_name = "TOKENS")]
    pub active_prefill_tokens_threshold: Option<u32>,
    /// The same as a share of the most tokens in one step of the worker's engine [default: none]
    #[arg(long, env = "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", value_name = "SHARE")]
    pub active_prefill_tokens_threshold_frac: Option<f64>,
    /// Requests wait while the prompt tokens of all workers exceed this share of one step of their engines [default: they never
    /// wait]
    #[arg(long, env = "DYN_ROUTER_QUEUE_THRESHOLD", value_name = "SHARE")]
    pub router_queue_threshold: Option<f64>,
    /// Which request of those that wait goes first, among equal strict priorities [default: fcfs]
    #[arg(long, env = "DYN_ROUTER_QUEUE_POLICY", value_enum)]
    pub router_queue_policy: Option<RouterQueuePolicy>,
    /// Most requests that wait; more are refused with 429 [default: 1024]
    #[arg(long, env = "ARMATURE_ROUTER_QUEUE_LIMIT", value_name = "REQUESTS")]
    pub router_queue_limit: Option<usize>,
    /// Longest wait of a request, in seconds [default: 60]
    #[arg(long, env = "ARMATURE_ROUTER_QUEUE_TIMEOUT_SECS", value_name = "SECONDS", value_parser = seconds)]
    pub router_queue_timeout_secs: Option<Duration>,
    /// Decisions kept to be explained afterwards; 0 keeps none
    #[arg(long, env = "ARMATURE_ROUTER_DECISIONS", value_name = "DECISIONS", default_value_t = Selection::default().decisions)]
    pub router_decisions: usize,
}

/// Settings of selection that have been checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    /// How a worker is picked.
    pub selector: SelectorConfig,
    /// What counts as load.
    pub load: LoadConfig,
    /// Who waits how long.
    pub queue: QueueSettings,
    /// Past decisions that are kept.
    pub decisions: usize,
}

/// Requests that wait for a worker with room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSettings {
    /// Who goes first.
    pub policy: QueuePolicy,
    /// Most that wait.
    pub limit: usize,
    /// Longest wait.
    pub timeout: Duration,
}

impl Default for Selection {
    fn default() -> Self {
        Self {
            selector: SelectorConfig::default(),
            load: LoadConfig::default(),
            queue: QueueSettings { policy: QueuePolicy::Fcfs, limit: 1024, timeout: Duration::from_secs(60) },
            decisions: 1024,
        }
    }
}

/// What a flag with a `--no-` form says: that form wins, so that it can take back a variable.
fn said(yes: Option<bool>, no: bool) -> Option<bool> {
    if no { Some(false) } else { yes }
}

impl SelectionOptions {
    /// Whether KV events are followed.
    pub(super) fn kv_events(&self) -> bool {
        said(self.router_kv_events, self.no_router_kv_events).unwrap_or(!self.load_aware)
    }

    /// Checks the flags, each alone and with the others.
    pub(super) fn validate(&self) -> Result<Selection, ConfigError> {
        self.contradictions()?;
        let defaults = Selection::default();
        let (credit, reuse) = if self.load_aware { (0.0, false) } else { (1.0, true) };
        let selector = SelectorConfig {
            mode: self.router_mode.unwrap_or(RouterMode::Kv).into(),
            cost: CostConfig {
                overlap_score_credit: self.router_kv_overlap_score_credit.unwrap_or(credit),
                host_cache_hit_weight: self.router_host_cache_hit_weight,
                disk_cache_hit_weight: self.router_disk_cache_hit_weight,
                shared_cache_multiplier: self.shared_cache_multiplier,
                prefill_load_scale: self.router_prefill_load_scale,
                temperature: self.router_temperature,
            },
            busy: BusyThresholds {
                decode_blocks: self.active_decode_blocks_threshold,
                prefill_tokens: self.active_prefill_tokens_threshold,
                prefill_tokens_frac: self.active_prefill_tokens_threshold_frac,
            },
            queue_threshold: self.router_queue_threshold,
        };
        selector.validate().map_err(|error| name_flag(&error))?;
        Ok(Selection {
            selector,
            load: LoadConfig {
                track_active_blocks: self.tracks_active_blocks().unwrap_or(true),
                track_output_blocks: self.tracks_output_blocks().unwrap_or(true),
                assume_kv_reuse: self.assumes_kv_reuse().unwrap_or(reuse),
                track_prefill_tokens: self.tracks_prefill_tokens().unwrap_or(true),
            },
            queue: QueueSettings {
                policy: self.router_queue_policy.map_or(defaults.queue.policy, |policy| match policy {
                    RouterQueuePolicy::Fcfs => QueuePolicy::Fcfs,
                    RouterQueuePolicy::Wspt => QueuePolicy::Wspt,
                    RouterQueuePolicy::Lcfs => QueuePolicy::Lcfs,
                }),
                limit: self.router_queue_limit.unwrap_or(defaults.queue.limit),
                timeout: self.router_queue_timeout_secs.unwrap_or(defaults.queue.timeout),
            },
            decisions: self.router_decisions,
        })
    }

    fn tracks_active_blocks(&self) -> Option<bool> {
        said(self.router_track_active_blocks, self.no_router_track_active_blocks)
    }

    fn tracks_output_blocks(&self) -> Option<bool> {
        said(self.router_track_output_blocks, self.no_router_track_output_blocks)
    }

    fn assumes_kv_reuse(&self) -> Option<bool> {
        said(self.router_assume_kv_reuse, self.no_router_assume_kv_reuse)
    }

    fn tracks_prefill_tokens(&self) -> Option<bool> {
        said(self.router_track_prefill_tokens, self.no_router_track_prefill_tokens)
    }

    /// Refuses what makes no sense together: both flags are named.
    fn contradictions(&self) -> Result<(), ConfigError> {
        let no_active = self.tracks_active_blocks() == Some(false);
        let no_prefill = self.tracks_prefill_tokens() == Some(false);
        let events = said(self.router_kv_events, self.no_router_kv_events);
        let preset = |contradicts: bool, flag| (self.load_aware && contradicts, "--load-aware", flag);
        let checks = [
            preset(self.router_mode.is_some_and(|mode| mode != RouterMode::Kv), "--router-mode"),
            preset(events == Some(true), "--router-kv-events"),
            preset(
                self.router_kv_overlap_score_credit.is_some_and(|credit| credit > 0.0),
                "--router-kv-overlap-score-credit",
            ),
            preset(self.assumes_kv_reuse() == Some(true), "--router-assume-kv-reuse"),
            preset(no_active, "--no-router-track-active-blocks"),
            preset(no_prefill, "--no-router-track-prefill-tokens"),
            (
                no_active && self.tracks_output_blocks() == Some(true),
                "--router-track-output-blocks",
                "--no-router-track-active-blocks",
            ),
            (
                no_active && self.active_decode_blocks_threshold.is_some(),
                "--active-decode-blocks-threshold",
                "--no-router-track-active-blocks",
            ),
            (
                no_prefill && self.active_prefill_tokens_threshold.is_some(),
                "--active-prefill-tokens-threshold",
                "--no-router-track-prefill-tokens",
            ),
            (
                no_prefill && self.active_prefill_tokens_threshold_frac.is_some(),
                "--active-prefill-tokens-threshold-frac",
                "--no-router-track-prefill-tokens",
            ),
            (
                no_prefill && self.router_queue_threshold.is_some(),
                "--router-queue-threshold",
                "--no-router-track-prefill-tokens",
            ),
        ];
        if let Some((_, one, other)) = checks.into_iter().find(|(contradict, ..)| *contradict) {
            return Err(ConfigError::new(format!("{one} and {other} contradict each other; drop one")));
        }
        let of_queue = [
            (self.router_queue_policy.is_some(), "--router-queue-policy"),
            (self.router_queue_limit.is_some(), "--router-queue-limit"),
            (self.router_queue_timeout_secs.is_some(), "--router-queue-timeout-secs"),
        ];
        match of_queue.into_iter().find(|(given, _)| *given && self.router_queue_threshold.is_none()) {
            Some((_, flag)) => Err(ConfigError::new(format!("{flag} needs --router-queue-threshold SHARE"))),
            None => Ok(()),
        }
    }
}

/// The same complaint about the flag behind the setting.
fn name_flag(error: &SettingError) -> ConfigError {
    let flag = match error.name {
        "overlap_score_credit" => "--router-kv-overlap-score-credit",
        "host_cache_hit_weight" => "--router-host-cache-hit-weight",
        "disk_cache_hit_weight" => "--router-disk-cache-hit-weight",
        "shared_cache_multiplier" => "--shared-cache-multiplier",
        "prefill_load_scale" => "--router-prefill-load-scale",
        "decode_blocks" => "--active-decode-blocks-threshold",
        "prefill_tokens_frac" => "--active-prefill-tokens-threshold-frac",
        "queue_threshold" => "--router-queue-threshold",
        _ => "--router-temperature",
    };
    ConfigError::new(format!("{flag} must be {}, not {}", error.range, error.value))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: SelectionOptions,
    }

    fn options(flags: &[&str]) -> SelectionOptions {
        Command::try_parse_from([&["router"], flags].concat()).unwrap_or_else(|error| panic!("{error}")).options
    }

    fn valid(flags: &[&str]) -> Selection {
        options(flags).validate().unwrap_or_else(|error| panic!("{error}"))
    }

    fn wrong(flags: &[&str]) -> String {
        options(flags).validate().expect_err("invalid").to_string()
    }

    #[test]
    fn without_flags_the_defaults_hold() {
        assert_eq!(valid(&[]), Selection::default());
        assert!(options(&[]).kv_events());
    }

    #[test]
    fn every_mode_has_the_name_that_metrics_show() {
        for mode in RouterMode::value_variants() {
            let name = mode.to_possible_value().expect("not hidden");
            assert_eq!(valid(&["--router-mode", name.get_name()]).selector.mode.as_str(), name.get_name());
        }
        for policy in RouterQueuePolicy::value_variants() {
            let name = policy.to_possible_value().expect("not hidden");
            let flags = ["--router-queue-threshold=2", "--router-queue-policy", name.get_name()];
            assert_eq!(valid(&flags).queue.policy.as_str(), name.get_name());
        }
    }

    #[test]
    fn what_is_on_can_be_turned_off_both_ways() {
        assert!(!options(&["--no-router-kv-events"]).kv_events());
        assert!(!options(&["--router-kv-events=false"]).kv_events());
        assert!(options(&["--router-kv-events"]).kv_events());
        let load = valid(&["--no-router-assume-kv-reuse", "--router-track-output-blocks=false"]).load;
        let expected = LoadConfig { assume_kv_reuse: false, track_output_blocks: false, ..LoadConfig::default() };
        assert_eq!(load, expected);
    }

    #[test]
    fn the_preset_is_load_alone() {
        let flags = ["--load-aware"];
        let selection = valid(&flags);
        assert!(!options(&flags).kv_events());
        assert_eq!((selection.selector.mode, selection.selector.cost.overlap_score_credit), (Mode::Kv, 0.0));
        let expected = LoadConfig { assume_kv_reuse: false, ..LoadConfig::default() };
        assert_eq!(selection.load, expected);
        for other in [
            "--router-mode=random",
            "--router-kv-events",
            "--router-kv-overlap-score-credit=0.5",
            "--router-assume-kv-reuse",
            "--no-router-track-active-blocks",
            "--no-router-track-prefill-tokens",
        ] {
            let flag = other.split('=').next().unwrap_or(other);
            assert_eq!(
                wrong(&["--load-aware", other]),
                format!("--load-aware and {flag} contradict each other; drop one")
            );
        }
    }

    #[test]
    fn a_threshold_needs_what_it_measures() {
        let contradict = |one: &str, other: &str| {
            let flag = one.split('=').next().unwrap_or(one);
            assert_eq!(wrong(&[one, other]), format!("{flag} and {other} contradict each other; drop one"));
        };
        contradict("--router-track-output-blocks", "--no-router-track-active-blocks");
        contradict("--active-decode-blocks-threshold=0.9", "--no-router-track-active-blocks");
        contradict("--active-prefill-tokens-threshold=10", "--no-router-track-prefill-tokens");
        contradict("--active-prefill-tokens-threshold-frac=2", "--no-router-track-prefill-tokens");
        contradict("--router-queue-threshold=2", "--no-router-track-prefill-tokens");
    }

    #[test]
    fn settings_of_the_queue_need_a_queue() {
        for flag in ["--router-queue-policy=wspt", "--router-queue-limit=5", "--router-queue-timeout-secs=5"] {
            let name = flag.split('=').next().unwrap_or(flag);
            assert_eq!(wrong(&[flag]), format!("{name} needs --router-queue-threshold SHARE"));
            valid(&["--router-queue-threshold=1.5", flag]);
        }
    }

    #[test]
    fn values_outside_their_ranges_name_the_flag() {
        for (flag, range) in [
            ("--router-kv-overlap-score-credit", "from 0 to 1"),
            ("--active-decode-blocks-threshold", "from 0 to 1"),
            ("--router-host-cache-hit-weight", "a number of at least 0"),
            ("--router-disk-cache-hit-weight", "a number of at least 0"),
            ("--shared-cache-multiplier", "a number of at least 0"),
            ("--router-prefill-load-scale", "a number of at least 0"),
            ("--router-temperature", "a number of at least 0"),
            ("--active-prefill-tokens-threshold-frac", "a number of at least 0"),
            ("--router-queue-threshold", "a number of at least 0"),
        ] {
            assert_eq!(wrong(&[&format!("{flag}=-1")]), format!("{flag} must be {range}, not -1"));
        }
    }
}
