//! Servers that refuse, stall, die and come back; clients that leave or do not read.

use std::time::Duration;

use serde_json::json;

use crate::client::{Client, PATIENCE};
use crate::harness::*;
use crate::server::{Behaviour, Server, done, finish, token};

const ROUND_ROBIN: &str = "--router-mode=round-robin";

#[tokio::test]
async fn a_dead_server_gets_nothing_until_it_is_back() {
    let (mut a, b) = (Server::start("a").await, Server::start("b").await);
    let router = Router::start(&[&a, &b], &[ROUND_ROBIN]).await;
    a.kill().await;
    for _ in 0..4 {
        let answer = router.chat(json!({})).await;
        assert_eq!((answer.status, answer.header("x-armature-worker")), (200, b.name()));
    }
    router.until_routable(1).await;
    a.revive().await;
    router.until_routable(2).await;
    for _ in 0..2 {
        assert_eq!(router.chat(json!({})).await.status, 200);
    }
    assert!(!a.seen().is_empty(), "it takes part again");
}

#[tokio::test]
async fn without_any_server_requests_are_unavailable_not_wrong() {
    let mut server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    server.kill().await;
    assert_eq!(router.chat(json!({})).await.error(), (503, None, Some("no_worker".into())));
    assert_eq!(router.get("/v1/models").await.json()["data"][0]["id"], "tiny", "its models are remembered");
    router.until_routable(0).await;
    assert_eq!(router.chat(json!({})).await.error().0, 503);
    assert_eq!(router.chat(json!({"model": "never"})).await.error().0, 404);
}

#[tokio::test]
async fn a_server_that_dies_before_its_answer_is_replaced() {
    for (behaviour, stream) in [
        (Behaviour::DieAtOnce, false),
        (Behaviour::DieAtOnce, true),
        (Behaviour::Status(500, "{}".into()), true),
        (Behaviour::Status(503, "loading".into()), false),
        (Behaviour::Status(429, "{}".into()), true),
    ] {
        let (bad, good) = (Server::start("bad").await, Server::start("good").await);
        let router = Router::start(&[&bad, &good], &[ROUND_ROBIN]).await;
        bad.behave(behaviour.clone());
        for _ in 0..2 {
            let answer = router.chat(json!({"stream": stream})).await;
            assert_eq!((answer.status, answer.header("x-armature-worker")), (200, good.name()), "{behaviour:?}");
        }
        assert!(!bad.seen().is_empty() && good.seen().len() == 2);
        assert_eq!(router.metric("armature_router_requests_in_flight").await, 0.0);
    }
}

#[tokio::test]
async fn when_no_server_will_the_client_hears_why() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    let complaint = r#"{"error": {"message": "the queue is full"}}"#;
    for (status, expected) in [(429, (429, "overloaded")), (500, (502, "worker_failed")), (503, (502, "worker_failed"))]
    {
        server.behave(Behaviour::Status(status, complaint.into()));
        let answer = router.chat(json!({"stream": true})).await;
        assert_eq!(answer.error(), (expected.0, None, Some(expected.1.into())));
        assert!(answer.body.contains("the queue is full"), "{}", answer.body);
    }
}

#[tokio::test]
async fn a_server_that_dies_on_the_way_ends_the_stream_with_an_error() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    server.behave(Behaviour::DieAfter(2));
    let answer = router.chat(json!({"stream": true})).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    let (last, before) = events.split_last().expect("events");
    assert_eq!(before.len(), 2, "whole events only");
    assert_eq!(last["error"]["code"], "worker_failed");
    assert!(last["error"]["message"].as_str().expect("a message").contains(&server.name()));
    // The same when the stream just ends.
    server.behave(Behaviour::Pieces(vec![token(0)]));
    let mut response = router.open(json!({"stream": true})).await;
    assert_eq!(response.piece().await, Some(token(0)));
    server.end();
    assert_eq!(response.whole().await.events()[0]["error"]["code"], "worker_failed");
    // A finish reason is an end, whether [DONE] follows or not.
    server.behave(Behaviour::Pieces(vec![finish()]));
    let mut response = router.open(json!({"stream": true})).await;
    assert_eq!(response.piece().await, Some(finish()));
    server.end();
    assert_eq!(response.piece().await, None);
    router.until("all are freed", |metrics| value(metrics, "armature_router_requests_in_flight") == 0.0).await;
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_by_the_server() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    let body = |stream: bool| chat(json!({"stream": stream})).to_string();
    // While its answer streams, and while nothing has come yet.
    server.behave(Behaviour::Pieces(vec![token(0)]));
    let mut client = router.client().await;
    let mut response = client.send("POST", "/v1/chat/completions", &[], body(true)).await;
    assert_eq!(response.piece().await, Some(token(0)));
    client.hang_up();
    until("the stream is abandoned", || server.abandoned() == 1).await;
    server.behave(Behaviour::Silent);
    for (at, stream) in [false, true].into_iter().enumerate() {
        let mut client = Client::connect(router.address).await;
        let seen = server.seen().len();
        let request = tokio::spawn(async move { client.send("POST", "/v1/chat/completions", &[], body(stream)).await });
        until("the request is there", || server.seen().len() > seen).await;
        request.abort();
        until("the request is abandoned", || server.abandoned() == at + 2).await;
    }
    router.until("all are freed", |metrics| value(metrics, "armature_router_requests_in_flight") == 0.0).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_the_server() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    server.behave(Behaviour::Flood);
    let response = router.open(json!({"stream": true})).await;
    // Buffers of four sockets fill up; then nothing more is sent.
    let mut last = 0;
    let settled = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(200));
        loop {
            ticks.tick().await;
            let sent = server.sent();
            if sent > 0 && sent == last {
                return sent;
            }
            last = sent;
        }
    };
    let sent = tokio::time::timeout(PATIENCE, settled).await.expect("it stops");
    assert!(sent < 64 << 20, "{sent} bytes");
    drop(response);
    router.until("it is freed", |metrics| value(metrics, "armature_router_requests_in_flight") == 0.0).await;
}

#[tokio::test]
async fn a_stuck_server_is_left_out_and_holds_up_nobody() {
    let (stuck, well) = (Server::start("stuck").await, Server::start("well").await);
    stuck.health(None);
    let router = Router::before(&[&stuck, &well], &["--worker-check-timeout-secs=0.2"]).await;
    router.until_routable(1).await;
    let answer = router.chat(json!({})).await;
    assert_eq!((answer.status, answer.header("x-armature-worker")), (200, well.name()));
    stuck.health(Some(200));
    router.until_routable(2).await;
    // Health counts, not only whether somebody listens.
    stuck.health(Some(503));
    router.until_routable(1).await;
    // A server without that page is asked for its models alone.
    stuck.health(Some(404));
    router.until_routable(2).await;
}

#[tokio::test]
async fn a_router_is_ready_when_its_servers_have_been_asked() {
    let stuck = Server::start("stuck").await;
    stuck.health(None);
    let router = Router::before(&[&stuck], &["--worker-check-timeout-secs=1.5"]).await;
    assert_eq!(router.get("/ready").await.status, 503);
    assert_eq!(router.chat(json!({})).await.error().0, 503, "unknown models may yet come");
    let ready = async {
        while router.get("/ready").await.status != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, ready).await.expect("ready in time");
    router.stop().await;
}

#[tokio::test]
async fn deadlines_end_requests_and_name_the_stage() {
    let server = Server::start("a").await;
    let flags = ["--first-token-timeout-secs=0.1", "--answer-timeout-secs=0.2", "--token-timeout-secs=0.1"];
    let router = Router::start(&[&server], &flags).await;
    server.behave(Behaviour::Silent);
    for (stream, stage) in [(true, "waiting for the first token"), (false, "waiting for the answer")] {
        let answer = router.chat(json!({"stream": stream})).await;
        assert_eq!(answer.error(), (504, None, Some("deadline_exceeded".into())));
        assert!(answer.body.contains(stage), "{}", answer.body);
    }
    server.behave(Behaviour::Pieces(vec![token(0)]));
    let events = router.chat(json!({"stream": true})).await.events();
    assert_eq!((events.len(), &events[1]["error"]["code"]), (2, &json!("deadline_exceeded")));
    until("the server is told", || server.abandoned() == 3).await;
}

#[tokio::test]
async fn a_client_hears_comments_while_nothing_comes() {
    let slow = Server::start("slow").await;
    let router = Router::start(&[&slow], &["--keep-alive-ms=50", "--first-token-timeout-secs=0.5"]).await;
    slow.behave(Behaviour::Pieces(vec![]));
    let mut response = router.open(json!({"stream": true})).await;
    assert_eq!((response.status().as_u16(), response.header("content-type").as_str()), (200, "text/event-stream"));
    assert_eq!(response.piece().await.as_deref(), Some(": keep-alive\n\n"));
    slow.say(&token(0));
    let mut piece = response.piece().await.expect("more");
    while piece.starts_with(':') {
        piece = response.piece().await.expect("more");
    }
    assert_eq!(piece, token(0));
    assert_eq!(response.piece().await.as_deref(), Some(": keep-alive\n\n"), "between tokens too");
    // An error that comes after the head is an event.
    slow.behave(Behaviour::Silent);
    let answer = router.chat(json!({"stream": true})).await;
    assert_eq!((answer.status, &answer.events()[0]["error"]["code"]), (200, &json!("deadline_exceeded")));
}

#[tokio::test]
async fn a_router_that_goes_down_ends_its_streams() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &["--drain-timeout-s=0"]).await;
    server.behave(Behaviour::Pieces(vec![token(0)]));
    let mut response = router.open(json!({"stream": true})).await;
    assert_eq!(response.piece().await, Some(token(0)));
    let (ended, ()) = tokio::join!(response.whole(), router.stop());
    assert_eq!(ended.events()[0]["error"]["code"], "shutting_down");
    assert!(ended.body.ends_with(&done()));
    until("the server is told", || server.abandoned() == 1).await;
}

#[tokio::test]
async fn a_kept_connection_that_the_server_closed_is_replaced() {
    let mut server = Server::start("a").await;
    let router = Router::start(&[&server], &["--worker-check-interval-secs=60"]).await;
    for _ in 0..5 {
        assert_eq!(router.chat(json!({})).await.status, 200);
        // The router's idle connection to it closes with it.
        server.kill().await;
        server.revive().await;
    }
    assert_eq!(server.seen().len(), 5);
}
