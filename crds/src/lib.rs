//! The API types: `ModelDeployment`, `WorkerPool` and `DynamoWorkerMetadata`, and the YAML generated from them.
//!
//! Types, schema and validation rules only; no client and no behaviour. The YAML files beside this crate are generated and
//! committed: `kubectl apply --server-side -f crds/`.

#![allow(clippy::duplicated_attributes, reason = "columns of a table may have the same type")]

pub mod model_deployment;
pub mod quantity;
pub mod source;
pub mod worker_metadata;
pub mod worker_pool;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

pub use model_deployment::{ModelDeployment, ModelDeploymentSpec, ModelDeploymentStatus};
pub use worker_metadata::{DynamoWorkerMetadata, DynamoWorkerMetadataSpec, DynamoWorkerMetadataStatus};
pub use worker_pool::{WorkerPool, WorkerPoolSpec, WorkerPoolStatus};

/// Labels on what the operator makes. Routers and tools select by them.
pub mod label {
    /// Name of the `ModelDeployment`.
    pub const DEPLOYMENT: &str = "armature.dev/deployment";
    /// Name of the pool within its deployment.
    pub const POOL: &str = "armature.dev/pool";
    /// `aggregated`, `prefill` or `decode`.
    pub const ROLE: &str = "armature.dev/role";
    /// Hash of the pod template; pods of one value are interchangeable.
    pub const REVISION: &str = "armature.dev/revision";
    /// On a Service, and so on its EndpointSlices: workers behind it take part in discovery.
    pub const DISCOVERY_ENABLED: &str = "nvidia.com/dynamo-discovery-enabled";
    /// On a Service: which discovery its workers use.
    pub const DISCOVERY_BACKEND: &str = "nvidia.com/dynamo-discovery-backend";
}

/// Condition types, all positive: `True` is good.
pub mod condition {
    /// The object does its job with pods of the current revision only.
    pub const READY: &str = "Ready";
    /// Every wanted router pod is ready.
    pub const ROUTERS_READY: &str = "RoutersReady";
    /// Every wanted worker pod is ready.
    pub const WORKERS_READY: &str = "WorkersReady";
    /// Pods are being started or replaced.
    pub const PROGRESSING: &str = "Progressing";
    /// A worker's endpoint is ready, belongs to the pod that owns the object, and the object says where to send requests.
    pub const ROUTABLE: &str = "Routable";
}

/// Every definition, in the order in which they should be applied.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![ModelDeployment::crd(), WorkerPool::crd(), DynamoWorkerMetadata::crd()]
}

/// File name and text of each definition's YAML, as committed in `crds/` and in the chart.
pub fn yaml() -> Vec<(String, String)> {
    all()
        .into_iter()
        .map(|crd| {
            let name = format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural);
            // A definition is a tree of maps with string keys: nothing in it can fail to serialize.
            let text = serde_saphyr::to_string(&crd).expect("a definition is plain data");
            (name, format!("# Generated from the types in crds/src by `cargo xtask generate`.\n{text}"))
        })
        .collect()
}

#[cfg(test)]
mod tests;
