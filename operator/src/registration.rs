//! Reconciles `DynamoWorkerMetadata` with EndpointSlices: says on each object whether routers can use it, and why not.
//!
//! Routers decide for themselves from the same two sources; this is their rule made visible.

use std::sync::Arc;
use std::time::Duration;

use crds::{DynamoWorkerMetadata, DynamoWorkerMetadataStatus, condition};
use jiff::Timestamp;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::controller::Action;
use kube::runtime::reflector::Store;
use kube::{Resource, ResourceExt};
use protocol::metadata::WorkerMetadata;

use crate::apply;
use crate::context::Context;
use crate::error::{CALL_DEADLINE, Error};
use crate::status::{self, Observation};

/// Reconciler state: the shared context and the EndpointSlices of discovery Services.
pub struct Registrations {
    /// Shared context.
    pub context: Arc<Context>,
    /// Kept current by a watch.
    pub slices: Store<EndpointSlice>,
}

/// One reconcile.
pub async fn reconcile(object: Arc<DynamoWorkerMetadata>, state: Arc<Registrations>) -> Result<Action, Error> {
    state.context.observe(object.as_ref(), run(&object, &state)).await
}

async fn run(object: &DynamoWorkerMetadata, state: &Registrations) -> Result<Action, Error> {
    if object.meta().deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    listed(&state.slices, CALL_DEADLINE).await?;
    let namespace = object.namespace();
    let slices: Vec<_> = state.slices.state().into_iter().filter(|slice| slice.namespace() == namespace).collect();
    let observed = [routable(object, &slices)];
    let previous = object.status.clone().unwrap_or_default();
    let conditions = status::conditions(&previous.conditions, &observed, object.meta().generation, Timestamp::now());
    let next = DynamoWorkerMetadataStatus { conditions };
    if object.status.as_ref() != Some(&next) {
        match apply::apply_status(&state.context.client, object, &next).await {
            // Dynamo's own definition has no status: then there is nowhere to say it.
            Err(Error::Api { source, .. }) if matches!(source.as_ref(), kube::Error::Api(s) if s.code == 404) => {}
            done => done?,
        }
    }
    Ok(Action::await_change())
}

/// Waits until all EndpointSlices were listed once: before that, no worker would look routable.
async fn listed(slices: &Store<EndpointSlice>, after: Duration) -> Result<(), Error> {
    match tokio::time::timeout(after, slices.wait_until_ready()).await {
        Ok(Ok(())) => Ok(()),
        // The watch ends only together with this controller; then nothing is tried again.
        Ok(Err(_)) | Err(_) => Err(Error::Deadline { stage: "listing EndpointSlices".into(), after }),
    }
}

/// Whether routers can send requests to this worker.
fn routable(object: &DynamoWorkerMetadata, slices: &[Arc<EndpointSlice>]) -> Observation {
    let no = |reason, message: &str| Observation {
        kind: condition::ROUTABLE,
        holds: false,
        reason,
        message: message.into(),
    };
    let data: WorkerMetadata = match serde_json::from_value(object.spec.data.clone()) {
        Ok(data) => data,
        Err(error) => return no("InvalidMetadata", &format!("spec.data: {error}")),
    };
    if data.endpoints.is_empty() {
        return no("NoEndpoints", "spec.data.endpoints is empty: the worker is starting or has withdrawn");
    }
    let mut cards = data.model_cards.values().filter_map(|entry| entry.card_json.armature.as_ref());
    if cards.any(|card| card.draining) {
        return no("Draining", "the worker takes no new requests");
    }
    let Some(owner) = object.owner_references().iter().find(|owner| owner.kind == "Pod") else {
        return no("NoPod", "the object is not owned by a pod, so its worker's life cannot be told from another's");
    };
    let mut endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
    let listed = endpoints.find(|endpoint| {
        endpoint.target_ref.as_ref().is_some_and(|target| target.uid.as_deref() == Some(owner.uid.as_str()))
    });
    match listed {
        None => no("NotListed", "no EndpointSlice of a discovery Service lists the pod"),
        // No answer means ready, by the rules of EndpointSlices.
        Some(endpoint) if endpoint.conditions.as_ref().and_then(|c| c.ready) == Some(false) => {
            no("EndpointNotReady", "the pod's endpoint is not ready")
        }
        Some(_) => Observation {
            kind: condition::ROUTABLE,
            holds: true,
            reason: "EndpointReady",
            message: "the endpoint is ready and belongs to the pod".into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;

    fn worker(data: serde_json::Value) -> DynamoWorkerMetadata {
        serde_json::from_value(json!({
            "apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata",
            "metadata": {"name": "w-0", "namespace": "default",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "w-0", "uid": "pod-1"}]},
            "spec": {"data": data},
        }))
        .expect("valid")
    }

    fn slice(uid: &str, ready: Option<bool>) -> Vec<Arc<EndpointSlice>> {
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "s", "namespace": "default"},
            "endpoints": [{"addresses": ["10.0.0.7"], "conditions": {"ready": ready},
                "targetRef": {"kind": "Pod", "name": "w-0", "uid": uid}}],
        });
        vec![Arc::new(serde_json::from_value(slice).expect("valid"))]
    }

    fn serving() -> serde_json::Value {
        json!({"endpoints": {"ns/backend/generate/1": {"namespace": "ns", "component": "backend", "endpoint": "generate",
            "instance_id": 1, "transport": {"tcp": "10.0.0.7:9000"}}}, "model_cards": null})
    }

    fn reason(data: serde_json::Value, slices: Vec<Arc<EndpointSlice>>) -> &'static str {
        routable(&worker(data), &slices).reason
    }

    #[tokio::test]
    async fn nothing_is_said_before_the_endpoints_are_listed() {
        let (slices, mut writer) = kube::runtime::reflector::store::<EndpointSlice>();
        let early = listed(&slices, Duration::from_millis(1)).await.expect_err("nothing is listed");
        assert_eq!((early.reason(), early.concerns_author()), ("Deadline", false));
        assert!(early.to_string().starts_with("listing EndpointSlices: no answer"), "{early}");
        let (waiting, ()) = tokio::join!(listed(&slices, CALL_DEADLINE), async {
            writer.apply_watcher_event(&Event::Init);
            writer.apply_watcher_event(&Event::InitDone);
        });
        waiting.expect("an empty list is a list");
    }

    #[test]
    fn a_worker_is_routable_only_as_the_pod_that_is_listed() {
        assert_eq!(reason(serving(), slice("pod-1", Some(true))), "EndpointReady");
        assert_eq!(reason(serving(), slice("pod-1", None)), "EndpointReady");
        assert_eq!(reason(serving(), slice("pod-1", Some(false))), "EndpointNotReady");
        assert_eq!(reason(serving(), slice("pod-2", Some(true))), "NotListed");
        assert_eq!(reason(serving(), vec![]), "NotListed");
    }

    #[test]
    fn partial_and_malformed_metadata_is_named() {
        let ready = || slice("pod-1", Some(true));
        assert_eq!(reason(json!({}), ready()), "NoEndpoints");
        assert_eq!(reason(json!(null), ready()), "InvalidMetadata");
        assert_eq!(reason(json!({"endpoints": null}), ready()), "NoEndpoints");
        assert_eq!(reason(json!({"endpoints": 7}), ready()), "InvalidMetadata");
    }
}
