//! The operator against a real API server and controller manager (the cluster of `KUBECONFIG`): what it refuses, what it
//! applies, who owns which field, and who leads. No pod needs to run.

mod server;

use std::sync::Arc;

use crds::{DynamoWorkerMetadata, ModelDeployment, WorkerPool};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use operator::{deployment, pool};
use serde_json::{Value, json};
use server::Server;

#[tokio::test]
async fn invalid_objects_are_refused_with_a_clear_message() {
    let server = Server::start("refuse").await;
    let source = json!({"source": "hf://org/name"});
    let cases = [
        (json!({}), "spec.model: Required value"),
        (json!({"model": {}}), "spec.model.source: Required value"),
        (json!({"model": {"source": "s3://bucket/x"}}), "must be hf://org/name"),
        (json!({"model": {"source": "file:///models/../etc/x"}}), "without .. in it"),
        (json!({"model": source, "pools": [{"name": "p", "role": "prefill"}]}), "prefill and decode need each other"),
        (json!({"model": source, "pools": [{"name": "a"}, {"name": "a"}]}), "Duplicate value"),
        (json!({"model": source, "pools": [{"name": "router"}]}), "the name router is taken"),
        (json!({"model": source, "pools": [{"name": "A"}]}), "lower-case letters"),
        (json!({"model": source, "pools": [{"name": "a", "replicas": -1}]}), "greater than or equal to 0"),
        (json!({"model": source, "pools": [{"name": "a", "engine": {"builtIn": {"blockSize": 17}}}]}), "16, 32 or 64"),
        (json!({"model": source, "router": {"overlapScoreCredit": 1.5}}), "less than or equal to 1"),
        (json!({"model": source, "router": {"mode": "magic"}}), "Unsupported value"),
        (json!({"model": source, "router": {"index": {"ttlSeconds": 9}}}), "set kvEvents: false"),
        (
            json!({"model": source, "router": {"loadAware": true, "index": {"predictedTtlSeconds": 2}}}),
            "follow KV events",
        ),
        (
            json!({"model": source, "router": {"kvEvents": false, "index": {"ttlSeconds": 9, "approximateCachePolicy": "lru"}}}),
            "ttlSeconds is for approximateCachePolicy ttl",
        ),
        (json!({"model": source, "router": {"index": {"predictedTtlSeconds": 0}}}), "greater than or equal to 1"),
        (json!({"model": source, "plans": 3}), "unknown field \"spec.plans\""),
    ];
    for (spec, expected) in cases {
        let refusal = server.create("chat", &spec).await.expect_err("must be refused").to_string();
        assert!(refusal.contains(expected), "{spec}: {refusal}");
    }
    let spec = json!({"model": source, "pools": [{"name": "p".repeat(20)}]});
    let refusal = server.create(&"d".repeat(30), &spec).await.expect_err("must be refused").to_string();
    assert!(refusal.contains("45 together with the name of a pool"), "{refusal}");
    let refusal = server.create("1chat", &json!({"model": source})).await.expect_err("must be refused").to_string();
    assert!(refusal.contains("must start with a letter"), "{refusal}");
    server.stop().await;
}

#[tokio::test]
async fn a_pool_has_one_engine_and_a_model_one_kind() {
    let server = Server::start("engines").await;
    let (one_server, trt) = (json!({"image": "e:1"}), json!({"image": "e:1", "kvBlocks": 1, "contextLength": 1}));
    let engines = [json!({"vllm": one_server}), json!({"sglang": one_server}), json!({"tensorrtLlm": trt})];
    let spec = |pools: Value| json!({"model": {"source": "hf://org/name"}, "pools": pools});
    for (index, engine) in engines.iter().enumerate() {
        let same = spec(json!([{"name": "a", "engine": engine}, {"name": "b", "engine": engine}]));
        server.create(&format!("chat-{index}"), &same).await.expect("valid");
        let mut both = engine.clone();
        both["builtIn"] = json!({});
        let mut two = engine.clone();
        two.as_object_mut()
            .expect("an object")
            .extend(engines[(index + 1) % 3].as_object().expect("an object").clone());
        for engines in [both, two] {
            let refused = server.create("chat", &spec(json!([{"name": "a", "engine": engines}]))).await;
            let refusal = refused.expect_err("two engines").to_string();
            assert!(refusal.contains("a pool has one engine: builtIn, vllm, sglang or tensorrtLlm"), "{refusal}");
        }
        for other in [json!({"name": "b"}), json!({"name": "b", "engine": engines[(index + 1) % 3]})] {
            let refused = server.create("chat", &spec(json!([{"name": "a", "engine": engine}, other]))).await;
            let refusal = refused.expect_err("two kinds").to_string();
            assert!(refusal.contains("share one kind of engine"), "{refusal}");
        }
        let cache = spec(json!([{"name": "a", "engine": engine, "kvCache": {"hostBytes": "1Gi"}}]));
        let refusal = server.create("chat", &cache).await.expect_err("not its cache").to_string();
        assert!(refusal.contains("kvCache is of the built-in engine"), "{refusal}");
    }
    let free_form = json!({"name": "a", "engine": {"tensorrtLlm": {"image": "e:1", "kvBlocks": 1, "contextLength": 1,
        "options": {"kv_cache_config": {"dtype": "fp8"}}}}});
    server.create("chat", &spec(json!([free_form]))).await.expect("valid");
    let kept =
        server.deployment("chat").await.spec.pools[0].worker.engine.clone().and_then(|engine| engine.tensorrt_llm);
    assert_eq!(kept.expect("set").options["kv_cache_config"]["dtype"], "fp8", "kept as it was written");
    server.stop().await;
}

#[tokio::test]
async fn reconciling_twice_changes_nothing() {
    let server = Server::start("twice").await;
    server
        .create("chat", &json!({"model": {"source": "hf://org/name"}, "router": {"temperature": 0.5}}))
        .await
        .expect("valid");
    server.reconcile("chat").await.expect("applied");
    // The controller manager has seen the Deployments before versions are compared.
    server.settled("chat-router").await;
    server.settled("chat-worker").await;
    server.reconcile("chat").await.expect("applied");
    let before = server.versions().await;
    assert_eq!(before.len(), 13, "{before:#?}");
    server.reconcile("chat").await.expect("applied");
    assert_eq!(server.versions().await, before);
    server.stop().await;
}

#[tokio::test]
async fn the_status_follows_the_pods() {
    let server = Server::start("status").await;
    server.create("chat", &json!({"model": {"source": "hf://org/name"}})).await.expect("valid");
    server.reconcile("chat").await.expect("applied");
    server.settled("chat-router").await;
    server.settled("chat-worker").await;
    server.reconcile("chat").await.expect("applied");
    let status = server.deployment("chat").await.status.expect("has a status");
    assert_eq!(status.observed_generation, Some(1));
    assert_eq!((status.routers.as_deref(), status.workers.as_deref()), (Some("0/1"), Some("0/1")));
    assert_eq!(server.condition("chat", "Ready").await, ("False".into(), "PodsNotReady".into()));
    assert_eq!(server.condition("chat", "Progressing").await, ("True".into(), "RollingOut".into()));
    let table = server.table::<ModelDeployment>("chat").await;
    let expected =
        json!(["chat", "chat", "False", "0/1", "0/1", format!("http://chat.{}.svc:8000/v1", server.namespace)]);
    assert_eq!(table.as_array().expect("cells")[..6], expected.as_array().expect("cells")[..]);
    server.stop().await;
}

#[tokio::test]
async fn whoever_scales_a_pool_owns_its_replicas() {
    let server = Server::start("scale").await;
    let spec =
        |replicas| json!({"model": {"source": "hf://org/name"}, "pools": [{"name": "worker", "replicas": replicas}]});
    server.create("chat", &spec(1)).await.expect("valid");
    server.reconcile("chat").await.expect("applied");
    server.replace("chat", &spec(2)).await;
    server.reconcile("chat").await.expect("applied");
    assert_eq!(server.pool("chat-worker").await.spec.replicas, 2, "the author scales while nobody else does");

    // Scale writes race reconciles; the last write must stand.
    let pools = server.api::<WorkerPool>();
    let scaler = async {
        for replicas in (3..40).chain([7]) {
            let scale = json!({"spec": {"replicas": replicas}});
            pools.patch_scale("chat-worker", &PatchParams::default(), &Patch::Merge(&scale)).await.expect("scaled");
        }
    };
    let parent = async {
        for _ in 0..12 {
            // A conflict is an answer too: the next try sees the scaler's value.
            let _ = server.reconcile("chat").await;
        }
    };
    tokio::join!(scaler, parent);
    server.reconcile("chat").await.expect("applied");
    assert_eq!(server.pool("chat-worker").await.spec.replicas, 7);
    let deployment = server.settled("chat-worker").await;
    assert_eq!(deployment.spec.and_then(|spec| spec.replicas), Some(7));
    let scale = pools.get_scale("chat-worker").await.expect("has the subresource");
    let selector = scale.status.and_then(|status| status.selector).expect("has a selector");
    assert!(selector.contains("armature.dev/pool=worker"), "{selector}");
    server.stop().await;
}

#[tokio::test]
async fn a_pool_that_is_not_wanted_any_more_is_deleted() {
    let server = Server::start("prune").await;
    let spec = |pools: Value| json!({"model": {"source": "hf://org/name"}, "pools": pools});
    server.create("chat", &spec(json!([{"name": "a"}, {"name": "b"}]))).await.expect("valid");
    server.reconcile("chat").await.expect("applied");
    server.pool("chat-a").await;
    server.replace("chat", &spec(json!([{"name": "b"}]))).await;
    server.reconcile("chat").await.expect("applied");
    server.gone::<WorkerPool>("chat-a").await;
    server.gone::<Deployment>("chat-a").await;
    server.pool("chat-b").await;
    server.stop().await;
}

#[tokio::test]
async fn an_object_of_somebody_else_is_left_alone() {
    let server = Server::start("taken").await;
    let service: Service = serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"},
        "spec": {"selector": {"app": "mine"}, "ports": [{"port": 80}]},
    }))
    .expect("valid");
    let services = server.api::<Service>();
    let before = services.create(&PostParams::default(), &service).await.expect("created");
    server.create("chat", &json!({"model": {"source": "hf://org/name"}})).await.expect("valid");
    let error = server.reconcile("chat").await.expect_err("the name is taken");
    assert_eq!(error.reason(), "NameTaken");
    assert_eq!(services.get("chat").await.expect("still there").resource_version(), before.resource_version());
    assert_eq!(server.condition("chat", "Ready").await, ("False".into(), "NameTaken".into()));
    let events = server.api::<Event>().list(&ListParams::default()).await.expect("listed");
    let told = events.items.iter().find(|e| e.reason.as_deref() == Some("NameTaken")).expect("an event tells");
    assert_eq!(told.regarding.as_ref().and_then(|object| object.name.as_deref()), Some("chat"));
    server.stop().await;
}

#[tokio::test]
async fn a_path_of_a_node_must_be_allowed() {
    let server = Server::start("path").await;
    server.create("chat", &json!({"model": {"source": "file:///etc/passwd"}})).await.expect("well formed");
    server.reconcile("chat").await.expect_err("not allowed");
    assert_eq!(server.condition("chat", "Ready").await, ("False".into(), "HostPathNotAllowed".into()));
    server.stop().await;
}

#[tokio::test]
async fn worker_metadata_is_kept_whole_and_says_whether_it_is_routable() {
    let server = Server::start("dwm").await;
    let data = json!({
        "endpoints": {"ns/backend/generate/1": {"type": "Endpoint", "namespace": "ns", "component": "backend",
            "endpoint": "generate", "instance_id": 1, "transport": {"tcp": "10.0.0.7:9000"}, "later": {"deep": [1, null]}}},
        "model_cards": {"ns/backend/generate/1": {"type": "Model", "namespace": "ns", "component": "backend",
            "endpoint": "generate", "instance_id": 1,
            "card_json": {"display_name": "smollm2", "worker_type": "aggregated", "runtime_config": {"taints": ["x"]}}}},
        "event_channels": {}, "event_sources": {}, "future": "no",
    });
    let object = json!({"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata", "metadata": {"name": "w-0"},
        "spec": {"data": data}});
    let objects = server.api::<DynamoWorkerMetadata>();
    let apply = PatchParams::apply("dynamo-worker").force();
    objects.patch("w-0", &apply, &Patch::Apply(&object)).await.expect("applied");
    assert_eq!(objects.get("w-0").await.expect("there").spec.data, data);
    let operator = server.operator("a", 3).await;
    server
        .until("w-0 has a condition", async || {
            let conditions = objects.get("w-0").await.expect("there").status.unwrap_or_default().conditions;
            conditions.iter().any(|c| c.type_ == "Routable" && c.reason == "NoPod")
        })
        .await;
    assert_eq!(objects.get("w-0").await.expect("there").spec.data, data, "a status leaves the spec alone");
    let table = server.table::<DynamoWorkerMetadata>("w-0").await;
    assert_eq!(
        table.as_array().expect("cells")[..5],
        json!(["w-0", "backend", "smollm2", "aggregated", "False"]).as_array().expect("cells")[..]
    );
    operator.stop().await.expect("ends well");
    server.stop().await;
}

#[tokio::test]
async fn the_operator_acts_and_a_second_one_takes_over() {
    let server = Server::start("lead").await;
    let first = server.operator("first", 15).await;
    server.until("first leads", async || first.leads().await).await;
    let second = server.operator("second", 15).await;
    server.create("chat", &json!({"model": {"source": "hf://org/name"}})).await.expect("valid");
    server
        .until("chat is built", async || {
            server.api::<Deployment>().get_opt("chat-worker").await.expect("answers").is_some()
        })
        .await;
    assert!(!second.leads().await);
    // Released, so the second need not wait for it to expire.
    first.stop().await.expect("ends well");
    server.until("second leads", async || second.leads().await).await;

    // Drift is repaired.
    let deployments = server.api::<Deployment>();
    deployments.delete("chat-router", &DeleteParams::default()).await.expect("deleted");
    server
        .until("the routers are back", async || {
            deployments
                .get_opt("chat-router")
                .await
                .expect("answers")
                .is_some_and(|d| d.metadata.deletion_timestamp.is_none())
        })
        .await;

    // Everything goes with the object.
    server.api::<ModelDeployment>().delete("chat", &DeleteParams::background()).await.expect("deleted");
    server.gone::<Deployment>("chat-worker").await;
    server.gone::<Service>("chat").await;
    second.stop().await.expect("ends well");
    server.stop().await;
}

impl Server {
    /// Reconciles a deployment and its pools once.
    async fn reconcile(&self, name: &str) -> Result<(), operator::error::Error> {
        let object = Arc::new(self.deployment(name).await);
        deployment::reconcile(object.clone(), self.context.clone()).await?;
        for item in self.api::<WorkerPool>().list(&ListParams::default()).await.expect("listed").items {
            pool::reconcile(Arc::new(item), self.context.clone()).await?;
        }
        Ok(())
    }

    /// Kind, name and resourceVersion of the object and all that was made from it.
    async fn versions(&self) -> Vec<(String, String, String)> {
        let mut all = Vec::new();
        self.versions_of::<ModelDeployment>(&mut all).await;
        self.versions_of::<WorkerPool>(&mut all).await;
        self.versions_of::<Deployment>(&mut all).await;
        self.versions_of::<Service>(&mut all).await;
        self.versions_of::<Role>(&mut all).await;
        self.versions_of::<RoleBinding>(&mut all).await;
        self.versions_of::<ServiceAccount>(&mut all).await;
        all.retain(|(_, name, _)| name.starts_with("chat"));
        all
    }

    async fn versions_of<K: server::Object>(&self, all: &mut Vec<(String, String, String)>) {
        let list = self.api::<K>().list(&ListParams::default()).await.expect("listed");
        all.extend(
            list.items.iter().map(|o| (K::kind(&()).into(), o.name_any(), o.resource_version().unwrap_or_default())),
        );
    }

    async fn condition(&self, name: &str, kind: &str) -> (String, String) {
        let conditions = self.deployment(name).await.status.unwrap_or_default().conditions;
        let found = conditions.into_iter().find(|c| c.type_ == kind).unwrap_or_else(|| panic!("no condition {kind}"));
        (found.status, found.reason)
    }
}

#[tokio::test]
async fn an_operator_that_lost_its_lease_is_a_candidate_again() {
    let server = Server::start("lost").await;
    let operator = server.operator("only", 3).await;
    server.until("it leads", async || operator.leads().await).await;
    let leases = server.api::<Lease>();
    let name = leases.list(&ListParams::default()).await.expect("listed").items.pop().and_then(|l| l.metadata.name);
    let name = name.expect("the Lease");
    let hand_to = async |holder: &str| {
        let spec = json!({"spec": {"holderIdentity": holder, "leaseDurationSeconds": 3600}});
        leases.patch(&name, &PatchParams::default(), &Patch::Merge(&spec)).await.expect("patched");
    };
    hand_to("another").await;
    server.until("it leads no longer", async || !operator.leads().await).await;
    server.create("chat", &json!({"model": {"source": "hf://org/name"}})).await.expect("valid");
    hand_to("").await;
    server.until("it leads again", async || operator.leads().await).await;
    server
        .until("chat is built", async || {
            server.api::<Deployment>().get_opt("chat-worker").await.expect("answers").is_some()
        })
        .await;
    operator.stop().await.expect("ends well");
    server.stop().await;
}
