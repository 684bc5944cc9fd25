//! The second half of a request that fails before its first token: what the first half kept is brought to one worker only.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::StreamExt;
use protocol::request_plane::ErrorCode;
use router::backend::{Backend, DispatchError, StreamItem};
use router::config::Deadlines;
use routing::Mode;
use serde_json::json;

use crate::harness::*;
use crate::worker::{Behaviour, Life, Worker};

async fn of_role(cluster: &Cluster, name: &str, role: &str) -> Worker {
    cluster.worker_of(Life { card: json!({"worker_type": role}), ..Life::new(name) }).await
}

/// A prefill worker, and two decode workers of which the first one is asked first.
async fn cluster() -> (Cluster, Worker, [Worker; 2]) {
    let cluster = Cluster::start(Mode::Kv).await;
    let first = of_role(&cluster, "d1", "decode").await;
    first.store(&tokens());
    cluster.until_equal(&first).await;
    let (second, prefill) = (of_role(&cluster, "d2", "decode").await, of_role(&cluster, "p1", "prefill").await);
    cluster.until("requests are split", || cluster.backend().splits(MODEL)).await;
    (cluster, prefill, [first, second])
}

fn tokens() -> Vec<u32> {
    prompt(1, 3)
}

async fn answers(cluster: &Cluster) {
    let routed = cluster.generate(&tokens()).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

fn prefills(cluster: &Cluster, reason: &str) -> f64 {
    cluster.metric(&format!("armature_router_prefills_total{{reason=\"{reason}\"}}"))
}

/// What a worker was asked last: which parameters came with it, and after how many tokens.
fn last(worker: &Worker) -> (String, u32) {
    let request = worker.requests().pop().expect("one");
    (request.disaggregated_params, request.generated)
}

#[tokio::test]
async fn what_a_worker_may_have_fetched_is_brought_to_no_other() {
    for behaviour in [
        Behaviour::DieAtOnce,
        // An agent whose engine was lost with the request says that it is about to leave.
        Behaviour::Fail(ErrorCode::Draining),
        Behaviour::Fail(ErrorCode::Overloaded),
        Behaviour::Fail(ErrorCode::Engine),
    ] {
        let (cluster, prefill, [first, second]) = cluster().await;
        first.behave(behaviour);
        answers(&cluster).await;
        assert_eq!(last(&first), ("kept by p1".into(), 1), "{behaviour:?}");
        assert_eq!(last(&second), (String::new(), 1), "{behaviour:?}: it computes the prompt");
        assert_eq!((prefills(&cluster, "not fetched"), prefills(&cluster, "remote")), (1.0, 0.0));
        cluster.until("the lease is ended", || prefill.cancelled.load(Ordering::SeqCst) == 1).await;
    }
}

#[tokio::test]
async fn what_no_worker_has_begun_to_fetch_goes_to_the_next_one() {
    for code in [ErrorCode::Draining, ErrorCode::Overloaded] {
        let (cluster, prefill, [first, second]) = cluster().await;
        first.behave(Behaviour::Refuse(code));
        answers(&cluster).await;
        assert_eq!((last(&first), last(&second)), (("kept by p1".into(), 1), ("kept by p1".into(), 1)), "{code:?}");
        assert_eq!((prefills(&cluster, "remote"), prefill.cancelled.load(Ordering::SeqCst)), (1.0, 0));
    }
}

#[tokio::test]
async fn before_anything_is_delivered_a_lost_half_is_replaced_by_two_new_ones() {
    for (behaviour, others) in
        [(Behaviour::DieAtOnce, false), (Behaviour::DieAtOnce, true), (Behaviour::Fail(ErrorCode::Draining), false)]
    {
        let (cluster, prefill, [first, second]) = cluster().await;
        let mut again = &prefill;
        let other = if others { Some(of_role(&cluster, "p2", "prefill").await) } else { None };
        prefill.store(&tokens());
        cluster.until_equal(&prefill).await;
        if let Some(other) = &other {
            other.behave(Behaviour::HandOverAtOnce);
            again = other;
        }
        prefill.behave(Behaviour::HandOverAtOnce);
        first.behave(behaviour);
        answers(&cluster).await;
        assert_eq!(last(&first), ("kept by p1".into(), 0));
        assert_eq!(last(&second), (format!("kept by {}", again.life.name), 0), "a room is for one decode worker");
        assert_eq!(prefill.requests().len() + other.map_or(0, |other| other.requests().len()), 2);
        assert_eq!((prefills(&cluster, "once more"), prefills(&cluster, "remote")), (1.0, 1.0));
        cluster.until("the first room is given up", || prefill.cancelled.load(Ordering::SeqCst) == 1).await;
    }
}

#[tokio::test]
async fn the_only_decode_worker_is_asked_again_after_a_prefill_server_was_lost_and_not_for_ever() {
    let cluster = Cluster::start(Mode::Kv).await;
    let decode = of_role(&cluster, "d1", "decode").await;
    let prefill = of_role(&cluster, "p1", "prefill").await;
    cluster.until("requests are split", || cluster.backend().splits(MODEL)).await;
    prefill.behave(Behaviour::HandOverAtOnce);
    decode.behave(Behaviour::FailOnce(ErrorCode::Engine));
    answers(&cluster).await;
    assert_eq!((prefill.requests().len(), decode.requests().len()), (2, 2));

    decode.behave(Behaviour::Fail(ErrorCode::Engine));
    let ended = drain(cluster.generate(&tokens()).await.expect("routed")).await.1;
    assert!(matches!(ended, Err(DispatchError::Worker { .. })), "{ended:?}");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (4, 4), "twice more, and then it is over");

    decode.behave(Behaviour::Fail(ErrorCode::Overloaded));
    let ended = drain(cluster.generate(&tokens()).await.expect("routed")).await.1;
    assert!(matches!(ended, Err(DispatchError::Overloaded(_))), "{ended:?}");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (5, 5), "nobody else could go on");
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn the_first_token_has_its_own_deadline_also_when_the_second_half_brings_it() {
    let (token, first_token) = (Duration::from_millis(50), Duration::from_millis(600));
    let cluster = Cluster::with_deadlines(Mode::Kv, Deadlines { token, first_token, ..Deadlines::default() }).await;
    let (decode, prefill) = (of_role(&cluster, "d", "decode").await, of_role(&cluster, "p", "prefill").await);
    cluster.until("requests are split", || cluster.backend().splits(MODEL)).await;
    prefill.behave(Behaviour::HandOverAtOnce);
    decode.behave(Behaviour::Silence);
    let asked = Instant::now();
    let ended = drain(cluster.generate(&tokens()).await.expect("routed")).await.1;
    let stage = "waiting for the first token";
    assert!(matches!(ended, Err(DispatchError::Deadline { stage: named, .. }) if named == stage), "{ended:?}");
    assert!(asked.elapsed() >= first_token, "{:?}", asked.elapsed());
}

#[tokio::test]
async fn workers_are_told_how_long_the_first_token_is_waited_for() {
    let (cluster, prefill, [decode, _]) = cluster().await;
    answers(&cluster).await;
    let told = |worker: &Worker| u64::from(worker.requests()[0].first_token_ms);
    // The second one's first token is the answer's second.
    let Deadlines { first_token, token, .. } = Deadlines::default();
    for (told, limit) in [(told(&prefill), first_token), (told(&decode), token)] {
        let limit = limit.as_millis() as u64;
        assert!((limit / 2..=limit).contains(&told), "{told} ms of {limit}");
    }
}

#[tokio::test]
async fn a_prompt_weighs_on_its_prefill_worker_until_the_second_half_has_a_token() {
    let (cluster, prefill, [decode, _]) = cluster().await;
    prefill.behave(Behaviour::HandOverAtOnce);
    decode.behave(Behaviour::Silence);
    let waiting = || {
        let all = cluster.backend().worker_status();
        let row = all.into_iter().find(|row| row.worker.rank == rank(&prefill)).expect("it is there");
        row.load.prefill_tokens
    };
    let routed = cluster.generate(&tokens()).await.expect("routed");
    let computing = tokio::spawn(drain(routed));
    cluster.until("the decode worker is asked", || decode.requests().len() == 1).await;
    assert_eq!(waiting(), 12, "it still computes");
    computing.abort();
    cluster.until("it is given up", || waiting() == 0).await;

    decode.behave(Behaviour::Stall);
    let mut routed = cluster.generate(&tokens()).await.expect("routed");
    assert!(matches!(routed.stream.next().await, Some(Ok(StreamItem::Output(_)))));
    assert_eq!(waiting(), 0, "the first token says that it is computed");
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 1.0);
}
