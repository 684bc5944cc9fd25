//! What workers say of their own load: it counts beside what the router sent them, for as long as they live and say so.

use std::time::Duration;

use protocol::event_plane::ActiveLoad;
use protocol::request_plane::Generate;
use router::backend::{DispatchError, RouteOptions};
use routing::{BusyThresholds, Explanation, Mode, Reported};
use serde_json::json;

use crate::harness::*;
use crate::worker::{Behaviour, Life, Worker};

fn explained(cluster: &Cluster) -> Explanation {
    let request = Generate { model: MODEL.into(), token_ids: prompt(1, 1), ..Generate::default() };
    cluster.backend().explain(&request, &RouteOptions::default()).expect("a model").answer
}

fn reported(cluster: &Cluster, worker: &Worker) -> Option<Reported> {
    explained(cluster).reports.iter().find(|(of, _)| *of == rank(worker)).map(|(_, reported)| *reported)
}

/// Lets a worker say that others' requests hold so many of its blocks, and waits until the router knows.
async fn others_hold(cluster: &Cluster, worker: &Worker, blocks: u64) {
    worker.report(ActiveLoad { active_decode_blocks: Some(blocks), ..ActiveLoad::default() });
    let heard = || reported(cluster, worker).and_then(|load| load.active_blocks) == Some(blocks as u32);
    cluster.until("its report is heard", heard).await;
}

/// A worker of ten blocks.
fn small(name: &str) -> Life {
    Life { card: json!({"runtime_config": {"total_kv_blocks": 10}}), ..Life::new(name) }
}

async fn with_thresholds() -> Cluster {
    Cluster::with(|settings| {
        settings.selection.selector.busy = BusyThresholds { decode_blocks: Some(0.5), ..BusyThresholds::default() };
    })
    .await
}

#[tokio::test]
async fn a_worker_that_others_keep_busy_gets_nothing() {
    let cluster = with_thresholds().await;
    let (a, b) = (cluster.worker_of(small("a")).await, cluster.worker_of(small("b")).await);
    others_hold(&cluster, &a, 6).await;
    for seed in 0..4 {
        let routed = cluster.generate(&prompt(seed, 1)).await.expect("the other has room");
        assert_eq!(routed.worker_id, b.life.instance_id);
        drain(routed).await.1.expect("it ends well");
    }
    // Four of others, and two that the router sends.
    others_hold(&cluster, &b, 4).await;
    b.behave(Behaviour::Stall);
    let _running = cluster.generate(&prompt(1, 2)).await.expect("room for it");
    assert_eq!(cluster.generate(&prompt(2, 1)).await.err(), Some(DispatchError::Busy { model: MODEL.into() }));
    others_hold(&cluster, &a, 0).await;
    assert_eq!(cluster.generate(&prompt(2, 1)).await.expect("room again").worker_id, a.life.instance_id);
}

#[tokio::test]
async fn the_least_loaded_worker_is_the_one_that_others_use_least() {
    let cluster = Cluster::start(Mode::LeastLoaded).await;
    let (a, b) = (cluster.worker("a").await, cluster.worker("b").await);
    a.report(ActiveLoad { running_requests: Some(2), waiting_requests: Some(1), ..ActiveLoad::default() });
    cluster.until("its report is heard", || reported(&cluster, &a).is_some()).await;
    b.behave(Behaviour::Stall);
    let mut running = Vec::new();
    for _ in 0..3 {
        let routed = cluster.generate(&prompt(1, 1)).await.expect("routed");
        assert_eq!(routed.worker_id, b.life.instance_id);
        running.push(routed);
    }
    let requests: Vec<u32> = explained(&cluster).candidates.iter().map(|row| row.requests()).collect();
    assert_eq!(requests, [3, 3]);
}

#[tokio::test]
async fn a_report_does_not_outlive_its_worker() {
    let cluster = with_thresholds().await;
    let old = cluster.worker_of(small("w")).await;
    others_hold(&cluster, &old, 9).await;
    assert_eq!(cluster.generate(&prompt(2, 1)).await.err(), Some(DispatchError::Busy { model: MODEL.into() }));
    // The next life under its name, which keeps its id: it has not said anything.
    let new = Worker::start(Life { boot_epoch: "w-2".into(), ..small("w") }).await;
    new.register(cluster.directory.path());
    cluster.until("the old report is gone", || reported(&cluster, &new).is_none()).await;
    let routed = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(10));
        loop {
            // Until the new life is connected, nobody is there; at no time is it busy.
            match cluster.generate(&prompt(2, 1)).await {
                Ok(routed) => return routed,
                Err(error) => assert_eq!(error, DispatchError::NoWorker { model: MODEL.into() }),
            }
            ticks.tick().await;
        }
    };
    let routed = tokio::time::timeout(Duration::from_secs(30), routed).await.expect("it serves");
    drain(routed).await.1.expect("it ends well");
    assert_eq!(reported(&cluster, &new), None, "though the old process goes on to publish");
    assert_eq!(new.prompts().len(), 1);
}

#[tokio::test]
async fn a_worker_whose_events_are_of_no_use_is_heard_all_the_same() {
    let cluster = with_thresholds().await;
    let decides = cluster.worker_of(small("decides")).await;
    let other = cluster.worker_of(Life { block_size: BLOCK * 2, ..small("other") }).await;
    assert_eq!(cluster.metric("armature_router_workers_event_mismatch"), 1.0);
    others_hold(&cluster, &decides, 6).await;
    others_hold(&cluster, &other, 7).await;
    assert_eq!(cluster.generate(&prompt(1, 1)).await.err(), Some(DispatchError::Busy { model: MODEL.into() }));
    // Its blocks are those of its model from now on, and its events are followed; so is its load.
    decides.unregister(cluster.directory.path());
    cluster.until("its events are of use", || cluster.metric("armature_router_workers_event_mismatch") == 0.0).await;
    others_hold(&cluster, &other, 5).await;
    other.report(ActiveLoad { draining: true, ..ActiveLoad::default() });
    let draining = || cluster.backend().workers().get(rank(&other)).is_some_and(|worker| worker.draining);
    cluster.until("it says that it leaves", draining).await;
}

#[tokio::test]
async fn a_worker_of_another_block_size_can_say_that_it_leaves() {
    let cluster = with_thresholds().await;
    let _decides = cluster.worker_of(small("decides")).await;
    let other = cluster.worker_of(Life { block_size: BLOCK * 2, ..small("other") }).await;
    other.report(ActiveLoad { draining: true, ..ActiveLoad::default() });
    let draining = || cluster.backend().workers().get(rank(&other)).is_some_and(|worker| worker.draining);
    cluster.until("it says that it leaves", draining).await;
}

#[tokio::test]
async fn reports_count_without_kv_events_too() {
    let cluster = Cluster::with(|settings| {
        settings.index.events = false;
        settings.selection.selector.busy = BusyThresholds { decode_blocks: Some(0.5), ..BusyThresholds::default() };
    })
    .await;
    let differs = Life { probe: Some(vec![1]), ..small("b") };
    let (a, b) = (cluster.worker_of(small("a")).await, cluster.worker_of(differs).await);
    others_hold(&cluster, &a, 6).await;
    others_hold(&cluster, &b, 7).await;
    assert_eq!(cluster.generate(&prompt(1, 1)).await.err(), Some(DispatchError::Busy { model: MODEL.into() }));
}
