//! Clients that hold on to the router: silence, half a request, no reading; and more work than there is room for.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use protocol::request_plane::FinishReason;
use router::http::FrontendConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::harness::*;

async fn in_time<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(DEADLINE, future).await.expect("in time")
}

async fn serve(config: FrontendConfig) -> Server {
    Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await
}

/// Waits until `/metrics` has this line.
async fn metric(server: &Server, line: &str) {
    in_time(async {
        while !server.get("/metrics").await.body.lines().any(|found| found == line) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn silence_and_half_a_request_are_ended_but_no_slow_answer() {
    let server = serve(FrontendConfig { header_timeout_s: 1, ..Default::default() }).await;
    let take = server.backend.hold();
    let slow = server.chat(json!({}));
    let ended = async {
        in_time(server.backend.started.notified()).await;
        for begin in ["", "P", "PRI * HTTP/2.0\r\n", "GET /live HTTP/1.1\r\nhost: "] {
            let mut socket = TcpStream::connect(server.address).await.expect("listening");
            socket.write_all(begin.as_bytes()).await.expect("sent");
            let mut rest = Vec::new();
            let _ = in_time(socket.read_to_end(&mut rest)).await;
            assert!(!rest.starts_with(b"HTTP/1.1 200"), "{begin:?}");
        }
        take.send(()).expect("the request waits");
    };
    let (answer, ()) = tokio::join!(slow, ended);
    assert_eq!(answer.status, 200);
    metric(&server, "armature_frontend_connections 1").await;
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_request() {
    let server = serve(FrontendConfig { write_timeout_s: 1, ..Default::default() }).await;
    let worker = server.backend.live();
    // More than the buffers of both sockets hold.
    let piece = byte_tokens(&"x".repeat(1 << 20));
    for _ in 0..12 {
        worker.send(tokens(&piece)).expect("a stream");
    }
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4 << 10).expect("a socket option");
    let mut socket = socket.connect(server.address).await.expect("listening");
    let body = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}).to_string();
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all((head + &body).as_bytes()).await.expect("sent");
    in_time(worker.closed()).await;
    metric(&server, r#"armature_frontend_disconnected_clients_total{model="m"} 1"#).await;
    drop(socket);
}

#[tokio::test]
async fn a_stream_of_http_2_without_window_loses_its_request() {
    let server = serve(FrontendConfig { write_timeout_s: 1, ..Default::default() }).await;
    let socket = TcpStream::connect(server.address).await.expect("listening");
    // The client's library answers pings.
    let mut builder = http2::Builder::new(TokioExecutor::new());
    let builder = builder.initial_stream_window_size(0).initial_connection_window_size(1 << 20);
    let (mut sender, connection) = builder.handshake(TokioIo::new(socket)).await.expect("HTTP/2");
    let connection = tokio::spawn(connection);
    let worker = server.backend.live();
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    for stream in [true, false] {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}).to_string();
        let request = hyper::Request::post("http://t/v1/chat/completions").body(Full::new(Bytes::from(body)));
        let response = in_time(sender.send_request(request.expect("a request"))).await.expect("an answer");
        assert_eq!(response.status(), 200);
        in_time(response.into_body().collect()).await.expect_err("the stream is reset");
    }
    in_time(worker.closed()).await;
    metric(&server, "armature_frontend_inflight_requests 0").await;
    metric(&server, r#"armature_frontend_disconnected_clients_total{model="m"} 1"#).await;
    assert!(!connection.is_finished(), "the other streams of the connection may be of use");
    connection.abort();
}

#[tokio::test]
async fn a_long_answer_arrives_whole_over_http_2() {
    let server = serve(FrontendConfig { write_timeout_s: 1, ..Default::default() }).await;
    let socket = TcpStream::connect(server.address).await.expect("listening");
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await.expect("HTTP/2");
    let connection = tokio::spawn(connection);
    for stream in [true, false] {
        let text = "x".repeat(3 << 20);
        server.backend.script(vec![tokens(&byte_tokens(&text)), finished(FinishReason::Eos, 3 << 20, 0)]);
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}).to_string();
        let request = hyper::Request::post("http://t/v1/chat/completions").body(Full::new(Bytes::from(body)));
        let response = in_time(sender.send_request(request.expect("a request"))).await.expect("an answer");
        let (head, body) = response.into_parts();
        let body = in_time(body.collect()).await.expect("a whole body").to_bytes();
        let body = String::from_utf8(body.to_vec()).expect("UTF-8");
        let answer = Answer { status: head.status, headers: head.headers, body };
        let arrived = match stream {
            true => streamed_text(&answer.events(), 0),
            false => answer.json()["choices"][0]["message"]["content"].as_str().expect("a text").to_owned(),
        };
        assert!(arrived == text, "{} of {} bytes", arrived.len(), text.len());
    }
    connection.abort();
}

#[tokio::test]
async fn a_long_answer_that_is_read_arrives_whole() {
    let server = serve(FrontendConfig { write_timeout_s: 1, ..Default::default() }).await;
    let worker = server.backend.live();
    let piece = byte_tokens(&"x".repeat(1 << 20));
    for _ in 0..4 {
        worker.send(tokens(&piece)).expect("a stream");
    }
    worker.send(finished(FinishReason::Eos, 4 << 20, 0)).expect("a stream");
    let mut client = server.connect().await;
    let answer = client.stream_chat(json!({})).await.whole().await;
    assert_eq!(streamed_text(&answer.events(), 0), "x".repeat(4 << 20));
}

#[tokio::test]
async fn large_bodies_over_the_room_for_them_are_refused_for_now_and_small_ones_served() {
    let config = FrontendConfig { preprocess_bytes: 64 << 10, body_limit_bytes: 64 << 10, ..Default::default() };
    let server = serve(config).await;
    let large = || json!({"messages": [{"role": "user", "content": "x".repeat(40 << 10)}]});
    for head in ["content-length: 65000\r\n\r\n", "transfer-encoding: chunked\r\n\r\nfde8\r\n"] {
        let mut holder = TcpStream::connect(server.address).await.expect("listening");
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: t\r\n{head}");
        holder.write_all(head.as_bytes()).await.expect("sent");
        holder.write_all(&[b' '; 64_000]).await.expect("sent");
        // An eighth is kept for small ones.
        metric(&server, "armature_frontend_preprocessing_bytes 57344").await;
        let answer = server.chat(large()).await;
        let (status, kind, _, code) = answer.error();
        assert_eq!((status, kind.as_str(), code.as_deref()), (429, "rate_limit_error", Some("overloaded")));
        assert_eq!(answer.header("retry-after"), "1");
        assert_eq!(server.chat(json!({})).await.status, 200);
        drop(holder);
        metric(&server, "armature_frontend_preprocessing_bytes 0").await;
        assert_eq!(server.chat(large()).await.error().3.as_deref(), Some("context_length_exceeded"), "there is room");
    }
}

#[tokio::test]
async fn a_request_with_a_worker_takes_no_room() {
    let config = FrontendConfig { preprocess_bytes: 1 << 10, ..Default::default() };
    let server = serve(config).await;
    let take = server.backend.hold();
    let second = async {
        in_time(server.backend.started.notified()).await;
        let answer = server.chat(json!({})).await;
        take.send(()).expect("the request waits");
        answer
    };
    let (first, second) = tokio::join!(server.chat(json!({})), second);
    assert_eq!((first.status.as_u16(), second.status.as_u16()), (200, 200));
}

#[tokio::test]
async fn large_requests_over_the_limit_of_jobs_are_refused_for_now() {
    let server = serve(FrontendConfig { preprocess_jobs: 1, ..Default::default() }).await;
    let large = || json!({"messages": [{"role": "user", "content": "x".repeat(40 << 10)}]});
    let release = server.backend.block_lookup();
    let second = async {
        metric(&server, "armature_frontend_preprocessing_jobs 1").await;
        // The job is counted before its thread runs; the small request below must not be the one that waits.
        in_time(async {
            while !server.backend.lookup_waits() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let refused = server.chat(large()).await;
        assert_eq!(server.chat(json!({})).await.status, 200, "small requests need no job");
        release.send(()).expect("the lookup waits");
        refused
    };
    let (first, refused) = tokio::join!(server.chat(large()), second);
    assert_eq!(first.error().3.as_deref(), Some("context_length_exceeded"));
    assert_eq!((refused.error().0, refused.header("retry-after")), (429, "1"));
    metric(&server, "armature_frontend_preprocessing_jobs 0").await;
    metric(&server, "armature_frontend_preprocessing_bytes 0").await;
}
