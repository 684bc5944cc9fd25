//! Requests and answers go through as they are; bad ones go nowhere.

use serde_json::{Value, json};

use crate::harness::*;
use crate::server::{Behaviour, Server, done, finish, token};

const JSON: (&str, &str) = ("content-type", "application/json; charset=utf-8");

#[tokio::test]
async fn a_request_arrives_as_it_was_sent() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    // Neither the order of the fields, nor the spaces, nor what no router knows, may change.
    let body = "{ \"messages\":[ {\"content\":\"H\\u0069\",\"role\":\"user\"}], \"unknown\": {\"b\":1,\"a\":[2.50]},\n\"model\":\"tiny\" }";
    let headers = [
        JSON,
        ("authorization", "Bearer secret"),
        ("x-request-id", "mine"),
        ("user-agent", "test/1"),
        ("accept-encoding", "gzip"),
        ("connection", "keep-alive, x-hop"),
        ("x-hop", "1"),
        ("te", "trailers"),
    ];
    let mut client = router.client().await;
    let answer = client.send("POST", "/v1/chat/completions", &headers, body).await.whole().await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let seen = &server.seen()[0];
    assert_eq!((seen.path.as_str(), &seen.body[..]), ("/v1/chat/completions", body.as_bytes()));
    let header = |name: &str| seen.headers.get(name).map_or("", |value| value.to_str().expect("text"));
    assert_eq!(
        (header("authorization"), header("x-request-id"), header("user-agent")),
        ("Bearer secret", "mine", "test/1")
    );
    assert_eq!((header("host"), header("content-type")), (server.name().as_str(), JSON.1));
    for dropped in ["accept-encoding", "connection", "x-hop", "te"] {
        assert!(!seen.headers.contains_key(dropped), "{dropped}");
    }
    assert_eq!((answer.header("x-request-id"), answer.header("x-server")), ("mine".into(), "1".into()));
    assert_eq!(answer.header("x-armature-worker"), server.name());
    assert!(answer.header("x-armature-worker-id").parse::<u64>().is_ok());
    assert_eq!(answer.header("x-armature-reused-blocks"), "0");
    assert_eq!(answer.json()["id"], "a");
}

#[tokio::test]
async fn a_stream_comes_back_as_it_was_sent() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    let answer = router.chat(json!({"stream": true})).await;
    let expected: String = (0..3).map(token).chain([finish(), done()]).collect();
    assert_eq!((answer.status, answer.body), (200, expected));
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(answer.headers["x-accel-buffering"], "no");
    // A piece goes out when it comes, not when the next one does.
    server.behave(Behaviour::Pieces(vec![token(0)]));
    let mut response = router.open(json!({"stream": true})).await;
    assert_eq!(response.piece().await, Some(token(0)));
    server.say(&token(1));
    assert_eq!(response.piece().await, Some(token(1)));
    let (half, rest) = (&token(2)[..20], format!("{}{}", &token(2)[20..], finish()));
    server.say(half);
    server.say(&rest);
    assert_eq!(response.piece().await, Some(token(2) + &finish()), "events stay whole");
    server.say(&done());
    server.end();
    assert_eq!(response.whole().await.body, done());
}

#[tokio::test]
async fn completions_and_what_only_servers_can_judge_go_through() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    let mut client = router.client().await;
    for (path, body) in [
        ("/v1/completions", json!({"model": "tiny", "prompt": "Hi", "suffix": "x", "echo": true})),
        ("/v1/completions", json!({"model": "tiny", "prompt": ["a", "b"], "n": 2})),
        ("/v1/completions", json!({"model": "tiny", "prompt": [1, 99999]})),
        ("/v1/chat/completions", chat(json!({"response_format": {"type": "json_object"}, "guided_json": {}}))),
        (
            "/v1/chat/completions",
            chat(json!({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]})),
        ),
        (
            "/v1/chat/completions",
            chat(json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": "http://images/1"}}]}]})),
        ),
    ] {
        let answer = client.post(path, &body).await.whole().await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
        let seen = server.seen().pop().expect("it came");
        assert_eq!((seen.path.as_str(), serde_json::from_slice::<Value>(&seen.body).expect("JSON")), (path, body));
    }
}

#[tokio::test]
async fn bad_requests_are_answered_before_any_server_is_chosen() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    let mut client = router.client().await;
    for (fields, param) in [
        (json!({"model": 3}), Some("model")),
        (json!({"model": ""}), Some("model")),
        (json!({"messages": []}), Some("messages")),
        (json!({"messages": [{"role": "user"}]}), Some("messages[0].content")),
        (json!({"messages": [{"role": "boss", "content": "x"}]}), Some("messages[0].role")),
        (json!({"max_tokens": 0}), Some("max_tokens")),
        (json!({"temperature": 3}), Some("temperature")),
        (json!({"n": 0}), Some("n")),
        (json!({"stop": [1]}), Some("stop[0]")),
        (json!({"stream_options": {"include_usage": true}}), Some("stream_options")),
    ] {
        let answer = client.post("/v1/chat/completions", &chat(fields.clone())).await.whole().await;
        let (status, at, _) = answer.error();
        assert_eq!((status, at.as_deref()), (400, param), "{fields}");
    }
    let answer = client.send("POST", "/v1/completions", &[JSON], "{\"model\": \"tiny\"").await.whole().await;
    assert_eq!(answer.error().0, 400);
    let answer = client.send("POST", "/v1/completions", &[("content-type", "text/plain")], "x").await.whole().await;
    assert_eq!(answer.error().1.as_deref(), Some("content-type"));
    let answer = client.post("/v1/completions", &json!({"model": "tiny"})).await.whole().await;
    assert_eq!(answer.error().1.as_deref(), Some("prompt"));
    let answer = client.post("/v1/chat/completions", &chat(json!({"model": "other"}))).await.whole().await;
    assert_eq!(answer.error(), (404, Some("model".into()), Some("model_not_found".into())));
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn a_servers_refusal_is_the_clients_business() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    for (status, label) in
        [(400, "invalid_request"), (401, "invalid_request"), (404, "not_found"), (422, "invalid_request")]
    {
        let body = r#"{"error": {"message": "guided_json is malformed", "type": "BadRequestError"}}"#;
        server.behave(Behaviour::Status(status, body.into()));
        for stream in [false, true] {
            let answer = router.chat(json!({"stream": stream})).await;
            assert_eq!((answer.status, answer.body.as_str()), (status, body));
        }
        let series = format!(
            "armature_frontend_requests_total{{model=\"tiny\",endpoint=\"chat_completions\",status=\"{label}\"}}"
        );
        assert!(router.metric(&series).await >= 2.0, "{series}");
    }
}

#[tokio::test]
async fn models_are_what_the_servers_list() {
    let (a, b) = (Server::start("a").await, Server::start("b").await);
    b.models(json!([{"id": "tiny", "max_model_len": 2048}, {"id": "org/other"}]));
    let router = Router::start(&[&a, &b], &[]).await;
    let list = router.get("/v1/models").await.json();
    let names: Vec<&str> = list["data"].as_array().expect("a list").iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(names, ["org/other", "tiny"]);
    assert_eq!(router.get("/v1/models/tiny").await.json()["max_model_len"], 2048, "what fits everywhere");
    assert_eq!(router.get("/v1/models/org%2Fother").await.status, 200);
    assert_eq!(router.get("/health").await.status, 200);
    assert_eq!(router.get("/ready").await.status, 200);
    // What only one of them serves goes to that one.
    for _ in 0..4 {
        let answer = router.chat(json!({"model": "org/other"})).await;
        assert_eq!(answer.header("x-armature-worker"), b.name());
    }
    assert_eq!(a.seen().len(), 0);
    // A list may change.
    a.models(json!([{"id": "tiny"}, {"id": "new"}]));
    let wait = async {
        while router.get("/v1/models/new").await.status != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, wait).await.expect("the new model is listed in time");
}

#[tokio::test]
async fn usage_and_tokens_are_counted() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    server.behave(Behaviour::Tokens(7));
    assert_eq!(router.chat(json!({})).await.json()["usage"]["completion_tokens"], 7);
    let tokens = "armature_frontend_output_tokens_total{model=\"tiny\"}";
    router.until("the tokens are counted", |metrics| value(metrics, tokens) == 7.0).await;
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
    let role = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    let pieces = [role.into(), token(0), finish(), usage.into(), done()];
    server.behave(Behaviour::Pieces(pieces.to_vec()));
    let mut response = router.open(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    let mut body = String::new();
    while !body.ends_with(&done()) {
        body += &response.piece().await.expect("more");
    }
    assert_eq!(body, pieces.concat());
    server.end();
    assert_eq!(response.piece().await, None);
    router.until("the tokens are counted", |metrics| value(metrics, tokens) == 9.0).await;
    assert_eq!(router.metric("armature_frontend_cached_tokens_total{model=\"tiny\"}").await, 8.0);
    assert_eq!(router.metric("armature_router_requests_in_flight").await, 0.0);
}

#[tokio::test]
async fn connections_to_a_server_are_kept() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &["--worker-check-interval-secs=60"]).await;
    let before = server.connections();
    let mut client = router.client().await;
    for at in 0..20 {
        let answer = client.post("/v1/chat/completions", &chat(json!({"stream": at % 2 == 0}))).await.whole().await;
        assert_eq!(answer.status, 200);
    }
    assert!(server.connections() - before <= 1, "{before} and then {}", server.connections());
}
