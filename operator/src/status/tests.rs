//! Rollouts and conditions, case by case.

use serde_json::{Value, json};

use super::*;

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("in range")
}

fn deployed(desired: i32, generation: i64, status: Value) -> Deployment {
    serde_json::from_value(json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "chat-router", "generation": generation},
        "spec": {"replicas": desired, "selector": {"matchLabels": {"a": "1", "b": "2"}}, "template": {}},
        "status": status,
    }))
    .expect("valid")
}

fn settled(n: i32) -> Deployment {
    deployed(n, 1, json!({"observedGeneration": 1, "replicas": n, "updatedReplicas": n, "readyReplicas": n}))
}

fn pool_with(status: Value) -> WorkerPool {
    serde_json::from_value(json!({
        "apiVersion": "armature.dev/v1alpha1", "kind": "WorkerPool",
        "metadata": {"name": "chat-worker", "namespace": "default", "generation": 3},
        "spec": {"deployment": "chat", "pool": "worker", "replicas": 2, "model": {"source": "hf://org/name"}},
        "status": status,
    }))
    .expect("valid")
}

fn chat() -> crds::ModelDeployment {
    serde_json::from_value(json!({
        "apiVersion": "armature.dev/v1alpha1", "kind": "ModelDeployment",
        "metadata": {"name": "chat", "namespace": "default", "generation": 5},
        "spec": {"model": {"source": "hf://org/name"}},
    }))
    .expect("valid")
}

fn state<'a>(conditions: &'a [Condition], kind: &str) -> (&'a str, &'a str) {
    let found = conditions.iter().find(|c| c.type_ == kind).unwrap_or_else(|| panic!("no {kind}"));
    (found.status.as_str(), found.reason.as_str())
}

#[test]
fn old_pods_do_not_count_as_ready() {
    // Three old pods serve, one new one is starting.
    let status = json!({"observedGeneration": 2, "replicas": 4, "updatedReplicas": 1, "readyReplicas": 3});
    let rollout = Rollout::of(&deployed(3, 2, status));
    assert_eq!((rollout.ready, rollout.complete), (0, false));
    // All new ones are ready, an old one is left.
    let status = json!({"observedGeneration": 2, "replicas": 4, "updatedReplicas": 3, "readyReplicas": 4});
    let rollout = Rollout::of(&deployed(3, 2, status));
    assert_eq!((rollout.ready, rollout.complete), (3, false));
}

#[test]
fn a_spec_that_nobody_has_seen_yet_has_no_ready_pods() {
    let status = json!({"observedGeneration": 1, "replicas": 3, "updatedReplicas": 3, "readyReplicas": 3});
    assert_eq!(Rollout::of(&deployed(3, 2, status)).ready, 0);
    assert_eq!(Rollout::of(&deployed(3, 1, Value::Null)).ready, 0);
}

#[test]
fn kubernetes_reasons_are_passed_on() {
    let status = json!({"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "conditions": [
        {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"},
        {"type": "Progressing", "status": "False", "message": "has timed out progressing"}]});
    let pool = pool(&pool_with(Value::Null), &deployed(2, 1, status), "r", time(0));
    assert_eq!(state(&pool.conditions, "Ready"), ("False", "Stalled"));
    assert_eq!(pool.conditions[0].message, "exceeded quota");
}

#[test]
fn a_pool_reports_its_selector_for_autoscalers() {
    let status = pool(&pool_with(Value::Null), &settled(2), "abc", time(0));
    assert_eq!(status.selector.as_deref(), Some("a=1,b=2"));
    assert_eq!((status.replicas, status.ready_replicas, status.revision.as_deref()), (2, 2, Some("abc")));
    assert_eq!(status.observed_generation, Some(3));
    assert_eq!(state(&status.conditions, "Ready"), ("True", "PodsReady"));
}

#[test]
fn a_deployment_is_ready_when_routers_and_workers_are() {
    let mut worker = pool_with(Value::Null);
    worker.status = Some(pool(&worker, &settled(2), "abc", time(0)));
    let status = deployment(&chat(), "smollm2", &settled(1), &[worker], time(9));
    assert_eq!(state(&status.conditions, "Ready"), ("True", "Serving"));
    assert_eq!(state(&status.conditions, "Progressing"), ("False", "Complete"));
    assert_eq!((status.routers.as_deref(), status.workers.as_deref()), (Some("1/1"), Some("2/2")));
    assert_eq!(status.url.as_deref(), Some("http://chat.default.svc:8000/v1"));
    assert!(status.conditions.iter().all(|c| c.observed_generation == Some(5)));
}

#[test]
fn a_pool_whose_status_is_older_than_its_spec_is_not_ready() {
    let mut worker = pool_with(Value::Null);
    worker.status = Some(pool(&worker, &settled(2), "abc", time(0)));
    worker.metadata.generation = Some(4);
    let status = deployment(&chat(), "m", &settled(1), &[worker], time(9));
    assert_eq!(state(&status.conditions, "WorkersReady"), ("False", "PodsNotReady"));
    assert_eq!(state(&status.conditions, "Progressing"), ("True", "RollingOut"));
}

#[test]
fn nothing_wanted_is_not_ready() {
    let mut worker = pool_with(Value::Null);
    worker.spec.replicas = 0;
    worker.status = Some(pool(&worker, &settled(0), "abc", time(0)));
    let status = deployment(&chat(), "m", &settled(1), &[worker], time(9));
    assert_eq!(state(&status.conditions, "Ready"), ("False", "ScaledToZero"));
    assert_eq!(state(&status.conditions, "Progressing"), ("False", "Complete"));
}

#[test]
fn a_pool_that_cannot_be_carried_out_is_named() {
    let mut worker = pool_with(Value::Null);
    worker.status = Some(pool_failed(&worker, "HostPathNotAllowed", "no".into(), time(0)));
    let status = deployment(&chat(), "m", &settled(1), &[worker], time(9));
    let ready = status.conditions.iter().find(|c| c.type_ == "WorkersReady").expect("observed");
    assert_eq!((ready.status.as_str(), ready.message.as_str()), ("False", "pool worker: no"));
}

#[test]
fn transitions_are_timed_and_an_unchanged_status_is_equal() {
    let mut object = chat();
    let first = deployment(&object, "m", &settled(1), &[], time(10));
    object.status = Some(first.clone());
    assert_eq!(deployment(&object, "m", &settled(1), &[], time(20)), first);
    let starting = deployed(1, 1, json!({"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1}));
    let second = deployment(&object, "m", &starting, &[], time(30));
    let at = |conditions: &[Condition], kind: &str| {
        conditions.iter().find(|c| c.type_ == kind).map(|c| c.last_transition_time.0.as_second())
    };
    assert_eq!(at(&second.conditions, "RoutersReady"), Some(30));
    assert_eq!(at(&second.conditions, "WorkersReady"), Some(10));
}

#[test]
fn a_failure_keeps_what_is_known_of_running_pods() {
    let mut object = chat();
    object.status = Some(deployment(&object, "m", &settled(1), &[], time(10)));
    let failed = failed(&object, "NameTaken", "Service chat exists".into(), time(20));
    assert_eq!(state(&failed.conditions, "Ready"), ("False", "NameTaken"));
    assert_eq!(state(&failed.conditions, "RoutersReady"), ("True", "PodsReady"));
    assert_eq!(failed.routers.as_deref(), Some("1/1"));
}
