//! The router section: a field for each flag of the router's that the operator does not set itself.

mod sections;

use k8s_openapi::api::core::v1::EnvVar;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Resources;
pub use sections::{ApproximateCachePolicy, Deadlines, Frontend, KvIndex};

/// Guesses about caches are for routers that are told nothing of them.
const GUESSES_RULE: &str = "!has(self.index) || !(has(self.index.ttlSeconds) || has(self.index.approximateCachePolicy)) || \
    (has(self.kvEvents) && !self.kvEvents && !(has(self.loadAware) && self.loadAware))";

/// A prediction bridges the time until an event comes.
const PREDICTED_RULE: &str = "!has(self.index) || !has(self.index.predictedTtlSeconds) || \
    ((!has(self.kvEvents) || self.kvEvents) && !(has(self.loadAware) && self.loadAware))";

/// The routers: how many, and how they choose. What is missing keeps the router's own default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(GUESSES_RULE)
        .message("index.ttlSeconds and index.approximateCachePolicy are for routers without KV events: set kvEvents: false, without loadAware"),
    validation = Rule::new(PREDICTED_RULE)
        .message("index.predictedTtlSeconds is for routers that follow KV events: drop it, or kvEvents: false and loadAware")
)]
pub struct Router {
    /// Router pods; 1 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub replicas: Option<i32>,
    /// Resources of the router container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// How a worker is chosen; kv where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<RouterMode>,
    /// By load alone: mode kv without KV events, credit for device memory or assumed reuse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_aware: Option<bool>,
    /// Credit per prompt block that a worker holds in device memory, 0 to 1. More favours reuse, less favours even load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub overlap_score_credit: Option<f64>,
    /// Credit per prompt block in host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub host_cache_hit_weight: Option<f64>,
    /// Credit per prompt block on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub disk_cache_hit_weight: Option<f64>,
    /// Credit per prompt block in a shared pool, beyond those that the worker holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub shared_cache_multiplier: Option<f64>,
    /// Factor on prompt blocks that must be computed, against blocks being decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub prefill_load_scale: Option<f64>,
    /// 0 takes the cheapest worker; above, workers are drawn by softmax over their costs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub temperature: Option<f64>,
    /// Follow the workers' KV events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events: Option<bool>,
    /// Count the KV blocks of running requests as load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub track_active_blocks: Option<bool>,
    /// Count the KV blocks that requests generate, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub track_output_blocks: Option<bool>,
    /// Count KV blocks that requests on a worker have in common once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assume_kv_reuse: Option<bool>,
    /// Count prompt tokens that are not computed yet as load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub track_prefill_tokens: Option<bool>,
    /// Count the requests of all routers in the load of workers, not only a router's own; true where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_sync: Option<bool>,
    /// Share of a worker's KV blocks in use above which it gets no more requests, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub active_decode_blocks_threshold: Option<f64>,
    /// Prompt tokens not computed yet above which a worker gets no more requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4294967295u32))]
    pub active_prefill_tokens_threshold: Option<i64>,
    /// The same as a share of the most tokens in one step of the worker's engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub active_prefill_tokens_threshold_frac: Option<f64>,
    /// Requests wait while the prompt tokens of all workers exceed this share of one step of their engines; they never wait where
    /// missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub queue_threshold: Option<f64>,
    /// Which request of those that wait goes first, among equal strict priorities; fcfs where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_policy: Option<QueuePolicy>,
    /// Most requests that wait; more are refused with 429.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub queue_limit: Option<i64>,
    /// Longest wait of a request, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub queue_timeout_seconds: Option<i64>,
    /// How often a stream whose worker is lost goes on at another one; 0 turns it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4294967295u32))]
    pub migration_limit: Option<i64>,
    /// How a prefill worker is chosen; as `mode` says where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_mode: Option<PrefillMode>,
    /// Lets decode workers compute short and well-cached prompts although there are prefill workers; without it prefill workers
    /// compute all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditional_disagg: Option<ConditionalDisagg>,
    /// What the router knows of the workers' KV blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<KvIndex>,
    /// How long the stages of a request may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadlines: Option<Deadlines>,
    /// Time without progress after which a request of another router counts no more as load, in seconds; 300 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub active_request_expiry_seconds: Option<i64>,
    /// Bounds of the HTTP frontend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frontend: Option<Frontend>,
    /// Decisions that each router keeps to be explained afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub decisions: Option<i64>,
    /// More arguments of `armature router`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_args: Vec<String>,
    /// More environment variables of the router container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_env: Vec<EnvVar>,
}

/// Which prompts a decode worker computes itself: those that are under both of the first two thresholds, or over the third.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConditionalDisagg {
    /// Fewer uncached prompt tokens than this; 2048 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4294967295u32))]
    pub eff_isl_threshold: Option<i64>,
    /// A smaller share of the prompt uncached than this, 0 to 1; 0.7 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub eff_isl_ratio_threshold: Option<f64>,
    /// More prompt tokens than this wait on the prefill worker, and fewer on the decode worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4294967295u32))]
    pub prefill_busy_threshold: Option<i64>,
}

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouterMode {
    /// By cached prompt blocks and load.
    Kv,
    /// In turn.
    RoundRobin,
    /// At random.
    Random,
    /// Of two taken at random, the one with fewer requests.
    PowerOfTwo,
    /// The one with the fewest requests.
    LeastLoaded,
    /// The one that the request names.
    Direct,
}

impl RouterMode {
    /// As it is written in objects and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
            Self::LeastLoaded => "least-loaded",
            Self::Direct => "direct",
        }
    }
}

/// How a prefill worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PrefillMode {
    /// By cached prompt blocks and load.
    Kv,
    /// In turn.
    RoundRobin,
    /// At random.
    Random,
    /// Of two taken at random, the one with fewer requests.
    PowerOfTwo,
    /// The one with the fewest requests.
    LeastLoaded,
}

impl PrefillMode {
    /// As it is written in objects and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
            Self::LeastLoaded => "least-loaded",
        }
    }
}

/// Which request of those that wait goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum QueuePolicy {
    /// The one that came first.
    Fcfs,
    /// The one with the most priority for the fewest uncached tokens.
    Wspt,
    /// The one that came last.
    Lcfs,
}

impl QueuePolicy {
    /// As it is written in objects and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Wspt => "wspt",
            Self::Lcfs => "lcfs",
        }
    }
}
