//! Prefill and decode on different vLLMs: what one says goes to the other as it is.

use protocol::request_plane::{FinishReason, Generate};
use serde_json::{Value, json};
use worker_agent::engine::EngineOutput;

use crate::server::*;

/// What a prefill says of `tokens` tokens.
fn params(tokens: usize) -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
        "remote_host": "10.0.0.7", "remote_port": 5600, "remote_num_tokens": tokens, "tp_size": 1, "later": {"x": [1.50]}})
}

fn disaggregated(kv_transfer_params: &Value) -> String {
    json!({"backend": "vllm", "kv_transfer_params": kv_transfer_params}).to_string()
}

/// The second half of a request whose prompt of `prompt` tokens another vLLM has computed.
fn second_half(prompt: usize, kv: &Value) -> Generate {
    let request = request((0..=prompt as u32).collect::<Vec<_>>(), 9);
    Generate { generated: 1, disaggregated_params: disaggregated(kv), ..request }
}

#[tokio::test]
async fn a_prefill_computes_one_token_and_tells_where_the_kv_is() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    let outputs = ask(&engine, Generate { prefill_only: true, ..request(0..70, 9) });
    let asked = vllm.asked().await;
    assert_eq!((&asked.body["max_tokens"], &asked.body["stream"]), (&json!(1), &json!(false)));
    assert_eq!(asked.body["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(asked.body["kv_transfer_params"]["do_remote_prefill"], false);
    let choice = json!({"token_ids": [20], "finish_reason": "length"});
    let usage = json!({"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": 64}});
    asked.answer(200, json!({"choices": [choice], "usage": usage, "kv_transfer_params": params(70)}));
    let found = all(outputs).await;
    assert!(matches!(found[0], EngineOutput::First { token: 20, reused_blocks: 2, .. }), "{found:?}");
    let EngineOutput::Prefilled(prefilled) = &found[1] else { panic!("{found:?}") };
    assert_eq!((prefilled.prompt_tokens, prefilled.completion_tokens, prefilled.reused_tokens), (70, 1, 64));
    let told: Value = serde_json::from_str(prefilled.disaggregated_params.as_ref().expect("kept")).expect("JSON");
    assert_eq!(told, json!({"backend": "vllm", "kv_transfer_params": params(70)}));
}

#[tokio::test]
async fn a_prompt_that_ends_at_its_first_token_is_not_handed_over() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, _) = vllm.engine(&[]).await;
    let outputs = ask(&engine, Generate { prefill_only: true, ..request(0..70, 9) });
    vllm.asked().await.answer(200, json!({"choices": [{"token_ids": [EOS], "finish_reason": "stop"}]}));
    let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens.len(), finish.reason), (0, FinishReason::Eos));
    // Nor one that may have a single token only.
    let outputs = ask(&engine, Generate { prefill_only: true, ..request(0..70, 1) });
    let asked = vllm.asked().await;
    assert!(asked.body.get("kv_transfer_params").is_none());
    asked.stream().end(&[20], "length", Value::Null);
    let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens, finish.reason), (vec![20], FinishReason::Length));
    // A server without a connector keeps nothing: the other half computes the prompt.
    let outputs = ask(&engine, Generate { prefill_only: true, ..request(0..70, 9) });
    let choice = json!({"token_ids": [20], "finish_reason": "length"});
    vllm.asked().await.answer(200, json!({"choices": [choice], "kv_transfer_params": null}));
    let (_, EngineOutput::Prefilled(prefilled)) = answer(outputs).await else { panic!("no end") };
    assert_eq!(prefilled.disaggregated_params, None);
}

#[tokio::test]
async fn the_other_half_passes_on_what_it_was_given() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&[]).await;
    let outputs = ask(&engine, second_half(70, &params(70)));
    let asked = vllm.asked().await;
    assert_eq!(asked.body["kv_transfer_params"], params(70));
    assert_eq!((asked.body["prompt"].as_array().expect("ids").len(), &asked.body["max_tokens"]), (71, &json!(8)));
    asked.stream().end(&[21], "length", Value::Null);
    let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
    assert_eq!((tokens, finish.prompt_tokens, finish.completion_tokens), (vec![21], 70, 2));
    assert_eq!(metrics.kv_fallbacks.get(), 0);
}

#[tokio::test]
async fn a_prompt_of_whole_blocks_is_fetched_by_a_request_of_its_own() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&[]).await;
    for fetched in [true, false] {
        let outputs = ask(&engine, second_half(64, &params(64)));
        let fetch = vllm.asked().await;
        assert_eq!(fetch.body["kv_transfer_params"], params(64));
        assert_eq!((fetch.body["prompt"].as_array().expect("ids").len(), &fetch.body["max_tokens"]), (64, &json!(1)));
        match fetched {
            true => fetch.answer(200, json!({"choices": [{"token_ids": [99], "finish_reason": "length"}]})),
            false => fetch.answer(500, json!({"error": {"message": "no such lease"}})),
        }
        let asked = vllm.asked().await;
        assert!(asked.body.get("kv_transfer_params").is_none());
        assert_eq!(asked.body["prompt"].as_array().expect("ids").len(), 65);
        asked.stream().end(&[21], "length", Value::Null);
        let (tokens, last) = answer(outputs).await;
        assert!(matches!(last, EngineOutput::Finished(_)), "{last:?}");
        assert_eq!(tokens, [21], "what the fetch generated is nobody's business");
    }
    assert_eq!(metrics.kv_fallbacks.get(), 1);
}

#[tokio::test]
async fn what_cannot_be_fetched_is_computed() {
    let mut vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&[]).await;
    // The transfer fails: vLLM ends the request with an error, before its first token.
    let outputs = ask(&engine, second_half(70, &params(70)));
    let events = vllm.asked().await.stream();
    events.say(json!({"error": {"message": "KV load failed", "code": 500}}));
    let again = vllm.asked().await;
    assert!(again.body.get("kv_transfer_params").is_none());
    again.stream().end(&[21], "length", Value::Null);
    assert_eq!(answer(outputs).await.0, [21]);
    assert_eq!(metrics.kv_fallbacks.get(), 1);
    // The parameters are another engine's, or none.
    for (count, params) in [
        (2, r#"{"backend":"tcp","address":"10.0.0.7:9002"}"#.to_owned()),
        (3, "rubbish".to_owned()),
        (4, disaggregated(&json!({"remote_block_ids": []}))),
    ] {
        let outputs = ask(&engine, Generate { disaggregated_params: params, ..second_half(70, &Value::Null) });
        let asked = vllm.asked().await;
        assert!(asked.body.get("kv_transfer_params").is_none());
        asked.stream().end(&[21], "length", Value::Null);
        assert_eq!(answer(outputs).await.0, [21]);
        assert_eq!(metrics.kv_fallbacks.get(), count);
    }
}
