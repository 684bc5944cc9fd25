//! Is the index true, bounded and heard of? Whatever happens to events, whatever a worker says, and without events at all.

use std::num::NonZeroUsize;
use std::time::Duration;

use kv_hashing::HashSpace;
use kv_index::predicted::Policy;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use protocol::kv_event::StorageTier;
use protocol::request_plane::Generate;
use router::backend::{Backend, RouteOptions, Warning};
use router::config::Settings;
use serde_json::json;

use crate::harness::*;
use crate::worker::{Behaviour, Fate, Life, Worker};

/// Comparisons so often that a test need not wait for them.
const OFTEN: Duration = Duration::from_millis(100);

fn checked_often(settings: &mut Settings) {
    settings.index.check_every = OFTEN;
}

/// One thing that happens to one of three workers.
#[derive(Clone, Debug)]
enum Op {
    Store {
        worker: usize,
        seed: u32,
        blocks: u32,
        fate: Fate,
    },
    Evict {
        worker: usize,
        seed: u32,
        fate: Fate,
    },
    Restart {
        worker: usize,
    },
    /// Until the index is right about a worker; what follows meets a router at rest.
    Settle {
        worker: usize,
    },
}

fn ops() -> impl Strategy<Value = Op> {
    let fate =
        || prop_oneof![4 => Just(Fate::Deliver), 1 => Just(Fate::Lose), 1 => Just(Fate::Twice), 1 => Just(Fate::Late)];
    let worker = || 0..3_usize;
    prop_oneof![
        24 => (worker(), 0..20_u32, 1..6_u32, fate())
            .prop_map(|(worker, seed, blocks, fate)| Op::Store { worker, seed, blocks, fate }),
        12 => (worker(), 0..20_u32, fate()).prop_map(|(worker, seed, fate)| Op::Evict { worker, seed, fate }),
        1 => worker().prop_map(|worker| Op::Restart { worker }),
        1 => worker().prop_map(|worker| Op::Settle { worker }),
    ]
}

async fn play(threads: usize, ops: Vec<Op>) {
    let cluster = Cluster::with(|settings| {
        checked_often(settings);
        settings.index.threads = NonZeroUsize::new(threads).expect("not zero");
    })
    .await;
    let workers = [cluster.worker("a").await, cluster.worker("b").await, cluster.worker("c").await];
    for op in ops {
        match op {
            Op::Store { worker, seed, blocks, fate } => {
                workers[worker].fates([fate]);
                workers[worker].store(&prompt(seed, blocks));
            }
            Op::Evict { worker, seed, fate } => {
                let held = workers[worker].held_prefixes();
                let of_seed = held.iter().filter(|tokens| tokens.starts_with(&prompt(seed, 1)));
                if let Some(longest) = of_seed.max_by_key(|tokens| tokens.len()) {
                    workers[worker].fates([fate]);
                    workers[worker].evict(longest);
                }
            }
            Op::Restart { worker } => workers[worker].restart_engine(),
            Op::Settle { worker } => cluster.until_equal(&workers[worker]).await,
        }
    }
    for worker in &workers {
        cluster.until_equal(worker).await;
    }
}

/// Case 10.
#[test]
fn whatever_happens_to_events_the_index_ends_equal_to_the_workers_own_sets() {
    for threads in [1, 4] {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let config = Config { cases: 3, max_shrink_iters: 16, failure_persistence: None, ..Config::default() };
        let played = TestRunner::new(config).run(&proptest::collection::vec(ops(), 20..60), |ops| {
            runtime.block_on(play(threads, ops));
            Ok(())
        });
        if let Err(error) = played {
            panic!("with {threads} event threads: {error}");
        }
    }
}

#[tokio::test]
async fn wrong_blocks_are_found_by_comparison_and_repaired() {
    let cluster = Cluster::with(checked_often).await;
    let worker = cluster.worker("w").await;
    worker.store(&prompt(1, 5));
    cluster.until_equal(&worker).await;
    worker.fates([Fate::Garble]);
    worker.store(&prompt(2, 3));
    let wrong = |side: &str| cluster.metric(&format!("armature_router_index_wrong_blocks_total{{reason=\"{side}\"}}"));
    cluster.until("both mistakes are found", || wrong("index") >= 1.0 && wrong("worker") >= 1.0).await;
    cluster.until_equal(&worker).await;
    assert!(cluster.metric("armature_router_index_repairs_total") >= 1.0, "{}", cluster.metrics());
    let agreed = || cluster.metric("armature_router_index_checks_total{reason=\"agreed\"}");
    let before = agreed();
    cluster.until("the worker and the index agree", || agreed() > before).await;
}

#[tokio::test]
async fn a_busy_worker_raises_no_false_alarm() {
    let cluster = Cluster::with(|settings| settings.index.check_every = Duration::from_millis(50)).await;
    let worker = cluster.worker("w").await;
    let agreed = || cluster.metric("armature_router_index_checks_total{reason=\"agreed\"}");
    let mut round = 0;
    while agreed() < 10.0 {
        // Each block comes and goes all the time, so that a look at another moment would be wrong.
        let seed = round % 40;
        worker.store(&prompt(seed, 4));
        if round % 3 > 0 {
            worker.evict(&prompt(seed, 4));
        }
        round += 1;
        tokio::task::yield_now().await;
        cluster.until("it follows", || cluster.indexed(&worker).total() > 0).await;
        assert!(round < 1_000_000, "no comparison: {}", cluster.metrics());
    }
    let metrics = cluster.metrics();
    assert_eq!(cluster.metric("armature_router_index_wrong_blocks_total{reason=\"index\"}"), 0.0, "{metrics}");
    assert_eq!(cluster.metric("armature_router_index_wrong_blocks_total{reason=\"worker\"}"), 0.0, "{metrics}");
    assert_eq!(cluster.metric("armature_router_index_repairs_total"), 0.0);
}

#[tokio::test]
async fn requests_do_not_wait_for_a_large_dump() {
    const BLOCKS: u64 = 200_000;
    let cluster = Cluster::with(|_| {}).await;
    let large = Worker::start(Life::new("large")).await;
    large.hold_silently(BLOCKS);
    large.holding.send_replace(true);
    large.register(cluster.directory.path());
    cluster.until_routable(&large).await;
    let small = cluster.worker("small").await;
    small.store(&prompt(1, 4));
    cluster.until_equal(&small).await;
    let routed = cluster.generate(&prompt(1, 5)).await.expect("routed");
    assert_eq!((routed.worker_id, routed.overlap_blocks), (small.life.instance_id, 4), "what is known counts");
    drain(routed).await.1.expect("it ends well");
    let routed = cluster.generate_pinned(&prompt(2, 2), large.life.instance_id).await.expect("routed");
    drain(routed).await.1.expect("a worker of which nothing is known serves, too");
    assert_eq!(cluster.indexed(&large).total(), 0, "the dump is still held");
    large.holding.send_replace(false);
    cluster.until("the dump is in", || u64::from(cluster.indexed(&large).device) == BLOCKS).await;
}

/// Case 10: the numbers in a dump are none; the worker's own last number counts.
#[tokio::test]
async fn after_a_dump_live_events_go_on_without_another_one() {
    let cluster = Cluster::with(|_| {}).await;
    let worker = cluster.worker("w").await;
    // More than the worker's ring, so that its answer is a dump whose events have no true numbers.
    worker.fates(vec![Fate::Lose; 100]);
    for seed in 0..101 {
        worker.store(&prompt(seed, 1));
    }
    cluster.until_equal(&worker).await;
    let dumps = || cluster.metric("armature_router_kv_recoveries_total{reason=\"dump\"}");
    let before = dumps();
    for seed in 101..140 {
        worker.store(&prompt(seed, 1));
        cluster.until_equal(&worker).await;
    }
    assert_eq!((dumps(), cluster.metric("armature_router_kv_recovery_failures_total")), (before, 0.0));
}

#[tokio::test]
async fn a_worker_that_hashes_otherwise_is_told_and_its_events_are_left_alone() {
    let cluster = Cluster::with(|_| {}).await;
    let worker = cluster.worker_of(Life { probe: Some(vec![1, 2, 3, 4]), ..Life::new("other") }).await;
    let silent = cluster.worker_of(Life { probe: Some(Vec::new()), ..Life::new("says nothing") }).await;
    let trouble = "armature_router_workers_event_trouble{reason=\"block hashes differ\"}";
    cluster.until("it is counted", || cluster.metric(trouble) == 1.0).await;
    worker.store(&prompt(1, 4));
    silent.store(&prompt(1, 4));
    cluster.until_equal(&silent).await;
    assert_eq!(cluster.indexed(&worker).total(), 0);
    let warning = Warning { worker: Some("other".into()), reason: "block hashes differ" };
    assert_eq!(cluster.backend().warnings(), [warning]);
    drain(cluster.generate_pinned(&prompt(1, 4), worker.life.instance_id).await.expect("routed"))
        .await
        .1
        .expect("served");
}

#[tokio::test]
async fn events_that_never_come_are_missed() {
    let cluster = Cluster::with(checked_often).await;
    let worker = cluster.worker("w").await;
    let mut seed = 0;
    let silent = "armature_router_workers_event_trouble{reason=\"no events\"}";
    // The worker computes, and its events are as if a firewall dropped them.
    while cluster.metric(silent) == 0.0 {
        drain(cluster.generate(&prompt(seed % 190, 3)).await.expect("routed")).await.1.expect("it ends well");
        seed += 1;
        assert!(seed < 100_000, "nobody misses them");
    }
    assert_eq!(cluster.backend().warnings(), [Warning { worker: Some("w".into()), reason: "no events" }]);
    worker.store(&prompt(1, 3));
    cluster.until("they have come", || cluster.metric(silent) == 0.0).await;
    assert_eq!(cluster.backend().warnings(), []);
}

/// Case 8: what an offload connector tells of host memory and disk counts with their weights.
#[tokio::test]
async fn media_that_are_known_count_and_others_are_counted() {
    let cluster = Cluster::with(|_| {}).await;
    let worker = cluster.worker("w").await;
    let dumps = "armature_router_kv_recoveries_total{reason=\"dump\"}";
    cluster.until("the feed has begun", || cluster.metric(dumps) == 1.0).await;
    worker.store_in(StorageTier::Unknown);
    worker.store(&prompt(1, 3));
    let refused = "armature_router_kv_events_refused_total{reason=\"unknown medium\"}";
    cluster.until("it is counted", || cluster.metric(refused) >= 1.0).await;
    worker.store_in(StorageTier::HostPinned);
    worker.store(&prompt(2, 4));
    cluster.until("host memory counts", || cluster.indexed(&worker).host == 4).await;
    assert_eq!(cluster.indexed(&worker).total(), 4);
    worker.store_in(StorageTier::Disk);
    worker.store(&prompt(3, 8));
    cluster.until("the disk counts", || cluster.indexed(&worker).disk == 8).await;
    for (seed, host, disk) in [(2, 4.0 * 0.75, 0.0), (3, 0.0, 8.0 * 0.25), (1, 0.0, 0.0)] {
        let request = Generate { model: MODEL.into(), token_ids: prompt(seed, 10), ..Generate::default() };
        let explained = cluster.backend().explain(&request, &RouteOptions::default()).expect("a model").answer;
        let terms = explained.outcome.expect("chosen").terms;
        assert_eq!((terms.credits.host, terms.credits.disk, terms.credits.device), (host, disk, 0.0));
        assert_eq!(terms.adjusted_prefill_blocks, 10.0 - host - disk);
    }
    assert_eq!(cluster.metric("armature_router_kv_event_gaps_total"), 0.0, "a number is a number");
}

/// A router that follows no events and guesses.
async fn guessing(policy: Policy) -> Cluster {
    Cluster::with(|settings| {
        settings.index.events = false;
        settings.index.guesses = Some(policy);
    })
    .await
}

#[tokio::test]
async fn without_events_the_second_turn_goes_to_the_worker_of_the_first() {
    for policy in [Policy::Ttl(Duration::from_secs(120)), Policy::Lru] {
        let cluster = guessing(policy).await;
        let _workers = [cluster.worker("a").await, cluster.worker("b").await, cluster.worker("c").await];
        for seed in 0..9 {
            let routed = cluster.generate(&prompt(seed, 4)).await.expect("routed");
            let home = routed.worker_id;
            drain(routed).await.1.expect("it ends well");
            let guessed = || cluster.backend().overlaps(MODEL, &prompt(seed, 7), HashSpace::default());
            cluster.until("the guess is in", || guessed().is_some_and(|overlaps| overlaps.iter().len() == 1)).await;
            let routed = cluster.generate(&prompt(seed, 7)).await.expect("routed");
            assert_eq!((routed.worker_id, routed.overlap_blocks), (home, 4));
            drain(routed).await.1.expect("it ends well");
        }
    }
}

#[tokio::test]
async fn guesses_of_the_least_recent_prompts_end_where_the_worker_has_no_more_room() {
    let cluster = guessing(Policy::Lru).await;
    let card = json!({"runtime_config": {"total_kv_blocks": 6}});
    let worker = cluster.worker_of(Life { card, ..Life::new("w") }).await;
    for seed in 1..4 {
        drain(cluster.generate(&prompt(seed, 4)).await.expect("routed")).await.1.expect("it ends well");
        cluster.until("the guess is in", || cluster.overlap(&worker, &prompt(seed, 4)) == 4).await;
    }
    assert_eq!(cluster.overlap(&worker, &prompt(1, 4)), 0);
}

#[tokio::test]
async fn guesses_end_and_those_of_a_worker_that_left_too() {
    let cluster = guessing(Policy::Ttl(Duration::from_millis(500))).await;
    let (stays, leaves) = (cluster.worker("stays").await, cluster.worker("leaves").await);
    stays.behave(Behaviour::Stall);
    for worker in [&stays, &leaves] {
        cluster.generate_pinned(&prompt(1, 4), worker.life.instance_id).await.expect("routed");
        cluster.until("the guess is in", || cluster.overlap(worker, &prompt(1, 4)) == 4).await;
    }
    cluster.until("the guesses have ended", || cluster.overlap(&stays, &prompt(1, 4)) == 0).await;
    cluster.generate_pinned(&prompt(2, 4), leaves.life.instance_id).await.expect("routed");
    leaves.unregister(cluster.directory.path());
    cluster.until("nothing is guessed of it", || cluster.overlap(&leaves, &prompt(2, 4)) == 0).await;
}
