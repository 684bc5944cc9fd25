//! Parts of the router section that few need: the KV index, deadlines of requests, the HTTP frontend.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Bytes;

/// A guess ends by age or by want of room.
const POLICY_RULE: &str =
    "!has(self.ttlSeconds) || !has(self.approximateCachePolicy) || self.approximateCachePolicy != 'lru'";

/// What the router knows of the workers' KV blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(POLICY_RULE).message("ttlSeconds is for approximateCachePolicy ttl: drop one"))]
pub struct KvIndex {
    /// Threads that apply KV events; 4 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub event_threads: Option<i64>,
    /// Most memory of the index, and once more of guesses where there are any; past it the least recently used prefixes are
    /// forgotten.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
    /// How often a few blocks of each worker are compared with what it says of itself, in seconds; 10 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub check_seconds: Option<i64>,
    /// Beside KV events, take a worker to hold what was sent to it for so many seconds: bridges the time until its events come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub predicted_ttl_seconds: Option<i64>,
    /// Without KV events: life of a guess about a worker's cache, in seconds; 120 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub ttl_seconds: Option<i64>,
    /// Without KV events: which guesses end; ttl where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approximate_cache_policy: Option<ApproximateCachePolicy>,
}

/// Which guesses about a worker's cache end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApproximateCachePolicy {
    /// Those older than `ttlSeconds`.
    Ttl,
    /// The least recently used, when a worker would hold more than it has room for.
    Lru,
}

impl ApproximateCachePolicy {
    /// As flags have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ttl => "ttl",
            Self::Lru => "lru",
        }
    }
}

/// How long the stages of a request may take, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Deadlines {
    /// Connecting to a worker; 2 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub connect_seconds: Option<i64>,
    /// Until the first token; 300 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub first_token_seconds: Option<i64>,
    /// Between two tokens; 120 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub token_seconds: Option<i64>,
}

/// Bounds of the HTTP frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Frontend {
    /// Largest request body; 32Mi where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_bytes: Option<Bytes>,
    /// Most values and names in a request's JSON, each token id of a prompt among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub json_values: Option<i64>,
    /// Most answers of one request: prompts times `n`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub choices: Option<i64>,
    /// Silence on a stream after which a comment is sent, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10))]
    pub keep_alive_milliseconds: Option<i64>,
    /// Time for a request's head to arrive, in seconds; idle connections are closed after it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub header_seconds: Option<i64>,
    /// Time for a request's body to arrive, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub body_seconds: Option<i64>,
    /// Time without progress after which a response that its client does not read is given up, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub write_seconds: Option<i64>,
    /// Most bytes of request bodies being read and tokenized; further requests are refused with 429.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess_bytes: Option<Bytes>,
    /// Most large requests being tokenized; further ones are refused with 429.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub preprocess_jobs: Option<i64>,
    /// Most open connections; further ones wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub connections: Option<i64>,
}
