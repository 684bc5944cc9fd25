//! Generate streams: order, credit, cancellation, many at once, and large answers beside them.

use std::collections::HashMap;

use protocol::request_plane::{
    ArtifactGet, ErrorCode, FinishReason, Generate, KvQuery, ServerFrame, client_frame, server_frame::Body,
};
use worker_agent::engine::{EngineOutput, Prefilled, SubmitError};

use crate::events::{chain, store};
use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_prefill_has_no_reason_and_says_where_the_blocks_are() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    router.send(1, client_frame::Body::Generate(Generate { prefill_only: true, ..request(1) })).await;
    let submission = worker.next_submission().await;
    assert!(submission.request.prefill_only);
    submission.first(10);
    assert_eq!(router.output(1).await.token_ids, [10]);
    let params = Some("{}".to_owned());
    let prefilled =
        Prefilled { prompt_tokens: 3, completion_tokens: 1, reused_tokens: 2, disaggregated_params: params };
    submission.outputs.send(EngineOutput::Prefilled(prefilled)).expect("the stream is open");
    match router.recv().await.body {
        Some(Body::Finished(finished)) => {
            assert_eq!(finished.reason(), FinishReason::Unspecified);
            assert_eq!((finished.prompt_tokens, finished.completion_tokens, finished.reused_tokens), (3, 1, 2));
            assert_eq!(finished.disaggregated_params, "{}");
        }
        other => panic!("not Finished: {other:?}"),
    }
    let metrics = worker.get("/metrics").await;
    assert!(metrics.contains("armature_worker_requests_total{reason=\"prefilled\"} 1"), "{metrics}");
    worker.stop().await.expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_come_in_order_and_end_with_the_reason() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let submission = worker.next_submission().await;
    assert_eq!(submission.request, request(1));
    submission.first(10);
    let output = router.output(1).await;
    assert_eq!(
        (output.first, output.reused_blocks, output.prompt_blocks, &output.token_ids[..]),
        (true, 2, 3, &[10][..])
    );
    submission.token(11);
    let output = router.output(1).await;
    assert_eq!((output.first, output.token_ids), (false, vec![11]));
    submission.finish(2);
    match router.recv().await.body {
        Some(Body::Finished(finished)) => {
            assert_eq!(finished.reason(), FinishReason::Eos);
            assert_eq!((finished.prompt_tokens, finished.completion_tokens, finished.reused_tokens), (3, 2, 1));
        }
        other => panic!("not Finished: {other:?}"),
    }
    let metrics = worker.get("/metrics").await;
    for line in [
        "armature_worker_requests_total{reason=\"eos\"} 1",
        "armature_worker_generation_tokens_total 2",
        "armature_worker_prompt_tokens_total 3",
        "armature_worker_prompt_tokens_reused_total 1",
        "armature_worker_kv_blocks_total 512",
        "armature_worker_time_to_first_token_seconds_count 1",
    ] {
        assert!(metrics.lines().any(|got| got == line), "{line} is not in\n{metrics}");
    }
    worker.stop().await.expect("a clean end");
}

#[tokio::test]
async fn without_credit_tokens_wait_and_leave_in_one_frame() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let submission = worker.next_submission().await;
    submission.first(0);
    router.output(1).await;
    for token in 1..64 {
        submission.token(token);
        assert_eq!(router.output(1).await.token_ids, [token]);
    }
    (64..164).for_each(|token| submission.token(token));
    router.nothing_more().await;
    submission.finish(164);
    router.nothing_more().await;
    router.credit(1, 1).await;
    assert_eq!(router.output(1).await.token_ids, (64..164).collect::<Vec<_>>());
    assert!(matches!(router.recv().await.body, Some(Body::Finished(_))), "the end needs no credit");
}

#[tokio::test]
async fn a_stream_without_credit_delays_no_other() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let slow = worker.next_submission().await;
    slow.first(0);
    router.output(1).await;
    for token in 1..64 {
        slow.token(token);
        router.output(1).await;
    }
    (0..100_000).for_each(|token| slow.token(token));
    router.generate(2).await;
    let quick = worker.next_submission().await;
    quick.first(0);
    router.output(2).await;
    for token in 1..1000 {
        router.credit(2, 1).await;
        quick.token(token);
        assert_eq!(router.output(2).await.token_ids, [token]);
    }
    // All of the slow one's tokens are still there, in frames of a bounded size.
    router.credit(1, 1000).await;
    let mut tokens = 0;
    while tokens < 100_000 {
        let output = router.output(1).await;
        assert!(output.token_ids.len() <= 4096);
        assert_eq!(output.token_ids[0], tokens);
        tokens += output.token_ids.len() as u32;
    }
}

#[tokio::test]
async fn a_cancelled_stream_frees_its_request_and_says_no_more() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let submission = worker.next_submission().await;
    submission.first(1);
    router.output(1).await;
    router.cancel(1).await;
    submission.cancelled().await;
    router.cancel(1).await;
    router.cancel(77).await;
    router.credit(1, 5).await;
    router.nothing_more().await;
    let metrics = worker.get("/metrics").await;
    assert!(metrics.contains("armature_worker_requests_total{reason=\"cancelled\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_lost_connection_cancels_its_streams_and_no_others() {
    let mut worker = Worker::start(&[]).await;
    let (mut lost, mut kept) = (worker.router().await, worker.router().await);
    let mut submissions = Vec::new();
    for id in 1..=20 {
        lost.generate(id).await;
        submissions.push(worker.next_submission().await);
    }
    kept.generate(1).await;
    let other = worker.next_submission().await;
    drop(lost);
    for submission in &submissions {
        submission.cancelled().await;
    }
    other.first(5);
    assert_eq!(kept.output(1).await.token_ids, [5]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_streams_share_one_connection() {
    const STREAMS: u64 = 500;
    const TOKENS: u32 = 40;
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    for id in 1..=STREAMS {
        router.generate(id).await;
    }
    let mut submissions = Vec::new();
    for id in 1..=STREAMS {
        let submission = worker.next_submission().await;
        assert_eq!(submission.request.request_id, format!("r{id}"), "requests arrive in order");
        submissions.push(submission);
    }
    let steps = tokio::spawn(async move {
        submissions.iter().for_each(|submission| submission.first(0));
        for token in 1..TOKENS {
            tokio::task::yield_now().await;
            submissions.iter().for_each(|submission| submission.token(token));
        }
        submissions.iter().for_each(|submission| submission.finish(TOKENS as usize));
        submissions
    });
    let (mut tokens, mut finished) = (HashMap::<u64, Vec<u32>>::new(), 0);
    while finished < STREAMS {
        match router.recv().await {
            ServerFrame { stream_id, body: Some(Body::Output(output)) } => {
                tokens.entry(stream_id).or_default().extend(output.token_ids);
            }
            ServerFrame { stream_id, body: Some(Body::Finished(_)) } => {
                assert_eq!(tokens[&stream_id], (0..TOKENS).collect::<Vec<_>>(), "stream {stream_id}");
                finished += 1;
            }
            other => panic!("unexpected: {other:?}"),
        }
    }
    steps.await.expect("no panic");
    worker.stop().await.expect("a clean end");
}

#[tokio::test]
async fn refusals_of_the_engine_reach_the_router_with_their_code() {
    let worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    let cases = [
        (SubmitError::Invalid("prompt of 9000 tokens is over 2048".into()), ErrorCode::InvalidRequest),
        (SubmitError::Overloaded(64), ErrorCode::Overloaded),
        (SubmitError::Stopped, ErrorCode::Draining),
    ];
    for (id, (error, code)) in (1..).zip(cases) {
        let message = error.to_string();
        *worker.engine.refuse.lock() = Some(error);
        router.generate(id).await;
        let failed = router.failed(id).await;
        assert_eq!((failed.code(), failed.message), (code, message));
    }
}

#[tokio::test]
async fn a_rank_that_the_worker_does_not_have_is_refused_as_invalid() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    let at = |id, dp_rank| client_frame::Body::Generate(Generate { dp_rank, ..request(id) });
    router.send(1, at(1, 1)).await;
    let failed = router.failed(1).await;
    assert_eq!((failed.code(), failed.message.as_str()), (ErrorCode::InvalidRequest, "dp_rank 1 of a worker with 1"));
    router.send(2, at(2, 0)).await;
    assert_eq!(worker.next_submission().await.request.dp_rank, 0);
}

#[tokio::test]
async fn engine_failures_and_deadlines_end_only_their_stream() {
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let failing = worker.next_submission().await;
    router.generate(2).await;
    let vanishing = worker.next_submission().await;
    let mut late = request(3);
    late.deadline_ms = 30;
    router.send(3, client_frame::Body::Generate(late)).await;
    let late = worker.next_submission().await;
    let failed = router.failed(3).await;
    assert_eq!(failed.code(), ErrorCode::Deadline);
    late.cancelled().await;
    failing.outputs.send(EngineOutput::Failed("no blocks left".into())).expect("open");
    let failed = router.failed(1).await;
    assert_eq!((failed.code(), failed.message.as_str()), (ErrorCode::Engine, "no blocks left"));
    drop(vanishing);
    assert_eq!(router.failed(2).await.code(), ErrorCode::Engine);
    router.nothing_more().await;
}

#[tokio::test]
async fn artifacts_come_whole_and_unknown_ones_are_refused() {
    let worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    for (id, name) in (1..).zip(["tokenizer.json", "empty"]) {
        router.send(id, client_frame::Body::ArtifactGet(ArtifactGet { name: name.into() })).await;
        let mut bytes = Vec::new();
        loop {
            match router.recv().await.body {
                Some(Body::ArtifactChunk(chunk)) => {
                    bytes.extend_from_slice(&chunk.data);
                    if chunk.end {
                        break;
                    }
                }
                other => panic!("not a chunk: {other:?}"),
            }
        }
        assert_eq!(bytes, model().files[name]);
        let digest = protocol::metadata::artifact_digest(xxhash_rust::xxh3::xxh3_64(&bytes));
        assert_eq!(worker.armature().artifacts[name], digest);
    }
    router.send(3, client_frame::Body::ArtifactGet(ArtifactGet { name: "../secret".into() })).await;
    assert_eq!(router.failed(3).await.code(), ErrorCode::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_of_many_chunks_lets_tokens_through() {
    const BLOCKS: u64 = 100_000;
    let mut worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    worker.events.send(store(None, chain(0..BLOCKS))).expect("the publisher runs");
    let mut query = 1;
    // The whole chain is taken in when a range query finds its last event.
    let last = BLOCKS.div_ceil(4096) - 1;
    let answer = loop {
        let answer = router.query(query, KvQuery { start: Some(last), ..Default::default() }).await;
        query += 1;
        if answer.last_event_id == Some(last) && !answer.dump {
            break answer;
        }
    };
    assert_eq!(answer.events.len(), 1);

    router.generate(query).await;
    let submission = worker.next_submission().await;
    router.send(query + 1, client_frame::Body::KvQuery(KvQuery::default())).await;
    let (mut chunks_before, mut tokens, mut sent) = (0, 0, 0);
    loop {
        match router.recv().await.body {
            Some(Body::KvAnswer(answer)) => {
                assert!(answer.events.len() <= protocol::request_plane::CHUNK_BYTES);
                if answer.end {
                    break;
                }
                chunks_before += 1;
                if sent == tokens && sent < 3 {
                    if sent == 0 {
                        submission.first(0)
                    } else {
                        submission.token(sent)
                    }
                    sent += 1;
                }
            }
            Some(Body::Output(output)) => tokens += output.token_ids.len() as u32,
            other => panic!("unexpected: {other:?}"),
        }
    }
    assert!(chunks_before > 20, "{chunks_before}");
    assert!(tokens > 0, "no token came through during {chunks_before} chunks");
}
