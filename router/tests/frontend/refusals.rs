//! What is refused, and how: every row answered in OpenAI's shape, with the field named, before a worker is chosen.

use bytes::Bytes;
use router::backend::DispatchError;
use serde_json::{Value, json};

use crate::harness::*;

/// Fields that make a chat invalid, and the field named.
fn invalid_chats() -> Vec<(Value, &'static str)> {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    vec![
        (json!({"model": 7}), "model"),
        (json!({"model": ""}), "model"),
        (json!({"model": null}), "model"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": "Hi"}), "messages"),
        (json!({"messages": ["Hi"]}), "messages[0]"),
        (json!({"messages": [{"content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "robot", "content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": 1, "content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": user(json!(5))}), "messages[0].content"),
        (
            json!({"messages": user(json!([{"type": "image_url", "image_url": {"url": "x"}}]))}),
            "messages[0].content[0].type",
        ),
        (json!({"messages": user(json!([{"type": "text"}]))}), "messages[0].content[0].text"),
        (json!({"messages": user(json!([{"text": "x"}]))}), "messages[0].content[0].type"),
        (json!({"messages": user(json!("long ".repeat(CONTEXT as usize)))}), "messages"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"max_tokens": "ten"}), "max_tokens"),
        (json!({"max_tokens": CONTEXT}), "max_tokens"),
        (json!({"max_tokens": u64::MAX}), "max_tokens"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"min_tokens": 9, "max_tokens": 8}), "min_tokens"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": 2.1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.01}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 1.5}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"presence_penalty": 2.5}), "presence_penalty"),
        (json!({"frequency_penalty": -3}), "frequency_penalty"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": {(VOCABULARY.to_string()): 1}}), "logit_bias"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": ["a", ""]}), "stop"),
        (json!({"stop": vec!["a"; 17]}), "stop"),
        (json!({"stop": "a".repeat(2000)}), "stop"),
        (json!({"stop": [1]}), "stop[0]"),
        (json!({"stop_token_ids": [VOCABULARY]}), "stop_token_ids"),
        (json!({"stop_token_ids": ["a"]}), "stop_token_ids[0]"),
        (json!({"seed": "x"}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"functions": [{}]}), "functions"),
        (json!({"modalities": ["audio"]}), "modalities"),
        (json!({"guided_json": {}}), "guided_json"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template"),
        (json!({"echo": true}), "echo"),
        (json!({"priority": 1e10}), "priority"),
        (json!({"nvext": 3}), "nvext"),
        (json!({"nvext": {"dp_rank": 1}}), "nvext.dp_rank"),
        (json!({"nvext": {"dp_rank": -1}}), "nvext.dp_rank"),
        (json!({"nvext": {"agent_hints": {"osl": "long"}}}), "nvext.agent_hints.osl"),
        (json!({"nvext": {"router": {"temperature": -1}}}), "nvext.router.temperature"),
        (json!({"nvext": {"router": {"overlap_score_credit": 2}}}), "nvext.router.overlap_score_credit"),
        (json!({"nvext": {"routing_constraints": {"required": ["a"]}}}), "nvext.routing_constraints.required"),
        (json!({"chat_template_kwargs": 3}), "chat_template_kwargs"),
    ]
}

fn invalid_completions() -> Vec<(Value, &'static str)> {
    vec![
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt"),
        (json!({"prompt": [-1]}), "prompt[0]"),
        (json!({"prompt": [VOCABULARY]}), "prompt"),
        (json!({"prompt": vec![1; CONTEXT as usize]}), "prompt"),
        (json!({"prompt": vec!["a"; 129]}), "prompt"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"max_tokens": 0}), "max_tokens"),
    ]
}

#[tokio::test]
async fn invalid_requests_name_their_field_and_reach_no_worker() {
    let server = Server::start().await;
    let rows = invalid_chats();
    assert!(rows.len() + invalid_completions().len() >= 40);
    for (fields, param) in rows {
        let answer = server.chat(fields.clone()).await;
        let (status, kind, named, _) = answer.error();
        assert_eq!(
            (status, kind.as_str(), named.as_deref()),
            (400, "invalid_request_error", Some(param)),
            "{fields}: {}",
            answer.body
        );
    }
    for (fields, param) in invalid_completions() {
        let answer = server.complete(fields.clone()).await;
        let (status, _, named, _) = answer.error();
        assert_eq!((status, named.as_deref()), (400, Some(param)), "{fields}: {}", answer.body);
    }
    assert!(server.backend.requests.lock().is_empty());
}

#[tokio::test]
async fn bodies_that_are_no_requests_are_refused() {
    let config = router::http::FrontendConfig { body_limit_bytes: 10_000, ..Default::default() };
    let server = Server::with(config, vec![("m", model(Some(CHAT_ML)))]).await;
    let json = ("content-type", "application/json; charset=utf-8");
    let valid = r#"{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}"#;
    let huge = format!(r#"{{"model": "m", "x": "{}"}}"#, "x".repeat(20_000));
    for (header, body, status, param) in [
        (json, "", 400, None),
        (json, "{", 400, None),
        (json, "not json", 400, None),
        (json, "[]", 400, None),
        (json, "3", 400, None),
        (json, "null", 400, None),
        (json, r#"{"model": "m", "temperature": NaN}"#, 400, None),
        (json, r#"{"model": "m", "temperature": 1e999}"#, 400, None),
        (json, r#"{"model": "m", "model": "m"}"#, 400, None),
        (json, "{\"model\": \"\u{0}\"}", 400, None),
        (json, huge.as_str(), 413, None),
        (("content-type", "text/plain"), valid, 400, Some("content-type")),
        (("content-type", "application/x-www-form-urlencoded"), valid, 400, Some("content-type")),
        (("x-armature-worker", "the fast one"), valid, 400, Some("x-armature-worker")),
        (json, valid, 200, None),
    ] {
        let answer = server.send("POST", "/v1/chat/completions", &[header], body.to_owned().into()).await;
        assert_eq!(answer.status, status, "{body:.60}: {}", answer.body);
        if status != 200 {
            assert_eq!(answer.error().2.as_deref(), param, "{body:.60}");
        }
    }
    let invalid_utf8 = Bytes::from_static(b"{\"model\": \"\xff\"}");
    assert_eq!(server.send("POST", "/v1/chat/completions", &[json], invalid_utf8).await.error().0, 400);
}

#[tokio::test]
async fn paths_and_methods_are_checked() {
    let server = Server::start().await;
    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions/", 404),
    ] {
        let answer = server.send(method, path, &[], Bytes::new()).await;
        assert_eq!(answer.error().0, status, "{method} {path}");
        assert_eq!(answer.headers.contains_key("allow"), status == 405);
    }
    let unknown = server.chat(json!({"model": "other"})).await.error();
    assert_eq!(unknown, (404, "invalid_request_error".into(), Some("model".into()), Some("model_not_found".into())));
}

fn unknown_worker(named_by: &'static str) -> DispatchError {
    DispatchError::UnknownWorker { worker: 9, named_by: Some(named_by) }
}

#[tokio::test]
async fn what_named_a_worker_that_is_not_there_is_the_param() {
    let server = Server::start().await;
    for (error, param) in [
        (unknown_worker("nvext.backend_instance_id"), "nvext.backend_instance_id"),
        (unknown_worker("x-dynamo-worker-instance-id"), "x-dynamo-worker-instance-id"),
        (DispatchError::NeedsWorker, "x-armature-worker"),
    ] {
        server.backend.refuse(error);
        assert_eq!(server.chat(json!({})).await.error().2.as_deref(), Some(param));
    }
}

#[tokio::test]
async fn a_cluster_error_is_a_status_type_and_code() {
    let server = Server::start().await;
    for (error, status, kind, code) in [
        (DispatchError::NoWorker { model: "m".into() }, 503, "server_error", Some("no_worker")),
        (unknown_worker("x-armature-worker"), 400, "invalid_request_error", Some("unknown_worker")),
        (DispatchError::NeedsWorker, 400, "invalid_request_error", Some("worker_required")),
        (DispatchError::Busy { model: "m".into() }, 503, "server_error", Some("workers_busy")),
        (DispatchError::Overloaded("queue".into()), 429, "rate_limit_error", Some("overloaded")),
        (DispatchError::Invalid("no".into()), 400, "invalid_request_error", None),
        (worker_failed(), 502, "server_error", Some("worker_failed")),
        (DispatchError::ShuttingDown("gone".into()), 503, "server_error", Some("shutting_down")),
        (DispatchError::Deadline { stage: "prefill", seconds: 3 }, 504, "timeout_error", Some("deadline_exceeded")),
    ] {
        for stream in [false, true] {
            // Before the worker is chosen, and before its first token.
            server.backend.refuse(error.clone());
            server.backend.script(vec![Err(error.clone())]);
            for _ in 0..2 {
                let answer = server.chat(json!({"stream": stream})).await;
                let (got, got_kind, _, got_code) = answer.error();
                assert_eq!((got, got_kind.as_str(), got_code.as_deref()), (status, kind, code), "{error}");
                assert_eq!(answer.header("retry-after").is_empty(), !matches!(status, 429 | 503));
            }
        }
    }
}

#[tokio::test]
async fn with_no_model_at_all_the_client_is_early_not_wrong() {
    let server = Server::with(Default::default(), Vec::new()).await;
    assert_eq!(server.chat(json!({})).await.error().0, 503);
    assert_eq!(server.get("/health").await.status, 503);
    assert_eq!(server.get("/ready").await.status, 200);
}

#[tokio::test]
async fn a_model_whose_workers_have_gone_is_unavailable_not_unknown() {
    let server = Server::with(Default::default(), vec![("m", model(Some(CHAT_ML))), ("other", model(None))]).await;
    server.backend.leave("m");
    let answer = server.chat(json!({})).await;
    assert_eq!((answer.error().0, answer.error().3.as_deref()), (503, Some("no_worker")));
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(server.chat(json!({"model": "never there"})).await.error().0, 404);
}

#[tokio::test]
async fn too_many_prompts_and_over_long_texts_are_refused_by_their_size() {
    let server = Server::start().await;
    let long = "x".repeat(CONTEXT as usize * 12 * 3 + 1);
    let answer = server.chat(json!({"messages": [{"role": "user", "content": long}]})).await;
    assert_eq!((answer.error().0, answer.error().3.as_deref()), (400, Some("context_length_exceeded")));
    assert!(answer.body.contains(" bytes "), "it was not tokenized: {}", answer.body);
    let answer = server.complete(json!({"prompt": [long.as_str(), "x"]})).await;
    assert_eq!(
        (answer.error().2.as_deref(), answer.error().3.as_deref()),
        (Some("prompt"), Some("context_length_exceeded"))
    );
    assert!(answer.body.contains(" bytes "), "it was not tokenized: {}", answer.body);
    // The count is told before the tokens are looked at.
    let answer = server.complete(json!({"prompt": vec![long.as_str(); 65], "n": 2})).await;
    assert!(answer.error().2.as_deref() == Some("prompt") && answer.body.contains("65 prompts"), "{}", answer.body);
    let answer = server.complete(json!({"prompt": vec!["a"; 64], "n": 2})).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn an_error_inside_a_stream_is_an_event_in_the_same_shape() {
    let server = Server::start().await;
    let worker = server.backend.live();
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    response.piece().await.expect("the first token");
    worker.send(Err(worker_failed())).expect("a stream");
    let rest = response.piece().await.expect("an error event");
    let event = rest.strip_prefix("data: ").and_then(|rest| rest.split_once("\n\n")).expect("an event");
    let error: Value = serde_json::from_str(event.0).expect("JSON");
    assert_eq!(error["error"]["code"], "worker_failed");
    assert_eq!(event.1, "data: [DONE]\n\n");
}

#[tokio::test]
async fn an_answer_without_a_usable_end_is_a_worker_failure() {
    use protocol::request_plane::FinishReason;
    let server = Server::start().await;
    for script in [
        vec![],
        vec![text("a")],
        vec![text("a"), finished(FinishReason::Unspecified, 1, 0)],
        vec![finished(FinishReason::Cancelled, 0, 0)],
    ] {
        server.backend.script(script);
        assert_eq!(server.chat(json!({})).await.error().0, 502);
    }
}

#[tokio::test]
async fn a_model_without_template_serves_completions_only() {
    let server = Server::with(Default::default(), vec![("m", model(None))]).await;
    assert_eq!(server.chat(json!({})).await.error().2.as_deref(), Some("model"));
    assert_eq!(server.complete(json!({})).await.status, 200);
}

#[tokio::test]
async fn the_templates_own_complaint_reaches_the_client() {
    let source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}{{ m.content }}{% endfor %}";
    let server = Server::with(Default::default(), vec![("m", model(Some(source)))]).await;
    let answer = server.chat(json!({"messages": [{"role": "system", "content": "x"}]})).await;
    assert_eq!((answer.error().0, &answer.json()["error"]["message"]), (400, &json!("no system messages")));
}
