//! Disaggregated serving between two agents: what a router sends them, and what their metrics say of it.

use std::path::PathBuf;
use std::sync::Arc;

use protocol::request_plane::{FinishReason, Finished, Generate, ServerFrame, Stop, client_frame, server_frame::Body};
use worker_agent::engine::builtin::open::OpenOptions;
use worker_agent::engine::mocker::timing::Profile;
use worker_agent::engine::mocker::{MockedModel, MockerOptions};

use crate::harness::*;

/// The default model, whose tokenizer mockers have.
fn model_file() -> PathBuf {
    let path = std::env::var_os("ARMATURE_TEST_MODEL").map(PathBuf::from).unwrap_or_else(|| {
        let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache");
        let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
        cache.join("armature/models/smollm2-135m-instruct-q4_1.gguf")
    });
    assert!(path.is_file(), "{} is missing; run `cargo xtask model` to download it", path.display());
    path
}

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_computed_by_one_agent_and_answered_by_another() {
    let options = MockerOptions {
        timing: Profile::default().timing(),
        speedup_ratio: 0.0,
        context_length: 2048,
        answer_tokens: None,
    };
    let mocked = MockedModel::read(&model_file(), options).expect("a model file");
    let sizes = OpenOptions { total_blocks: 64, ..OpenOptions::default() };
    let engine = || Arc::new(mocked.start(sizes).expect("starts"));
    let prefill = Worker::with_engine(engine(), &["--role", "prefill"]).await;
    let decode = Worker::with_engine(engine(), &["--role", "decode"]).await;
    let (one, other) = (prefill.armature(), decode.armature());
    assert_eq!((one.kv_revision.as_deref(), &one.kv_layout), (Some(""), &other.kv_layout), "routers may pair them");
    assert!(one.kv_layout.is_some_and(|layout| layout.starts_with("f16-v1/") && layout.ends_with("/16")));
    let (mut to_prefill, mut to_decode) = (prefill.router().await, decode.router().await);

    let token_ids: Vec<u32> = (100..170).collect();
    let stop = Some(Stop { max_tokens: 20, ..Default::default() });
    let request = Generate { model: "scripted".into(), token_ids: token_ids.clone(), stop, ..Default::default() };
    let (expected, _) = answer(&mut to_prefill, 1, request.clone()).await;

    let (first, finished) = answer(&mut to_prefill, 2, Generate { prefill_only: true, ..request.clone() }).await;
    assert_eq!((&first[..], finished.reason()), (&expected[..1], FinishReason::Unspecified));
    let disaggregated_params = finished.disaggregated_params;
    assert!(disaggregated_params.contains(r#""backend":"tcp","address":"127.0.0.1:"#), "{disaggregated_params}");

    let continued =
        Generate { token_ids: [&token_ids[..], &first].concat(), generated: 1, disaggregated_params, ..request };
    let (rest, finished) = answer(&mut to_decode, 1, continued).await;
    assert_eq!((&rest[..], finished.reused_tokens), (&expected[1..], 64));

    let metrics = decode.get("/metrics").await;
    assert!(metrics.contains("armature_worker_kv_transfer_received_blocks_total 4\n"), "{metrics}");
    let metrics = prefill.get("/metrics").await;
    assert!(metrics.contains("armature_worker_kv_transfer_sent_bytes_total 4096\n"), "{metrics}");
    prefill.stop().await.expect("a clean end");
    decode.stop().await.expect("a clean end");
}
