//! Objects in, objects out: what a deployment and a pool consist of. Pure; snapshots in `build/snapshots`.

mod pod;
mod router;
mod router_flags;
mod worker;

use std::collections::BTreeMap;

use crds::WorkerPool;
use crds::label;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::{PodTemplateSpec, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

pub use pod::POD_ENVIRONMENT;
pub use router::HTTP_PORT;
pub use router_flags::router_flags;
pub(crate) use worker::server;
pub use worker::{ADMIN_PORT, EVENT_PORT, REQUEST_PORT, pool_deployment};

use crate::config::Settings;
use crate::validate::ValidDeployment;

/// Value of `app.kubernetes.io/managed-by`: what the operator watches and may delete.
pub const MANAGED_BY: &str = "armature-operator";
/// Selects everything that the operator made.
pub const MANAGED_SELECTOR: &str = "app.kubernetes.io/managed-by=armature-operator";

/// Everything a `ModelDeployment` owns.
#[derive(Clone, Debug)]
pub struct Children {
    /// For routers and for workers.
    pub service_accounts: Vec<ServiceAccount>,
    /// What each may do.
    pub roles: Vec<Role>,
    /// Who may do it.
    pub role_bindings: Vec<RoleBinding>,
    /// The clients' Service, and the headless ones behind which routers and workers are discovered.
    pub services: Vec<Service>,
    /// Router pods.
    pub routers: Deployment,
    /// One for each pool.
    pub pools: Vec<WorkerPool>,
}

/// Builds what `deployment` owns.
pub fn children(deployment: &ValidDeployment<'_>, settings: &Settings, owner: &OwnerReference) -> Children {
    let (router_access, worker_access) = (router::access(deployment, owner), worker::access(deployment, owner));
    Children {
        service_accounts: vec![router_access.account, worker_access.account],
        roles: vec![router_access.role, worker_access.role],
        role_bindings: vec![router_access.binding, worker_access.binding],
        services: vec![
            router::service(deployment, owner),
            router::peers(deployment, owner),
            worker::service(deployment, owner),
        ],
        routers: router::deployment(deployment, settings, owner),
        pools: deployment.pools.iter().map(|pool| worker::pool(deployment, pool, owner)).collect(),
    }
}

/// Name of the Service of a deployment, its routers' and workers' objects.
pub mod name {
    /// Routers: Deployment, ServiceAccount, Role, and the headless Service by which they find each other.
    pub fn routers(deployment: &str) -> String {
        format!("{deployment}-router")
    }

    /// ServiceAccount and Role of workers, and the headless Service they are discovered through.
    pub fn workers(deployment: &str) -> String {
        format!("{deployment}-workers")
    }

    /// A pool and its pods' Deployment.
    pub fn pool(deployment: &str, pool: &str) -> String {
        format!("{deployment}-{pool}")
    }
}

/// A part of a deployment, as labels see it.
struct Part<'a> {
    deployment: &'a str,
    component: &'static str,
    /// Pool and role, for workers.
    pool: Option<(&'a str, crds::worker_pool::Role)>,
}

impl Part<'_> {
    /// Labels that never change: what Deployments and Services select by.
    fn selector(&self) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::from([
            (label::DEPLOYMENT.into(), self.deployment.into()),
            ("app.kubernetes.io/component".into(), self.component.into()),
        ]);
        if let Some((pool, _)) = self.pool {
            labels.insert(label::POOL.into(), pool.into());
        }
        labels
    }

    /// All labels but the revision.
    fn labels(&self) -> BTreeMap<String, String> {
        let mut labels = self.selector();
        labels.insert("app.kubernetes.io/name".into(), "armature".into());
        labels.insert("app.kubernetes.io/instance".into(), self.deployment.into());
        labels.insert("app.kubernetes.io/managed-by".into(), MANAGED_BY.into());
        if let Some((_, role)) = self.pool {
            labels.insert(label::ROLE.into(), role.as_str().into());
        }
        labels
    }

    fn meta(&self, name: String, namespace: &str, owner: &OwnerReference) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: Some(namespace.into()),
            labels: Some(self.labels()),
            owner_references: Some(vec![owner.clone()]),
            ..Default::default()
        }
    }
}

/// Seconds a pod must have been ready before an old one is removed: time for every router to see the new worker, and for
/// every node's proxy to see the new router. Both follow a watch; two seconds are many times what that takes.
const MIN_READY_S: i32 = 2;

/// A Deployment that never has fewer pods than wanted while it changes.
fn rolling(meta: ObjectMeta, part: &Part<'_>, replicas: i32, template: PodTemplateSpec, deadline_s: i32) -> Deployment {
    Deployment {
        metadata: meta,
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            selector: LabelSelector { match_labels: Some(part.selector()), ..Default::default() },
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".into()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_unavailable: Some(IntOrString::Int(0)),
                    max_surge: Some(IntOrString::Int(1)),
                }),
            }),
            min_ready_seconds: Some(MIN_READY_S),
            revision_history_limit: Some(2),
            progress_deadline_seconds: Some(deadline_s),
            template,
            ..Default::default()
        }),
        status: None,
    }
}

/// Hash of a pod template or a part of it: 10 hex digits of XXH3-64 over its JSON. Equal ones have equal revisions in every build.
fn revision(template: &impl Serialize) -> String {
    // A pod template is a tree of structs and maps with string keys: it always serializes.
    let json = serde_json::to_vec(template).expect("a pod template is plain data");
    format!("{:010x}", xxh3_64(&json) >> 24)
}

#[cfg(test)]
mod tests;
