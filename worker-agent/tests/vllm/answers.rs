//! Requests as vLLM is asked them, and answers as routers hear them.

use protocol::request_plane::{ErrorCode, FinishReason, Generate, Sampling, Stop};
use serde_json::{Value, json};
use worker_agent::engine::{Engine, EngineOutput, Finish, SubmitError};

use crate::server::*;

#[tokio::test]
async fn a_request_is_said_in_full_and_its_tokens_come_back() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&["--vllm-priority", "--vllm-dp-rank", "0"]).await;
    let info = engine.info();
    assert_eq!((info.block_size.get(), info.total_blocks, info.context_length), (BLOCK, 100, 2048));
    let sampling = Sampling {
        temperature: 0.5,
        top_k: 40,
        seed: Some(u64::MAX),
        frequency_penalty: 0.25,
        logit_bias: [(7, -1.5)].into(),
        ..Sampling::default()
    };
    let stop =
        Stop { max_tokens: 9000, min_tokens: 1, ignore_eos: true, strings: vec!["END".into()], token_ids: vec![5] };
    let outputs = ask(
        &engine,
        Generate {
            sampling: Some(sampling),
            stop: Some(stop),
            cache_namespace: "tenant".into(),
            priority: 3,
            logprobs: Some(1),
            ..request(10..15, 0)
        },
    );
    let asked = vllm.asked().await;
    assert_eq!(asked.headers["x-data-parallel-rank"], "0");
    let body = &asked.body;
    for (name, value) in [
        ("model", json!("m")),
        ("prompt", json!([10, 11, 12, 13, 14])),
        ("stream", json!(true)),
        ("return_token_ids", json!(true)),
        ("max_tokens", json!(2043)),
        ("min_tokens", json!(1)),
        ("ignore_eos", json!(true)),
        ("stop", json!(["END"])),
        ("stop_token_ids", json!([5])),
        ("temperature", json!(0.5)),
        ("top_p", json!(1.0)),
        ("top_k", json!(40)),
        ("repetition_penalty", json!(1.0)),
        ("frequency_penalty", json!(0.25)),
        ("seed", json!(i64::MAX)),
        ("logit_bias", json!({"7": -1.5})),
        ("cache_salt", json!("tenant")),
        ("priority", json!(-3)),
        ("logprobs", json!(1)),
    ] {
        assert_eq!(body[name], value, "{name}");
    }
    assert!(body.get("kv_transfer_params").is_none());
    let events = asked.stream();
    let logprobs = json!({"tokens": ["token_id:20"], "token_logprobs": [-2.0],
        "top_logprobs": [{"token_id:20": -2.0, "token_id:21": -0.5}]});
    events.say(json!({"choices": [{"token_ids": [20], "logprobs": logprobs, "finish_reason": null}]}));
    let logprobs =
        json!({"tokens": ["token_id:22"], "token_logprobs": [-0.25], "top_logprobs": [{"token_id:22": -0.25}]});
    events.say(json!({"choices": [{"token_ids": [22], "logprobs": logprobs, "finish_reason": "length"}]}));
    events
        .raw("data: {\"choices\":[],\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n");
    let found = all(outputs).await;
    let EngineOutput::First { token: 20, logprobs: Some(first), prompt_blocks: 0, .. } = &found[0] else {
        panic!("{found:?}")
    };
    assert_eq!((first.logprob, first.top.len(), first.top[0].token_id), (-2.0, 1, 21));
    assert!(matches!(&found[1], EngineOutput::Token { token: 22, logprobs: Some(_) }), "{found:?}");
    let finish = Finish {
        reason: FinishReason::Length,
        prompt_tokens: 5,
        completion_tokens: 2,
        reused_tokens: 4,
        stop_string: None,
        stop_token: None,
    };
    assert!(matches!(&found[2], EngineOutput::Finished(last) if *last == finish), "{found:?}");
}

#[tokio::test]
async fn a_stream_that_goes_on_asks_for_what_is_left() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    let stop = Stop { max_tokens: 10, min_tokens: 4, ..Stop::default() };
    let penalties = Sampling { presence_penalty: 0.5, frequency_penalty: 0.25, ..Sampling::default() };
    let tokens = [0, 1, 2, 3, 4, 7, 5, 7];
    let begun = Generate { generated: 3, stop: Some(stop), sampling: Some(penalties), ..request(tokens, 0) };
    let outputs = ask(&engine, begun);
    let asked = vllm.asked().await;
    let bias = json!({"5": -0.75, "7": -1.0});
    assert_eq!(asked.body["logit_bias"], bias, "what was generated elsewhere is penalized all the same");
    assert_eq!((&asked.body["max_tokens"], &asked.body["min_tokens"]), (&json!(7), &json!(1)));
    asked.stream().end(&[20], "length", Value::Null);
    let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens, finish.prompt_tokens, finish.completion_tokens), (vec![20], 5, 4));
}

#[tokio::test]
async fn each_end_has_its_reason_and_what_only_signals_it_is_not_delivered() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    for (last, reason, stop, expected, delivered) in [
        (EOS, "stop", Value::Null, FinishReason::Eos, &[20][..]),
        (5, "stop", json!(5), FinishReason::StopToken, &[20]),
        // Another end token of the model's own configuration.
        (6, "stop", json!(6), FinishReason::Eos, &[20]),
        (7, "stop", json!("END"), FinishReason::StopString, &[20, 7]),
        (7, "length", Value::Null, FinishReason::Length, &[20, 7]),
    ] {
        let stop_tokens = Stop { max_tokens: 9, token_ids: vec![5], ..Stop::default() };
        let outputs = ask(&engine, Generate { stop: Some(stop_tokens), ..request(0..4, 0) });
        let events = vllm.asked().await.stream();
        events.tokens(&[20]);
        events.end(&[last], reason, stop);
        let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
        assert_eq!((&tokens[..], finish.reason, finish.completion_tokens), (delivered, expected, 2));
        assert_eq!(finish.stop_string.is_some(), expected == FinishReason::StopString);
        assert_eq!(finish.stop_token.is_some(), expected == FinishReason::StopToken);
    }
}

#[tokio::test]
async fn an_answer_may_be_empty() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    let outputs = ask(&engine, request(0..4, 9));
    vllm.asked().await.stream().end(&[EOS], "stop", Value::Null);
    let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens.len(), finish.reason, finish.completion_tokens), (0, FinishReason::Eos, 1));
}

#[tokio::test]
async fn a_request_that_fails_is_told_why() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    let error = |code: u16| json!({"error": {"message": "no good", "type": "x", "code": code}});
    for (status, expected) in [
        (400, ErrorCode::InvalidRequest),
        (404, ErrorCode::Engine),
        (429, ErrorCode::Overloaded),
        (503, ErrorCode::Overloaded),
    ] {
        let outputs = ask(&engine, request(0..4, 9));
        vllm.asked().await.answer(status, error(status));
        let (found, message) = code(answer(outputs).await.1);
        assert_eq!(found, expected, "{status}");
        assert!(message.contains("no good"), "{message}");
    }
    // A bare "error" as the reason, an error as an event, an end that nobody knows, and rubbish.
    for (event, expected, said) in [
        (json!({"choices": [{"token_ids": [], "finish_reason": "error"}]}), ErrorCode::Engine, "error"),
        (json!({"choices": [{"token_ids": [21], "finish_reason": "abort"}]}), ErrorCode::Engine, "abort"),
        (error(500), ErrorCode::Engine, "no good"),
        (error(400), ErrorCode::InvalidRequest, "no good"),
        (json!({"choices": [{"text": "no ids"}]}), ErrorCode::Engine, "token_ids"),
        (json!(["rubbish"]), ErrorCode::Engine, "no completion"),
    ] {
        let outputs = ask(&engine, request(0..4, 9));
        let events = vllm.asked().await.stream();
        events.tokens(&[20]);
        events.say(event);
        let (tokens, last) = answer(outputs).await;
        let (found, message) = code(last);
        assert_eq!((tokens, found), (vec![20], expected), "{message}");
        assert!(message.contains(said), "{message}");
    }
    assert_eq!(engine.lost(), None, "the server answers its checks");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_not_an_end() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    let outputs = ask(&engine, request(0..4, 9));
    let events = vllm.asked().await.stream();
    events.tokens(&[20]);
    drop(events);
    let (tokens, last) = answer(outputs).await;
    let (found, message) = code(last);
    assert_eq!((tokens, found), (vec![20], ErrorCode::Engine));
    assert!(message.contains("cut off"), "{message}");
}

#[tokio::test]
async fn a_server_that_says_nothing_is_waited_for_no_longer_than_set() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&["--vllm-first-token-s-max", "1", "--vllm-token-s-max", "1"]).await;
    let outputs = ask(&engine, request(0..4, 9));
    let silent = vllm.asked().await;
    let (_, message) = code(answer(outputs).await.1);
    assert!(message.contains("nothing for 1 s while waiting for the engine's answer"), "{message}");
    silent.given_up().await;
    let outputs = ask(&engine, request(0..4, 9));
    let begun = vllm.asked().await.stream();
    let (_, message) = code(answer(outputs).await.1);
    assert!(message.contains("waiting for the engine's first token"), "{message}");
    begun.given_up().await;
    let outputs = ask(&engine, request(0..4, 9));
    let stuck = vllm.asked().await.stream();
    stuck.tokens(&[20]);
    let (tokens, last) = answer(outputs).await;
    assert_eq!(tokens, [20]);
    assert!(code(last).1.contains("while generating"));
    stuck.given_up().await;
}

#[tokio::test]
async fn a_request_that_nobody_waits_for_is_given_up_at_the_server() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&["--vllm-max-num-seqs", "1", "--vllm-max-waiting", "1"]).await;
    let queued = ask(&engine, request(0..4, 9));
    let before = vllm.asked().await;
    let mut running = ask(&engine, request(0..4, 9));
    let during = vllm.asked().await.stream();
    during.tokens(&[20]);
    within("a token", running.recv()).await.expect("one");
    let refused = engine.submit(request(0..4, 9));
    assert!(matches!(refused, Err(SubmitError::Overloaded(2))), "two are all that it may have");
    assert_eq!(engine.load().running + engine.load().waiting, 2);
    drop((queued, running));
    before.given_up().await;
    during.given_up().await;
    until("places are free", || engine.load().running + engine.load().waiting == 0).await;
    let outputs = ask(&engine, request(0..4, 9));
    vllm.asked().await.stream().end(&[20], "length", Value::Null);
    assert_eq!(answer(outputs).await.0, [20]);
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_the_server_hears_of_it() {
    let vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    for bad in [
        request([], 9),
        request(0..2048, 9),
        request(0..4, 0),
        Generate { generated: 4, ..request(0..4, 9) },
        Generate { generated: 3, ..request(0..4, 3) },
    ] {
        assert!(matches!(engine.submit(bad), Err(SubmitError::Invalid(_))));
    }
}

#[tokio::test]
async fn the_load_is_what_the_server_says_and_what_it_was_sent() {
    let mut vllm = Server::start(Make::Vllm).await;
    vllm.say_metrics("vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"0\"} 2\n");
    vllm.say_metrics("vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n");
    let (engine, _) = vllm.engine(&[]).await;
    until("a look at the metrics", || engine.load().running == 3).await;
    let load = engine.load();
    assert_eq!((load.waiting, load.active_blocks, load.pending_prefill_tokens), (2, 50, 0));
    let mut outputs = ask(&engine, request(0..40, 9));
    let events = vllm.asked().await.stream();
    assert_eq!(engine.load().pending_prefill_tokens, 40);
    events.tokens(&[20]);
    within("a token", outputs.recv()).await.expect("one");
    assert_eq!(engine.load().pending_prefill_tokens, 0);
}
