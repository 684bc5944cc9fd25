//! Clients that hold on to the router: silence, half a request, no reading; and more work than there is room for.

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
async fn bodies_over_the_room_for_them_are_refused_for_now() {
    let config = FrontendConfig { preprocess_bytes: 64 << 10, body_limit_bytes: 64 << 10, ..Default::default() };
    let server = serve(config).await;
    for head in ["content-length: 65000", "transfer-encoding: chunked"] {
        let mut holder = TcpStream::connect(server.address).await.expect("listening");
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: t\r\n{head}\r\n\r\n");
        holder.write_all(head.as_bytes()).await.expect("sent");
        metric(&server, "armature_frontend_preprocessing_bytes 65536").await;
        let answer = server.chat(json!({})).await;
        let (status, kind, _, code) = answer.error();
        assert_eq!((status, kind.as_str(), code.as_deref()), (429, "rate_limit_error", Some("overloaded")));
        assert_eq!(answer.header("retry-after"), "1");
        drop(holder);
        metric(&server, "armature_frontend_preprocessing_bytes 0").await;
        assert_eq!(server.chat(json!({})).await.status, 200);
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
