//! Two SGLang: each is told the same room, while both run.

use super::*;

/// An answer of these tokens.
fn whole(tokens: &[u32]) -> Value {
    json!({"text": "", "output_ids": tokens, "meta_info": {"id": "r", "prompt_tokens": 5, "cached_tokens": 0,
        "completion_tokens": tokens.len(), "finish_reason": {"type": "length", "length": tokens.len()}}})
}

fn end(asked: Asked, tokens: &[u32]) {
    let events = asked.stream();
    events.say(whole(tokens));
    events.raw("data: [DONE]\n\n");
}

/// Where a request meets its other half.
fn room(asked: &Asked) -> (String, u64, u64) {
    let number = |name: &str| asked.body[name].as_u64().expect("a number");
    let host = asked.body["bootstrap_host"].as_str().expect("a host").to_owned();
    (host, number("bootstrap_port"), number("bootstrap_room"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_halves_of_each_request_meet_in_one_room() {
    let mut pair = Pair::start(Make::Sglang("prefill"), Make::Sglang("decode")).await;
    let bodies: Vec<Value> = (0..AT_ONCE).map(body).collect();
    let answers = join_all(bodies.iter().map(|body| pair.system.ask(body)));
    let served = async {
        // None of them is answered before all of them are here: the first half does not end before the second one runs.
        let mut computing = asked(&mut pair.prefill, "input_ids", AT_ONCE).await;
        let mut generating = asked(&mut pair.decode, "input_ids", AT_ONCE).await;
        let mut rooms = HashSet::new();
        for (number, body) in bodies.iter().enumerate() {
            let prompt = prompt_of(body);
            let computes = computing.remove(&prompt).expect("the prefill server computes the prompt");
            let generates = generating.remove(&prompt).expect("the decode server is asked with the same prompt");
            assert_eq!(room(&computes), room(&generates));
            assert_eq!(
                (room(&computes).0.as_str(), room(&computes).1),
                ("127.0.0.1", 8997),
                "where the prefill server is"
            );
            assert_eq!(computes.body["sampling_params"]["max_new_tokens"], 1);
            assert_eq!(generates.body["sampling_params"]["max_new_tokens"], TOKENS);
            rooms.insert(room(&computes).2);
            computes.answer(200, whole(&tokens("a")));
            end(generates, &tokens(&format!("a{number}.!")));
        }
        assert_eq!(rooms.len(), AT_ONCE, "each has a room of its own");
    };
    let (answers, ()) = tokio::join!(answers, served);
    for (number, (text, usage, _)) in answers.into_iter().enumerate() {
        assert_eq!(text, format!("a{number}.!"));
        assert_eq!(usage["completion_tokens"], TOKENS);
    }
    assert_eq!(pair.counts().await, (AT_ONCE as f64, 0.0));
    let (_, _, page) = pair.system.router.send(Method::GET, "/", None).await.expect("a page for people");
    let page = String::from_utf8(page.to_vec()).expect("UTF-8");
    for (at, role) in ["prefill", "decode"].into_iter().enumerate() {
        let name = pair.system.name(at);
        let row = page.split("<tr>").find(|row| row.contains(&format!("<td>{name}</td>"))).expect("a row of it");
        assert!(row.contains(&format!("<td>{role}</td><td>ready</td><td>0</td><td>0 of 100</td>")), "{row}");
    }
    a_client_that_leaves_frees_both(&mut pair).await;
}

/// Neither server is left with a request that nobody waits for, nor the prefill server with KV that nobody fetches.
async fn a_client_that_leaves_frees_both(pair: &mut Pair) {
    let body = body(9);
    let mut left = Box::pin(pair.system.router.begin(Method::POST, "/v1/chat/completions", Some(&body)));
    let (computes, generates) = tokio::select! {
        biased;
        both = async { (pair.prefill.asked().await, pair.decode.asked().await) } => both,
        _ = &mut left => panic!("nobody has answered"),
    };
    drop(left);
    for (server, asked) in [(&mut pair.decode, generates), (&mut pair.prefill, computes)] {
        let name = asked.body["rid"].clone();
        asked.given_up().await;
        let abort = server.asked().await;
        assert_eq!((abort.path.as_str(), &abort.body["rid"]), ("/abort_request", &name));
        abort.answer(200, json!({}));
    }
    until("idle workers", SOON, || async {
        let mut running = 0.0;
        for agent in 0..2 {
            running += pair.system.agent_metric(agent, "armature_worker_requests_running").await;
        }
        if running == 0.0 { Ok(()) } else { Err(running) }
    })
    .await;
}
