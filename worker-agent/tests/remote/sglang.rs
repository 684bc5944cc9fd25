//! SGLang, as it documents itself; and two of them for one request, each of which waits for the other.

use protocol::request_plane::{ErrorCode, FinishReason, Generate, Sampling};
use serde_json::{Value, json};
use worker_agent::engine::remote::{Remote, wait_until_it_computes};
use worker_agent::engine::{Engine, EngineOutput, Prefilled};

use crate::server::*;

/// An event with these tokens, of which there are `so_far`.
fn event(tokens: &[u32], so_far: usize, finish: Value) -> Value {
    json!({"text": "", "output_ids": tokens, "meta_info": {"id": "r", "finish_reason": finish, "prompt_tokens": 5,
        "completion_tokens": so_far, "cached_tokens": 4}})
}

fn length() -> Value {
    json!({"type": "length", "length": 1})
}

/// The end of an answer of these tokens.
fn end(asked: Asked, tokens: &[u32]) {
    let events = asked.stream();
    events.say(event(tokens, tokens.len(), length()));
    events.raw("data: [DONE]\n\n");
}

fn prefill_only() -> Generate {
    Generate { prefill_only: true, ..request(0..70, 9) }
}

/// The first half of a request: it ends at once, and says where the second one meets it.
async fn first_half(engine: &Remote) -> Prefilled {
    let (tokens, EngineOutput::Prefilled(prefilled)) = answer(ask(engine, prefill_only())).await else {
        panic!("no end")
    };
    assert!(tokens.is_empty(), "the first token is the other one's");
    prefilled
}

fn second_half(prefilled: &Prefilled) -> Generate {
    Generate { disaggregated_params: prefilled.disaggregated_params.clone().expect("a room"), ..request(0..70, 9) }
}

fn room(asked: &Asked) -> (&Value, &Value, u64) {
    let room = asked.body["bootstrap_room"].as_u64().expect("a room");
    assert!(room < 1 << 63, "it is signed there");
    (&asked.body["bootstrap_host"], &asked.body["bootstrap_port"], room)
}

fn requests(engine: &Remote) -> usize {
    let load = engine.load();
    load.running + load.waiting
}

#[tokio::test]
async fn a_request_is_said_in_full_and_its_tokens_come_back() {
    let mut server = Server::start(Make::Sglang("null")).await;
    let (engine, _) = server.engine(&["--engine-priority"]).await;
    let info = engine.info();
    assert_eq!((info.block_size.get(), info.total_blocks, info.context_length), (BLOCK, 100, 2048));
    let sampling = Sampling { temperature: 0.5, top_k: 40, seed: Some(7), ..Sampling::default() };
    let wanted = Generate {
        sampling: Some(sampling),
        cache_namespace: "tenant".into(),
        lora: "adapter".into(),
        priority: 3,
        logprobs: Some(1),
        ..request(10..15, 9)
    };
    let outputs = ask(&engine, wanted);
    let asked = server.asked().await;
    for (name, value) in [
        ("input_ids", json!([10, 11, 12, 13, 14])),
        ("stream", json!(true)),
        ("return_logprob", json!(true)),
        ("logprob_start_len", json!(-1)),
        ("top_logprobs_num", json!(1)),
        ("extra_key", json!("tenant")),
        ("lora_path", json!("adapter")),
        ("priority", json!(3)),
    ] {
        assert_eq!(asked.body[name], value, "{name}");
    }
    let sampling = &asked.body["sampling_params"];
    assert_eq!((&sampling["max_new_tokens"], &sampling["top_k"]), (&json!(9), &json!(40)));
    assert!(sampling.get("sampling_seed").is_none(), "most servers refuse it");
    assert!(asked.body.get("bootstrap_room").is_none());
    let events = asked.stream();
    let mut first = event(&[20], 1, Value::Null);
    first["meta_info"]["output_token_logprobs"] = json!([[-2.0, 20, null]]);
    first["meta_info"]["output_top_logprobs"] = json!([[[-0.5, 21, null]]]);
    events.say(first);
    let mut last = event(&[20, 22], 2, length());
    last["meta_info"]["output_token_logprobs"] = json!([[-2.0, 20, null], [-0.25, 22, null]]);
    events.say(last);
    events.raw("data: [DONE]\n\n");
    let found = all(outputs).await;
    let EngineOutput::First { token: 20, logprobs: Some(first), .. } = &found[0] else { panic!("{found:?}") };
    assert_eq!((first.logprob, first.top[0].token_id), (-2.0, 21));
    let EngineOutput::Token { token: 22, logprobs: Some(second) } = &found[1] else { panic!("{found:?}") };
    assert_eq!((second.token_id, second.logprob), (22, -0.25));
    let EngineOutput::Finished(finish) = &found[2] else { panic!("{found:?}") };
    assert_eq!((finish.reason, finish.completion_tokens, finish.reused_tokens), (FinishReason::Length, 2, 4));
}

#[tokio::test]
async fn tokens_are_told_once_whether_events_repeat_them_or_not() {
    let mut server = Server::start(Make::Sglang("null")).await;
    let (engine, _) = server.engine(&[]).await;
    for repeats in [true, false] {
        let outputs = ask(&engine, request(0..4, 9));
        let events = server.asked().await.stream();
        let all = [20, 21, 22, EOS];
        let of = |from: usize, to: usize| if repeats { &all[..to] } else { &all[from..to] };
        events.say(event(of(0, 1), 1, Value::Null));
        events.say(event(of(1, 3), 3, Value::Null));
        events.say(event(of(3, 3), 3, Value::Null));
        events.say(event(of(3, 4), 4, json!({"type": "stop", "matched": EOS})));
        events.raw("data: [DONE]\n\n");
        let (tokens, EngineOutput::Finished(finish)) = answer(outputs).await else { panic!("no end") };
        assert_eq!((tokens, finish.reason), (vec![20, 21, 22], FinishReason::Eos));
    }
    let outputs = ask(&engine, request(0..4, 9));
    server.asked().await.stream().say(event(&[21], 3, Value::Null));
    let (found, message) = code(answer(outputs).await.1);
    assert!(found == ErrorCode::Engine && message.contains("tokens are missing"), "{message}");
}

#[tokio::test]
async fn a_request_that_nobody_waits_for_is_aborted_by_its_name() {
    let mut server = Server::start(Make::Sglang("null")).await;
    let (engine, _) = server.engine(&["--engine-max-num-seqs", "1", "--engine-max-waiting", "0"]).await;
    let outputs = ask(&engine, request(0..4, 9));
    let asked = server.asked().await;
    let name = asked.body["rid"].clone();
    drop(outputs);
    asked.given_up().await;
    let abort = server.asked().await;
    assert_eq!((abort.path.as_str(), &abort.body), ("/abort_request", &json!({"rid": name})));
    abort.answer(200, json!({}));
    until("its place is free", || requests(&engine) == 0).await;
    let again = within("a place", async {
        loop {
            match engine.submit(request(0..4, 9)) {
                Ok(outputs) => return outputs,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    })
    .await;
    end(server.asked().await, &[20]);
    assert_eq!(answer(again).await.0, [20]);
}

#[tokio::test]
async fn two_halves_meet_in_a_room_while_both_run() {
    let (mut p, mut d) = (Server::start(Make::Sglang("prefill")).await, Server::start(Make::Sglang("decode")).await);
    let ((prefill, _), (decode, metrics)) = (p.engine(&[]).await, d.engine(&[]).await);
    assert_eq!(prefill.kv_layout(), decode.kv_layout());
    let mut rooms = Vec::new();
    for _ in 0..2 {
        let prefilled = first_half(&prefill).await;
        assert_eq!((prefilled.prompt_tokens, prefilled.completion_tokens), (70, 0));
        let computes = p.asked().await;
        assert_eq!(requests(&prefill), 1, "it computes for another");
        let outputs = ask(&decode, second_half(&prefilled));
        let generates = d.asked().await;
        assert_eq!(room(&computes), room(&generates));
        assert_eq!(room(&computes).0, "10.0.0.7");
        assert_eq!(room(&computes).1, 8997);
        assert_eq!(computes.body["input_ids"], generates.body["input_ids"]);
        assert_eq!(generates.body["sampling_params"]["max_new_tokens"], 9);
        rooms.push(room(&computes).2);
        // They have met: only now the first one ends.
        computes.answer(200, event(&[20], 1, length()));
        end(generates, &[20, 21, 22]);
        let found = all(outputs).await;
        assert!(matches!(found[0], EngineOutput::First { token: 20, .. }), "{found:?}");
        assert_eq!(found.len(), 4);
        until("its place is free", || requests(&prefill) == 0).await;
    }
    assert_ne!(rooms[0], rooms[1]);
    assert_eq!(metrics.kv_fallbacks.get(), 0);
}

#[tokio::test]
async fn a_prompt_that_nobody_fetches_is_aborted_and_frees_its_place() {
    let mut p = Server::start(Make::Sglang("prefill")).await;
    let (prefill, _) = p.engine(&[]).await;
    let prefilled = first_half(&prefill).await;
    let computes = p.asked().await;
    // What a router says when the client leaves, or when nobody could go on.
    let params: Value = serde_json::from_str(prefilled.disaggregated_params.as_ref().expect("a room")).expect("JSON");
    let lease = u64::from_str_radix(params["lease"].as_str().expect("a lease"), 16).expect("hexadecimal");
    assert_eq!(lease, room(&computes).2);
    let name = computes.body["rid"].clone();
    prefill.end_lease(lease);
    prefill.end_lease(lease);
    computes.given_up().await;
    let abort = p.asked().await;
    assert_eq!((abort.path.as_str(), &abort.body["rid"]), ("/abort_request", &name));
    abort.answer(200, json!({}));
    until("its place is free", || requests(&prefill) == 0).await;
    // One that fails by itself, since nobody came, is over.
    first_half(&prefill).await;
    p.asked().await.answer(500, json!({"error": {"message": "bootstrap timed out"}}));
    until("its place is free", || requests(&prefill) == 0).await;
    assert_eq!(prefill.lost(), None);
}

#[tokio::test]
async fn a_drain_waits_until_another_server_has_fetched_what_is_computed_here() {
    let mut p = Server::start(Make::Sglang("prefill")).await;
    let (prefill, _) = p.engine(&[]).await;
    assert_eq!(prefill.leases(), 0);
    within("nothing to wait for", prefill.unleased()).await;
    first_half(&prefill).await;
    let computes = p.asked().await;
    let mut drained = prefill.unleased();
    assert!(futures::poll!(&mut drained).is_pending() && prefill.leases() == 1);
    computes.answer(200, event(&[20], 1, length()));
    within("it is fetched", drained).await;
    assert_eq!(prefill.leases(), 0);
}

#[tokio::test]
async fn a_first_half_that_nobody_heard_the_end_of_is_not_computed() {
    let mut p = Server::start(Make::Sglang("prefill")).await;
    let (prefill, _) = p.engine(&[]).await;
    drop(ask(&prefill, prefill_only()));
    until("its place is free", || requests(&prefill) == 0 && prefill.leases() == 0).await;
    let prefilled = first_half(&prefill).await;
    let computes = p.asked().await;
    let params = prefilled.disaggregated_params.expect("a room");
    assert!(params.contains(&room(&computes).2.to_string()), "the server's first request is the second one");
    computes.answer(200, event(&[20], 1, length()));
}

#[tokio::test]
async fn a_transfer_that_fails_is_an_answer_that_fails() {
    let (mut p, mut d) = (Server::start(Make::Sglang("prefill")).await, Server::start(Make::Sglang("decode")).await);
    let ((prefill, _), (decode, _)) = (p.engine(&[]).await, d.engine(&[]).await);
    let prefilled = first_half(&prefill).await;
    let computes = p.asked().await;
    let outputs = ask(&decode, second_half(&prefilled));
    let abort = json!({"type": "abort", "message": "KV transfer failed", "status_code": 500});
    d.asked().await.stream().say(event(&[], 0, abort));
    let (found, message) = code(answer(outputs).await.1);
    assert!(found == ErrorCode::Engine && message.contains("KV transfer failed"), "{message}");
    computes.answer(200, event(&[20], 1, json!({"type": "abort", "message": "KV transfer failed"})));
    until("its place is free", || requests(&prefill) == 0).await;
}

#[tokio::test]
async fn each_half_does_its_own_and_another_worker_may_do_the_rest() {
    let (p, d) = (Server::start(Make::Sglang("prefill")).await, Server::start(Make::Sglang("decode")).await);
    let both = Server::start(Make::Sglang("null")).await;
    let other = r#"{"backend":"vllm","kv_transfer_params":{}}"#;
    for (server, request) in [
        (&p, request(0..70, 9)),
        (&d, request(0..70, 9)),
        (&d, prefill_only()),
        (&d, Generate { disaggregated_params: other.into(), ..request(0..70, 9) }),
        (&both, prefill_only()),
    ] {
        let (engine, _) = server.engine(&[]).await;
        assert_eq!(code(answer(ask(&engine, request)).await.1).0, ErrorCode::Overloaded);
    }
}

#[tokio::test]
async fn an_answer_of_one_token_is_the_decode_worker_s_too() {
    let mut p = Server::start(Make::Sglang("prefill")).await;
    let (prefill, _) = p.engine(&[]).await;
    let outputs = ask(&prefill, Generate { prefill_only: true, ..request(0..70, 1) });
    let (tokens, last) = answer(outputs).await;
    assert!(tokens.is_empty() && matches!(last, EngineOutput::Prefilled(_)), "{last:?}");
    p.asked().await.answer(200, event(&[20], 1, length()));
}

#[tokio::test]
async fn its_events_are_those_of_vllm_and_its_load_is_its_own() {
    let mut publisher = Publisher::bind().await;
    let server = Server::start(Make::Sglang("null")).await;
    let (engine, _) = server.engine(&["--engine-kv-events", &publisher.address]).await;
    publisher.subscribed(&engine).await;
    server.set_metrics(r#"[{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 1600}]"#);
    until("a look at the load", || engine.load().running == 3).await;
    assert_eq!((engine.load().waiting, engine.load().active_blocks), (2, 50));
}

#[tokio::test]
async fn a_half_that_hung_is_taken_back_when_what_ran_there_goes_on_or_is_gone() {
    let server = Server::start(Make::Sglang("decode")).await;
    let runs = |requests: u32, tokens: u32| {
        let rank = json!({"dp_rank": 0, "num_reqs": requests, "num_waiting_reqs": 0, "num_tokens": tokens});
        server.set_metrics(&json!([rank]).to_string());
    };
    runs(1, 64);
    let brief = server.settings(&["--engine-start-s-max", "1"]);
    let text = wait_until_it_computes(&brief).await.map(drop).expect_err("it hangs").to_string();
    assert!(text.contains("gets nowhere"), "{text}");
    let settings = server.settings(&[]);
    let waiting = tokio::spawn(async move { wait_until_it_computes(&settings).await });
    runs(0, 0);
    within("the engine", waiting).await.expect("no panic").expect("nothing runs there");
}
