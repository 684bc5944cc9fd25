//! From settings to the last frame: start, registration, drain, end.

use protocol::metadata::REQUEST_CODEC;
use protocol::request_plane::{ErrorCode, server_frame::Body};
use tokio::io::AsyncReadExt;
use tokio_util::sync::CancellationToken;
use worker_agent::agent::{AgentError, Listeners, run};

use crate::harness::*;

#[tokio::test]
async fn a_worker_registers_what_it_serves() {
    let worker = Worker::start(&["--role", "prefill", "--revision", "7", "--labels", "zone=a"]).await;
    let metadata = worker.metadata().expect("registered");
    let hello = worker.hello();
    let key = |endpoint: &str| format!("test/prefill/{endpoint}/{:x}", hello.instance_id);
    let endpoint = &metadata.endpoints[&key("generate")];
    assert_eq!(endpoint.request_plane_codec.as_deref(), Some(REQUEST_CODEC));
    assert!(
        metadata.event_channels[&key("events")].transport["zmq"]
            .as_str()
            .is_some_and(|zmq| zmq.starts_with("tcp://127."))
    );
    assert_eq!(metadata.model_cards[&key("generate")].card_json, worker.card());
    let card = worker.card();
    assert_eq!((card.display_name.as_str(), card.context_length, card.kv_cache_block_size), ("scripted", 2048, 16));
    assert_eq!((card.worker_type.as_deref(), card.runtime_config.total_kv_blocks), (Some("prefill"), Some(512)));
    assert!(card.runtime_config.enable_local_indexer);
    let armature = worker.armature();
    assert_eq!((armature.eos_token_ids, armature.bos_token_id, armature.draining), (vec![2], Some(1), false));
    assert_eq!((armature.revision.as_str(), armature.labels["zone"].as_str()), ("7", "a"));
    assert_eq!(hello.instance_id, protocol::metadata::instance_id(&format!("w0:{}", hello.boot_epoch)));
    assert!(worker.get("/live").await.starts_with("HTTP/1.1 200"));
    assert!(worker.get("/health").await.contains("\"status\":\"ready\""));
    assert!(worker.get("/nothing").await.starts_with("HTTP/1.1 404"));
}

#[tokio::test]
async fn a_deleted_registration_comes_back() {
    let worker = Worker::start(&[]).await;
    std::fs::remove_file(worker.file().expect("registered")).expect("its file");
    until("the registration's return", || worker.metadata()).await;
    let file = worker.file().expect("registered");
    worker.stop().await.expect("a clean end");
    assert!(!file.exists(), "an ended worker is not registered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_finishes_what_runs_and_refuses_the_rest() {
    let mut worker = Worker::start(&[]).await;
    assert!(worker.get("/ready").await.starts_with("HTTP/1.1 200"));
    let mut router = worker.router().await;
    router.generate(1).await;
    let submission = worker.next_submission().await;
    submission.first(1);
    router.output(1).await;

    worker.shutdown.cancel();
    assert!(matches!(router.recv().await.body, Some(Body::Draining(_))));
    router.generate(2).await;
    assert_eq!(router.failed(2).await.code(), ErrorCode::Draining);
    until("the registration to say draining", || worker.armature().draining.then_some(())).await;
    assert!(worker.get("/ready").await.starts_with("HTTP/1.1 503"));
    let mut late = worker.router().await;
    assert!(matches!(late.recv().await.body, Some(Body::Draining(_))), "a late router is told, too");
    drop(late);

    submission.token(2);
    assert_eq!(router.output(1).await.token_ids, [2]);
    assert!(!worker.running.is_finished());
    let file = worker.file().expect("registered");
    submission.finish(2);
    assert!(matches!(router.recv().await.body, Some(Body::Finished(_))));
    assert_eq!(router.recv_or_end().await, None);
    worker.stop().await.expect("a clean end");
    assert!(!file.exists());
}

#[tokio::test]
async fn a_drain_has_an_end() {
    let mut worker = Worker::start(&["--drain-s-max", "0"]).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let submission = worker.next_submission().await;
    worker.stop().await.expect("a clean end");
    submission.cancelled().await;
    let mut told = None;
    while let Some(frame) = router.recv_or_end().await {
        match frame.body {
            Some(Body::Failed(failed)) if frame.stream_id == 1 => told = Some((failed.code(), failed.message)),
            Some(Body::Draining(_)) => {}
            other => panic!("unexpected: {other:?}"),
        }
    }
    let why = "worker w0 is shutting down; its drain deadline of 0 s passed";
    assert_eq!(told, Some((ErrorCode::Draining, why.to_owned())));
}

#[tokio::test]
async fn silent_admin_connections_keep_no_probe_waiting() {
    let worker = Worker::start(&[]).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(tokio::net::TcpStream::connect(worker.admin).await.expect("accepted"));
    }
    assert!(worker.get("/live").await.starts_with("HTTP/1.1 200"));
    let mut first = silent.swap_remove(0);
    let closed = within("the end of the oldest", first.read(&mut [0])).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "only so many are kept: {closed:?}");
    worker.stop().await.expect("a clean end");
}

#[tokio::test]
async fn a_discovery_directory_that_is_a_file_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("file");
    std::fs::write(&path, "").expect("a writable directory");
    let config = config(&path, &[]);
    let listeners = Listeners::bind(&config.settings().expect("valid")).await.expect("free ports");
    let error = run(config, engine().0, model(), listeners, CancellationToken::new()).await.expect_err("refused");
    assert_eq!(error.to_string(), format!("--discovery-dir {} is not a directory", path.display()));
}

#[tokio::test]
async fn an_engine_that_stops_ends_the_agent() {
    let mut worker = Worker::start(&[]).await;
    let (events, _) = tokio::sync::mpsc::unbounded_channel();
    drop(std::mem::replace(&mut worker.events, events));
    let file = worker.file().expect("registered");
    let ended = within("the agent's end", &mut worker.running).await.expect("no panic");
    assert_eq!(ended.expect_err("an error").to_string(), "the engine has stopped");
    assert!(!file.exists());
}

/// Case 9: all ranks publish through their agent's one port, and whoever finds it taken is told so before anything is served.
#[tokio::test]
async fn a_port_of_events_that_is_in_use_is_named_with_its_flag() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut config = config(dir.path(), &[]);
    let first = Listeners::bind(&config.settings().expect("valid")).await.expect("free ports");
    config.event_port = first.events.local_addr().expect("bound").port();
    let error = Listeners::bind(&config.settings().expect("valid")).await.expect_err("the port is taken");
    let port = config.event_port;
    assert_eq!(error.to_string(), format!("port {port} on 127.0.0.1 is in use; choose another with --event-port"));
}

#[tokio::test]
async fn wrong_settings_and_ports_in_use_are_one_line() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let good = config(dir.path(), &[]);
    let listeners = Listeners::bind(&good.settings().expect("valid")).await.expect("free ports");
    let taken = listeners.request.local_addr().expect("bound").port().to_string();
    let mut busy = good.clone();
    busy.port = taken.parse().expect("a port");
    let error = Listeners::bind(&busy.settings().expect("valid")).await.expect_err("the port is taken");
    assert_eq!(error.to_string(), format!("port {taken} on 127.0.0.1 is in use; choose another with --port"));

    let mut bad = good;
    bad.block_size = 17;
    let error = run(bad, engine().0, model(), listeners, CancellationToken::new()).await.expect_err("refused");
    assert!(matches!(error, AgentError::Config(_)), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 0, "nothing was registered");
}
