//! Selection over real workers: what a request may say about its worker, who is busy, and who waits.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use protocol::kv_event::StorageTier;
use protocol::request_plane::{ErrorCode, Generate};
use router::backend::{Backend, DispatchError, RouteOptions, Routed, RoutingHints};
use router::dispatch::Dispatcher;
use routing::{BusyThresholds, CostOverrides, Exclusion, Mode, Pick, QueuePolicy};
use serde_json::json;

use crate::harness::*;
use crate::worker::{Behaviour, Life, Worker};

fn hinted(hints: RoutingHints) -> RouteOptions {
    RouteOptions { hints, ..RouteOptions::default() }
}

fn id(worker: &Worker) -> u64 {
    worker.life.instance_id
}

async fn chosen(cluster: &Cluster, hints: RoutingHints) -> Result<u64, DispatchError> {
    let routed = cluster.generate_with(&prompt(1, 4), hinted(hints)).await?;
    let worker = routed.worker_id;
    drain(routed).await.1.map(|()| worker)
}

/// Case S7: the task of a request decides itself, at once, and hands nothing to another task before it is sent.
#[tokio::test]
async fn a_decision_takes_no_hop_to_another_task() {
    let cluster = Cluster::start(Mode::Kv).await;
    let worker = cluster.worker("a").await;
    worker.store(&prompt(1, 4));
    cluster.until_equal(&worker).await;
    let request =
        Generate { request_id: "r".into(), model: MODEL.into(), token_ids: prompt(1, 4), ..Generate::default() };
    let mut dispatch = std::pin::pin!(cluster.backend().generate(request, RouteOptions::default()));
    // Nothing else runs on this thread meanwhile, and what the threads of the index do is not waited for.
    assert!(futures::poll!(&mut dispatch).is_pending(), "the worker has not answered");
    let records = cluster.backend().decisions("r");
    let decision = records[0].explanation.outcome.expect("chosen");
    assert_eq!((records.len(), decision.rank, decision.terms.overlap.device), (1, rank(&worker), 4));
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 1.0, "booked, too");
    drain(dispatch.await.expect("routed")).await.1.expect("it ends well");
}

#[tokio::test]
async fn labels_and_exclusions_narrow_the_choice() {
    let cluster = Cluster::start(Mode::Kv).await;
    let labelled = |name, zone| Life { labels: json!({"zone": zone}), ..Life::new(name) };
    let a = cluster.worker_of(labelled("a", "east")).await;
    let b = cluster.worker_of(labelled("b", "west")).await;
    let in_zone = |zone: &str| RoutingHints { labels: vec![("zone".into(), zone.into())], ..RoutingHints::default() };
    for _ in 0..3 {
        assert_eq!(chosen(&cluster, in_zone("east")).await, Ok(id(&a)));
        assert_eq!(chosen(&cluster, in_zone("west")).await, Ok(id(&b)));
        let not_a = RoutingHints { excluded: vec![id(&a)], ..RoutingHints::default() };
        assert_eq!(chosen(&cluster, not_a).await, Ok(id(&b)));
    }
    let nowhere = chosen(&cluster, in_zone("north")).await;
    assert_eq!(nowhere, Err(DispatchError::NoWorker { model: MODEL.into() }));
}

#[tokio::test]
async fn a_prefill_worker_gets_no_whole_request() {
    let cluster = Cluster::start(Mode::RoundRobin).await;
    let decode = cluster.worker_of(Life { card: json!({"worker_type": "decode"}), ..Life::new("d") }).await;
    let prefill = cluster.worker_of(Life { card: json!({"worker_type": "prefill"}), ..Life::new("p") }).await;
    let whole = cluster.generate_pinned(&prompt(1, 1), id(&decode)).await.expect("routed");
    assert_eq!(whole.worker_id, id(&decode), "who names a worker means the one that answers");
    assert!(prefill.prompts().is_empty());
    let pinned = cluster.generate_pinned(&prompt(1, 1), id(&prefill)).await.err();
    assert_eq!(pinned, Some(unknown(id(&prefill))));
}

#[tokio::test]
async fn in_direct_mode_every_request_names_its_worker() {
    let cluster = Cluster::start(Mode::Direct).await;
    let worker = cluster.worker("a").await;
    assert_eq!(chosen(&cluster, RoutingHints::default()).await, Err(DispatchError::NeedsWorker));
    let routed = cluster.generate_pinned(&prompt(1, 1), id(&worker)).await.expect("routed");
    assert_eq!(routed.worker_id, id(&worker));
    let options = RouteOptions {
        pinned_worker: Some(id(&worker)),
        ..hinted(RoutingHints { dp_rank: Some(3), ..RoutingHints::default() })
    };
    let refused = cluster.generate_with(&prompt(1, 1), options).await.err();
    assert_eq!(refused, Some(unknown(id(&worker))), "it has one rank");
}

#[tokio::test]
async fn a_worker_with_ranks_is_told_which_of_them_is_meant() {
    let cluster = Cluster::start(Mode::RoundRobin).await;
    let ranks = Life { card: json!({"runtime_config": {"data_parallel_size": 2}}), ..Life::new("a") };
    let worker = cluster.worker_of(ranks).await;
    let sent = || worker.requests().iter().map(|request| request.dp_rank).collect::<Vec<_>>();
    for _ in 0..2 {
        assert_eq!(chosen(&cluster, RoutingHints::default()).await, Ok(id(&worker)));
    }
    assert_eq!(sent(), [0, 1], "each in turn");
    let at = |dp_rank| RouteOptions {
        pinned_worker: Some(id(&worker)),
        ..hinted(RoutingHints { dp_rank: Some(dp_rank), ..RoutingHints::default() })
    };
    for _ in 0..2 {
        drain(cluster.generate_with(&prompt(1, 1), at(1)).await.expect("routed")).await.1.expect("it ends well");
    }
    assert_eq!(sent(), [0, 1, 1, 1]);
    let refused = cluster.generate_with(&prompt(1, 1), at(2)).await.err();
    assert_eq!(refused, Some(unknown(id(&worker))), "it has two");
    assert_eq!(cluster.metric("armature_router_workers_routable"), 1.0, "one worker, not two");
}

#[tokio::test]
async fn where_one_rank_is_full_another_of_the_same_worker_is_asked() {
    let cluster = Cluster::start(Mode::RoundRobin).await;
    let ranks = Life { card: json!({"runtime_config": {"data_parallel_size": 2}}), ..Life::new("a") };
    let worker = cluster.worker_of(ranks).await;
    worker.behave(Behaviour::Refuse(ErrorCode::Overloaded));
    assert!(matches!(chosen(&cluster, RoutingHints::default()).await, Err(DispatchError::Overloaded(_))));
    let asked: Vec<u32> = worker.requests().iter().map(|request| request.dp_rank).collect();
    assert_eq!(asked, [0, 1], "each once");
}

#[tokio::test]
async fn a_request_brings_weights_of_its_own() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (warm, cold) = (cluster.worker("warm").await, cluster.worker("cold").await);
    warm.store(&prompt(1, 4));
    cluster.until_equal(&warm).await;
    // Something runs on the warm worker, so that it is chosen for its cache alone.
    warm.behave(Behaviour::Stall);
    let _busy = cluster.generate_pinned(&prompt(9, 2), id(&warm)).await.expect("routed");
    warm.behave(Behaviour::Answer);
    assert_eq!(chosen(&cluster, RoutingHints::default()).await, Ok(id(&warm)));
    let cost = CostOverrides { overlap_score_credit: Some(0.0), ..CostOverrides::default() };
    assert_eq!(chosen(&cluster, RoutingHints { cost, ..RoutingHints::default() }).await, Ok(id(&cold)));
    let bad = CostOverrides { temperature: Some(-1.0), ..CostOverrides::default() };
    let refused = chosen(&cluster, RoutingHints { cost: bad, ..RoutingHints::default() }).await;
    assert_eq!(refused, Err(DispatchError::Invalid("temperature must be a number of at least 0, not -1".into())));
}

#[tokio::test]
async fn a_decision_is_explained_before_and_after() {
    let cluster = Cluster::start(Mode::Kv).await;
    let (warm, cold) = (cluster.worker("warm").await, cluster.worker("cold").await);
    warm.store(&prompt(1, 4));
    cluster.until_equal(&warm).await;
    let request = Generate { model: MODEL.into(), token_ids: prompt(1, 4), ..Generate::default() };
    let excluded = hinted(RoutingHints { excluded: vec![id(&cold)], ..RoutingHints::default() });
    let before = cluster.backend().explain(&request, &excluded).expect("a model").answer;
    assert_eq!(before.outcome.expect("somebody").rank, rank(&warm));
    let out = before.candidates.iter().find(|row| row.rank == rank(&cold)).expect("every worker is shown");
    assert_eq!(out.exclusion, Some(Exclusion::Excluded));
    assert!(warm.prompts().is_empty(), "nothing was sent");
    let known_as = ["chatcmpl-1".into(), "client's".into()].into();
    let named = RouteOptions { known_as, ..excluded };
    drain(cluster.generate_with(&prompt(1, 4), named).await.expect("routed")).await.1.expect("it ends well");
    let records = cluster.backend().decisions("r");
    let [record] = &records[..] else { panic!("one attempt: {records:?}") };
    assert_eq!(record.explanation, before);
    for name in ["chatcmpl-1", "client's"] {
        assert_eq!(cluster.backend().decisions(name), records);
    }
    assert_eq!(record.explanation.outcome.expect("somebody").pick, Pick::Lowest { ties: 1 });
}

#[tokio::test]
async fn busy_workers_get_nothing_and_when_all_are_nobody_does() {
    let cluster = Cluster::with(|settings| {
        settings.selection.selector.busy = BusyThresholds { decode_blocks: Some(0.5), ..BusyThresholds::default() };
    })
    .await;
    let small = |name| Life { card: json!({"runtime_config": {"total_kv_blocks": 10}}), ..Life::new(name) };
    let workers = [cluster.worker_of(small("a")).await, cluster.worker_of(small("b")).await];
    workers.iter().for_each(|worker| worker.behave(Behaviour::Stall));
    let first = cluster.generate_pinned(&prompt(1, 6), id(&workers[0])).await.expect("routed");
    let second = cluster.generate(&prompt(1, 6)).await.expect("routed");
    assert_eq!(second.worker_id, id(&workers[1]), "more than half of the first one's blocks are in use");
    let refused = cluster.generate(&prompt(2, 1)).await.err();
    assert_eq!(refused, Some(DispatchError::Busy { model: MODEL.into() }));
    drop(first);
    assert_eq!(cluster.generate(&prompt(2, 1)).await.expect("room again").worker_id, id(&workers[0]));
}

/// A cluster of one worker whose batch holds 16 tokens; requests wait while more of them are not computed yet.
async fn queueing(policy: QueuePolicy, limit: usize, timeout: Duration) -> (Cluster, Worker) {
    let cluster = Cluster::with(|settings| {
        settings.selection.selector.queue_threshold = Some(1.0);
        let queue = &mut settings.selection.queue;
        (queue.policy, queue.limit, queue.timeout) = (policy, limit, timeout);
    })
    .await;
    let batch = Life { card: json!({"runtime_config": {"max_num_batched_tokens": 16}}), ..Life::new("a") };
    let worker = cluster.worker_of(batch).await;
    (cluster, worker)
}

const LONG: Duration = Duration::from_secs(60);

/// A request that has been sent off, and is at the worker or waits.
type Pending = BoxFuture<'static, Result<Routed, DispatchError>>;

fn send(cluster: &Cluster, seed: u32, blocks: u32, hints: RoutingHints) -> Pending {
    let backend: Arc<Dispatcher> = cluster.backend().clone();
    let request = Generate {
        request_id: format!("r{seed}"),
        model: MODEL.into(),
        token_ids: prompt(seed, blocks),
        ..Generate::default()
    };
    let task = tokio::spawn(async move { backend.generate(request, hinted(hints)).await });
    // Dropping it must drop the request, as a client that goes away does.
    let guard = AbortOnDrop(task);
    guard.boxed()
}

struct AbortOnDrop(tokio::task::JoinHandle<Result<Routed, DispatchError>>);

impl Future for AbortOnDrop {
    type Output = Result<Routed, DispatchError>;

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        self.0.poll_unpin(cx).map(|joined| joined.expect("no panic"))
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn until_waiting(cluster: &Cluster, count: f64) {
    cluster.until("so many wait", || cluster.metric("armature_router_queue_requests") == count).await;
}

/// Fills the worker's batch with a prompt that it never begins.
async fn fill(cluster: &Cluster, worker: &Worker) -> Pending {
    worker.behave(Behaviour::Silence);
    let filling = send(cluster, 100, 5, RoutingHints::default());
    cluster.until("it is at the worker", || worker.prompts().len() == 1).await;
    worker.behave(Behaviour::Answer);
    filling
}

#[tokio::test]
async fn a_request_waits_until_prompts_have_been_computed() {
    let (cluster, worker) = queueing(QueuePolicy::Fcfs, 10, LONG).await;
    let filling = fill(&cluster, &worker).await;
    let waiting = send(&cluster, 1, 2, RoutingHints::default());
    until_waiting(&cluster, 1.0).await;
    assert_eq!(worker.prompts().len(), 1, "nothing is sent meanwhile");
    drop(filling);
    let routed = waiting.await.expect("its turn");
    drain(routed).await.1.expect("it ends well");
    until_waiting(&cluster, 0.0).await;
    assert_eq!(cluster.metric("armature_router_queue_left_total{reason=\"placed\"}"), 1.0);
}

#[tokio::test]
async fn those_who_wait_are_served_by_priority_and_policy() {
    let (cluster, worker) = queueing(QueuePolicy::Wspt, 10, LONG).await;
    let filling = fill(&cluster, &worker).await;
    let strict = RoutingHints { strict_priority: 1, ..RoutingHints::default() };
    let requests = [
        (1, 9, RoutingHints::default()),
        (2, 5, RoutingHints::default()),
        (3, 7, RoutingHints::default()),
        (4, 8, strict),
    ];
    let mut waiting = Vec::new();
    for (at, (seed, blocks, hints)) in requests.into_iter().enumerate() {
        waiting.push(send(&cluster, seed, blocks, hints));
        until_waiting(&cluster, at as f64 + 1.0).await;
    }
    // Each of them fills the batch until its first token, so they go one by one.
    drop(filling);
    for routed in futures::future::join_all(waiting).await {
        drain(routed.expect("its turn")).await.1.expect("it ends well");
    }
    let lengths: Vec<usize> = worker.prompts().iter().skip(1).map(|prompt| prompt.len() / BLOCK as usize).collect();
    assert_eq!(lengths, [8, 5, 7, 9], "the strict one, then the shortest first");
}

#[tokio::test]
async fn the_queue_is_bounded_and_a_client_that_leaves_gives_its_place_back() {
    let (cluster, worker) = queueing(QueuePolicy::Fcfs, 1, LONG).await;
    let _filling = fill(&cluster, &worker).await;
    let waiting = send(&cluster, 1, 2, RoutingHints::default());
    until_waiting(&cluster, 1.0).await;
    let refused = cluster.generate(&prompt(2, 2)).await.err();
    assert_eq!(refused, Some(DispatchError::Overloaded("1 requests wait already".into())));
    drop(waiting);
    until_waiting(&cluster, 0.0).await;
    let _waiting = send(&cluster, 3, 2, RoutingHints::default());
    until_waiting(&cluster, 1.0).await;
    for (reason, count) in [("full", 1.0), ("gone", 1.0)] {
        let name = format!("armature_router_queue_left_total{{reason=\"{reason}\"}}");
        assert_eq!(cluster.metric(&name), count, "{reason}");
    }
}

#[tokio::test]
async fn a_wait_has_an_end_and_the_error_says_where_it_was() {
    let (cluster, worker) = queueing(QueuePolicy::Fcfs, 10, Duration::from_millis(100)).await;
    let _filling = fill(&cluster, &worker).await;
    let refused = cluster.generate(&prompt(1, 2)).await.err();
    assert_eq!(refused, Some(DispatchError::Deadline { stage: "waiting for a worker with room", seconds: 0 }));
    until_waiting(&cluster, 0.0).await;
}

#[tokio::test]
async fn a_worker_that_joins_takes_those_who_wait() {
    let (cluster, worker) = queueing(QueuePolicy::Fcfs, 10, LONG).await;
    let _filling = fill(&cluster, &worker).await;
    let waiting = [send(&cluster, 1, 2, RoutingHints::default()), send(&cluster, 2, 2, RoutingHints::default())];
    until_waiting(&cluster, 2.0).await;
    let second = cluster.worker("b").await;
    for routed in futures::future::join_all(waiting).await {
        assert_eq!(routed.expect("room").worker_id, id(&second));
    }
}

#[tokio::test]
async fn what_can_never_be_placed_does_not_wait() {
    let (cluster, worker) = queueing(QueuePolicy::Fcfs, 10, LONG).await;
    let _filling = fill(&cluster, &worker).await;
    let _waiting = send(&cluster, 1, 2, RoutingHints::default());
    until_waiting(&cluster, 1.0).await;
    assert_eq!(cluster.generate_pinned(&prompt(2, 1), 12345).await.err(), Some(unknown(12345)));
}

#[tokio::test]
async fn what_one_worker_put_into_a_shared_pool_lowers_the_cost_of_the_others() {
    let cluster = Cluster::with(|settings| settings.selection.selector.cost.shared_cache_multiplier = 0.5).await;
    let (a, b) = (cluster.worker("a").await, cluster.worker("b").await);
    let other = cluster.worker_of(Life { card: json!({"display_name": "other"}), ..Life::new("other") }).await;
    b.store(&prompt(1, 2));
    cluster.until_equal(&b).await;
    let row = |worker: &Worker, model: &str| {
        let request = Generate { model: model.into(), token_ids: prompt(1, 8), ..Generate::default() };
        let explained = cluster.backend().explain(&request, &RouteOptions::default()).expect("a model").answer;
        let found = explained.candidates.iter().find(|row| row.rank == rank(worker));
        found.map(|row| (row.overlap, row.shared_beyond, row.cost)).expect("every worker is shown")
    };
    let alone = row(&b, MODEL);
    assert_eq!((alone.0.device, alone.1, alone.2), (2, 0, 8.0 - 2.0 + 8.0));
    a.store_in(StorageTier::External);
    a.store(&prompt(1, 6));
    cluster.until("its events are in", || cluster.indexed(&a).shared == 6).await;
    let (overlap, beyond, cost) = row(&b, MODEL);
    assert_eq!((overlap, beyond), (alone.0, 4), "blocks beyond its own");
    assert_eq!(cost, alone.2 - 0.5 * 4.0);
    assert_eq!(row(&a, MODEL).1, 6);
    assert_eq!((row(&other, "other").1, row(&other, "other").2), (0, 16.0), "another model's blocks are others");
    a.unregister(cluster.directory.path());
    cluster.until("what it told is void", || row(&b, MODEL).1 == 0).await;
}
