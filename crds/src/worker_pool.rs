//! `WorkerPool`: one role of a deployment, and what its pods run. It has the scale subresource.
//!
//! The operator writes it from a `ModelDeployment`; whoever scales it (planner, autoscaler, a person) owns `spec.replicas`
//! from then on.

mod server;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EnvVar, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model_deployment::{Model, PullPolicy};
use crate::quantity::{Bytes, Resources};
pub use server::{Server, TensorRtLlm};

/// Worker pods of one role, all alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "armature.dev",
    version = "v1alpha1",
    kind = "WorkerPool",
    shortname = "wp",
    category = "armature",
    namespaced,
    status = "WorkerPoolStatus",
    derive = "PartialEq",
    doc = "Worker pods of one role of a ModelDeployment. Made by the operator; scale it with kubectl scale, an HPA or KEDA.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.role"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.revision", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct WorkerPoolSpec {
    /// Name of the ModelDeployment it belongs to.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("a pool cannot move to another deployment"))]
    pub deployment: String,
    /// Name within that deployment.
    #[schemars(length(min = 1, max = 30))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("a pool cannot be renamed"))]
    pub pool: String,
    /// What its workers do.
    #[serde(default)]
    pub role: Role,
    /// Wanted pods.
    #[serde(default = "one")]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// What they serve.
    pub model: Model,
    /// Image of the pods; the operator's own where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// When the image is pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    /// Everything else about a pod.
    #[serde(flatten)]
    pub worker: WorkerTemplate,
}

/// How one worker pod runs; shared by `WorkerPool` and the pools of a `ModelDeployment`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerTemplate {
    /// The engine that computes; the built-in one where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// KV blocks that the built-in engine's own memory has no room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCache>,
    /// Resources of the container that computes: the worker (its memory without that of `kvCache`), or the server beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Labels a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints its pods tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// More environment variables of the pod's containers, for example HF_TOKEN from a Secret.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    /// More arguments of `armature worker`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_args: Vec<String>,
    /// Seconds a worker may take to finish its running requests before it is killed; 600 where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 15))]
    pub termination_grace_period_seconds: Option<i64>,
}

/// The engine of a pool. One of its fields is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.builtIn), has(self.vllm), has(self.sglang), has(self.tensorrtLlm)].filter(set, set).size() <= 1")
        .message("a pool has one engine: builtIn, vllm, sglang or tensorrtLlm")
)]
pub struct Engine {
    /// The engine that is part of this program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub built_in: Option<BuiltIn>,
    /// A vLLM server beside the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vllm: Option<Server>,
    /// An SGLang server beside the worker. Not tested with the real engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sglang: Option<Server>,
    /// A TensorRT-LLM server beside the worker. Not tested with the real engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensorrt_llm: Option<TensorRtLlm>,
}

/// Settings of the built-in engine. What is missing keeps the worker's own default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuiltIn {
    /// Compute threads; one per core of the node where missing. Request as many CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub threads: Option<u32>,
    /// Tokens per KV block: 16, 32 or 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self in [16, 32, 64]").message("must be 16, 32 or 64"))]
    pub block_size: Option<u32>,
    /// KV blocks in the arena; one takes layers × KV heads × head size × block size × 4 bytes. A worker whose memory limit is
    /// below that refuses to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub kv_blocks: Option<u32>,
    /// Most sequences that run at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_num_seqs: Option<u32>,
    /// Most tokens in one engine step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_num_batched_tokens: Option<u32>,
}

/// Where the built-in engine keeps KV blocks that its arena has no room for: first in host memory, then on disk. They come back
/// when a request wants them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.hostBytes) || has(self.diskBytes)").message("kvCache needs hostBytes or diskBytes"))]
pub struct KvCache {
    /// Host memory; added to the container's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// Disk: an emptyDir of the pod, which survives a restart of the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<Bytes>,
    /// Which blocks go first; the least recently used where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<KvCachePolicy>,
}

/// Which blocks a full cache gives up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvCachePolicy {
    /// The least recently used.
    Lru,
    /// The least frequently used.
    Lfu,
}

impl KvCachePolicy {
    /// As flags have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
        }
    }
}

/// What a worker does with a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prompt and answer.
    #[default]
    Aggregated,
    /// The prompt only.
    Prefill,
    /// The answer only.
    Decode,
}

impl Role {
    /// As it is written in objects, labels and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What the operator observed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerPoolStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods that exist, of any revision.
    #[serde(default)]
    pub replicas: i32,
    /// Ready pods of the current revision; while older pods remain, a lower bound.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Label selector of its pods, for autoscalers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Hash of the current pod template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// `Ready`, `Progressing`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

fn one() -> i32 {
    1
}
