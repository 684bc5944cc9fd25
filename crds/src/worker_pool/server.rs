//! Engines that are servers: one runs beside each worker, in the same pod.
//!
//! What all of them have in common is a [`Server`]; where an engine does not tell its sizes, they are fields of its own.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::model_deployment::PullPolicy;

/// A server beside each worker. Where it listens, its KV events, and with roles prefill and decode its KV transfer are set up by
/// the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Server {
    /// Image with the engine, for example vllm/vllm-openai at a version.
    #[schemars(length(min = 1))]
    pub image: String,
    /// When it is pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    /// What starts the server; where missing `vllm serve`, `python3 -m sglang.launch_server` or `trtllm-serve`. The model and the
    /// arguments follow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// More arguments of the server. They come last, so that they win over the operator's; those that would cut it off from its
    /// worker are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// User that the server runs as; the one of our own containers where missing. An image that must run as root says 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub run_as_user: Option<i64>,
    /// Size of /dev/shm; half of the node's memory where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory: Option<crate::quantity::Amount>,
}

/// A `trtllm-serve` beside each worker. It does not tell its sizes, so that the operator gives them to both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TensorRtLlm {
    /// What it has in common with other servers.
    #[serde(flatten)]
    pub server: Server,
    /// Tokens per KV block (`kv_cache_config.tokens_per_block`); 32 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub block_size: Option<u32>,
    /// KV blocks: the cache gets `kv_cache_config.max_tokens` = kvBlocks × blockSize. Say no more than fits: where the device has no
    /// room for them, TensorRT-LLM takes fewer and routers are told too many.
    #[schemars(range(min = 1))]
    pub kv_blocks: u32,
    /// Most tokens of prompt and answer together (`max_seq_len`).
    #[schemars(range(min = 1))]
    pub context_length: u32,
    /// More of the file that `--extra_llm_api_options` names, as it is written there. It wins over the operator's; what the fields
    /// beside it say is refused.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "free_form")]
    pub options: Map<String, Value>,
}

fn free_form(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}
