//! What the definitions promise: structure, defaults, and YAML that reads back as the same thing.

use serde_json::{Value, json};

use super::*;
use crate::source::Source;

#[test]
fn yaml_reads_back_as_the_definition() {
    for (crd, (name, text)) in all().into_iter().zip(yaml()) {
        let read: CustomResourceDefinition = serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(read, crd, "{name}");
    }
}

#[test]
fn conditions_are_maps_keyed_by_type() {
    for crd in all() {
        let schema = schema(&crd);
        let conditions = &schema["properties"]["status"]["properties"]["conditions"];
        assert_eq!(conditions["x-kubernetes-list-map-keys"], json!(["type"]), "{}", crd.spec.names.kind);
        assert_eq!(conditions["x-kubernetes-list-type"], "map");
    }
}

#[test]
fn worker_metadata_keeps_unknown_fields() {
    let schema = schema(&DynamoWorkerMetadata::crd());
    assert_eq!(schema["properties"]["spec"]["properties"]["data"]["x-kubernetes-preserve-unknown-fields"], true);
}

#[test]
fn worker_pools_can_be_scaled() {
    let crd = serde_json::to_value(WorkerPool::crd()).expect("serializable");
    assert_eq!(
        crd["spec"]["versions"][0]["subresources"]["scale"],
        json!({"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.selector"})
    );
}

#[test]
fn the_smallest_object_is_read_and_written_unchanged() {
    let smallest = json!({"model": {"source": "hf://org/name"}});
    let spec: ModelDeploymentSpec = serde_json::from_value(smallest.clone()).expect("valid");
    assert_eq!(serde_json::to_value(&spec).expect("serializable"), smallest);
}

#[test]
fn the_examples_say_nothing_that_is_not_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/examples");
    let mut count = 0;
    for file in std::fs::read_dir(folder).expect("it is there") {
        let path = file.expect("readable").path();
        let text = std::fs::read_to_string(&path).expect("readable");
        let written: Value = serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let object: ModelDeployment = serde_json::from_value(written.clone()).expect("a ModelDeployment");
        Source::parse(&object.spec.model.source).expect("a source");
        let read = serde_json::to_value(&object).expect("serializable");
        assert_eq!(read["spec"], written["spec"], "{}", path.display());
        count += 1;
    }
    assert!(count >= 4, "only {count} examples");
}

#[test]
fn amounts_may_be_numbers() {
    let spec: ModelDeploymentSpec = serde_json::from_value(json!({
        "model": {"source": "hf://org/name"},
        "pools": [{"name": "w", "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}}}],
    }))
    .expect("valid");
    let limits =
        spec.pools[0].worker.resources.as_ref().and_then(|r| r.requirements()).and_then(|r| r.limits).expect("set");
    assert_eq!((limits["nvidia.com/gpu"].0.as_str(), limits["memory"].0.as_str()), ("1", "4Gi"));
}

#[test]
fn sources() {
    assert_eq!(Source::parse("hf://org/name"), Ok(Source::Hub("org/name".into())));
    assert_eq!(
        Source::parse("pvc://models/llama/x.gguf"),
        Ok(Source::Claim { claim: "models".into(), path: "llama/x.gguf".into() })
    );
    assert_eq!(Source::parse("file:///models/x.gguf"), Ok(Source::Node("/models/x.gguf".into())));
    for bad in [
        "",
        "x.gguf",
        "hf://name",
        "hf:///name",
        "pvc://claim",
        "pvc://claim/",
        "file://models/x",
        "file:///",
        "s3://b/k",
        "file:///models/../etc",
    ] {
        assert!(Source::parse(bad).is_err(), "{bad:?}");
    }
}

fn schema(crd: &CustomResourceDefinition) -> Value {
    serde_json::to_value(&crd.spec.versions[0].schema.as_ref().expect("has one").open_api_v3_schema)
        .expect("serializable")
}
