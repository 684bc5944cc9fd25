//! `ModelDeployment`: one model, the routers in front of it and the pools of workers behind them.
//!
//! The smallest object is `spec: {model: {source: …}}`: one router and one aggregated worker. What is missing is decided when
//! pods are built, so a stored object stays as its author wrote it.

mod router;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::source::{SOURCE_MESSAGE, SOURCE_RULE};
use crate::worker_pool::{Role, WorkerTemplate};
pub use router::{
    ApproximateCachePolicy, ConditionalDisagg, Deadlines, Frontend, KvIndex, PrefillMode, QueuePolicy, Router,
    RouterMode,
};

/// A model and how it is served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "armature.dev",
    version = "v1alpha1",
    kind = "ModelDeployment",
    shortname = "md",
    category = "armature",
    namespaced,
    status = "ModelDeploymentStatus",
    derive = "PartialEq",
    doc = "A model, the routers in front of it and the pools of workers behind them.",
    validation = Rule::new(NAME_RULE).message(NAME_MESSAGE),
    validation = Rule::new(CHILD_NAME_RULE).message(CHILD_NAME_MESSAGE),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.model"),
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Routers", type_ = "string", json_path = ".status.routers"),
    printcolumn(name = "Workers", type_ = "string", json_path = ".status.workers"),
    printcolumn(name = "URL", type_ = "string", json_path = ".status.url"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].reason"#,
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct ModelDeploymentSpec {
    /// What is served.
    pub model: Model,
    /// The routers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router: Option<Router>,
    /// The workers; one aggregated pool named `worker` where missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(
        merge_strategy = ListMerge::Map(vec!["name".into()]),
        validation = Rule::new("self.exists(p, p.role == 'prefill') == self.exists(p, p.role == 'decode')")
            .message("roles prefill and decode need each other; add the missing pool or use role aggregated"),
        validation = Rule::new(ONE_KIND_RULE)
            .message("pools of one model share one kind of engine: all of them vllm, all sglang, all tensorrtLlm, or none of these"),
        validation = Rule::new(KV_CACHE_RULE)
            .message("kvCache is of the built-in engine; vLLM, SGLang and TensorRT-LLM have arguments of their own for it")
    )]
    pub pools: Vec<Pool>,
    /// Image of all pods; the operator's own where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub image: Option<String>,
    /// When the image is pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
}

/// Services and labels carry the name.
const NAME_RULE: &str = "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')";
const NAME_MESSAGE: &str = "metadata.name must start with a letter and hold only lower-case letters, digits and -";
/// 63 = 46 + `-` and 10 characters of the ReplicaSet + `-` and 5 of the pod.
const CHILD_NAME_RULE: &str = "self.metadata.name.size() <= 38 && (!has(self.spec.pools) || self.spec.pools.all(p, self.metadata.name.size() + p.name.size() <= 45))";
const CHILD_NAME_MESSAGE: &str =
    "metadata.name may have 38 characters, and 45 together with the name of a pool: pods are named after both";

/// A server is the engine of all pools, or of none.
const ONE_KIND_RULE: &str = "[self.filter(p, has(p.engine) && has(p.engine.vllm)).size(), self.filter(p, has(p.engine) && has(p.engine.sglang)).size(), self.filter(p, has(p.engine) && has(p.engine.tensorrtLlm)).size()].all(count, count == 0 || count == self.size())";
const KV_CACHE_RULE: &str = "self.all(p, !(has(p.kvCache) && has(p.engine) && (has(p.engine.vllm) || has(p.engine.sglang) || has(p.engine.tensorrtLlm))))";

/// The model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// What clients put into `model`; the object's name where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub name: Option<String>,
    /// Where its GGUF file is (for vLLM, SGLang and TensorRT-LLM: its directory): hf://org/name (then @revision and /file.gguf where
    /// wanted), pvc://claim/path, or file:///path on the nodes, below a directory that the operator may mount.
    #[schemars(length(max = 1024))]
    #[x_kube(validation = Rule::new(SOURCE_RULE).message(SOURCE_MESSAGE))]
    pub source: String,
}

/// A pool of workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// Name, unique in the deployment; part of its pods' names.
    #[schemars(length(min = 1, max = 30))]
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("must hold only lower-case letters, digits and -"),
        validation = Rule::new("self != 'router'").message("the name router is taken by the routers")
    )]
    pub name: String,
    /// What its workers do.
    #[serde(default)]
    pub role: Role,
    /// Wanted pods, 1 where missing; only the first value counts once something else scales the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub replicas: Option<i32>,
    /// Everything else about a pod.
    #[serde(flatten)]
    pub worker: WorkerTemplate,
}

/// When an image is pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PullPolicy {
    /// At every start.
    Always,
    /// If the node lacks it.
    IfNotPresent,
    /// Never: the node has it.
    Never,
}

impl PullPolicy {
    /// As Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// What the operator observed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelDeploymentStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Name clients put into `model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Where clients inside the cluster send requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Ready and wanted routers of the current revision, as `2/2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routers: Option<String>,
    /// Ready and wanted workers of the current revision, as `5/5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<String>,
    /// `Ready`, `RoutersReady`, `WorkersReady`, `Progressing`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}
