//! Objects, endpoints and pods to visible workers: plain values in and out.

use std::collections::HashSet;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::DynamicObject;
use kube::{Resource, ResourceExt};
use protocol::metadata::WorkerMetadata;

/// What a worker registered.
pub(super) struct Registration {
    /// Its pod or container.
    pub(super) name: String,
    /// The pod that owns the object.
    pod_uid: String,
    /// When the object was created.
    pub(super) since: SystemTime,
    pub(super) metadata: WorkerMetadata,
}

/// UID of a pod that is ready.
pub(super) struct ReadyPod(String);

/// Reads an object; one without an owning pod, or malformed, is none.
pub(super) fn registration(object: DynamicObject) -> Option<Registration> {
    let name = object.name_any();
    let pod_uid = object.owner_references().iter().find(|owner| owner.kind == "Pod").map(|owner| owner.uid.clone())?;
    let since = object.creation_timestamp().map_or(SystemTime::UNIX_EPOCH, |time| time.0.into());
    match serde_json::from_value(object.data.get("spec")?.get("data")?.clone()) {
        Ok(metadata) => Some(Registration { name, pod_uid, since, metadata }),
        Err(error) => {
            tracing::warn!(object = name, %error, "discovery: malformed DynamoWorkerMetadata");
            None
        }
    }
}

/// The ready pods behind a slice. Absent readiness counts as ready, as the API defines it.
pub(super) fn ready_endpoints(slice: EndpointSlice) -> Option<Vec<ReadyPod>> {
    let ready = slice.endpoints.into_iter().filter(|endpoint| {
        let conditions = endpoint.conditions.as_ref();
        let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
        !terminating && conditions.and_then(|c| c.ready).unwrap_or(true)
    });
    Some(ready.filter_map(|endpoint| Some(ReadyPod(endpoint.target_ref?.uid?))).collect())
}

/// A pod whose containers are ready. One that is being deleted stays: it says itself, in its object, that it is draining.
pub(super) fn ready_pod(pod: Pod) -> Option<ReadyPod> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().any(|c| c.type_ == "ContainersReady" && c.status == "True");
    ready.then(|| pod.meta().uid.clone()).flatten().map(ReadyPod)
}

/// Workers whose own pod is ready, one way or the other.
pub(super) fn visible<'a>(
    objects: impl Iterator<Item = &'a Registration>,
    slices: impl Iterator<Item = &'a Vec<ReadyPod>>,
    pods: impl Iterator<Item = &'a ReadyPod>,
) -> impl Iterator<Item = &'a Registration> {
    let ready: HashSet<&str> = slices.flatten().chain(pods).map(|pod| pod.0.as_str()).collect();
    objects.filter(move |object| ready.contains(object.pod_uid.as_str()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(name: &str, uid: &str, data: serde_json::Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata",
            "metadata": {"name": name, "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]},
            "spec": {"data": data},
        }))
        .expect("an object")
    }

    fn slice(endpoints: &[(&str, serde_json::Value)]) -> EndpointSlice {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|(uid, conditions)| json!({"addresses": ["10.0.0.1"], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": uid}}))
            .collect();
        serde_json::from_value(json!({"addressType": "IPv4", "metadata": {"name": "s"}, "endpoints": endpoints}))
            .expect("a slice")
    }

    fn pod(uid: &str, containers_ready: &str) -> Pod {
        let conditions =
            json!([{"type": "ContainersReady", "status": containers_ready}, {"type": "Ready", "status": "False"}]);
        serde_json::from_value(json!({"metadata": {"name": "p", "uid": uid}, "status": {"conditions": conditions}}))
            .expect("a pod")
    }

    fn names(objects: &[Registration], slices: &[Vec<ReadyPod>], pods: &[ReadyPod]) -> Vec<String> {
        visible(objects.iter(), slices.iter(), pods.iter()).map(|o| o.name.clone()).collect()
    }

    #[test]
    fn a_ready_endpoint_or_ready_containers_make_a_worker_visible() {
        let objects: Vec<_> = ["a", "b", "c"]
            .iter()
            .filter_map(|n| {
                registration(object(n, &format!("uid-{n}"), json!({"endpoints": null, "model_cards": null})))
            })
            .collect();
        let slices: Vec<_> = ready_endpoints(slice(&[
            ("uid-a", json!({"ready": true})),
            ("uid-c", json!({"ready": false, "serving": true, "terminating": true})),
        ]))
        .into_iter()
        .collect();
        let pods: Vec<_> = [pod("uid-b", "True"), pod("uid-c", "False")].into_iter().filter_map(ready_pod).collect();
        assert_eq!(names(&objects, &slices, &pods), ["a", "b"]);
    }

    #[test]
    fn a_new_pod_of_the_same_name_does_not_inherit_old_metadata() {
        let objects: Vec<_> = registration(object("a", "old-uid", json!({}))).into_iter().collect();
        let pods: Vec<_> = ready_pod(pod("new-uid", "True")).into_iter().collect();
        assert!(names(&objects, &[], &pods).is_empty());
    }

    #[test]
    fn a_malformed_object_hides_only_itself() {
        assert!(registration(object("a", "uid", json!({"endpoints": 5}))).is_none());
        let mut orphan = object("a", "uid", json!({}));
        orphan.metadata.owner_references = None;
        assert!(registration(orphan).is_none());
    }
}
