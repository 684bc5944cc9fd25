//! Requests in two halves: who computes the prompt, who goes on with it, and what happens when one of them cannot.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use protocol::request_plane::{ErrorCode, Generate, Stop};
use router::backend::{Backend, DispatchError, PrefillChoice, RouteOptions, StreamItem};
use router::config::Deadlines;
use routing::{ConditionalDisagg, Mode};
use serde_json::json;

use crate::harness::*;
use crate::worker::{Behaviour, Life, Worker};

async fn of_role(cluster: &Cluster, name: &str, role: &str) -> Worker {
    cluster.worker_of(Life { card: json!({"worker_type": role}), ..Life::new(name) }).await
}

/// A prefill and a decode worker, once requests are split.
async fn halves(cluster: &Cluster) -> (Worker, Worker) {
    // A model without anybody to decode is none.
    let (decode, prefill) = (of_role(cluster, "d", "decode").await, of_role(cluster, "p", "prefill").await);
    until_split(cluster).await;
    (prefill, decode)
}

async fn until_split(cluster: &Cluster) {
    cluster.until("requests are split", || cluster.backend().splits(MODEL)).await;
}

fn prefills(cluster: &Cluster, reason: &str) -> f64 {
    cluster.metric(&format!("armature_router_prefills_total{{reason=\"{reason}\"}}"))
}

#[tokio::test]
async fn the_decode_worker_goes_on_after_the_first_token_with_what_the_prefill_worker_kept() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    let tokens = prompt(1, 3);
    let routed = cluster.generate(&tokens).await.expect("routed");
    assert_eq!(routed.worker_id, prefill.life.instance_id);
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));

    let (first, second) = (&prefill.requests()[0], &decode.requests()[0]);
    assert!(first.prefill_only && first.disaggregated_params.is_empty() && first.generated == 0);
    assert!(!second.prefill_only && second.generated == 1);
    assert_eq!(second.disaggregated_params, "kept by p");
    assert_eq!(second.token_ids, [&tokens[..], &[1]].concat());
    assert_eq!((&second.stop, &second.sampling), (&first.stop, &first.sampling), "limits are those of the whole");
    assert_eq!((prefills(&cluster, "remote"), prefills(&cluster, "failed")), (1.0, 0.0));
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
    assert_eq!(cluster.backend().decisions("r").len(), 2);
}

#[tokio::test]
async fn a_prefill_worker_may_leave_the_first_token_to_the_decode_worker() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    prefill.behave(Behaviour::HandOverAtOnce);
    let tokens = prompt(1, 3);
    let mut routed = cluster.generate(&tokens).await.expect("routed");
    let Some(Ok(StreamItem::Output(first))) = routed.stream.next().await else { panic!("no first token") };
    assert_eq!((first.token_ids, first.first, first.prompt_blocks), (vec![1], true, 3), "it is the answer's first");
    assert_eq!(drain(routed).await, (vec![2, 3], Ok(())));
    let second = &decode.requests()[0];
    assert_eq!((second.generated, second.disaggregated_params.as_str()), (0, "kept by p"));
    assert_eq!((&second.token_ids, prefills(&cluster, "remote")), (&tokens, 1.0));
}

#[tokio::test]
async fn without_moves_a_request_is_split_all_the_same() {
    let cluster = Cluster::with(|settings| settings.migration_limit = 0).await;
    let (_prefill, decode) = halves(&cluster).await;
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    assert_eq!(decode.requests().len(), 1);
}

#[tokio::test]
async fn an_answer_that_ends_at_its_first_token_needs_no_decode_worker() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    prefill.behave(Behaviour::EndAtFirst);
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1], Ok(())));
    assert_eq!(decode.requests().len(), 0);
}

#[tokio::test]
async fn a_prefill_worker_that_fails_is_replaced_by_another_and_then_by_the_decode_worker() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    let other = of_role(&cluster, "p2", "prefill").await;
    for behaviour in
        [Behaviour::Refuse(ErrorCode::Engine), Behaviour::Refuse(ErrorCode::Overloaded), Behaviour::DieAtOnce]
    {
        prefill.behave(behaviour);
        for _ in 0..2 {
            let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
            assert_eq!(routed.worker_id, other.life.instance_id, "{behaviour:?}");
            assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
        }
        assert_eq!(prefills(&cluster, "failed"), 0.0);
    }
    other.behave(Behaviour::Refuse(ErrorCode::Engine));
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(routed.worker_id, decode.life.instance_id);
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    let last = decode.requests().pop().expect("one");
    assert!(!last.prefill_only && last.generated == 0 && last.disaggregated_params.is_empty());
    assert_eq!(prefills(&cluster, "failed"), 1.0);
}

#[tokio::test]
async fn a_prefill_worker_that_dies_after_the_first_token_costs_the_client_only_time() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    prefill.behave(Behaviour::DieAfterFirst);
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    let second = &decode.requests()[0];
    assert!(!second.prefill_only && second.generated == 1 && second.disaggregated_params.is_empty());
}

#[tokio::test]
async fn a_decode_worker_that_dies_is_replaced_without_what_was_kept_for_it() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (_prefill, dies) = halves(&cluster).await;
    dies.behave(Behaviour::DieAfterFirst);
    let tokens = prompt(1, 2);
    dies.store(&tokens);
    cluster.until_equal(&dies).await;
    let other = of_role(&cluster, "d2", "decode").await;
    let routed = cluster.generate(&tokens).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    assert_eq!((dies.requests()[0].disaggregated_params.as_str(), dies.requests()[0].generated), ("kept by p", 1));
    assert_eq!((other.requests()[0].disaggregated_params.as_str(), other.requests()[0].generated), ("", 2));
}

#[tokio::test]
async fn where_nothing_was_kept_the_decode_worker_still_goes_on() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    prefill.keep_nothing();
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    assert_eq!((decode.requests()[0].generated, prefills(&cluster, "not kept")), (1, 1.0));
}

#[tokio::test]
async fn without_a_prefill_pool_or_when_it_leaves_decode_workers_do_all() {
    let cluster = Cluster::start(Mode::Kv).await;
    let decode = of_role(&cluster, "d", "decode").await;
    let whole = async || {
        let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
        assert_eq!(routed.worker_id, decode.life.instance_id);
        assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    };
    whole().await;
    let prefill = of_role(&cluster, "p", "prefill").await;
    until_split(&cluster).await;
    prefill.behave(Behaviour::Refuse(ErrorCode::Draining));
    whole().await;
    assert_eq!(prefill.requests().len(), 1, "it was asked once, and said that it leaves");
    cluster
        .until("it counts as leaving", || cluster.backend().workers().get(rank(&prefill)).is_some_and(|w| w.draining))
        .await;
    whole().await;
    assert_eq!(prefill.requests().len(), 1);
    assert_eq!(prefills(&cluster, "failed"), 1.0);
}

#[tokio::test]
async fn while_the_first_prefill_worker_is_not_reached_yet_clients_are_to_try_again() {
    let cluster = Cluster::start(Mode::Kv).await;
    let _decode = of_role(&cluster, "d", "decode").await;
    // Somebody else listens where it says it is.
    let life = Life { card: json!({"worker_type": "prefill"}), ..Life::new("p") };
    let prefill = Worker::start(life.clone()).await;
    prefill.greet_as(Life::new("another"));
    prefill.register(cluster.directory.path());
    cluster
        .until("nobody answers there", || {
            cluster.backend().workers().get(rank(&prefill)).is_some_and(|w| w.unreachable)
        })
        .await;
    let refused = cluster.generate(&prompt(1, 2)).await.map(|routed| routed.worker_name);
    assert_eq!(refused, Err(DispatchError::NoWorker { model: MODEL.into() }));
    prefill.greet_as(life);
    until_split(&cluster).await;
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    assert_eq!(prefill.requests().len(), 1);
}

#[tokio::test]
async fn first_halves_that_wait_hold_up_neither_second_halves_nor_whole_requests() {
    let cluster = Cluster::with(|settings| {
        settings.selection.selector.queue_threshold = Some(1.0);
        settings.selection.queue.limit = 1;
    })
    .await;
    let batch = json!({"max_num_batched_tokens": 16});
    let decode = of_role(&cluster, "d", "decode").await;
    let card = json!({"worker_type": "prefill", "runtime_config": batch});
    let prefill = cluster.worker_of(Life { card, ..Life::new("p") }).await;
    until_split(&cluster).await;
    // Two requests whose prompts are not computed yet fill the prefill worker; the third waits, and the queue is full.
    prefill.behave(Behaviour::Silence);
    let ask = |seed| {
        let backend = cluster.backend().clone();
        let stop = Some(Stop { max_tokens: 3, ..Stop::default() });
        let request = Generate {
            request_id: format!("r{seed}"),
            model: MODEL.into(),
            token_ids: prompt(seed, 6),
            stop,
            ..Generate::default()
        };
        tokio::spawn(async move { backend.generate(request, RouteOptions::default()).await })
    };
    let waiting = [ask(1), ask(2)];
    cluster.until("one waits", || cluster.metric("armature_router_queue_requests") == 1.0).await;
    let whole = cluster.generate_pinned(&prompt(3, 2), decode.life.instance_id).await.expect("not held up");
    assert_eq!(drain(whole).await, (vec![1, 2, 3], Ok(())));
    waiting.into_iter().for_each(|request| request.abort());
}

#[tokio::test]
async fn while_a_prefill_pool_comes_late_requests_are_answered_or_to_be_tried_again() {
    let cluster = Cluster::start(Mode::Kv).await;
    let decode = of_role(&cluster, "d", "decode").await;
    let mut seen = Vec::new();
    let mut ask = async || match cluster.generate(&prompt(1, 2)).await {
        Ok(routed) => {
            assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
            seen.push("answered");
        }
        Err(DispatchError::NoWorker { .. }) => seen.push("503"),
        Err(other) => panic!("{other}"),
    };
    ask().await;
    // It is announced, and cannot be reached yet.
    let life = Life { card: json!({"worker_type": "prefill"}), ..Life::new("p") };
    let prefill = Worker::start(life).await;
    prefill.greet_as(Life::new("another"));
    prefill.register(cluster.directory.path());
    let unreachable = || cluster.backend().workers().get(rank(&prefill)).is_some_and(|worker| worker.unreachable);
    cluster.until("nobody answers there", unreachable).await;
    ask().await;
    prefill.greet_as(prefill.life.clone());
    while !cluster.backend().splits(MODEL) {
        ask().await;
    }
    ask().await;
    assert_eq!((seen.first(), seen.last()), (Some(&"answered"), Some(&"answered")));
    assert!(seen.contains(&"503"), "the pool must not push its prompts onto decode workers while it starts: {seen:?}");
    assert_eq!(prefill.requests().len(), 1);
    for request in decode.requests() {
        assert_eq!(request.generated == 1, request.disaggregated_params == "kept by p", "whole, or with all it needs");
    }
}

#[tokio::test]
async fn each_half_has_a_deadline_that_names_its_stage() {
    let short = Duration::from_millis(300);
    let first = Deadlines { first_token: short, ..Deadlines::default() };
    // The client has the first token: what it waits for now is the next one.
    let second = Deadlines { token: short, ..Deadlines::default() };
    for (silent, deadlines, stage) in
        [("p", first, "waiting for the first token"), ("d", second, "moving to another worker")]
    {
        let cluster = Cluster::with_deadlines(Mode::Kv, deadlines).await;
        let (prefill, decode) = halves(&cluster).await;
        let silent = if silent == "p" { &prefill } else { &decode };
        silent.behave(Behaviour::Silence);
        let end = match cluster.generate(&prompt(1, 2)).await {
            Ok(routed) => drain(routed).await.1,
            Err(error) => Err(error),
        };
        assert!(matches!(end, Err(DispatchError::Deadline { stage: named, .. }) if named == stage), "{end:?}");
        cluster.until("the worker is told", || silent.cancelled.load(Ordering::SeqCst) == 1).await;
        assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
    }
}

#[tokio::test]
async fn a_prompt_that_kills_prefill_workers_does_not_go_on_to_kill_the_others() {
    for (migration_limit, most) in [(0, 2), (3, 4)] {
        let cluster = Cluster::with(|settings| settings.migration_limit = migration_limit).await;
        let (prefill, decode) = halves(&cluster).await;
        let mut workers = vec![prefill, decode];
        for (name, role) in [("p2", "prefill"), ("d2", "decode"), ("d3", "decode"), ("d4", "decode")] {
            workers.push(of_role(&cluster, name, role).await);
        }
        workers.iter().for_each(|worker| worker.behave(Behaviour::DieAtOnce));
        let refused = cluster.generate(&prompt(1, 2)).await.err();
        assert!(matches!(refused, Some(DispatchError::Worker { .. })), "{refused:?}");
        assert_eq!(workers.iter().map(|worker| worker.requests().len()).sum::<usize>(), most);
    }
}

#[tokio::test]
async fn prefill_workers_may_be_picked_by_load_and_decode_workers_by_cache() {
    let cluster = Cluster::with(|settings| settings.prefill_mode = Some(Mode::RoundRobin)).await;
    let (prefill, decode) = halves(&cluster).await;
    let (other, cold) = (of_role(&cluster, "p2", "prefill").await, of_role(&cluster, "d2", "decode").await);
    let tokens = prompt(1, 6);
    for warm in [&prefill, &decode] {
        warm.store(&tokens);
        cluster.until_equal(warm).await;
    }
    for _ in 0..4 {
        drain(cluster.generate(&tokens).await.expect("routed")).await.1.expect("an end");
    }
    assert_eq!((prefill.requests().len(), other.requests().len()), (2, 2), "in turn");
    assert_eq!((decode.requests().len(), cold.requests().len()), (4, 0), "where the blocks are");
    let metric = |mode: &str| cluster.metric(&format!("armature_router_decisions_total{{mode=\"{mode}\"}}"));
    assert_eq!((metric("round-robin"), metric("kv")), (4.0, 4.0));
}

#[tokio::test]
async fn an_explanation_shows_both_halves() {
    let policy =
        ConditionalDisagg { eff_isl_threshold: 16, eff_isl_ratio_threshold: 0.7, prefill_busy_threshold: None };
    let cluster = Cluster::with(|settings| settings.conditional_disagg = Some(policy)).await;
    let explain = |tokens: &[u32]| {
        let request = Generate { model: MODEL.into(), token_ids: tokens.to_vec(), ..Generate::default() };
        cluster.backend().explain(&request, &RouteOptions::default()).expect("a model")
    };
    let decode = of_role(&cluster, "d", "decode").await;
    let tokens = prompt(1, 6);
    assert_eq!(explain(&tokens).prefill, None, "there are no prefill workers");
    let prefill = of_role(&cluster, "p", "prefill").await;
    until_split(&cluster).await;
    let split = explain(&tokens);
    let Some(PrefillChoice::Remote(first)) = split.prefill else { panic!("{split:?}") };
    assert_eq!(first.outcome.expect("somebody").rank, rank(&prefill));
    assert_eq!(split.answer.outcome.expect("somebody").rank, rank(&decode));
    decode.store(&tokens[..16]);
    cluster.until_equal(&decode).await;
    assert_eq!(explain(&tokens).prefill, Some(PrefillChoice::Local("few uncached tokens")));
    assert!(prefill.requests().is_empty() && decode.requests().is_empty(), "nothing was sent");
}

#[tokio::test]
async fn prompts_go_past_busy_prefill_workers_where_that_is_wanted() {
    let policy = ConditionalDisagg { prefill_busy_threshold: Some(8), ..ConditionalDisagg::default() };
    let cluster = Cluster::with(|settings| settings.conditional_disagg = Some(policy)).await;
    let (prefill, decode) = halves(&cluster).await;
    prefill.behave(Behaviour::Silence);
    let backend = cluster.backend().clone();
    let request = Generate { model: MODEL.into(), token_ids: prompt(1, 6), ..Generate::default() };
    let waits = tokio::spawn(async move { backend.generate(request, RouteOptions::default()).await });
    cluster.until("it is at the prefill worker", || prefill.requests().len() == 1).await;
    let routed = cluster.generate(&prompt(2, 6)).await.expect("routed");
    assert_eq!(routed.worker_id, decode.life.instance_id);
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
    assert_eq!(prefills(&cluster, "prefill workers busy"), 1.0);
    waits.abort();
}

#[tokio::test]
async fn short_or_cached_prompts_stay_on_the_decode_worker_where_that_is_wanted() {
    let policy =
        ConditionalDisagg { eff_isl_threshold: 16, eff_isl_ratio_threshold: 0.7, prefill_busy_threshold: None };
    let cluster = Cluster::with(|settings| settings.conditional_disagg = Some(policy)).await;
    let (prefill, decode) = halves(&cluster).await;
    let tokens = prompt(1, 6);
    drain(cluster.generate(&tokens).await.expect("routed")).await.1.expect("an end");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 1), "nothing is cached");
    decode.store(&tokens[..16]);
    cluster.until_equal(&decode).await;
    drain(cluster.generate(&tokens).await.expect("routed")).await.1.expect("an end");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 2), "8 of 24 tokens are left");
    assert_eq!(prefills(&cluster, "few uncached tokens"), 1.0);
}

#[tokio::test]
async fn a_prompt_that_nobody_will_fetch_is_given_back() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (prefill, decode) = halves(&cluster).await;
    let given_back = || prefill.cancelled.load(Ordering::SeqCst);
    let routed = cluster.generate(&prompt(1, 2)).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));

    decode.behave(Behaviour::Refuse(ErrorCode::InvalidRequest));
    let routed = cluster.generate(&prompt(2, 2)).await.expect("routed");
    assert!(drain(routed).await.1.is_err());
    cluster.until("the prefill worker is told that the second half failed", || given_back() == 1).await;

    decode.behave(Behaviour::Silence);
    let routed = cluster.generate(&prompt(3, 2)).await.expect("routed");
    let asked = decode.requests().len();
    let moving = tokio::spawn(async move { drain(routed).await });
    cluster.until("the decode worker is asked", || decode.requests().len() > asked).await;
    moving.abort();
    cluster.until("the prefill worker is told that the client has left", || given_back() == 2).await;
}
