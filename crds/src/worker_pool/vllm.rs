//! vLLM as the engine of a pool: its server runs beside the worker in the same pod.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model_deployment::PullPolicy;

/// A vLLM server beside each worker. Where it listens, its KV events, and with roles prefill and decode its KV transfer are set
/// up by the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Vllm {
    /// Image with vLLM, for example vllm/vllm-openai at a version.
    #[schemars(length(min = 1))]
    pub image: String,
    /// When it is pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    /// What starts the server; `vllm serve` where missing. The model and the arguments follow.
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
