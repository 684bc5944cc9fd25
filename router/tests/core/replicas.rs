//! Several routers before the same workers: each counts what the others have running.

use router::backend::Backend;

use crate::harness::*;
use crate::worker::{Behaviour, Worker};

const REQUESTS: &str = "armature_router_replica_requests";

/// Two routers that hear each other, and workers that answer with one token and then nothing.
async fn two_routers(workers: &[&str]) -> ([Cluster; 2], Vec<Worker>) {
    let first = Cluster::sharing().await;
    let second = first.beside().await;
    let mut started = Vec::new();
    for name in workers {
        let worker = first.worker(name).await;
        worker.behave(Behaviour::Stall);
        second.until_routable(&worker).await;
        started.push(worker);
    }
    for router in [&first, &second] {
        router.until("the other one is heard", || router.metric("armature_router_replica_peers") == 1.0).await;
    }
    ([first, second], started)
}

async fn until_counted(router: &Cluster, requests: usize) {
    router.until("the other's requests count", || router.metric(REQUESTS) == requests as f64).await;
}

#[tokio::test]
async fn requests_at_two_routers_are_spread_as_at_one() {
    let (routers, workers) = two_routers(&["a", "b"]).await;
    let mut open = Vec::new();
    for seed in 0..6 {
        let at = seed as usize % 2;
        open.push(routers[at].generate(&prompt(seed, 4)).await.expect("routed"));
        until_counted(&routers[1 - at], seed as usize / 2 + 1).await;
    }
    assert_eq!(workers.iter().map(|worker| worker.prompts().len()).collect::<Vec<_>>(), [3, 3]);
    drop(open);
    for router in &routers {
        until_counted(router, 0).await;
    }
}

#[tokio::test]
async fn a_request_that_is_tried_again_counts_once_where_it_runs() {
    let (routers, workers) = two_routers(&["bad", "good"]).await;
    workers[0].behave(Behaviour::DieAtOnce);
    workers[0].store(&prompt(1, 4));
    routers[0].until_equal(&workers[0]).await;
    let open = routers[0].generate(&prompt(1, 4)).await.expect("routed");
    assert_eq!(open.worker_id, workers[1].life.instance_id);
    until_counted(&routers[1], 1).await;
    drop(open);
    until_counted(&routers[1], 0).await;
}

#[tokio::test]
async fn a_router_that_joins_knows_what_runs_before_it_is_ready() {
    let first = Cluster::sharing().await;
    let worker = first.worker("a").await;
    worker.behave(Behaviour::Stall);
    let mut open = Vec::new();
    for seed in 0..3 {
        open.push(first.generate(&prompt(seed, 4)).await.expect("routed"));
    }
    let second = first.beside().await;
    second.until("it is ready", || second.backend().synced()).await;
    until_counted(&second, 3).await;
    drop(open);
    until_counted(&second, 0).await;
}

#[tokio::test]
async fn the_requests_of_a_router_that_is_gone_are_forgotten() {
    let ([first, second], _workers) = two_routers(&["a"]).await;
    let open = first.generate(&prompt(1, 4)).await.expect("routed");
    until_counted(&second, 1).await;
    // It tells nothing any more, not even an end.
    first.core.stop().await;
    until_counted(&second, 0).await;
    assert_eq!(second.metric("armature_router_replica_peers"), 0.0);
    drop(open);
}

#[tokio::test]
async fn routers_that_do_not_share_count_their_own() {
    let first = Cluster::start(routing::Mode::Kv).await;
    let second = first.beside().await;
    let worker = first.worker("a").await;
    second.until_routable(&worker).await;
    worker.behave(Behaviour::Stall);
    let _open = first.generate(&prompt(1, 4)).await.expect("routed");
    assert!(!second.metrics().contains("armature_router_replica"));
    assert!(!first.directory.path().join("routers").exists());
}
