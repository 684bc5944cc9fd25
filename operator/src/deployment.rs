//! Reconciles `ModelDeployment`: fetch → validate → build → apply → status.
//!
//! It owns everything but the pods of workers; those are the pools' business.

use std::sync::Arc;
use std::time::Duration;

use crds::{ModelDeployment, ModelDeploymentStatus, WorkerPool, label};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, OwnerReference};
use kube::runtime::controller::Action;
use kube::{Api, Resource, ResourceExt};
use serde_json::{Value, json};

use crate::apply::{self, FIELD_MANAGER};
use crate::build::{self, Children};
use crate::context::Context;
use crate::error::{Error, call};
use crate::status;
use crate::validate::{self, Invalid};

/// Everything is looked at again after this time, even if no watch said anything.
const RESYNC: Duration = Duration::from_secs(300);
/// Tries to write a pool while others write it too.
const POOL_TRIES: u32 = 4;

/// One reconcile, with its outcome reported on the object.
pub async fn reconcile(object: Arc<ModelDeployment>, context: Arc<Context>) -> Result<Action, Error> {
    context.observe(object.as_ref(), run(&object, &context)).await
}

async fn run(object: &ModelDeployment, context: &Context) -> Result<Action, Error> {
    if object.meta().deletion_timestamp.is_some() {
        // Garbage collection follows the owner references.
        return Ok(Action::await_change());
    }
    match steps(object, context).await {
        Ok(status) => write_status(object, status, context).await?,
        Err(error) if error.concerns_author() => {
            context.warn(object, &error).await;
            let failed = status::failed(object, error.reason(), error.to_string(), Timestamp::now());
            write_status(object, failed, context).await?;
            return Err(error);
        }
        Err(error) => return Err(error),
    }
    Ok(Action::requeue(RESYNC))
}

async fn steps(object: &ModelDeployment, context: &Context) -> Result<ModelDeploymentStatus, Error> {
    let present = fetch(object, context).await?;
    let valid = validate::deployment(object, &context.settings)?;
    let children = build::children(&valid, &context.settings, &owner(object)?);
    let (routers, pools) = apply(&children, present, context).await?;
    Ok(status::deployment(object, &valid.model_name, &routers, &pools, Timestamp::now()))
}

/// The pools that exist already.
async fn fetch(object: &ModelDeployment, context: &Context) -> Result<Vec<WorkerPool>, Error> {
    let namespace = object.namespace().unwrap_or_default();
    let labels = format!("{}={},{}", label::DEPLOYMENT, object.name_any(), build::MANAGED_SELECTOR);
    apply::owned(&context.client, &namespace, &labels, &object.uid().unwrap_or_default()).await
}

async fn apply(
    children: &Children,
    present: Vec<WorkerPool>,
    context: &Context,
) -> Result<(Deployment, Vec<WorkerPool>), Error> {
    let client = &context.client;
    for account in &children.service_accounts {
        apply::apply(client, account).await?;
    }
    for role in &children.roles {
        apply::apply(client, role).await?;
    }
    for binding in &children.role_bindings {
        apply::apply(client, binding).await?;
    }
    for service in &children.services {
        apply::apply(client, service).await?;
    }
    let routers = apply::apply(client, &children.routers).await?;
    let mut pools = Vec::with_capacity(children.pools.len());
    for pool in &children.pools {
        pools.push(apply_pool(pool, context).await?);
    }
    // Pools that are not wanted any more go last: their successors exist by now.
    for old in present.iter().filter(|old| !children.pools.iter().any(|pool| pool.name_any() == old.name_any())) {
        apply::delete(client, old).await?;
    }
    Ok((routers, pools))
}

/// Applies a pool, but not its replicas once somebody else owns them. While we do own them, the write is bound to the version
/// that was read, so that a scaler's write in between is never undone.
async fn apply_pool(pool: &WorkerPool, context: &Context) -> Result<WorkerPool, Error> {
    let (name, namespace) = (pool.name_any(), pool.namespace().unwrap_or_default());
    let api: Api<WorkerPool> = Api::namespaced(context.client.clone(), &namespace);
    let mut tries = 0;
    loop {
        let live = call(|| format!("reading WorkerPool {name}"), api.get_opt(&name)).await?;
        let patch = match live {
            // The plain path creates it, or refuses it as somebody else's.
            None => return apply::apply(&context.client, pool).await,
            Some(live) if live.controller_owner() != pool.controller_owner() => {
                return Err(Error::NotOurs { kind: "WorkerPool".into(), name });
            }
            Some(live) => patch_of(pool, &live),
        };
        match apply::apply_value(&context.client, &namespace, &name, &patch).await {
            Err(error) if error.reason() == "Conflict" && tries + 1 < POOL_TRIES => tries += 1,
            done => return done,
        }
    }
}

/// What to apply over `live`.
fn patch_of(pool: &WorkerPool, live: &WorkerPool) -> Value {
    let mut patch = json!(pool);
    if replicas_owner(live.managed_fields()).is_some() {
        if let Some(spec) = patch["spec"].as_object_mut() {
            spec.remove("replicas");
        }
    } else {
        patch["metadata"]["resourceVersion"] = json!(live.resource_version());
    }
    patch
}

/// Who else set `spec.replicas`: an autoscaler, the planner, `kubectl scale`.
fn replicas_owner(managed: &[ManagedFieldsEntry]) -> Option<&str> {
    managed
        .iter()
        .filter(|entry| entry.manager.as_deref() != Some(FIELD_MANAGER))
        .find(|entry| entry.fields_v1.as_ref().is_some_and(|fields| !fields.0["f:spec"]["f:replicas"].is_null()))
        .and_then(|entry| entry.manager.as_deref())
}

trait ControllerOwner {
    fn controller_owner(&self) -> Option<&str>;
}

impl ControllerOwner for WorkerPool {
    fn controller_owner(&self) -> Option<&str> {
        self.owner_references().iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str())
    }
}

fn owner(object: &ModelDeployment) -> Result<OwnerReference, Invalid> {
    object.controller_owner_ref(&()).ok_or(Invalid::Incomplete("UID"))
}

async fn write_status(object: &ModelDeployment, status: ModelDeploymentStatus, context: &Context) -> Result<(), Error> {
    if object.status.as_ref() == Some(&status) {
        return Ok(());
    }
    apply::apply_status(&context.client, object, &status).await
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::FieldsV1;

    use super::*;

    fn entry(manager: &str, fields: Value) -> ManagedFieldsEntry {
        ManagedFieldsEntry {
            manager: Some(manager.into()),
            fields_v1: Some(FieldsV1(fields)),
            ..ManagedFieldsEntry::default()
        }
    }

    fn pool(managed: Vec<ManagedFieldsEntry>) -> WorkerPool {
        let mut pool: WorkerPool = serde_json::from_value(json!({
            "apiVersion": "armature.dev/v1alpha1", "kind": "WorkerPool",
            "metadata": {"name": "chat-worker", "namespace": "default"},
            "spec": {"deployment": "chat", "pool": "worker", "replicas": 2, "model": {"source": "hf://org/name"}},
        }))
        .expect("valid");
        pool.metadata.managed_fields = (!managed.is_empty()).then_some(managed);
        pool
    }

    #[test]
    fn replicas_are_left_to_whoever_scaled() {
        let ours = entry(FIELD_MANAGER, json!({"f:spec": {"f:replicas": {}, "f:role": {}}}));
        let scaler = entry("kubectl", json!({"f:spec": {"f:replicas": {}}}));
        let patch = patch_of(&pool(vec![]), &pool(vec![ours, scaler]));
        assert!(patch["spec"].get("replicas").is_none());
        assert!(patch["metadata"].get("resourceVersion").is_none());
    }

    #[test]
    fn our_own_replicas_are_bound_to_the_version_that_was_read() {
        let ours = entry(FIELD_MANAGER, json!({"f:spec": {"f:replicas": {}}}));
        let other = entry("kubectl-label", json!({"f:metadata": {"f:labels": {"f:team": {}}}}));
        let mut live = pool(vec![ours, other]);
        live.metadata.resource_version = Some("7".into());
        let patch = patch_of(&pool(vec![]), &live);
        assert_eq!((&patch["spec"]["replicas"], &patch["metadata"]["resourceVersion"]), (&json!(2), &json!("7")));
    }
}
