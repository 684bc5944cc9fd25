//! Two TensorRT-LLM: what the first one says of a prompt reaches the second one as it is.

use super::*;

/// What the first half says, as nobody but the servers understands it.
fn state(number: usize, first: u32) -> Value {
    json!({"request_type": "context_only", "first_gen_tokens": [first], "ctx_request_id": u64::MAX - number as u64,
        "encoded_opaque_state": format!("AAE={number}"), "draft_tokens": null})
}

/// The same, as the second half is asked with it.
fn given(number: usize, first: u32) -> Value {
    json!({"request_type": "generation_only", "first_gen_tokens": [first], "ctx_request_id": u64::MAX - number as u64,
        "encoded_opaque_state": format!("AAE={number}")})
}

/// Answers the first half with its token.
fn hand_over(asked: Asked, number: usize, first: u32) {
    assert_eq!(asked.body["disaggregated_params"], json!({"request_type": "context_only"}));
    let state = state(number, first);
    let choice =
        json!({"index": 0, "text": "", "token_ids": [first], "finish_reason": "length", "disaggregated_params": state});
    asked.answer(200, json!({"choices": [choice], "usage": {"prompt_tokens": 70}}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_state_of_each_prompt_goes_to_the_second_half_of_its_own_request() {
    let mut pair = Pair::start(Make::TensorRtLlm, Make::TensorRtLlm).await;
    let bodies: Vec<Value> = (0..AT_ONCE).map(body).collect();
    let answers = join_all(bodies.iter().map(|body| pair.system.ask(body)));
    let served = async {
        let computing = asked(&mut pair.prefill, "prompt", AT_ONCE).await;
        let mut numbers = HashMap::new();
        for (prompt, asked) in computing {
            let number = bodies.iter().position(|body| prompt_of(body) == prompt).expect("the prompt of a client");
            hand_over(asked, number, u32::from(b'a') + number as u32);
            numbers.insert(prompt, number);
        }
        for (prompt, generates) in asked(&mut pair.decode, "prompt", AT_ONCE).await {
            let number = numbers[&prompt];
            let first = u32::from(b'a') + number as u32;
            assert_eq!(generates.body["disaggregated_params"], given(number, first));
            let events = generates.stream();
            // It repeats what the first half has said.
            events.tokens(&[first]);
            events.end(&tokens(&format!("{number}.!")), "length", Value::Null);
        }
    };
    let (answers, ()) = tokio::join!(answers, served);
    for (number, (text, usage, _)) in answers.into_iter().enumerate() {
        assert_eq!(text, format!("{}{number}.!", char::from(b'a' + number as u8)), "the first token comes once");
        assert_eq!(usage["completion_tokens"], TOKENS);
    }
    assert_eq!(pair.counts().await, (AT_ONCE as f64, 0.0));
    kv_that_does_not_come_is_computed(&mut pair).await;
}

/// The decode server cannot fetch the KV: it computes the prompt, and the client does not notice.
async fn kv_that_does_not_come_is_computed(pair: &mut Pair) {
    let body = body(9);
    let served = async {
        hand_over(pair.prefill.asked().await, 9, u32::from(b'a'));
        let fetches = pair.decode.asked().await;
        fetches.answer(500, json!({"message": "KV transfer failed", "code": 500}));
        let computes = pair.decode.asked().await;
        assert!(computes.body.get("disaggregated_params").is_none());
        let last = computes.body["prompt"].as_array().and_then(|tokens| tokens.last().cloned());
        assert_eq!(last, Some(json!(u32::from(b'a'))), "the client has that token already");
        computes.stream().end(&tokens("9.!"), "length", Value::Null);
    };
    let ((text, _, _), ()) = tokio::join!(pair.system.ask(&body), served);
    assert_eq!(text, "a9.!");
    assert_eq!(pair.counts().await, (AT_ONCE as f64 + 1.0, 1.0));
}
