//! A vLLM that starts, dies and comes back, and what routers see of it.

use std::sync::Arc;

use axum::http::StatusCode;
use clap::Parser;
use kv_index::KvEventData;
use protocol::request_plane::ErrorCode;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use worker_agent::admin;
use worker_agent::agent::{self, Listeners, ModelInfo};
use worker_agent::config::Config;
use worker_agent::drain::Drain;
use worker_agent::engine::remote::metrics::RemoteMetrics;
use worker_agent::engine::remote::{ConnectError, Loss, wait, wait_until_it_computes};
use worker_agent::engine::{Engine, SubmitError};

use crate::server::*;

#[tokio::test]
async fn a_killed_server_ends_its_streams_so_that_they_can_go_on_elsewhere() {
    let (mut vllm, mut publisher) = (Server::start(Make::Vllm).await, Publisher::bind().await);
    let (engine, metrics) = vllm.engine(&["--vllm-kv-events", &publisher.address]).await;
    let mut events = engine.take_events().expect("taken once");
    publisher.subscribed(&engine).await;
    let outputs = ask(&engine, request(0..4, 9));
    let stream = vllm.asked().await.stream();
    stream.tokens(&[20]);
    let queued = ask(&engine, request(0..4, 9));
    let waiting = vllm.asked().await;
    vllm.kill().await;
    let (tokens, last) = answer(outputs).await;
    assert_eq!((tokens, code(last).0), (vec![20], ErrorCode::Draining));
    assert_eq!(code(answer(queued).await.1).0, ErrorCode::Draining);
    drop((stream, waiting));
    let mut last = None;
    within("the end of events", async {
        while let Some(event) = events.recv().await {
            last = Some(event.data);
        }
    })
    .await;
    assert_eq!(last, Some(KvEventData::Cleared), "nothing is held any more, and nothing follows");
    assert!(engine.lost().is_some());
    assert!(matches!(engine.submit(request(0..4, 9)), Err(SubmitError::Stopped)));
    assert_eq!((metrics.lost.get(), engine.load().used_blocks), (1, 0));
}

#[tokio::test]
async fn one_that_says_that_it_is_ill_is_lost_and_one_slow_answer_says_nothing() {
    let vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&[]).await;
    vllm.say_health(StatusCode::SERVICE_UNAVAILABLE);
    until("a check that fails", || metrics.failed_checks.get() > 0).await;
    assert_eq!(engine.lost(), None);
    vllm.say_health(StatusCode::OK);
    let outputs = ask(&engine, request(0..4, 9));
    drop(outputs);
    vllm.say_health(StatusCode::SERVICE_UNAVAILABLE);
    until("the loss", || engine.lost().is_some()).await;
    assert!(engine.lost().is_some_and(|why| why.to_string().contains("503")), "{:?}", engine.lost());
}

/// A page of vLLM's metrics while one request is computed.
fn page(generated: u32) -> String {
    format!(
        "vllm:cache_config_info{{block_size=\"32\",num_gpu_blocks=\"100\"}} 1.0\nvllm:num_requests_running{{engine=\"0\"}} 1.0\n\
         vllm:generation_tokens_total{{engine=\"0\"}} {generated}.0\n"
    )
}

#[tokio::test]
async fn one_that_hangs_while_it_says_that_it_is_well_is_lost_and_not_taken_back_before_it_computes() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&["--engine-stall-s-max", "3"]).await;
    let outputs = ask(&engine, request(0..4, 9));
    let stream = vllm.asked().await.stream();
    stream.tokens(&[20]);
    // A long prompt of somebody else's: no token, and figures that move.
    let mut moves = tokio::time::interval(std::time::Duration::from_millis(500));
    for generated in 0..8 {
        moves.tick().await;
        vllm.set_metrics(&page(generated));
        assert_eq!(engine.lost(), None);
    }
    let (tokens, last) = answer(outputs).await;
    let (found, message) = code(last);
    assert_eq!((tokens, found), (vec![20], ErrorCode::Draining), "it goes on elsewhere");
    assert!(message.contains("computed nothing for 3 s"), "{message}");
    assert!(matches!(engine.lost(), Some(Loss::Hung { requests: 1, .. })), "{:?}", engine.lost());
    assert_eq!((metrics.lost.get(), metrics.hung.get(), metrics.failed_checks.get()), (1, 1, 0));
    drop(stream);
    let settings = vllm.settings(&["--engine-stall-s-max", "1"]);
    let again = tokio::spawn(async move { wait_until_it_computes(&settings).await });
    let hangs = vllm.asked().await;
    assert_eq!((&hangs.body["max_tokens"], &hangs.body["prompt"]), (&json!(1), &json!([0])));
    hangs.given_up().await;
    vllm.asked().await.stream().end(&[20], "length", Value::Null);
    within("the engine", again).await.expect("no panic").expect("it computes again");
}

#[tokio::test]
async fn a_page_of_metrics_that_does_not_come_says_nothing_of_its_health() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&[]).await;
    vllm.refuse_metrics();
    until("checks that fail", || metrics.failed_checks.get() > 2).await;
    assert_eq!(engine.lost(), None);
    let outputs = ask(&engine, request(0..4, 9));
    vllm.asked().await.stream().end(&[20], "length", Value::Null);
    assert_eq!(answer(outputs).await.0, [20]);
}

#[tokio::test]
async fn a_server_that_starts_is_waited_for_and_one_that_does_not_is_named() {
    let vllm = Server::start(Make::Vllm).await;
    vllm.say_health(StatusCode::SERVICE_UNAVAILABLE);
    let settings = vllm.settings(&["--vllm-start-s-max", "1"]);
    let failed = wait(&settings).await.expect_err("it is not ready");
    let text = failed.to_string();
    assert!(text.contains("not ready after 1 s") && text.contains("503"), "{text}");
    let settings = vllm.settings(&[]);
    let waiting = tokio::spawn(async move { wait(&settings).await });
    tokio::task::yield_now().await;
    vllm.say_health(StatusCode::OK);
    within("the engine", waiting).await.expect("no panic").expect("it is ready");
}

#[tokio::test]
async fn what_the_server_does_not_tell_is_a_flag() {
    let vllm = Server::start(Make::Vllm).await;
    // A page of metrics of another make.
    let other = vllm.settings(&["--vllm-block-size", "64", "--vllm-kv-blocks", "7", "--vllm-context-length", "99"]);
    let ready = wait(&other).await.expect("it is ready");
    let engine = ready.start(&other, Vec::new(), RemoteMetrics::default());
    let info = engine.info();
    assert_eq!((info.block_size.get(), info.total_blocks, info.context_length), (64, 7, 99));
    vllm.forget_metrics();
    let failed = wait(&vllm.settings(&[])).await.expect_err("unknown");
    assert!(matches!(failed, ConnectError::Untold { flag: "--engine-block-size", .. }), "{failed}");
}

#[tokio::test]
async fn a_worker_stands_for_one_data_parallel_rank_of_those_that_there_are() {
    let vllm = Server::start(Make::Vllm).await;
    let rank =
        |rank| format!("vllm:cache_config_info{{block_size=\"32\",engine=\"{rank}\",num_gpu_blocks=\"100\"}} 1.0\n");
    let events = ["--vllm-kv-events", "tcp://127.0.0.1:1"];
    let ready = async |page: &str, more: &[&str]| {
        vllm.set_metrics(page);
        wait(&vllm.settings(more)).await.map(drop)
    };
    let both = rank(0) + &rank(1);
    for (page, more) in [(&both, &[&events[..], &["--engine-dp-rank", "1"]].concat()), (&rank(3), &events.into())] {
        ready(page, more).await.expect("one of them");
    }
    // Its cache is of no interest.
    ready(&both, &[]).await.expect("all of them");
    for more in [&events[..], &["--engine-dp-rank", "2"]] {
        let failed = ready(&both, more).await.expect_err("which of them");
        assert!(failed.to_string().contains("has the data-parallel ranks [0, 1]"), "{failed}");
    }
}

#[tokio::test]
async fn a_worker_whose_server_is_killed_leaves() {
    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }
    let vllm = Server::start(Make::Vllm).await;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("UTF-8");
    let file = ["worker", "--name", "w", "--discovery-backend", "file", "--discovery-dir", path];
    let ports = ["--port", "0", "--event-port", "0", "--admin-port", "0", "--engine", "vllm", "--model-path", "m"];
    let config = Cli::parse_from([&file[..], &ports].concat()).config;
    let listeners = Listeners::bind(&config.settings().expect("valid")).await.expect("free ports");
    let admin = listeners.admin.local_addr().expect("bound");
    let (engine, _) = vllm.engine(&[]).await;
    let engine = Arc::new(engine);
    let model = ModelInfo { name: "m".into(), ..ModelInfo::default() };
    let agent = tokio::spawn(agent::run(config, engine.clone(), model, listeners, CancellationToken::new()));
    let entries = || std::fs::read_dir(path).expect("readable").count();
    until("registration", || entries() == 1).await;
    let metrics = admin_page(admin, "/metrics").await;
    assert!(metrics.contains("armature_worker_engine_losses_total 0"), "{metrics}");
    vllm.kill().await;
    let ended = within("the end of the agent", agent).await.expect("no panic");
    assert!(ended.is_err(), "nobody asked it to end");
    assert_eq!(entries(), 0, "routers find it no more");
    assert!(engine.lost().is_some());
}

#[tokio::test]
async fn a_process_that_waits_for_its_server_lives_and_is_not_ready() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let (address, drain) = (listener.local_addr().expect("bound"), Arc::new(Drain::default()));
    let serving = tokio::spawn(admin::serve_waiting(listener, drain.clone()));
    assert!(admin_page(address, "/live").await.starts_with("HTTP/1.1 200"));
    let ready = admin_page(address, "/ready").await;
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("waiting for the engine"), "{ready}");
    drain.stop();
    within("its end", serving).await.expect("no panic");
}

async fn admin_page(address: std::net::SocketAddr, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(address).await.expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.expect("open");
    let mut answer = String::new();
    within("a page", socket.read_to_string(&mut answer)).await.expect("text");
    answer
}
