//! Kubernetes discovery: a `DynamoWorkerMetadata` object named after the pod, owned by it and applied by it.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use protocol::metadata::WorkerMetadata;
use serde_json::json;

use super::RegistrationError;
use crate::config::Pod;

/// An object that somebody deleted is back after this. Applying what is there already changes nothing on the server.
pub(super) const REFRESH: Duration = Duration::from_secs(60);

/// Field manager of a worker's own object.
const FIELD_MANAGER: &str = "armature-worker";

/// The object of one worker.
pub struct KubernetesEntry {
    api: Api<DynamicObject>,
    resource: ApiResource,
    pod: Pod,
}

impl KubernetesEntry {
    /// The object of `pod`, through `client`.
    pub fn new(client: kube::Client, pod: Pod) -> Self {
        let kind = GroupVersionKind::gvk("nvidia.com", "v1alpha1", "DynamoWorkerMetadata");
        let resource = ApiResource::from_gvk_with_plural(&kind, "dynamoworkermetadatas");
        Self { api: Api::namespaced_with(client, &pod.namespace, &resource), resource, pod }
    }

    /// Makes the object what it should be, whoever else wrote to it.
    pub(super) async fn apply(&self, metadata: &WorkerMetadata) -> Result<(), RegistrationError> {
        let mut object =
            DynamicObject::new(&self.pod.name, &self.resource).data(json!({ "spec": { "data": metadata } }));
        object.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Pod".into(),
            name: self.pod.name.clone(),
            uid: self.pod.uid.clone(),
            ..Default::default()
        }]);
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let applied = self.api.patch(&self.pod.name, &params, &Patch::Apply(&object)).await;
        let source = |source| RegistrationError::Kubernetes { name: self.pod.name.clone(), source: Box::new(source) };
        applied.map(drop).map_err(source)
    }
}
