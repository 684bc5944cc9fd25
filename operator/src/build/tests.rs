//! What is built from the smallest and from a full object, and what must hold for every object.

use crds::ModelDeployment;
use kube::Resource;
use serde_json::{Value, json};

use super::*;
use crate::validate;

fn settings() -> Settings {
    Settings {
        image: "armature:test".into(),
        image_pull_policy: "IfNotPresent".into(),
        image_pull_secrets: Vec::new(),
        host_model_paths: vec!["/models".into()],
    }
}

fn object(name: &str, spec: Value) -> ModelDeployment {
    serde_json::from_value(json!({
        "apiVersion": "armature.dev/v1alpha1", "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": "default", "uid": "d-1"}, "spec": spec,
    }))
    .expect("valid")
}

fn smallest() -> ModelDeployment {
    object("chat", json!({"model": {"source": "hf://org/name"}}))
}

fn full() -> ModelDeployment {
    object(
        "chat",
        json!({
            "image": "registry.example/armature:1", "imagePullPolicy": "Always",
            "model": {"name": "smollm2", "source": "file:///models/smollm2.gguf"},
            "router": {
                "replicas": 2, "mode": "kv", "overlapScoreCredit": 0.9, "hostCacheHitWeight": 0.5, "diskCacheHitWeight": 0,
                "prefillLoadScale": 2, "temperature": 0.25, "kvEvents": false, "replicaSync": false,
                "assumeKvReuse": true, "trackOutputBlocks": false, "activeDecodeBlocksThreshold": 0.9,
                "queueThreshold": 1.5, "queuePolicy": "wspt", "queueLimit": 100, "queueTimeoutSeconds": 30,
                "migrationLimit": 0,
                "resources": {"requests": {"cpu": "500m"}}, "extraArgs": ["--verbose"],
                "extraEnv": [{"name": "RUST_LOG", "value": "debug"}, {"name": "POD_IP", "value": "::1"}],
            },
            "pools": [
                {"name": "prefill", "role": "prefill", "nodeSelector": {"class": "big"},
                 "tolerations": [{"key": "gpu", "operator": "Exists"}], "terminationGracePeriodSeconds": 60},
                {"name": "decode", "role": "decode", "replicas": 4,
                 "engine": {"builtIn": {"threads": 2, "blockSize": 32, "kvBlocks": 1024, "maxNumSeqs": 8, "maxNumBatchedTokens": 256}},
                 "kvCache": {"hostBytes": "2Gi", "diskBytes": "20Gi", "policy": "lfu"},
                 "resources": {"limits": {"cpu": 2, "memory": "4Gi"}},
                 "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]},
            ],
        }),
    )
}

/// Everything that both reconcilers make of a deployment, as JSON.
fn built(object: &ModelDeployment, settings: &Settings) -> Vec<Value> {
    let owner = object.controller_owner_ref(&()).expect("has a UID");
    let valid = validate::deployment(object, settings).expect("valid");
    let children = children(&valid, settings, &owner);
    let mut all = Vec::new();
    all.extend(children.service_accounts.iter().map(|o| json!(o)));
    all.extend(children.roles.iter().map(|o| json!(o)));
    all.extend(children.role_bindings.iter().map(|o| json!(o)));
    all.extend(children.services.iter().map(|o| json!(o)));
    all.push(json!(children.routers));
    for mut pool in children.pools {
        all.push(json!(pool));
        pool.metadata.uid = Some(format!("p-{}", pool.spec.pool));
        let owner = pool.controller_owner_ref(&()).expect("has a UID");
        all.push(json!(pool_deployment(&pool, settings, &owner).expect("valid").0));
    }
    all
}

fn deployments(object: &ModelDeployment, settings: &Settings) -> Vec<Deployment> {
    let of_kind = |value: &Value| value["kind"] == "Deployment";
    let read = |value| serde_json::from_value(value).expect("a Deployment");
    built(object, settings).into_iter().filter(of_kind).map(read).collect()
}

fn revision_of(deployment: &Deployment) -> String {
    let template = &deployment.spec.as_ref().expect("has a spec").template;
    template.metadata.as_ref().and_then(|m| m.labels.as_ref()).expect("has labels")[label::REVISION].clone()
}

#[test]
fn the_smallest_object() {
    insta::assert_yaml_snapshot!(built(&smallest(), &settings()));
}

#[test]
fn a_full_object() {
    let settings = Settings { image_pull_secrets: vec!["registry".into(), "mirror".into()], ..settings() };
    insta::assert_yaml_snapshot!(built(&full(), &settings));
}

/// Prefill and decode by vLLM: what differs between the pods of the two roles shows as well.
#[test]
fn pools_of_vllm() {
    let vllm = json!({
        "image": "vllm/vllm-openai:v0.32.0", "args": ["--max-model-len=8192"], "sharedMemory": "2Gi", "runAsUser": 0,
    });
    let pool = |role| {
        json!({"name": role, "role": role, "engine": {"vllm": vllm}, "resources": {"limits": {"nvidia.com/gpu": 1}},
            "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]})
    };
    let spec = json!({"model": {"source": "hf://org/name@v2"}, "pools": [pool("prefill"), pool("decode")]});
    let pods: Vec<_> = deployments(&object("chat", spec), &settings()).into_iter().skip(1).collect();
    insta::assert_yaml_snapshot!(pods);
}

/// The same with SGLang.
#[test]
fn pools_of_sglang() {
    let sglang = json!({"image": "lmsysorg/sglang:v0.5.6", "args": ["--max-running-requests=64"]});
    let pool = |role| json!({"name": role, "role": role, "engine": {"sglang": sglang}, "resources": {"limits": {"nvidia.com/gpu": 1}}});
    let spec = json!({"model": {"source": "hf://org/name@v2"}, "pools": [pool("prefill"), pool("decode")]});
    let pods: Vec<_> = deployments(&object("chat", spec), &settings()).into_iter().skip(1).collect();
    insta::assert_yaml_snapshot!(pods);
}

/// The same with TensorRT-LLM, whose options are a file.
#[test]
fn pools_of_tensorrt_llm() {
    let engine = json!({"image": "tensorrt-llm:1.1", "args": ["--max_batch_size=64"], "runAsUser": 0,
        "kvBlocks": 20000, "contextLength": 8192, "options": {"kv_cache_config": {"dtype": "fp8"}}});
    let pool = |role| json!({"name": role, "role": role, "engine": {"tensorrtLlm": engine}});
    let spec = json!({"model": {"source": "pvc://models/llama"}, "pools": [pool("prefill"), pool("decode")]});
    let pods: Vec<_> = deployments(&object("chat", spec), &settings()).into_iter().skip(1).collect();
    insta::assert_yaml_snapshot!(pods);
}

#[test]
fn options_of_an_engine_are_part_of_the_revision() {
    let pods = |options: Value| {
        let engine = json!({"tensorrtLlm": {"image": "t:1", "kvBlocks": 9, "contextLength": 99, "options": options}});
        let spec = json!({"model": {"source": "hf://org/name"}, "pools": [{"name": "w", "engine": engine}]});
        deployments(&object("chat", spec), &settings()).pop().expect("workers")
    };
    let (one, other) = (pods(json!({})), pods(json!({"enable_chunked_prefill": true})));
    assert_ne!(revision_of(&one), revision_of(&other));
    assert_eq!(revision_of(&one), revision_of(&pods(json!({}))));
}

#[test]
fn vllm_ends_after_its_worker_and_has_the_resources() {
    let engine = json!({"vllm": {"image": "vllm:1", "command": ["python3", "-m", "server"], "args": ["--x"]}});
    let spec = json!({
        "model": {"name": "m", "source": "pvc://models/llama"},
        "pools": [{"name": "w", "engine": engine, "resources": {"limits": {"nvidia.com/gpu": 2}}}],
    });
    let deployment = deployments(&object("chat", spec), &settings()).pop().expect("workers");
    let pod = deployment.spec.and_then(|spec| spec.template.spec).expect("a pod");
    let (worker, server) = (&pod.containers[0], &pod.init_containers.as_ref().expect("a sidecar")[0]);
    assert_eq!(server.restart_policy.as_deref(), Some("Always"), "a sidecar: it outlives the containers");
    let limits = |container: &k8s_openapi::api::core::v1::Container| {
        container.resources.as_ref().and_then(|resources| resources.limits.clone()).unwrap_or_default()
    };
    assert_eq!((limits(worker).len(), limits(server)["nvidia.com/gpu"].0.as_str()), (0, "2"));
    assert_eq!(server.command, Some(vec!["python3".into(), "-m".into(), "server".into()]));
    let args = server.args.as_ref().expect("has arguments");
    assert_eq!((args[0].as_str(), args.last().map(String::as_str)), ("/model/llama", Some("--x")));
    assert!(!args.iter().any(|arg| arg.contains("NixlConnector")), "it does not exchange KV: {args:?}");
    for container in [worker, server] {
        let mounts: Vec<_> = container.volume_mounts.iter().flatten().map(|mount| mount.mount_path.as_str()).collect();
        assert!(mounts.contains(&"/model") && mounts.contains(&"/cache"), "{mounts:?}");
    }
}

#[test]
fn building_twice_gives_the_same_bytes() {
    for object in [smallest(), full()] {
        let bytes = |_| serde_json::to_string(&built(&object, &settings())).expect("serializable");
        assert_eq!(bytes(1), bytes(2));
    }
}

#[test]
fn a_claim_is_mounted_read_only() {
    let object = object("chat", json!({"model": {"source": "pvc://models/llama/x.gguf"}}));
    let deployments = deployments(&object, &settings());
    let pod = deployments[1].spec.as_ref().and_then(|spec| spec.template.spec.as_ref()).expect("a pod");
    assert_eq!(
        json!(pod.volumes),
        json!([{"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": true}}])
    );
    let args = pod.containers[0].args.as_ref().expect("has arguments");
    assert!(args.contains(&"--model=/model/llama/x.gguf".into()), "{args:?}");
}

#[test]
fn every_container_of_ours_knows_its_pod() {
    for deployment in deployments(&smallest(), &settings()).iter().chain(&deployments(&full(), &settings())) {
        for container in &deployment.spec.as_ref().and_then(|s| s.template.spec.as_ref()).expect("a pod").containers {
            let names: Vec<_> = container.env.iter().flatten().map(|variable| variable.name.as_str()).collect();
            for (name, _) in POD_ENVIRONMENT {
                assert_eq!(names.iter().filter(|known| **known == name).count(), 1, "{name} in {}", container.name);
            }
            assert!(names.contains(&"DYN_DISCOVERY_BACKEND"));
        }
    }
}

#[test]
fn scaling_keeps_the_revision_and_an_image_changes_it() {
    let (one, mut many) = (smallest(), smallest());
    many.spec.router = Some(serde_json::from_value(json!({"replicas": 3})).expect("valid"));
    many.spec.pools = serde_json::from_value(json!([{"name": "worker", "replicas": 9}])).expect("valid");
    let revisions = |object, settings: &Settings| -> Vec<String> {
        deployments(object, settings).iter().map(revision_of).collect()
    };
    assert_eq!(revisions(&one, &settings()), revisions(&many, &settings()));
    let newer = Settings { image: "armature:newer".into(), ..settings() };
    let (old, new) = (revisions(&one, &settings()), revisions(&one, &newer));
    assert!(old.iter().zip(&new).all(|(old, new)| old != new), "{old:?} {new:?}");
}

#[test]
fn a_change_of_one_pool_leaves_the_other_revisions() {
    let (before, mut after) = (full(), full());
    after.spec.pools[1].worker.extra_args = vec!["--x".into()];
    let before: Vec<_> = deployments(&before, &settings()).iter().map(revision_of).collect();
    let after: Vec<_> = deployments(&after, &settings()).iter().map(revision_of).collect();
    assert_eq!((&before[0], &before[1]), (&after[0], &after[1]));
    assert_ne!(before[2], after[2]);
}

#[test]
fn selectors_hold_nothing_that_changes() {
    for deployment in deployments(&full(), &settings()) {
        let spec = deployment.spec.expect("has a spec");
        let selector = spec.selector.match_labels.expect("has labels");
        let labels = spec.template.metadata.and_then(|m| m.labels).expect("has labels");
        assert!(selector.iter().all(|(key, value)| labels.get(key) == Some(value)));
        assert!(!selector.contains_key(label::REVISION) && !selector.contains_key(label::ROLE));
    }
}

#[test]
fn the_longest_names_fit() {
    let object = object(&"d".repeat(38), json!({"model": {"source": "hf://o/n"}, "pools": [{"name": "p".repeat(7)}]}));
    for deployment in deployments(&object, &settings()) {
        let name = deployment.metadata.name.expect("has a name");
        assert!(name.len() + "-0123456789-abcde".len() <= 63, "{name}");
    }
}
