//! Requests: where they go, and what happens when their worker fails.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use protocol::request_plane::{ErrorCode, Generate, Stop};
use router::backend::{Backend, DispatchError, RouteOptions};
use router::config::Deadlines;
use router::openai::error::ApiError;
use routing::Mode;
use serde_json::json;
use tokio::time::Instant;

use crate::harness::*;
use crate::worker::{Behaviour, Life, Worker};

#[tokio::test]
async fn an_empty_cluster_says_so() {
    let cluster = Cluster::start(Mode::Kv).await;
    let refused = cluster.generate(&prompt(1, 1)).await.err();
    assert_eq!(refused, Some(DispatchError::NoWorker { model: MODEL.into() }));
}

#[tokio::test]
async fn the_second_turn_goes_to_the_worker_of_the_first() {
    let cluster = Cluster::start(Mode::Kv).await;
    let workers = [cluster.worker("a").await, cluster.worker("b").await, cluster.worker("c").await];
    for seed in 0..9 {
        let (first, second) = (prompt(seed, 4), prompt(seed, 7));
        let routed = cluster.generate(&first).await.expect("routed");
        let home = workers.iter().find(|w| w.life.instance_id == routed.worker_id).expect("one of them");
        drain(routed).await.1.expect("it ends well");
        home.store(&first);
        cluster.until_equal(home).await;
        let routed = cluster.generate(&second).await.expect("routed");
        assert_eq!((routed.worker_id, routed.overlap_blocks), (home.life.instance_id, 4));
        drain(routed).await.1.expect("it ends well");
    }
}

#[tokio::test]
async fn requests_that_come_together_are_spread() {
    let cluster = Cluster::start(Mode::Kv).await;
    let workers = [cluster.worker("a").await, cluster.worker("b").await];
    let mut open = Vec::new();
    for worker in &workers {
        worker.behave(Behaviour::Stall);
    }
    for seed in 0..4 {
        open.push(cluster.generate(&prompt(seed, 4)).await.expect("routed"));
    }
    assert_eq!(workers.map(|worker| worker.prompts().len()), [2, 2]);
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 4.0);
    drop(open);
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn a_pin_is_kept_and_an_unknown_one_refused() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (cold, warm) = (cluster.worker("cold").await, cluster.worker("warm").await);
    warm.store(&prompt(1, 4));
    cluster.until_equal(&warm).await;
    let routed = cluster.generate_pinned(&prompt(1, 4), cold.life.instance_id).await.expect("routed");
    assert_eq!((routed.worker_id, routed.worker_name.as_str()), (cold.life.instance_id, "cold"));
    assert_eq!(cluster.generate_pinned(&prompt(1, 4), 12345).await.err(), Some(unknown(12345)));
}

#[tokio::test]
async fn a_worker_that_dies_before_the_first_token_is_replaced() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (bad, good) = (cluster.worker("bad").await, cluster.worker("good").await);
    bad.store(&prompt(1, 4));
    cluster.until_equal(&bad).await;
    bad.behave(Behaviour::DieAtOnce);
    let routed = cluster.generate(&prompt(1, 4)).await.expect("routed");
    assert_eq!(routed.worker_id, good.life.instance_id);
    assert_eq!(bad.prompts().len(), 1, "it was tried first, for its cache");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
}

#[tokio::test]
async fn a_dead_worker_that_is_still_registered_gets_nothing() {
    let cluster = Cluster::start(Mode::RoundRobin).await;
    let (dead, alive) = (cluster.worker("dead").await, cluster.worker("alive").await);
    dead.kill();
    for seed in 0..6 {
        let routed = cluster.generate(&prompt(seed, 2)).await.expect("routed");
        assert_eq!(routed.worker_id, alive.life.instance_id);
        drain(routed).await.1.expect("it ends well");
    }
}

#[tokio::test]
async fn refusals_that_another_worker_may_not_share_are_retried() {
    for code in [ErrorCode::Overloaded, ErrorCode::Draining, ErrorCode::WrongWorker, ErrorCode::Engine] {
        let cluster = Cluster::start(Mode::Kv).await;
        let (full, free) = (cluster.worker("full").await, cluster.worker("free").await);
        full.store(&prompt(1, 4));
        cluster.until_equal(&full).await;
        full.behave(Behaviour::Refuse(code));
        let routed = cluster.generate(&prompt(1, 4)).await.expect("routed");
        assert_eq!(routed.worker_id, free.life.instance_id, "{code:?}");
    }
}

#[tokio::test]
async fn final_refusals_are_told_as_they_are() {
    let cluster = Cluster::start(Mode::Kv).await;
    let workers = [cluster.worker("a").await, cluster.worker("b").await];
    let all = |behaviour| workers.iter().for_each(|worker| worker.behave(behaviour));
    all(Behaviour::Refuse(ErrorCode::Overloaded));
    assert_eq!(cluster.generate(&prompt(1, 1)).await.err(), Some(DispatchError::Overloaded("not now".into())));
    let tried = workers.iter().map(|worker| worker.prompts().len()).sum::<usize>();
    all(Behaviour::Refuse(ErrorCode::InvalidRequest));
    assert_eq!(cluster.generate(&prompt(1, 1)).await.err(), Some(DispatchError::Invalid("not now".into())));
    assert_eq!(workers.iter().map(|worker| worker.prompts().len()).sum::<usize>(), tried + 1, "no second try");
}

#[tokio::test]
async fn workers_that_are_not_there_for_it_mean_that_none_is_ready() {
    for code in [ErrorCode::Draining, ErrorCode::WrongWorker] {
        let cluster = Cluster::start(Mode::Kv).await;
        let workers = [cluster.worker("a").await, cluster.worker("b").await];
        workers.iter().for_each(|worker| worker.behave(Behaviour::Refuse(code)));
        let refused = cluster.generate(&prompt(1, 1)).await.err();
        assert_eq!(refused, Some(DispatchError::NoWorker { model: MODEL.into() }), "{code:?}");
    }
    let cluster = Cluster::start(Mode::Kv).await;
    let (full, draining) = (cluster.worker("full").await, cluster.worker("draining").await);
    full.behave(Behaviour::Refuse(ErrorCode::Overloaded));
    draining.behave(Behaviour::Refuse(ErrorCode::Draining));
    assert_eq!(cluster.generate(&prompt(1, 1)).await.err(), Some(DispatchError::Overloaded("not now".into())));
}

#[tokio::test]
async fn an_engine_that_fails_everywhere_is_told_with_its_worker() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.behave(Behaviour::Refuse(ErrorCode::Engine));
    let refused = cluster.generate(&prompt(1, 1)).await.err();
    assert!(matches!(refused, Some(DispatchError::Worker { stage: "waiting for the first token", .. })), "{refused:?}");
}

#[tokio::test]
async fn a_model_without_a_worker_stays_known() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    assert!(cluster.backend().known(MODEL));
    worker.unregister(cluster.directory.path());
    cluster.until("it is gone", || cluster.backend().model(MODEL).is_none()).await;
    assert!(cluster.backend().known(MODEL) && !cluster.backend().known("another"));
}

#[tokio::test]
async fn tokens_of_one_tokenizer_never_go_to_workers_of_another() {
    let cluster = Cluster::start(Mode::Kv).await;
    let old = cluster.worker("old").await;
    let admitted = cluster.backend().model(MODEL).expect("served").model.clone();
    let new = Worker::start(Life { tokenizer: 1, ..Life::new("new") }).await;
    new.register(cluster.directory.path());
    old.unregister(cluster.directory.path());
    let gone_over = || cluster.backend().workers().get(rank(&new)).is_some();
    cluster.until("the name goes over to the new worker", gone_over).await;
    let options = RouteOptions { model: Some(admitted), ..RouteOptions::default() };
    let refused = cluster.generate_with(&prompt(1, 1), options).await.err();
    assert_eq!(refused, Some(DispatchError::NoWorker { model: MODEL.into() }));
    assert!(new.prompts().is_empty());
    drain(cluster.generate(&prompt(1, 1)).await.expect("tokenized anew")).await.1.expect("it ends well");
}

#[tokio::test]
async fn a_worker_lost_while_generating_ends_the_stream_with_its_stage() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.behave(Behaviour::DieAfterFirst);
    let (tokens, end) = drain(cluster.generate(&prompt(1, 2)).await.expect("routed")).await;
    assert_eq!(tokens, [1]);
    assert!(matches!(end, Err(DispatchError::Worker { stage: "generating", .. })), "{end:?}");
    cluster.until("it is reconnected", || cluster.metric("armature_router_workers_routable") == 1.0).await;
}

#[tokio::test]
async fn silence_in_the_middle_has_a_deadline() {
    let deadlines = Deadlines { token: Duration::from_millis(300), ..Deadlines::default() };
    let cluster = Cluster::with_deadlines(Mode::Kv, deadlines).await;
    let worker = cluster.worker("w").await;
    worker.behave(Behaviour::Stall);
    let (tokens, end) = drain(cluster.generate(&prompt(1, 2)).await.expect("routed")).await;
    assert_eq!(tokens, [1]);
    assert_eq!(end, Err(DispatchError::Deadline { stage: "generating", seconds: 0 }));
    cluster.until("the worker is told", || worker.cancelled.load(Ordering::SeqCst) == 1).await;
}

/// How soon a worker hears of a client that left, and the router has let go of its request.
const SOON: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_frees_its_place_within_a_second() {
    let of_role = |name: &str, role: &str| Life { card: json!({"worker_type": role}), ..Life::new(name) };
    // Whole requests, and those whose prompt is computed elsewhere: in the middle of that, and after it.
    for (split, silent) in [(false, "d"), (true, "p"), (true, "d")] {
        let cluster = Cluster::start(Mode::Kv).await;
        let mut workers = vec![cluster.worker_of(of_role("d", "decode")).await];
        if split {
            workers.push(cluster.worker_of(of_role("p", "prefill")).await);
            cluster.until("requests are split", || cluster.backend().splits(MODEL)).await;
        }
        let silent = workers.iter().find(|worker| worker.life.name == silent).expect("one of them");
        silent.behave(Behaviour::Silence);
        let backend = cluster.backend().clone();
        let stop = Some(Stop { max_tokens: 3, ..Stop::default() });
        let request = Generate { model: MODEL.into(), token_ids: prompt(1, 4), stop, ..Generate::default() };
        let client = tokio::spawn(async move {
            let mut routed = backend.generate(request, RouteOptions::default()).await.expect("routed");
            while routed.stream.next().await.is_some() {}
        });
        cluster.until("the worker has it", || silent.requests().len() == 1).await;
        client.abort();
        let left = Instant::now();
        cluster
            .until("the worker is told, and nothing is booked", || {
                silent.cancelled.load(Ordering::SeqCst) == 1
                    && cluster.metric("armature_router_requests_in_flight") == 0.0
            })
            .await;
        assert!(left.elapsed() < SOON, "{split} {}: {:?}", silent.life.name, left.elapsed());
    }
}

#[tokio::test]
async fn whatever_a_worker_says_a_request_ends_and_says_how() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("a").await;
    for seed in 0..150 {
        worker.behave(Behaviour::Babble(seed));
        cluster.until("it is reachable", || !cluster.backend().workers().iter().any(|worker| worker.unreachable)).await;
        let end = match cluster.generate(&prompt(1, 2)).await {
            Ok(routed) => drain(routed).await.1,
            Err(error) => Err(error),
        };
        if let Err(error) = end {
            let error = ApiError::from(error);
            assert!(error.status.is_client_error() || error.status.is_server_error(), "{seed}: {error:?}");
            assert!(!error.message.is_empty());
        }
        assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0, "{seed}");
    }
}

#[tokio::test]
async fn a_dropped_stream_is_cancelled_at_the_worker() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.behave(Behaviour::Stall);
    let mut routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    routed.stream.next().await.expect("a token").expect("no error");
    drop(routed);
    cluster.until("the worker is told", || worker.cancelled.load(Ordering::SeqCst) == 1).await;
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn an_address_that_belongs_to_another_worker_now_gets_nothing() {
    let cluster = Cluster::start(Mode::RoundRobin).await;
    let (stale, good) = (cluster.worker("stale").await, cluster.worker("good").await);
    // The connection breaks, and whoever answers at the address now is somebody else.
    stale.greet_as(Life::new("somebody else"));
    stale.behave(Behaviour::DieAtOnce);
    for seed in 0..4 {
        let routed = cluster.generate(&prompt(seed, 2)).await.expect("routed");
        assert_eq!(routed.worker_id, good.life.instance_id);
    }
    assert!(stale.prompts().len() <= 1);
    cluster.until("it is not routable", || cluster.metric("armature_router_workers_routable") == 1.0).await;
}

#[tokio::test]
async fn open_streams_survive_their_workers_departure_from_discovery() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("w").await;
    worker.behave(Behaviour::Stall);
    let mut routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    routed.stream.next().await.expect("a token").expect("no error");
    worker.unregister(cluster.directory.path());
    cluster.until("it is gone", || cluster.metric("armature_router_workers_known") == 0.0).await;
    assert!(futures::poll!(routed.stream.next()).is_pending(), "still open");
}

#[tokio::test]
async fn a_worker_that_can_no_longer_write_stays_for_as_long_as_its_connection() {
    let cluster = Cluster::start(Mode::RoundRobin).await;
    let (mute, other) = (Worker::start(Life::new("mute")).await, cluster.worker("other").await);
    mute.register_once(cluster.directory.path());
    cluster.until_routable(&mute).await;
    let written = std::time::Instant::now();
    // The file is good for 3 s, and looked at four times a second.
    cluster.until("its file has lapsed", || written.elapsed().as_secs() >= 4).await;
    let newcomer = cluster.beside().await;
    newcomer.until_routable(&other).await;
    assert!(newcomer.backend().workers().get(rank(&mute)).is_none(), "who never knew it does not begin to");
    for seed in 0..4 {
        drain(cluster.generate(&prompt(seed, 2)).await.expect("routed")).await.1.expect("it ends well");
    }
    assert_eq!((mute.prompts().len(), other.prompts().len()), (2, 2));
    mute.kill();
    cluster.until("it is gone", || cluster.metric("armature_router_workers_known") == 1.0).await;
}
