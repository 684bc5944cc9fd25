//! Connections: clients that leave, silence, drain, limits.

use std::time::{Duration, Instant};

use bytes::Bytes;
use protocol::request_plane::FinishReason;
use router::http::FrontendConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::*;

async fn in_time<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(DEADLINE, future).await.expect("in time")
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let server = Server::start().await;
    for stream in [true, false] {
        // Before the first token.
        let _worker = server.backend.live();
        let body = json!({"model": "m", "stream": stream, "messages": [{"role": "user", "content": "Hi"}]}).to_string();
        let mut socket = TcpStream::connect(server.address).await.expect("listening");
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all((head + &body).as_bytes()).await.expect("sent");
        in_time(server.backend.started.notified()).await;
        drop(socket);
        in_time(server.backend.dropped.notified()).await;
    }
    // In the middle of the answer.
    let worker = server.backend.live();
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    response.piece().await.expect("a token");
    client.hang_up();
    in_time(server.backend.dropped.notified()).await;
    let metrics = server.get("/metrics").await.body;
    assert!(metrics.contains(r#"disconnected_clients_total{model="m"} 3"#), "{metrics}");
    assert!(metrics.contains(r#"status="client_closed"} 3"#));
}

#[tokio::test]
async fn silence_is_filled_with_comments_even_before_the_first_token() {
    let config = FrontendConfig { keep_alive_ms: 10, ..Default::default() };
    let server = Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await;
    let worker = server.backend.live();
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    // The head did not wait for a token: the blocks are what the router expects.
    assert_eq!(response.headers()["x-armature-reused-blocks"], "7");
    for _ in 0..3 {
        assert_eq!(response.piece().await.as_deref(), Some(": keep-alive\n\n"));
    }
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    worker.send(finished(FinishReason::Eos, 1, 0)).expect("a stream");
    let rest = response.whole().await.body;
    assert!(rest.contains("\"content\":\"a\"") && rest.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn silence_is_filled_even_before_a_worker_takes_the_request() {
    let config = FrontendConfig { keep_alive_ms: 10, ..Default::default() };
    let server = Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await;
    let take = server.backend.hold();
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    assert!(!response.headers().contains_key("x-armature-worker"));
    for _ in 0..2 {
        assert_eq!(response.piece().await.as_deref(), Some(": keep-alive\n\n"));
    }
    take.send(()).expect("the request waits");
    assert!(response.whole().await.body.contains("\"content\":\"ok\""));
    in_time(server.backend.dropped.notified()).await;
    // Its failure is an event then, and leaving cancels it.
    let held = server.backend.hold();
    let response = client.stream_chat(json!({})).await;
    drop(held);
    assert!(response.whole().await.body.contains("worker_failed"));
    in_time(server.backend.dropped.notified()).await;
    let _held = server.backend.hold();
    let response = client.stream_chat(json!({})).await;
    drop(response);
    client.hang_up();
    in_time(server.backend.dropped.notified()).await;
}

#[tokio::test]
async fn a_drain_lets_open_streams_finish() {
    let server = Server::start().await;
    let worker = server.backend.live();
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    response.piece().await.expect("a token");
    server.shutdown.cancel();
    in_time(async { while TcpStream::connect(server.address).await.is_ok() {} }).await;
    worker.send(text("b")).expect("a stream");
    worker.send(finished(FinishReason::Eos, 2, 0)).expect("a stream");
    let rest = response.whole().await.body;
    assert!(rest.contains("\"content\":\"b\"") && rest.contains("\"finish_reason\":\"stop\""));
    in_time(server.task).await.expect("the server has ended");
}

#[tokio::test]
async fn a_drain_that_runs_out_ends_streams_with_an_error() {
    let config = FrontendConfig { drain_timeout_s: 0, ..Default::default() };
    let server = Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await;
    let workers = [server.backend.live(), server.backend.live()];
    workers[0].send(first(&byte_tokens("a"), 0)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    response.piece().await.expect("a token");
    in_time(server.backend.started.notified()).await;
    let waiting = async { server.chat(json!({})).await };
    let stop = async {
        in_time(server.backend.started.notified()).await;
        server.shutdown.cancel();
    };
    let (answer, ()) = tokio::join!(waiting, stop);
    assert_eq!(answer.error().3.as_deref(), Some("shutting_down"));
    let rest = response.whole().await.body;
    assert!(rest.contains("shutting_down") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    in_time(server.task).await.expect("the server has ended");
}

#[tokio::test]
async fn an_idle_connection_does_not_hold_up_the_drain() {
    let server = Server::start().await;
    let mut idle = TcpStream::connect(server.address).await.expect("listening");
    let mut kept = server.connect().await;
    kept.send("GET", "/live", &[], Bytes::new()).await.whole().await;
    server.shutdown.cancel();
    in_time(server.task).await.expect("the server has ended");
    let mut rest = Vec::new();
    assert!(in_time(idle.read_to_end(&mut rest)).await.is_ok_and(|read| read == 0) || rest.is_empty());
}

#[tokio::test]
async fn a_connection_is_used_for_many_requests() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    for _ in 0..20 {
        let answer = client.stream_chat(json!({})).await.whole().await;
        assert_eq!(streamed_text(&answer.events(), 0), "ok");
    }
}

#[tokio::test]
async fn a_streamed_token_waits_for_no_acknowledgement() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    let (mut streamed, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..25 {
        let begun = Instant::now();
        client.stream_chat(json!({})).await.whole().await;
        streamed.push(begun.elapsed());
        let mut fields = json!({});
        chat_fields(&mut fields);
        let begun = Instant::now();
        client.send("POST", "/v1/chat/completions", &[], fields.to_string().into()).await.whole().await;
        whole.push(begun.elapsed());
    }
    streamed.sort();
    whole.sort();
    // Without TCP_NODELAY the end of each stream waits for the client's delayed acknowledgement, 40 ms.
    let more = streamed[12].saturating_sub(whole[12]);
    assert!(more < Duration::from_millis(20), "a stream takes {more:?} more, in the middle of 25");
}

#[tokio::test]
async fn a_body_without_length_is_bounded_too() {
    let config = FrontendConfig { body_limit_bytes: 1000, ..Default::default() };
    let server = Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await;
    let mut socket = TcpStream::connect(server.address).await.expect("listening");
    let head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("{:x}\r\n{}\r\n", 600, "x".repeat(600));
    socket.write_all(format!("{head}{chunk}{chunk}").as_bytes()).await.expect("sent");
    let mut answer = [0; 12];
    in_time(socket.read_exact(&mut answer)).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn the_connection_limit_makes_clients_wait_not_fail() {
    let config = FrontendConfig { max_connections: 1, ..Default::default() };
    let server = Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await;
    let mut holder = server.connect().await;
    holder.send("GET", "/live", &[], Bytes::new()).await.whole().await;
    let second = server.get("/live");
    holder.hang_up();
    assert_eq!(in_time(second).await.status, 200);
}

#[tokio::test]
async fn http_2_is_served_on_the_same_port() {
    use http_body_util::{BodyExt, Full};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    let server = Server::start().await;
    let socket = TcpStream::connect(server.address).await.expect("listening");
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await.expect("HTTP/2");
    let connection = tokio::spawn(connection);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": true}).to_string();
    let request =
        hyper::Request::post("http://t/v1/chat/completions").body(Full::new(Bytes::from(body))).expect("a request");
    let response = in_time(sender.send_request(request)).await.expect("an answer");
    assert_eq!(response.status(), 200);
    let body = in_time(response.into_body().collect()).await.expect("a body").to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
    connection.abort();
}
