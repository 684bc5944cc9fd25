//! Halves on workers whose KV is not all of one kind: who goes on after whom, and who computes a prompt by itself.

use protocol::request_plane::{ErrorCode, Generate};
use router::backend::{PrefillChoice, RouteOptions};
use routing::{Exclusion, Mode};
use serde_json::json;

use crate::harness::*;
use crate::worker::{Behaviour, Life, Worker};

/// A worker whose KV is of `revision`; `?`: it does not say.
async fn of_kind(cluster: &Cluster, name: &str, role: &str, revision: &str) -> Worker {
    let own = if revision == "?" { json!({}) } else { json!({"kv_revision": revision, "kv_layout": "l"}) };
    cluster.worker_of(Life { card: json!({"worker_type": role}), own, ..Life::new(name) }).await
}

async fn until_split(cluster: &Cluster) {
    cluster.until("requests are split", || cluster.backend().splits(MODEL)).await;
}

fn prefills(cluster: &Cluster, reason: &str) -> f64 {
    cluster.metric(&format!("armature_router_prefills_total{{reason=\"{reason}\"}}"))
}

/// Makes a worker the one that a prompt would rather go to.
async fn warm(cluster: &Cluster, worker: &Worker, tokens: &[u32]) {
    worker.store(tokens);
    cluster.until_equal(worker).await;
}

async fn answered(cluster: &Cluster, tokens: &[u32]) {
    let routed = cluster.generate(tokens).await.expect("routed");
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));
}

fn params(worker: &Worker) -> Vec<String> {
    worker.requests().into_iter().map(|request| request.disaggregated_params).collect()
}

#[tokio::test]
async fn the_decode_worker_is_one_that_can_use_the_prefill_workers_kv() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (other, fits) = (of_kind(&cluster, "d1", "decode", "r1").await, of_kind(&cluster, "d2", "decode", "r2").await);
    let _prefill = of_kind(&cluster, "p2", "prefill", "r2").await;
    until_split(&cluster).await;
    let tokens = prompt(1, 4);
    warm(&cluster, &other, &tokens).await;
    answered(&cluster, &tokens).await;
    assert_eq!((params(&fits), other.requests().len()), (vec!["kept by p2".to_owned()], 0));
    assert_eq!(prefills(&cluster, "remote"), 1.0);
    let second = cluster.backend().decisions("r").pop().expect("two decisions").explanation;
    let row = second.candidates.iter().find(|row| row.rank == rank(&other)).expect("every worker is shown");
    assert_eq!(row.exclusion, Some(Exclusion::KvDiffers));
}

#[tokio::test]
async fn the_prefill_worker_is_one_whose_kv_somebody_can_use() {
    let cluster = Cluster::start(Mode::Kv).await;
    let _decode = of_kind(&cluster, "d2", "decode", "r2").await;
    let (useless, useful) =
        (of_kind(&cluster, "p1", "prefill", "r1").await, of_kind(&cluster, "p2", "prefill", "r2").await);
    until_split(&cluster).await;
    let tokens = prompt(1, 4);
    warm(&cluster, &useless, &tokens).await;
    for _ in 0..3 {
        answered(&cluster, &tokens).await;
    }
    assert_eq!((useless.requests().len(), useful.requests().len()), (0, 3));
}

#[tokio::test]
async fn pools_that_cannot_exchange_leave_prompts_to_the_decode_workers_and_say_so() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (decode, prefill) =
        (of_kind(&cluster, "d", "decode", "r1").await, of_kind(&cluster, "p", "prefill", "r2").await);
    until_split(&cluster).await;
    let tokens = prompt(1, 4);
    answered(&cluster, &tokens).await;
    assert_eq!((prefill.requests().len(), params(&decode)), (0, vec![String::new()]));
    assert_eq!((prefills(&cluster, "kv differs"), prefills(&cluster, "failed")), (1.0, 0.0));
    let request = Generate { model: MODEL.into(), token_ids: tokens.clone(), ..Generate::default() };
    let explained = cluster.backend().explain(&request, &RouteOptions::default()).expect("a model");
    assert_eq!(explained.prefill, Some(PrefillChoice::Local("kv differs")));
    assert_eq!(explained.answer.outcome.expect("somebody").rank, rank(&decode));
    // One that fits comes.
    let fits = of_kind(&cluster, "p2", "prefill", "r1").await;
    answered(&cluster, &tokens).await;
    assert_eq!((prefill.requests().len(), fits.requests().len()), (0, 1));
}

#[tokio::test]
async fn who_does_not_say_is_taken_to_fit_anybody() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (decode, _other) = (of_kind(&cluster, "d", "decode", "?").await, of_kind(&cluster, "d1", "decode", "r1").await);
    let _prefill = of_kind(&cluster, "p", "prefill", "r2").await;
    until_split(&cluster).await;
    answered(&cluster, &prompt(1, 4)).await;
    assert_eq!(params(&decode), ["kept by p"]);
}

#[tokio::test]
async fn when_the_only_worker_that_could_use_the_kv_is_lost_another_computes_it() {
    for (behaviour, reason) in
        [(Behaviour::Refuse(ErrorCode::Draining), "kv differs"), (Behaviour::DieAtOnce, "not fetched")]
    {
        let cluster = Cluster::start(Mode::Kv).await;
        let lost = of_kind(&cluster, "d1", "decode", "r1").await;
        let (other, _prefill) =
            (of_kind(&cluster, "d2", "decode", "r2").await, of_kind(&cluster, "p1", "prefill", "r1").await);
        until_split(&cluster).await;
        lost.behave(behaviour);
        answered(&cluster, &prompt(1, 4)).await;
        assert_eq!((params(&lost), params(&other)), (vec!["kept by p1".to_owned()], vec![String::new()]));
        assert_eq!(other.requests()[0].generated, 1);
        assert_eq!((prefills(&cluster, reason), prefills(&cluster, "remote")), (1.0, 0.0), "{behaviour:?}");
    }
}
