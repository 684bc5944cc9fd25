//! What clients get: whole answers, streams, choices, log-probabilities, pages.

use protocol::request_plane::{FinishReason, Output};
use router::backend::{RouteOptions, StreamItem};
use serde_json::{Value, json};

use crate::harness::*;

#[tokio::test]
async fn a_chat_is_answered_as_a_whole() {
    let server = Server::start().await;
    server.backend.script(vec![first(&byte_tokens("Hel"), 3), text("lo!"), finished(FinishReason::Eos, 7, 48)]);
    let answer = server.chat(json!({"temperature": 0, "max_tokens": 9, "seed": 5, "user": "x", "unknown": [1]})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": "Hello!", "refusal": null}, "logprobs": null, "finish_reason": "stop"}])
    );
    let request = server.backend.request();
    let prompt = request.token_ids.len();
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7, "prompt_tokens_details": {"cached_tokens": 48}})
    );
    assert_eq!((answer.header("x-armature-worker"), answer.header("x-armature-worker-id")), ("w0", "42"));
    assert_eq!(answer.header("x-armature-reused-blocks"), "3");
    assert_eq!(answer.header("x-request-id").len(), 32);
    let (sampling, stop) = (request.sampling.expect("set"), request.stop.expect("set"));
    assert_eq!((sampling.temperature, sampling.top_p, sampling.seed), (0.0, 1.0, Some(5)));
    assert_eq!((stop.max_tokens, request.model.as_str()), (9, "m"));
}

#[tokio::test]
async fn a_chat_is_streamed() {
    let server = Server::start().await;
    server.backend.script(vec![first(&byte_tokens("Hi"), 1), text(" there"), finished(FinishReason::Length, 9, 16)]);
    let answer = server.chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    assert_eq!((answer.status.as_u16(), answer.header("content-type")), (200, "text/event-stream"));
    assert_eq!(answer.header("x-armature-reused-blocks"), "1");
    let events = answer.events();
    let (usage, chunks) = events.split_last().expect("events");
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(streamed_text(chunks, 0), "Hi there");
    let last = chunks.last().expect("chunks");
    assert_eq!((&last["choices"][0]["finish_reason"], &last["choices"][0]["delta"]), (&json!("length"), &json!({})));
    for chunk in chunks {
        assert_eq!((&chunk["object"], &chunk["usage"]), (&json!("chat.completion.chunk"), &Value::Null));
        assert_eq!((&chunk["id"], &chunk["model"]), (&chunks[0]["id"], &json!("m")));
    }
    assert_eq!(
        (&usage["choices"], &usage["usage"]["prompt_tokens_details"]["cached_tokens"]),
        (&json!([]), &json!(16))
    );
}

#[tokio::test]
async fn a_token_reaches_the_client_before_the_next_one_exists() {
    let server = Server::start().await;
    let worker = server.backend.live();
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({})).await;
    assert!(response.piece().await.expect("a piece").contains("\"content\":\"a\""));
    worker.send(text("b")).expect("a stream");
    assert!(response.piece().await.expect("a piece").contains("\"content\":\"b\""));
    worker.send(finished(FinishReason::Eos, 2, 0)).expect("a stream");
    assert!(response.piece().await.expect("a piece").ends_with("data: [DONE]\n\n"));
    assert_eq!(response.piece().await, None);
}

#[tokio::test]
async fn characters_and_stop_strings_are_whole_or_not_there() {
    let server = Server::start().await;
    for stream in [false, true] {
        for (said, stop, expected) in [
            ("é😀 字", json!(null), "é😀 字"),
            ("one STOP two", json!("STOP"), "one "),
            ("one STO", json!(["STOP", "x"]), "one STO"),
            ("a é! b", json!("é!"), "a "),
        ] {
            let mut items: Vec<_> = byte_tokens(said).iter().map(|token| tokens(&[*token])).collect();
            items.push(finished(FinishReason::Length, 1, 0));
            server.backend.script(items);
            let answer = server.chat(json!({"stream": stream, "stop": stop})).await;
            let said = match stream {
                true => streamed_text(&answer.events(), 0),
                false => answer.json()["choices"][0]["message"]["content"].as_str().expect("text").to_owned(),
            };
            assert_eq!(said, expected, "stream: {stream}");
        }
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_even_if_the_worker_goes_on() {
    let server = Server::start().await;
    let worker = server.backend.live();
    for item in [text("go STOP"), text(" and on"), text(" and on")] {
        worker.send(item).expect("a stream");
    }
    let answer = server.chat(json!({"stop": ["STOP"], "include_stop_str_in_output": true})).await;
    let choice = &answer.json()["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("go STOP"), &json!("stop")));
    tokio::time::timeout(DEADLINE, server.backend.dropped.notified()).await.expect("the request is cancelled");
}

#[tokio::test]
async fn end_tokens_are_no_text() {
    let server = Server::start().await;
    let said = [u32::from(b'a'), IM_START, u32::from(b'!')];
    for (fields, expected) in [
        (json!({}), "a!"),
        (json!({"stop_token_ids": [33]}), "a"),
        (json!({"skip_special_tokens": false}), "a<|im_start|>!"),
    ] {
        server.backend.script(vec![tokens(&said), tokens(&[IM_END]), finished(FinishReason::Eos, 4, 0)]);
        let answer = server.chat(fields).await;
        assert_eq!(answer.json()["choices"][0]["message"]["content"], expected);
    }
}

#[tokio::test]
async fn several_choices_have_seeds_and_indices_of_their_own() {
    let server = Server::start().await;
    for said in ["a", "b", "c"] {
        server.backend.script(vec![text(said), finished(FinishReason::Eos, 2, 0)]);
    }
    let answer =
        server.chat(json!({"n": 3, "seed": 7, "stream": true, "stream_options": {"include_usage": true}})).await;
    let events = answer.events();
    for (index, said) in ["a", "b", "c"].iter().enumerate() {
        assert_eq!(streamed_text(&events, index as u64), *said);
    }
    let usage = &events.last().expect("usage")["usage"];
    assert_eq!(usage["completion_tokens"], 6);
    let requests = server.backend.requests.lock();
    let seeds: Vec<_> = requests.iter().map(|(request, _)| request.sampling.as_ref().and_then(|s| s.seed)).collect();
    assert_eq!(seeds, [Some(7), Some(8), Some(9)]);
    assert_eq!(usage["prompt_tokens"], requests[0].0.token_ids.len());
    let mut ids: Vec<_> = requests.iter().map(|(request, _)| &request.request_id).collect();
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

#[tokio::test]
async fn a_choice_streams_while_another_waits_for_a_worker() {
    let server = Server::start().await;
    let worker = server.backend.live();
    let late = server.backend.hold();
    worker.send(first(&byte_tokens("a"), 2)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({"n": 2})).await;
    assert_eq!(response.headers()["x-armature-worker"], "w0");
    assert_eq!(response.headers()["x-armature-reused-blocks"], "2");
    assert!(response.piece().await.expect("a piece").contains("\"content\":\"a\""));
    worker.send(finished(FinishReason::Eos, 1, 0)).expect("a stream");
    let piece = response.piece().await.expect("a piece");
    assert!(piece.contains("\"index\":0") && piece.contains("\"finish_reason\":\"stop\""), "{piece}");
    late.send(()).expect("the second choice waits");
    let rest = response.whole().await.body;
    assert!(rest.contains("\"index\":1") && rest.contains("\"content\":\"ok\"") && rest.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_choice_that_finds_no_worker_fails_the_request() {
    let server = Server::start().await;
    // Before any output it is a status, streamed or not, and the other choice is cancelled.
    for stream in [false, true] {
        let _worker = server.backend.live();
        drop(server.backend.hold());
        let answer = server.chat(json!({"n": 2, "stream": stream})).await;
        assert_eq!((answer.error().0, answer.error().3.as_deref()), (502, Some("worker_failed")));
        tokio::time::timeout(DEADLINE, server.backend.dropped.notified()).await.expect("it is cancelled");
    }
    // Afterwards it is an event.
    let worker = server.backend.live();
    let late = server.backend.hold();
    worker.send(first(&byte_tokens("a"), 0)).expect("a stream");
    let mut client = server.connect().await;
    let mut response = client.stream_chat(json!({"n": 2})).await;
    assert!(response.piece().await.expect("a piece").contains("\"content\":\"a\""));
    drop(late);
    let rest = response.whole().await.body;
    assert!(rest.contains("worker_failed") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    tokio::time::timeout(DEADLINE, async { worker.closed().await }).await.expect("the other choice is cancelled");
}

#[tokio::test]
async fn chat_logprobs_have_bytes_and_no_infinities() {
    let server = Server::start().await;
    let split: Vec<u32> = byte_tokens("é");
    server.backend.script(vec![with_logprobs(&split), finished(FinishReason::Eos, 3, 0)]);
    let answer = server.chat(json!({"logprobs": true, "top_logprobs": 2})).await;
    let content = &answer.json()["choices"][0]["logprobs"]["content"];
    assert_eq!(content.as_array().map(Vec::len), Some(2));
    assert_eq!((&content[0]["bytes"], &content[0]["logprob"]), (&json!([0xc3]), &json!(-0.5)));
    assert_eq!(
        content[1]["top_logprobs"],
        json!([{"token": "\u{fffd}", "logprob": -0.5, "bytes": [0xa9]}, {"token": "z", "logprob": -9999.0, "bytes": [122]}])
    );
    assert_eq!(server.backend.request().logprobs, Some(2));
}

#[tokio::test]
async fn completions_echo_with_logprobs_and_offsets() {
    let server = Server::start().await;
    let prompt = byte_tokens("é!");
    let StreamItem::Output(mut output) = with_logprobs(&byte_tokens("xy")).expect("an item") else { unreachable!() };
    output = Output { first: true, prompt_logprobs: prompt[1..].iter().map(|t| logprob(*t)).collect(), ..output };
    server.backend.script(vec![Ok(StreamItem::Output(output)), finished(FinishReason::Length, 2, 0)]);
    let answer = server.complete(json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": 2})).await;
    let body = answer.json();
    let choice = &body["choices"][0];
    assert_eq!((&body["object"], &choice["text"]), (&json!("text_completion"), &json!("é!xy")));
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["\u{fffd}", "\u{fffd}", "!", "x", "y"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2, 3]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.5]));
    assert_eq!(
        (&logprobs["top_logprobs"][0], &logprobs["top_logprobs"][3]),
        (&Value::Null, &json!({"x": -0.5, "z": -9999.0}))
    );
    let request = server.backend.request();
    assert!(request.prompt_logprobs && request.token_ids == prompt);
}

#[tokio::test]
async fn every_form_of_completion_prompt_works() {
    let server = Server::start().await;
    for (prompt, expected) in [
        (json!("hello"), vec![vec![BOS, 259]]),
        (json!("<|bos|>hello<|im_end|>"), vec![vec![BOS, 259, IM_END]]),
        (json!([104, 105]), vec![vec![104, 105]]),
        (json!(["a", "b"]), vec![vec![BOS, 97], vec![BOS, 98]]),
        (json!([[1], [2, 3]]), vec![vec![1], vec![2, 3]]),
    ] {
        server.backend.requests.lock().clear();
        let answer = server.complete(json!({"prompt": prompt})).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let sent: Vec<_> =
            server.backend.requests.lock().iter().map(|(request, _)| request.token_ids.clone()).collect();
        assert_eq!(sent, expected);
        assert_eq!(answer.json()["choices"].as_array().map(Vec::len), Some(expected.len()));
    }
}

#[tokio::test]
async fn without_max_tokens_the_answer_may_fill_the_context() {
    let server = Server::start().await;
    server.complete(json!({"prompt": [1, 2, 3]})).await;
    assert_eq!(server.backend.request().stop.expect("set").max_tokens, CONTEXT - 3);
}

#[tokio::test]
async fn extras_reach_the_worker() {
    let server = Server::start().await;
    let answer = server
        .chat(json!({"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": true, "min_tokens": 2,
            "max_completion_tokens": 5, "stop_token_ids": [65], "logit_bias": {"66": -100}, "cache_salt": "tenant", "priority": 3,
            "stop": "x", "top_p": 0.5, "presence_penalty": -2, "frequency_penalty": 2}))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let request = server.backend.request();
    let (sampling, stop) = (request.sampling.expect("set"), request.stop.expect("set"));
    assert_eq!((sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.top_p), (40, 0.1, 1.2, 0.5));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (-2.0, 2.0));
    assert_eq!(sampling.logit_bias.get(&66), Some(&-100.0));
    assert_eq!((stop.min_tokens, stop.max_tokens, stop.ignore_eos), (2, 5, true));
    assert_eq!((stop.token_ids, stop.strings), (vec![65], vec!["x".to_owned()]));
    assert_eq!((request.cache_namespace.as_str(), request.priority), ("tenant", -3));
}

#[tokio::test]
async fn a_request_can_name_its_worker_and_its_id() {
    let server = Server::start().await;
    let headers = [("x-armature-worker", "77"), ("x-request-id", "trace-1")];
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).to_string();
    let answer = server.send("POST", "/v1/chat/completions", &headers, body.into()).await;
    assert_eq!((answer.status.as_u16(), answer.header("x-request-id")), (200, "trace-1"));
    let options = server.backend.requests.lock()[0].1.clone();
    assert_eq!((options.pinned_worker, options.pinned_by), (Some(77), Some("x-armature-worker")));
}

#[tokio::test]
async fn decisions_are_asked_for_by_any_id_that_the_client_sees() {
    let server = Server::start().await;
    let body = json!({"model": "m", "n": 2, "messages": [{"role": "user", "content": "Hi"}]}).to_string();
    let given = [("x-request-id", "trace 1/a")];
    for headers in [&given[..], &[]] {
        let answer = server.send("POST", "/v1/chat/completions", headers, body.clone().into()).await;
        let ids = [answer.json()["id"].as_str().expect("an id").to_owned(), answer.header("x-request-id").to_owned()];
        assert!(!ids[1].is_empty());
        let requests = std::mem::take(&mut *server.backend.requests.lock());
        assert_eq!(requests.len(), 2, "one for each choice");
        for (_, options) in requests {
            assert!(ids.iter().all(|id| options.known_as.contains(&id.as_str().into())), "{ids:?}");
        }
    }
    assert_eq!(server.get("/debug/decisions/trace%201%2Fa").await.error().0, 404);
    assert_eq!(*server.backend.asked.lock(), ["trace 1/a"]);
}

#[tokio::test]
async fn what_a_request_says_of_its_routing_reaches_the_backend() {
    let server = Server::start().await;
    let nvext = json!({
        "backend_instance_id": 77, "agent_hints": {"priority": 2, "strict_priority": 1, "osl": 300},
        "router": {"temperature": 0.5}, "routing_constraints": {"required": {"zone": "a"}, "excluded_workers": [5]},
    });
    assert_eq!(server.chat(json!({"nvext": nvext})).await.status, 200);
    let headers = [("x-dynamo-worker-instance-id", "77"), ("x-dynamo-dp-rank", "3")];
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "nvext": {"dp_rank": 1}, "priority": 4});
    let answer = server.send("POST", "/v1/chat/completions", &headers, body.to_string().into()).await;
    assert_eq!(answer.status, 200);
    let requests = server.backend.requests.lock();
    let (request, RouteOptions { pinned_worker, hints, .. }) = &requests[0];
    assert_eq!((*pinned_worker, request.priority), (Some(77), 2), "the worker's queue goes by it, too");
    assert_eq!((hints.priority, hints.strict_priority, hints.expected_output_tokens), (2.0, 1, Some(300)));
    assert_eq!((hints.cost.temperature, &hints.excluded[..]), (Some(0.5), &[5][..]));
    assert_eq!(hints.labels, [("zone".to_owned(), "a".to_owned())]);
    let (request, RouteOptions { pinned_worker, hints, .. }) = &requests[1];
    assert_eq!((*pinned_worker, hints.dp_rank, hints.priority, request.priority), (Some(77), Some(3), -4.0, -4));
}

#[tokio::test]
async fn pages_say_what_is_served() {
    let server = Server::with(Default::default(), vec![("org/b", model(None)), ("a", model(Some(CHAT_ML)))]).await;
    let models = server.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "a");
    assert_eq!(models["data"][1]["max_model_len"], CONTEXT);
    for path in ["/v1/models/org/b", "/v1/models/org%2Fb"] {
        assert_eq!(server.get(path).await.json()["id"], "org/b");
    }
    assert_eq!(server.get("/v1/models/none").await.error().0, 404);
    for path in ["/health", "/live", "/ready"] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    assert!(server.get("/").await.body.contains("<td>org/b</td>"));
    server.chat(json!({"model": "a"})).await;
    server.chat(json!({"model": "made up"})).await;
    server.chat(json!({"model": "org/b"})).await;
    let metrics = server.get("/metrics").await.body;
    for line in [
        r#"armature_frontend_requests_total{model="a",endpoint="chat_completions",status="success"} 1"#,
        r#"armature_frontend_requests_total{model="",endpoint="chat_completions",status="not_found"} 1"#,
        r#"armature_frontend_time_to_first_token_seconds_count{model="a"} 1"#,
        r#"armature_frontend_output_tokens_total{model="a"} 2"#,
        "armature_frontend_inflight_requests 0",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    assert!(!metrics.contains("made up"));
}
