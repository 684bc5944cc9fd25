//! KV events over a bad network: whatever is lost, doubled or late, the index ends equal to the worker's own set.

use routing::Mode;

use crate::harness::*;
use crate::worker::{Fate, Life, Worker};

#[tokio::test]
async fn blocks_held_before_the_router_came_are_known() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = Worker::start(Life::new("w")).await;
    worker.store(&prompt(1, 5));
    worker.evict(&prompt(1, 5));
    worker.register(cluster.directory.path());
    cluster.until("the dump is in", || cluster.indexed(&worker).device == 4).await;
    cluster.until_equal(&worker).await;
}

#[tokio::test]
async fn losses_duplicates_and_reordering_heal() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.fates([
        Fate::Deliver,
        Fate::Lose,
        Fate::Twice,
        Fate::Late,
        Fate::Deliver,
        Fate::Lose,
        Fate::Lose,
        Fate::Late,
        Fate::Twice,
    ]);
    for seed in 0..12 {
        worker.store(&prompt(seed, 3));
        if seed % 3 == 2 {
            worker.evict(&prompt(seed, 3));
        }
    }
    cluster.until_equal(&worker).await;
    // A loss at the very end shows by the heartbeat alone.
    worker.fates([Fate::Lose]);
    worker.store(&prompt(99, 2));
    cluster.until_equal(&worker).await;
    assert!(cluster.metric("armature_router_kv_event_gaps_total") >= 1.0, "{}", cluster.metrics());
}

#[tokio::test]
async fn a_loss_larger_than_the_workers_ring_is_answered_with_a_dump() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.store(&prompt(0, 1));
    cluster.until_equal(&worker).await;
    worker.fates(vec![Fate::Lose; 100]);
    for seed in 1..102 {
        worker.store(&prompt(seed, 1));
    }
    cluster.until_equal(&worker).await;
    let metrics = cluster.metrics();
    assert!(metrics.contains(r#"kv_recoveries_total{reason="dump"}"#), "{metrics}");
}

#[tokio::test]
async fn a_restarted_engine_loses_its_old_blocks() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    for seed in 0..3 {
        worker.store(&prompt(seed, 2));
    }
    cluster.until_equal(&worker).await;
    worker.restart_engine();
    worker.store(&prompt(50, 1));
    cluster.until_equal(&worker).await;
    assert_eq!(cluster.overlap(&worker, &prompt(0, 2)), 0);
}

#[tokio::test]
async fn a_new_life_under_the_same_name_replaces_the_old_one() {
    let cluster = Cluster::start(Mode::Kv).await;
    let old = cluster.worker("w").await;
    old.store(&prompt(1, 4));
    cluster.until_equal(&old).await;
    old.kill();
    let new = Worker::start(Life { boot_epoch: "w-2".into(), ..Life::new("w") }).await;
    new.store(&prompt(2, 2));
    new.register(cluster.directory.path());
    cluster.until_equal(&new).await;
    assert_eq!(cluster.overlap(&new, &prompt(1, 4)), 0);
    let (tokens, end) = drain(cluster.generate(&prompt(2, 2)).await.expect("routed")).await;
    assert_eq!((tokens, end), (vec![1, 2, 3], Ok(())));
}

#[tokio::test]
async fn a_restart_without_events_is_seen_by_heartbeats_alone() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.store(&prompt(1, 4));
    cluster.until_equal(&worker).await;
    worker.restart_engine();
    cluster.until("its blocks are gone", || cluster.indexed(&worker).total() == 0).await;
}

#[tokio::test]
async fn a_rollout_of_another_block_size_ends_with_events_followed_again() {
    let cluster = Cluster::start(Mode::Kv).await;
    let old = Worker::start(Life { block_size: BLOCK * 2, ..Life::new("old") }).await;
    old.register(cluster.directory.path());
    cluster.until("the old one is routable", || cluster.backend().workers().get(rank(&old)).is_some()).await;
    let new = cluster.worker("new").await;
    new.store(&prompt(1, 4));
    assert_eq!(cluster.metric("armature_router_workers_event_mismatch"), 1.0, "the old one decides");
    assert_eq!(cluster.indexed(&new).total(), 0);
    old.unregister(cluster.directory.path());
    cluster.until_equal(&new).await;
    new.store(&prompt(2, 3));
    cluster.until_equal(&new).await;
    assert_eq!(cluster.metric("armature_router_workers_event_mismatch"), 0.0);
}

#[tokio::test]
async fn a_worker_that_leaves_leaves_nothing() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (stays, leaves) = (cluster.worker("a").await, cluster.worker("b").await);
    stays.store(&prompt(1, 2));
    leaves.store(&prompt(1, 4));
    cluster.until_equal(&stays).await;
    cluster.until_equal(&leaves).await;
    leaves.unregister(cluster.directory.path());
    cluster.until("its blocks are gone", || cluster.indexed(&leaves).total() == 0).await;
    assert_eq!(cluster.metric("armature_router_index_blocks"), 2.0);
    assert_eq!(cluster.overlap(&stays, &prompt(1, 4)), 2);
}

#[tokio::test]
async fn a_worker_that_cannot_be_reached_does_not_delay_the_others() {
    let cluster = Cluster::start(Mode::Kv).await;
    let dead = Worker::start(Life::new("dead")).await;
    dead.register(cluster.directory.path());
    dead.greet_as(Life::new("somebody else"));
    let worker = cluster.worker("w").await;
    worker.store(&prompt(1, 2));
    cluster.until_equal(&worker).await;
}
