//! Routers with sockets, on one machine: how they find each other, and what they wait for.

use std::net::TcpListener;
use std::path::Path;

use prometheus_client::registry::Registry;
use tokio_util::sync::DropGuard;

use super::*;
use crate::replicas::options::{PeerSource, ReplicaSettings};
use crate::replicas::{Outbox, ReplicaError, Replicas};

/// Longest wait for anything here, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(30);

struct Router {
    node: Node,
    outbox: Outbox,
    registry: Registry,
    _stop: DropGuard,
}

fn settings(peers: PeerSource, port: u16) -> ReplicaSettings {
    let bind = ([127, 0, 0, 1], port).into();
    ReplicaSettings { peers, bind, host: "127.0.0.1".into(), expiry: EXPIRY }
}

async fn start(node: Node, settings: ReplicaSettings) -> Result<Router, ReplicaError> {
    let mut registry = Registry::default();
    let (outbox, replicas) = Replicas::bind(node.own, settings, &mut registry).await?;
    let stop = tokio_util::sync::CancellationToken::new();
    replicas.start(node.load.clone(), stop.clone()).await?;
    Ok(Router { node, outbox, registry, _stop: stop.drop_guard() })
}

async fn in_directory(node: Node, directory: &Path) -> Router {
    start(node, settings(PeerSource::Directory(directory.to_owned()), 0)).await.expect("a free port")
}

impl Router {
    fn joined(&self) -> bool {
        self.outbox.joined()
    }

    /// Tells what happened to own requests since the last call.
    fn tell(&mut self) {
        for event in std::mem::take(&mut self.node.untold) {
            self.outbox.tell(&event.request, || Some(event.change.clone()));
        }
    }

    fn metric(&self, name: &str) -> f64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a String takes it");
        let prefixed = format!("armature_router_replica_{name} ");
        text.lines().find_map(|line| line.strip_prefix(&prefixed)?.parse().ok()).unwrap_or_default()
    }
}

/// Waits for a condition that other tasks bring about.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let poll = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        while !condition() {
            ticks.tick().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, poll).await.is_ok(), "waited {PATIENCE:?} in vain until {what}");
}

#[tokio::test]
async fn routers_in_one_directory_count_for_each_other() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut first = Node::new(1);
    for _ in 0..3 {
        first.book(10, 4);
    }
    first.untold.clear();
    let mut first = in_directory(first, directory.path()).await;
    until("a router without peers is ready", || first.joined()).await;
    let mut second = in_directory(Node::new(2), directory.path()).await;
    until("the newcomer knows what runs", || second.node.replicated() == 3 && second.joined()).await;

    until("it is heard in turn", || first.metric("peers") == 1.0).await;
    first.node.first_token(0);
    first.node.end(1);
    first.tell();
    second.node.book(11, 2);
    second.tell();
    let equal = || [10, 11].iter().all(|worker| first.node.view(*worker) == second.node.view(*worker));
    until("both count all", equal).await;
    assert_eq!((first.node.replicated(), second.node.replicated()), (1, 2));

    let file = directory.path().join("routers/0000000000000001.json");
    assert!(file.exists());
    drop(first);
    until("its file goes with it", || !file.exists()).await;
}

#[tokio::test]
async fn a_listed_router_may_be_the_router_itself() {
    let free = || TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
    let ports = [free(), free()];
    let list = || PeerSource::Listed(ports.iter().map(|port| format!("127.0.0.1:{port}")).collect());
    let mut first = start(Node::new(1), settings(list(), ports[0])).await.expect("free a moment ago");
    let second = start(Node::new(2), settings(list(), ports[1])).await.expect("free a moment ago");
    until("both know the other", || first.metric("peers") == 1.0 && second.metric("peers") == 1.0).await;
    first.node.book(10, 4);
    first.tell();
    until("it counts", || second.node.replicated() == 1).await;
    assert_eq!((first.node.replicated(), first.metric("events_refused_total")), (0, 0.0));
}

#[tokio::test]
async fn nobody_waits_long_for_a_router_that_is_not_there() {
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = nobody.local_addr().expect("bound").to_string();
    let begin = std::time::Instant::now();
    let router = start(Node::new(1), settings(PeerSource::Listed(vec![address]), 0)).await.expect("a free port");
    assert!(!router.joined(), "it hopes for a snapshot");
    until("it is ready without", || router.joined()).await;
    assert!(begin.elapsed() >= Duration::from_secs(1));
}

#[tokio::test]
async fn a_taken_port_is_told_with_its_flag() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let error = start(Node::new(1), settings(PeerSource::Listed(Vec::new()), port)).await.err().expect("refused");
    let text = error.to_string();
    assert!(text.contains(&format!("127.0.0.1:{port}")) && text.contains("--sync-port"), "{text}");
}
