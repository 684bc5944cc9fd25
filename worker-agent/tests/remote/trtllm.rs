//! TensorRT-LLM, as `trtllm-serve` documents itself.

use kv_hashing::HashSpace;
use protocol::request_plane::{ErrorCode, FinishReason, Generate, Sampling};
use serde_json::{Value, json};
use worker_agent::engine::{Engine, EngineOutput};

use crate::server::*;

/// All that a completion may say; a field that it does not know fails a request.
const FIELDS: [&str; 19] = [
    "model",
    "prompt",
    "stream",
    "stream_options",
    "detokenize",
    "add_special_tokens",
    "logprobs",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "disaggregated_params",
];
const PENALTIES: [&str; 3] = ["repetition_penalty", "presence_penalty", "frequency_penalty"];

/// What the first half says of a prompt whose first token is 20.
fn state() -> Value {
    json!({"request_type": "context_only", "first_gen_tokens": [20], "ctx_request_id": 18_446_744_073_709_551_615_u64,
        "encoded_opaque_state": "AAE=", "draft_tokens": null})
}

/// What the second half is asked with.
fn given() -> Value {
    json!({"request_type": "generation_only", "first_gen_tokens": [20],
        "ctx_request_id": 18_446_744_073_709_551_615_u64, "encoded_opaque_state": "AAE="})
}

fn second_half() -> Generate {
    let params = json!({"backend": "tensorrt-llm", "disaggregated_params": state()}).to_string();
    let tokens = (0..70).chain([20]);
    Generate { generated: 1, disaggregated_params: params, ..request(tokens, 9) }
}

#[tokio::test]
async fn a_request_says_only_what_every_version_knows_and_gets_token_ids() {
    let mut server = Server::start(Make::TensorRtLlm).await;
    let (engine, _) = server.engine(&[]).await;
    let sampling = Sampling { temperature: 0.5, seed: Some(7), logit_bias: [(7, -1.5)].into(), ..Sampling::default() };
    let outputs = ask(&engine, Generate { sampling: Some(sampling), logprobs: Some(0), ..request(10..15, 9) });
    let asked = server.asked().await;
    let body = asked.body.as_object().expect("an object");
    let unknown: Vec<_> =
        body.keys().filter(|name| !FIELDS.iter().chain(&PENALTIES).any(|known| known == name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    for (name, value) in [
        ("prompt", json!([10, 11, 12, 13, 14])),
        ("detokenize", json!(false)),
        ("add_special_tokens", json!(false)),
        ("logprobs", json!(1)),
        ("max_tokens", json!(9)),
        ("temperature", json!(0.5)),
        ("seed", json!(7)),
        ("logit_bias", json!({"7": -1.5})),
        ("stream_options", json!({"include_usage": true})),
    ] {
        assert_eq!(body[name], value, "{name}");
    }
    let events = asked.stream();
    let logprobs =
        json!({"tokens": [" a"], "token_logprobs": [-2.0], "top_logprobs": [{" a": -2.0}], "text_offset": [0]});
    events.say(json!({"choices": [{"index": 0, "text": "", "token_ids": [20], "logprobs": logprobs}]}));
    events.end(&[EOS], "stop", Value::Null);
    let found = all(outputs).await;
    let EngineOutput::First { token: 20, logprobs: Some(first), .. } = &found[0] else { panic!("{found:?}") };
    assert_eq!((first.token_id, first.logprob), (20, -2.0));
    let EngineOutput::Finished(finish) = &found[1] else { panic!("{found:?}") };
    assert_eq!((finish.reason, finish.completion_tokens, finish.reused_tokens), (FinishReason::Eos, 2, 5));
}

#[tokio::test]
async fn what_it_has_no_word_for_is_refused_before_it_hears_of_it() {
    let server = Server::start(Make::TensorRtLlm).await;
    let (engine, _) = server.engine(&[]).await;
    for bad in [
        Generate { lora: "l".into(), ..request(0..4, 9) },
        Generate { cache_namespace: "tenant".into(), ..request(0..4, 9) },
        Generate { prompt_logprobs: true, ..request(0..4, 9) },
    ] {
        assert_eq!(code(answer(ask(&engine, bad)).await.1).0, ErrorCode::InvalidRequest);
    }
}

#[tokio::test]
async fn the_state_of_the_first_half_goes_to_the_second_as_it_is() {
    let mut server = Server::start(Make::TensorRtLlm).await;
    let (engine, metrics) = server.engine(&[]).await;
    let outputs = ask(&engine, Generate { prefill_only: true, ..request(0..70, 9) });
    let asked = server.asked().await;
    assert_eq!(asked.body["disaggregated_params"], json!({"request_type": "context_only"}));
    assert_eq!((&asked.body["max_tokens"], &asked.body["stream"]), (&json!(1), &json!(false)));
    assert!(asked.body.get("stream_options").is_none(), "it goes with streams only");
    let choice =
        json!({"index": 0, "text": "", "token_ids": [20], "finish_reason": "length", "disaggregated_params": state()});
    asked.answer(200, json!({"choices": [choice], "usage": {"prompt_tokens": 70}, "prompt_token_ids": [1]}));
    let (tokens, EngineOutput::Prefilled(prefilled)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens, prefilled.prompt_tokens, prefilled.completion_tokens), (vec![20], 70, 1));
    let params = prefilled.disaggregated_params.expect("kept");

    // The answer of the second half begins with the token that the first one made.
    let outputs = ask(&engine, Generate { disaggregated_params: params, ..second_half() });
    let asked = server.asked().await;
    assert_eq!(asked.body["disaggregated_params"], given());
    let prompt = asked.body["prompt"].as_array().expect("ids").len();
    assert_eq!((prompt, &asked.body["max_tokens"]), (70, &json!(9)), "it counts the first one too");
    let events = asked.stream();
    events.tokens(&[20]);
    events.tokens(&[21, 22]);
    events.end(&[23], "length", Value::Null);
    let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens, finish.prompt_tokens, finish.completion_tokens), (vec![21, 22, 23], 70, 4));
    assert_eq!(metrics.kv_fallbacks.get(), 0);
}

#[tokio::test]
async fn a_state_that_cannot_be_used_is_not_and_the_prompt_is_computed() {
    let mut server = Server::start(Make::TensorRtLlm).await;
    let (engine, metrics) = server.engine(&[]).await;
    // The transfer fails, or the answer is another one's.
    for wrong in [None, Some(99)] {
        let outputs = ask(&engine, second_half());
        let asked = server.asked().await;
        assert_eq!(asked.body["disaggregated_params"], given());
        match wrong {
            None => asked.answer(500, json!({"message": "KV transfer failed", "code": 500})),
            Some(token) => asked.stream().tokens(&[token]),
        }
        let again = server.asked().await;
        assert!(again.body.get("disaggregated_params").is_none());
        let prompt = again.body["prompt"].as_array().expect("ids").len();
        assert_eq!((prompt, &again.body["max_tokens"]), (71, &json!(8)));
        again.stream().end(&[21], "length", Value::Null);
        assert_eq!(answer(outputs).await.0, [21]);
    }
    assert_eq!(metrics.kv_fallbacks.get(), 2);
    // The parameters are another engine's, of other tokens, or none.
    let other = json!({"backend": "tensorrt-llm", "disaggregated_params": {"first_gen_tokens": [21]}}).to_string();
    for params in [r#"{"backend":"vllm","kv_transfer_params":{}}"#.to_owned(), other, "rubbish".to_owned()] {
        let outputs = ask(&engine, Generate { disaggregated_params: params, ..second_half() });
        let asked = server.asked().await;
        assert!(asked.body.get("disaggregated_params").is_none());
        asked.stream().end(&[21], "length", Value::Null);
        assert_eq!(answer(outputs).await.0, [21]);
    }
    assert_eq!(metrics.kv_fallbacks.get(), 5);
}

#[tokio::test]
async fn a_request_that_nobody_waits_for_loses_its_connection_in_every_phase() {
    let mut server = Server::start(Make::TensorRtLlm).await;
    let (engine, _) = server.engine(&[]).await;
    let prefill = ask(&engine, Generate { prefill_only: true, ..request(0..70, 9) });
    let during_prefill = server.asked().await;
    let decode = ask(&engine, second_half());
    let during_transfer = server.asked().await;
    drop((prefill, decode));
    during_prefill.given_up().await;
    during_transfer.given_up().await;
    until("places are free", || engine.load().running + engine.load().waiting == 0).await;
}

#[tokio::test]
async fn the_load_is_that_of_the_newest_iteration() {
    let server = Server::start(Make::TensorRtLlm).await;
    let (engine, _) = server.engine(&[]).await;
    server.set_metrics(
        r#"[{"numActiveRequests":3,"numQueuedRequests":2,"kvCacheStats":{"maxNumBlocks":100,"usedNumBlocks":50}}]"#,
    );
    until("a look at the metrics", || engine.load().running == 3).await;
    assert_eq!((engine.load().waiting, engine.load().active_blocks), (2, 50));
}

/// An event of the cache that sees all tokens.
fn event(number: u64, data: Value) -> Value {
    json!({"event_id": number, "window_size": 2048, "data": data})
}

fn block(hash: Value, tokens: std::ops::Range<u32>) -> Value {
    let tokens: Vec<_> =
        tokens.map(|token| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0})).collect();
    json!({"type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35, "mm_keys": []})
}

fn stored(parent: Value, blocks: &[Value]) -> Value {
    json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
}

#[tokio::test]
async fn its_list_of_events_becomes_ours() {
    let server = Server::start(Make::TensorRtLlm).await;
    let (engine, metrics) = server.engine(&[]).await;
    let mut events = engine.take_events().expect("once");
    let blocks = [block(json!(10), 0..32), block(json!("eleven"), 32..64), block(json!(12), 64..70)];
    let narrow = json!({"event_id": 2, "window_size": 128, "data": {"type": "removed", "block_hashes": [10]}});
    let moved = json!({"type": "updated", "block_hash": 10, "cache_level": {"old_value": 0, "new_value": 1}});
    server.say_events([
        event(0, json!({"type": "created", "num_blocks_per_cache_level": [100, 10]})),
        event(1, stored(Value::Null, &blocks)),
        narrow,
        event(3, moved),
        event(4, json!({"type": "removed", "block_hashes": ["eleven", 12]})),
    ]);
    let mut told = Vec::new();
    while told.len() < 5 {
        told.push(within("an event", events.recv()).await.expect("the engine runs"));
    }
    let text: Vec<_> = told.iter().map(|event| format!("{:?} {:?}", event.tier, event.data)).collect();
    let local = HashSpace::default().block(&(0..32).collect::<Vec<_>>(), &[]);
    assert!(text[0].starts_with("Device Stored { parent: None") && text[0].contains(&format!("{local:?}")), "{text:?}");
    assert!(text[1].starts_with("Device Stored { parent: Some(EngineHash(10"), "{text:?}");
    assert!(text[2].starts_with("Host Stored"), "{text:?}");
    assert!(text[3].starts_with("Device Removed") && text[4].starts_with("Device Removed"), "{text:?}");
    assert_eq!(metrics.refused("partial block").get(), 1);
    assert_eq!(metrics.refused("other window").get(), 1);
    assert_eq!(engine.load().used_blocks, 0);
}

#[tokio::test]
async fn a_gap_or_a_new_cache_makes_all_that_is_known_void() {
    let server = Server::start(Make::TensorRtLlm).await;
    let (engine, metrics) = server.engine(&[]).await;
    server.say_events([event(5, stored(Value::Null, &[block(json!(10), 0..32)]))]);
    until("a block", || engine.load().used_blocks == 1).await;
    server.say_events([event(7, stored(Value::Null, &[block(json!(11), 32..64)]))]);
    until("a gap", || metrics.event_gaps.get() == 1).await;
    until("the new block alone", || engine.load().used_blocks == 1).await;
    server.say_events([event(8, json!({"type": "created", "num_blocks_per_cache_level": [100]}))]);
    until("none", || engine.load().used_blocks == 0).await;
    assert_eq!(metrics.event_resyncs.get(), 2);
}
