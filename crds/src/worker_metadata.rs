//! `DynamoWorkerMetadata`: what a worker pod registers. Wire-compatible with Dynamo's definition of the same name.
//!
//! `spec.data` is free-form here; the `protocol` crate reads it. We add printer columns and conditions, both optional.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What one worker pod says about itself. Named after the pod, owned by it, and written by it with server-side apply.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "nvidia.com",
    version = "v1alpha1",
    kind = "DynamoWorkerMetadata",
    plural = "dynamoworkermetadatas",
    shortname = "dwm",
    namespaced,
    status = "DynamoWorkerMetadataStatus",
    derive = "PartialEq",
    doc = "What one worker pod says about itself: endpoints, models and event channels. Written by the pod.",
    printcolumn(name = "Component", type_ = "string", json_path = ".spec.data.endpoints.*.component"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.data.model_cards.*.card_json.display_name"),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.data.model_cards.*.card_json.worker_type"),
    printcolumn(
        name = "Routable",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Routable")].status"#
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct DynamoWorkerMetadataSpec {
    /// Four maps: endpoints, model_cards, event_channels, event_sources. Kept as written, unknown fields included.
    #[schemars(schema_with = "free_form")]
    #[serde(default)]
    pub data: Value,
}

/// What the operator adds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DynamoWorkerMetadataStatus {
    /// `Routable`: the endpoint is ready, belongs to the pod that owns this object, and the object has an address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

fn free_form(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "nullable": true, "x-kubernetes-preserve-unknown-fields": true})
}
