//! Disaggregated serving between two agents: what a router sends them, and what their metrics say of it.

use std::sync::Arc;

use integration_tests::model;
use protocol::request_plane::{FinishReason, Finished, Generate, ServerFrame, Stop, client_frame, server_frame::Body};
use worker_agent::engine::builtin::open::OpenOptions;
use worker_agent::engine::mocker::timing::Profile;
use worker_agent::engine::mocker::{MockedModel, MockerOptions};

use crate::harness::*;

/// All tokens of an answer, and its end.
async fn answer(router: &mut Router, stream_id: u64, generate: Generate) -> (Vec<u32>, Finished) {
    router.send(stream_id, client_frame::Body::Generate(generate)).await;
    let mut tokens = Vec::new();
    loop {
        match router.recv().await {
            ServerFrame { stream_id: id, body: Some(Body::Output(output)) } if id == stream_id => {
                tokens.extend(output.token_ids);
            }
            ServerFrame { body: Some(Body::Finished(finished)), .. } => return (tokens, finished),
            other => panic!("unexpected: {other:?}"),
        }
    }
}

/// A worker that computes nothing, and whose blocks can be moved.
async fn worker(role: &str) -> Worker {
    let options = MockerOptions {
        timing: Profile::default().timing(),
        speedup_ratio: 0.0,
        context_length: 2048,
        answer_tokens: None,
    };
    let mocked = MockedModel::read(&model::path(), options).expect("a model file");
    let sizes = OpenOptions { total_blocks: 64, ..OpenOptions::default() };
    Worker::with_engine(Arc::new(mocked.start(sizes).expect("starts")), &["--role", role]).await
}

fn request() -> Generate {
    let stop = Some(Stop { max_tokens: 20, ..Default::default() });
    Generate { model: "scripted".into(), token_ids: (100..170).collect(), stop, ..Default::default() }
}

/// What the decode worker is sent after the prefill worker's answer.
fn second_half(first: &[u32], finished: Finished) -> Generate {
    let disaggregated_params = finished.disaggregated_params;
    let token_ids = [&request().token_ids[..], first].concat();
    Generate { token_ids, generated: 1, disaggregated_params, ..request() }
}

async fn until_leases(worker: &Worker, count: usize) {
    let line = format!("armature_worker_kv_leases {count}\n");
    within(&line, async { while !worker.get("/metrics").await.contains(&line) {} }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_computed_by_one_agent_and_answered_by_another() {
    let (prefill, decode) = (worker("prefill").await, worker("decode").await);
    let (one, other) = (prefill.armature(), decode.armature());
    assert_eq!((one.kv_revision.as_deref(), &one.kv_layout), (Some(""), &other.kv_layout), "routers may pair them");
    assert!(one.kv_layout.is_some_and(|layout| layout.starts_with("f16-v1/") && layout.ends_with("/16")));
    let (mut to_prefill, mut to_decode) = (prefill.router().await, decode.router().await);

    let (expected, _) = answer(&mut to_prefill, 1, request()).await;

    let (first, finished) = answer(&mut to_prefill, 2, Generate { prefill_only: true, ..request() }).await;
    assert_eq!((&first[..], finished.reason()), (&expected[..1], FinishReason::Unspecified));
    let params = &finished.disaggregated_params;
    assert!(params.contains(r#""backend":"tcp","address":"127.0.0.1:"#), "{params}");

    let (rest, finished) = answer(&mut to_decode, 1, second_half(&first, finished)).await;
    assert_eq!((&rest[..], finished.reused_tokens), (&expected[1..], 64));

    let metrics = decode.get("/metrics").await;
    assert!(metrics.contains("armature_worker_kv_transfer_received_blocks_total 4\n"), "{metrics}");
    let metrics = prefill.get("/metrics").await;
    assert!(metrics.contains("armature_worker_kv_transfer_sent_bytes_total{transport=\"shm\"} 4096\n"), "{metrics}");
    prefill.stop().await.expect("a clean end");
    decode.stop().await.expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_has_no_use_for_a_prompt_gives_it_back() {
    let prefill = worker("prefill").await;
    let mut router = prefill.router().await;
    for stream in [1, 2] {
        answer(&mut router, stream, Generate { prefill_only: true, ..request() }).await;
    }
    for (stream, left) in [(2, 1), (1, 0)] {
        until_leases(&prefill, left + 1).await;
        router.cancel(stream).await;
        router.cancel(stream).await;
        until_leases(&prefill, left).await;
    }
    prefill.stop().await.expect("a clean end, at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_prompts_to_be_fetched() {
    let (prefill, decode) = (worker("prefill").await, worker("decode").await);
    let (mut to_prefill, mut to_decode) = (prefill.router().await, decode.router().await);
    let (first, finished) = answer(&mut to_prefill, 1, Generate { prefill_only: true, ..request() }).await;
    prefill.shutdown.cancel();
    until("the registration to say draining", || prefill.armature().draining.then_some(())).await;
    let (_, finished) = answer(&mut to_decode, 1, second_half(&first, finished)).await;
    assert_eq!(finished.reused_tokens, 64);
    prefill.stop().await.expect("a clean end, long before the drain's deadline");
    decode.stop().await.expect("a clean end");
}
