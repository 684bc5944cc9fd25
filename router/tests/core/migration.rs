//! Streams that have begun and lose their worker: where they go on, and when they end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use protocol::request_plane::{ErrorCode, FinishReason};
use router::backend::{DispatchError, StreamItem};
use router::config::Deadlines;
use routing::Mode;

use crate::harness::*;
use crate::worker::{Behaviour, Worker};

const LIMIT: u32 = 3;

/// Workers in the order in which a request for `tokens` prefers them: each holds a block less of it than the one before.
async fn preferred<const N: usize>(cluster: &Cluster, tokens: &[u32], behaviours: [Behaviour; N]) -> [Worker; N] {
    let mut workers = Vec::new();
    for (at, behaviour) in behaviours.into_iter().enumerate() {
        let worker = cluster.worker(&format!("w{at}")).await;
        worker.store(&tokens[..tokens.len() - at * BLOCK as usize]);
        worker.behave(behaviour);
        cluster.until_equal(&worker).await;
        workers.push(worker);
    }
    workers.try_into().unwrap_or_else(|_| panic!("as many as behaviours"))
}

async fn limited(migration_limit: u32) -> Cluster {
    Cluster::with(|settings| settings.migration_limit = migration_limit).await
}

fn moved(cluster: &Cluster, reason: &str) -> f64 {
    cluster.metric(&format!("armature_router_migrations_total{{reason=\"{reason}\"}}"))
}

fn refused(cluster: &Cluster, reason: &str) -> f64 {
    cluster.metric(&format!("armature_router_migrations_refused_total{{reason=\"{reason}\"}}"))
}

#[tokio::test]
async fn a_stream_goes_on_where_most_of_prompt_and_answer_is_held() {
    let cluster = limited(LIMIT).await;
    // With the first token its fourth block is full.
    let tokens = [prompt(1, 3), vec![7, 8, 9]].concat();
    let [dies, other] = preferred(&cluster, &prompt(1, 3), [Behaviour::DieAfterFirst, Behaviour::Answer]).await;
    let home = cluster.worker("home").await;
    let routed = cluster.generate(&tokens).await.expect("routed");
    assert_eq!(routed.worker_id, dies.life.instance_id);
    let whole = [&tokens[..], &[1]].concat();
    home.store(&whole);
    cluster.until_equal(&home).await;
    assert_eq!(drain(routed).await, (vec![1, 2, 3], Ok(())));

    let requests = home.requests();
    assert_eq!((requests.len(), other.requests().len()), (1, 0));
    assert_eq!((&requests[0].token_ids, requests[0].generated), (&whole, 1));
    assert_eq!(requests[0].stop, dies.requests()[0].stop, "limits are those of the whole");
    let attempts: Vec<_> = cluster.backend().decisions("r").iter().map(|record| record.explanation.outcome).collect();
    let overlaps = attempts.iter().map(|outcome| outcome.as_ref().expect("placed").terms.overlap.total());
    assert_eq!(overlaps.collect::<Vec<_>>(), [3, 4], "one decision for each attempt");
    assert_eq!((moved(&cluster, "lost"), refused(&cluster, "lost")), (1.0, 0.0));
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn a_worker_killed_in_the_middle_is_replaced_and_so_is_the_next() {
    let cluster = limited(LIMIT).await;
    let behaviours = [Behaviour::Stall, Behaviour::DieAfterFirst, Behaviour::Answer];
    let [stalls, dies, answers] = preferred(&cluster, &prompt(1, 4), behaviours).await;
    let mut routed = cluster.generate(&prompt(1, 4)).await.expect("routed");
    let Some(Ok(StreamItem::Output(first))) = routed.stream.next().await else { panic!("no token") };
    assert!(first.first && first.token_ids == [1]);
    stalls.kill();
    let mut outputs = Vec::new();
    let finished = loop {
        match routed.stream.next().await.expect("an end").expect("no error") {
            StreamItem::Output(output) => outputs.push(output),
            StreamItem::Finished(finished) => break finished,
        }
    };
    let seen: Vec<_> = outputs.iter().map(|output| (output.token_ids.clone(), output.first)).collect();
    assert_eq!(seen, [(vec![2], false), (vec![3], false)], "one answer, with one beginning");
    assert_eq!((finished.prompt_tokens, finished.completion_tokens), (16, 3));
    assert_eq!(dies.requests()[0].generated, 1);
    assert_eq!(answers.requests()[0].generated, 2);
    assert_eq!(answers.prompts()[0], [&prompt(1, 4)[..], &[1, 2]].concat());
    assert_eq!(moved(&cluster, "lost"), 2.0);
}

#[tokio::test]
async fn when_all_workers_die_the_stream_ends_with_the_last_ones_error() {
    let cluster = limited(LIMIT).await;
    let [_first, last] = preferred(&cluster, &prompt(1, 4), [Behaviour::DieAfterFirst; 2]).await;
    let (tokens, end) = drain(cluster.generate(&prompt(1, 4)).await.expect("routed")).await;
    assert_eq!(tokens, [1, 2]);
    match end {
        Err(DispatchError::Worker { worker, stage: "generating", .. }) => assert_eq!(worker, last.life.name),
        other => panic!("{other:?}"),
    }
    assert_eq!((moved(&cluster, "lost"), refused(&cluster, "lost")), (1.0, 1.0));
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn a_stream_moves_no_more_often_than_allowed() {
    for limit in [0, 1] {
        let cluster = limited(limit).await;
        let behaviours = [Behaviour::DieAfterFirst, Behaviour::DieAfterFirst, Behaviour::Answer];
        let [_first, second, third] = preferred(&cluster, &prompt(1, 4), behaviours).await;
        let (tokens, end) = drain(cluster.generate(&prompt(1, 4)).await.expect("routed")).await;
        assert_eq!(tokens.len() as u32, 1 + limit);
        assert!(matches!(end, Err(DispatchError::Worker { stage: "generating", .. })), "{end:?}");
        assert_eq!((second.requests().len() as u32, third.requests().len()), (limit, 0));
        assert_eq!((moved(&cluster, "lost"), refused(&cluster, "lost")), (f64::from(limit), 1.0));
    }
}

#[tokio::test]
async fn a_request_that_kills_its_workers_takes_no_more_of_them_than_it_may_move() {
    use Behaviour::{Answer, DieAfterFirst, DieAtOnce};
    // However far each of them gets.
    for behaviours in [
        [DieAtOnce, DieAtOnce, DieAtOnce, DieAtOnce, Answer, Answer],
        [DieAtOnce, DieAfterFirst, DieAtOnce, DieAtOnce, Answer, Answer],
        [DieAfterFirst, DieAtOnce, DieAfterFirst, DieAtOnce, Answer, Answer],
    ] {
        let cluster = limited(LIMIT).await;
        let workers = preferred(&cluster, &prompt(1, 6), behaviours).await;
        let end = match cluster.generate(&prompt(1, 6)).await {
            Ok(routed) => drain(routed).await.1,
            Err(error) => Err(error),
        };
        assert!(matches!(end, Err(DispatchError::Worker { .. })), "{end:?}");
        let lost = workers.each_ref().map(|worker| worker.requests().len());
        assert_eq!(lost, [1, 1, 1, 1, 0, 0], "{behaviours:?}: the first, and {LIMIT} more");
        assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
    }
}

#[tokio::test]
async fn a_worker_that_dies_of_something_else_is_replaced_even_where_nothing_moves() {
    for (behaviours, survives) in [
        ([Behaviour::DieAtOnce, Behaviour::Answer, Behaviour::Answer], true),
        ([Behaviour::DieAtOnce, Behaviour::DieAtOnce, Behaviour::Answer], false),
    ] {
        let cluster = limited(0).await;
        let workers = preferred(&cluster, &prompt(1, 4), behaviours).await;
        assert_eq!(cluster.generate(&prompt(1, 4)).await.is_ok(), survives);
        assert_eq!(workers.each_ref().map(|worker| worker.requests().len()), [1, 1, 0]);
    }
}

#[tokio::test]
async fn a_client_that_leaves_during_the_move_takes_everything_with_it() {
    let cluster = limited(LIMIT).await;
    let [_first, silent] = preferred(&cluster, &prompt(1, 4), [Behaviour::DieAfterFirst, Behaviour::Silence]).await;
    let mut routed = cluster.generate(&prompt(1, 4)).await.expect("routed");
    routed.stream.next().await.expect("a token").expect("no error");
    let reader = tokio::spawn(async move { routed.stream.next().await });
    cluster.until("the next worker has it", || silent.requests().len() == 1).await;
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 1.0);
    reader.abort();
    cluster.until("the next worker is told", || silent.cancelled.load(Ordering::SeqCst) == 1).await;
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn a_move_counts_as_silence() {
    let deadlines = Deadlines { token: Duration::from_millis(300), ..Deadlines::default() };
    let cluster = Cluster::with_deadlines(Mode::Kv, deadlines).await;
    let [_first, silent] = preferred(&cluster, &prompt(1, 4), [Behaviour::DieAfterFirst, Behaviour::Silence]).await;
    let (tokens, end) = drain(cluster.generate(&prompt(1, 4)).await.expect("routed")).await;
    assert_eq!(tokens, [1]);
    assert_eq!(end, Err(DispatchError::Deadline { stage: "moving to another worker", seconds: 0 }));
    cluster.until("the worker is told", || silent.cancelled.load(Ordering::SeqCst) == 1).await;
    assert_eq!(cluster.metric("armature_router_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn a_stream_that_a_drain_cuts_short_goes_on_and_so_does_one_whose_engine_failed_once() {
    for (code, reason) in [(ErrorCode::Draining, "draining"), (ErrorCode::Engine, "failed")] {
        let cluster = limited(LIMIT).await;
        let behaviours = [Behaviour::FailAfterFirst(code), Behaviour::Refuse(ErrorCode::Overloaded), Behaviour::Answer];
        let [_first, full, answers] = preferred(&cluster, &prompt(1, 4), behaviours).await;
        assert_eq!(drain(cluster.generate(&prompt(1, 4)).await.expect("routed")).await, (vec![1, 2, 3], Ok(())));
        assert_eq!((full.requests().len(), answers.requests().len()), (1, 1), "a full worker is passed over");
        assert_eq!(moved(&cluster, reason), 1.0);
    }
}

#[tokio::test]
async fn a_request_that_fails_two_engines_gets_no_third_and_a_final_failure_is_final() {
    let cluster = limited(LIMIT).await;
    let fails = Behaviour::FailAfterFirst(ErrorCode::Engine);
    let [_first, _second, third] = preferred(&cluster, &prompt(1, 4), [fails, fails, Behaviour::Answer]).await;
    let (tokens, end) = drain(cluster.generate(&prompt(1, 4)).await.expect("routed")).await;
    assert_eq!(tokens, [1, 2]);
    assert!(matches!(&end, Err(DispatchError::Worker { message, .. }) if message == "no more"), "{end:?}");
    assert_eq!((third.requests().len(), refused(&cluster, "failed")), (0, 1.0));

    let cluster = limited(LIMIT).await;
    let behaviours = [Behaviour::FailAfterFirst(ErrorCode::Deadline), Behaviour::Answer];
    let [_first, other] = preferred(&cluster, &prompt(1, 4), behaviours).await;
    let (_, end) = drain(cluster.generate(&prompt(1, 4)).await.expect("routed")).await;
    assert!(matches!(end, Err(DispatchError::Deadline { stage: "generating", .. })), "{end:?}");
    assert!(other.requests().is_empty());
}

#[tokio::test]
async fn an_answer_that_is_whole_needs_nobody_to_say_so() {
    let cluster = limited(LIMIT).await;
    let [_first, other] = preferred(&cluster, &prompt(1, 4), [Behaviour::DieBeforeEnd, Behaviour::Answer]).await;
    let mut routed = cluster.generate(&prompt(1, 4)).await.expect("routed");
    for _ in 0..3 {
        routed.stream.next().await.expect("a token").expect("no error");
    }
    let Some(Ok(StreamItem::Finished(finished))) = routed.stream.next().await else { panic!("no end") };
    assert_eq!(finished.reason(), FinishReason::Length);
    assert_eq!((finished.prompt_tokens, finished.completion_tokens), (16, 3));
    assert!(other.requests().is_empty());
}

#[tokio::test]
async fn a_pinned_stream_ends_with_its_worker() {
    let cluster = limited(LIMIT).await;
    let [dies, other] = preferred(&cluster, &prompt(1, 4), [Behaviour::DieAfterFirst, Behaviour::Answer]).await;
    let (tokens, end) =
        drain(cluster.generate_pinned(&prompt(1, 4), dies.life.instance_id).await.expect("routed")).await;
    assert_eq!(tokens, [1]);
    assert!(matches!(end, Err(DispatchError::Worker { stage: "generating", .. })), "{end:?}");
    assert!(other.requests().is_empty());
}
