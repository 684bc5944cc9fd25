//! Requests in two halves: who computes the prompt, who goes on with it, and what happens when one of them cannot.

use std::sync::atomic::Ordering;

use protocol::request_plane::{ErrorCode, Generate, Stop};
use router::backend::{Backend, DispatchError, RouteOptions};
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
