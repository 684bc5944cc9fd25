//! Bodies on their way in: what a client may hold with one, and what one may become.

use router::http::FrontendConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::*;

async fn serve(config: FrontendConfig) -> Server {
    Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await
}

/// A request whose head is these lines.
async fn begin(server: &Server, lines: &str) -> TcpStream {
    let mut socket = TcpStream::connect(server.address).await.expect("listening");
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\n{lines}\r\n\r\n");
    socket.write_all(head.as_bytes()).await.expect("sent");
    socket
}

/// What comes back, up to the end of the error in it.
async fn error(socket: &mut TcpStream) -> String {
    let mut read = Vec::new();
    let reading = async {
        while !read.ends_with(b"}}") {
            assert_ne!(socket.read_buf(&mut read).await.expect("an answer"), 0, "{}", String::from_utf8_lossy(&read));
        }
    };
    tokio::time::timeout(DEADLINE, reading).await.expect("an answer in time");
    String::from_utf8(read).expect("UTF-8")
}

#[tokio::test]
async fn what_is_only_announced_takes_no_room() {
    let server = serve(FrontendConfig { preprocess_bytes: 1 << 20, ..Default::default() }).await;
    let mut silent = Vec::new();
    for length in [1 << 25, 1 << 25, 1 << 20, 1 << 16, 1 << 10].repeat(10) {
        silent.push(begin(&server, &format!("content-length: {length}")).await);
    }
    let large = json!({"messages": [{"role": "user", "content": "x".repeat(40 << 10)}]});
    assert_eq!(server.chat(large).await.error().3.as_deref(), Some("context_length_exceeded"));
    assert_eq!(server.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn a_body_that_stops_is_given_up_long_before_its_deadline() {
    let server = serve(FrontendConfig { body_timeout_s: 6, ..Default::default() }).await;
    let begun = std::time::Instant::now();
    let mut socket = begin(&server, "content-length: 1000").await;
    socket.write_all(b"{").await.expect("sent");
    let answer = error(&mut socket).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("too slowly"), "{answer}");
    assert!(begun.elapsed().as_secs() < 6);
}

#[tokio::test]
async fn a_body_of_very_many_values_is_refused_before_they_are_read() {
    let server = serve(FrontendConfig::default()).await;
    let many = |value: &str| format!("{}0", format!("{value},").repeat(150_000));
    for fields in [
        format!(r#""messages": [{}]"#, many(r#"{"role":"user","content":""}"#)),
        format!(r#""messages": [{{"role": "user", "content": [{}]}}]"#, many("{}")),
        format!(r#""messages": [{{"role": "user", "content": "x", "tool_calls": [{}]}}]"#, many("{}")),
        format!(r#""tools": [{}]"#, many(r#"{"":0}"#)),
        format!(r#""chat_template_kwargs": {{"a": [{}]}}"#, many("[]")),
        format!(r#""prompt": [{}]"#, many("[]")),
        format!(r#""stop": [[{}]]"#, many("[]")),
        format!(r#""nobody knows it": [{}]"#, many("[]")),
    ] {
        let body = format!(r#"{{"model": "m", {fields}}}"#);
        let answer = server.send("POST", "/v1/chat/completions", &[], body.into()).await;
        assert_eq!(answer.error().0, 413, "{fields:.60}");
        assert!(answer.body.contains("262144 JSON values"), "{}", answer.body);
    }
    let server = serve(FrontendConfig { max_json_values: 14, ..Default::default() }).await;
    let answer = server.chat(json!({})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(server.chat(json!({"x": [1, 2, 3, 4]})).await.status, 413, "small bodies too");
}

#[tokio::test]
async fn tools_that_no_context_holds_are_refused_by_their_size() {
    let server = serve(FrontendConfig::default()).await;
    let long = "x".repeat(CONTEXT as usize * 12 * 3 + 1);
    for (field, value) in [
        ("tools", json!([{"type": "function", "function": {"name": "f", "description": long}}])),
        ("chat_template_kwargs", json!({"a": [{"b": long}]})),
        ("documents", json!([long])),
    ] {
        let answer = server.chat(json!({field: value})).await;
        let (status, _, param, code) = answer.error();
        assert_eq!((status, param.as_deref(), code.as_deref()), (400, Some(field), Some("context_length_exceeded")));
        assert!(answer.body.contains(" bytes "), "{}", answer.body);
    }
}

#[tokio::test]
async fn a_client_that_is_still_sending_gets_to_see_that_its_body_is_too_large() {
    let server = serve(FrontendConfig { body_limit_bytes: 1 << 20, ..Default::default() }).await;
    let body = vec![b' '; 24 << 20];
    for head in [format!("content-length: {}", body.len()), "transfer-encoding: chunked".to_owned()] {
        let mut socket = begin(&server, &head).await;
        if head.starts_with("transfer") {
            let chunk = format!("{:x}\r\n", body.len());
            socket.write_all(chunk.as_bytes()).await.expect("sent");
        }
        socket.write_all(&body).await.expect("all of it can be sent");
        let answer = error(&mut socket).await;
        assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("over the limit of 1048576 bytes"), "{answer}");
    }
    // One that asks first is not told to go on.
    let answer = error(&mut begin(&server, "content-length: 5000000\r\nexpect: 100-continue").await).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[tokio::test]
async fn a_body_that_cannot_be_read_is_refused_with_the_cause() {
    let server = serve(FrontendConfig::default()).await;
    let mut socket = begin(&server, "transfer-encoding: chunked").await;
    socket.write_all(b"ZZ\r\nabc\r\n").await.expect("sent");
    let answer = error(&mut socket).await;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("nvalid"), "{answer}");
}
