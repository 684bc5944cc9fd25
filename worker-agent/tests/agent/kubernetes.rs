//! Registration in Kubernetes, against the HTTP surface of an API server: what is sent, and what happens when it fails.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json};
use axum::routing::patch;
use protocol::metadata::WorkerMetadata;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use worker_agent::config::Pod;
use worker_agent::registration::{Entry, KubernetesEntry, hold};

use crate::harness::within;

/// One apply that arrived.
struct Applied {
    namespace: String,
    name: String,
    query: Vec<(String, String)>,
    content_type: String,
    object: Value,
}

struct Api {
    applied: mpsc::UnboundedSender<Applied>,
    refuse: parking_lot::Mutex<usize>,
}

/// An API server that refuses the first `refuse` applies.
async fn api_server(refuse: usize) -> (kube::Client, mpsc::UnboundedReceiver<Applied>) {
    let (applied, received) = mpsc::unbounded_channel();
    let api = Arc::new(Api { applied, refuse: refuse.into() });
    let path = "/apis/nvidia.com/v1alpha1/namespaces/{namespace}/dynamoworkermetadatas/{name}";
    let routes = axum::Router::new().route(path, patch(apply)).with_state(api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let config = kube::Config::new(url.parse().expect("a URL"));
    (kube::Client::try_from(config).expect("a client"), received)
}

async fn apply(
    State(api): State<Arc<Api>>,
    Path((namespace, name)): Path<(String, String)>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    body: String,
) -> axum::response::Response {
    let left = *api.refuse.lock();
    if left > 0 {
        *api.refuse.lock() = left - 1;
        let status = json!({"kind": "Status", "status": "Failure", "message": "etcd is away", "reason": "InternalError", "code": 500});
        return (StatusCode::INTERNAL_SERVER_ERROR, Json(status)).into_response();
    }
    let content_type = headers["content-type"].to_str().expect("text").to_owned();
    let object: Value = serde_json::from_str(&body).expect("JSON");
    let stored = object.clone();
    api.applied.send(Applied { namespace, name, query, content_type, object }).expect("the test listens");
    Json(stored).into_response()
}

#[tokio::test]
async fn the_object_is_applied_retried_and_changed() {
    let (client, mut received) = api_server(2).await;
    let pod = Pod { name: "chat-0".into(), namespace: "prod".into(), uid: "u-1".into() };
    let (metadata, receiver) = watch::channel(WorkerMetadata::default());
    let (stop, (registered, was_registered)) = (CancellationToken::new(), tokio::sync::oneshot::channel());
    let entry = Entry::Kubernetes(Box::new(KubernetesEntry::new(client, pod)));
    let call = move || registered.send(()).expect("the test listens");
    let held = tokio::spawn(hold(entry, receiver, call, stop.clone()));

    let first = within("the apply after two failures", received.recv()).await.expect("the server runs");
    within("registered", was_registered).await.expect("called");
    assert_eq!((first.namespace.as_str(), first.name.as_str()), ("prod", "chat-0"));
    assert_eq!(first.content_type, "application/apply-patch+yaml");
    for (key, value) in [("fieldManager", "armature-worker"), ("force", "true")] {
        assert!(first.query.contains(&(key.into(), value.into())), "{:?}", first.query);
    }
    assert_eq!(
        (&first.object["kind"], &first.object["apiVersion"]),
        (&"DynamoWorkerMetadata".into(), &"nvidia.com/v1alpha1".into())
    );
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "chat-0", "uid": "u-1"}]);
    assert_eq!(first.object["metadata"]["ownerReferences"], owner);

    let mut changed = WorkerMetadata::default();
    changed.event_sources.insert("a/b/c/1".into(), json!({"x": 1}));
    metadata.send_replace(changed);
    let second = loop {
        let applied = within("the changed object", received.recv()).await.expect("the server runs");
        if applied.object["spec"]["data"]["event_sources"]["a/b/c/1"]["x"] == 1 {
            break applied;
        }
    };
    assert_eq!(second.name, "chat-0");
    // The last state goes out even if the end comes with it.
    let mut last = WorkerMetadata::default();
    last.event_sources.insert("a/b/c/2".into(), json!({}));
    metadata.send_replace(last);
    stop.cancel();
    within("the end", held).await.expect("no panic").expect("no error");
    let mut applied = std::iter::from_fn(|| received.try_recv().ok());
    assert!(applied.any(|applied| applied.object["spec"]["data"]["event_sources"]["a/b/c/2"].is_object()));
}

#[tokio::test]
async fn a_worker_that_is_told_to_stop_does_not_wait_for_an_api_server() {
    let (client, _received) = api_server(usize::MAX).await;
    let pod = Pod { name: "chat-0".into(), namespace: "prod".into(), uid: "u-1".into() };
    let (_metadata, receiver) = watch::channel(WorkerMetadata::default());
    let stop = CancellationToken::new();
    stop.cancel();
    let held = hold(
        Entry::Kubernetes(Box::new(KubernetesEntry::new(client, pod))),
        receiver,
        || panic!("never registered"),
        stop,
    );
    tokio::time::timeout(Duration::from_secs(5), held).await.expect("at once").expect("no error");
}
