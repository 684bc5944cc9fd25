//! Two real vLLM on a core each, agents beside them and a router: what the router knows of them is what they do.
//!
//! One test, since the servers take a minute to start. Run by `cargo xtask test --stage vllm`.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, StatusCode};
use integration_tests::chat::{Router, message, read_stream, request};
use integration_tests::process::{required, signal_process};
use integration_tests::system::{Beside, System};
use integration_tests::wait::until;
use rustix::process::Signal;
use serde_json::{Value, json};

#[path = "vllm/server.rs"]
mod server;

use server::Vllm;

const MODEL: &str = "smollm2";
/// Tokens of a block: the least that vLLM has on a CPU.
const BLOCK: u64 = 32;
/// An answer, on a machine that is busy with other things.
const ANSWER: Duration = Duration::from_secs(120);
/// Seconds in which a vLLM has to get somewhere: longer than a step on a machine that is busy with other things.
const STALL: &str = "10";
/// Tokens of an answer that takes seconds.
const LONG: u32 = 160;
/// Until something that happens at once is seen.
const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_real_vllm_behind_a_router() {
    let (first, second) = tokio::join!(Vllm::start(0), Vllm::start(1));
    let servers = [first, second];
    let split = halves(&servers).await;
    let system = start(&servers, ["aggregated", "aggregated"]).await;
    let whole = answers(&system).await;
    assert_eq!(split, whole, "the same text, whether or not the KV travelled");
    overlap_is_vllm_s_own(&system, &servers).await;
    a_client_that_leaves_ends_its_request(&system, &servers).await;
    a_vllm_that_hangs_is_left_until_it_computes(&system, &servers).await;
    a_killed_vllm_is_left(&system, servers).await;
}

/// A router, and a worker beside each server.
async fn start(servers: &[Vllm; 2], roles: [&str; 2]) -> System {
    let model = required("ARMATURE_VLLM_MODEL");
    let beside = |server: &Vllm, role| {
        let flags = [
            "--engine",
            "vllm",
            "--vllm-url",
            &server.url,
            "--vllm-kv-events",
            &server.events,
            "--engine-stall-s-max",
            STALL,
        ];
        Beside { role, model: &model, flags: flags.map(str::to_owned).into() }
    };
    System::start(&[beside(&servers[0], roles[0]), beside(&servers[1], roles[1])]).await
}

/// Prompts whose answers are compared: of any length, and of whole blocks.
async fn prompts(system: &System) -> Vec<Value> {
    let mut prompts = Vec::new();
    for (number, aligned) in [(1, false), (2, true), (3, false), (4, true)] {
        let mut text = format!("Story {number} is about a river and two friends who live beside it. ").repeat(6);
        loop {
            let body = request(MODEL, &[message("user", &text)], 12);
            let tokens = system.explain(&body).await["prompt_tokens"].as_u64().expect("a number");
            if (tokens % BLOCK == 0) == aligned {
                prompts.push(body);
                break;
            }
            text.push_str(" again");
        }
    }
    prompts
}

async fn answers(system: &System) -> Vec<String> {
    let mut texts = Vec::new();
    for body in prompts(system).await {
        texts.push(system.ask(&body).await.0);
    }
    texts
}

/// Prefill on one server, decode on the other: KV goes from one to the other by their own means.
async fn halves(servers: &[Vllm; 2]) -> Vec<String> {
    let system = start(servers, ["prefill", "decode"]).await;
    let before = servers[1].metric("external_prefix_cache_hits_total").await;
    let texts = answers(&system).await;
    let remote = system.metric("armature_router_prefills_total{reason=\"remote\"}").await;
    assert_eq!(remote, texts.len() as f64, "every prompt was handed over");
    let hits = servers[1].metric("external_prefix_cache_hits_total").await - before;
    assert!(hits >= (texts.len() as u64 * 2 * BLOCK) as f64, "{hits} tokens came from the other server");
    for agent in 0..2 {
        assert_eq!(system.agent_metric(agent, "armature_worker_engine_kv_fallbacks_total").await, 0.0);
    }
    texts
}

/// What the router takes a server to hold when it chooses it is what that server then reuses.
async fn overlap_is_vllm_s_own(system: &System, servers: &[Vllm; 2]) {
    let hits = async || {
        let [first, second] = [0, 1].map(|at| servers[at].metric("prefix_cache_hits_total"));
        (first.await + second.await) as u64
    };
    let (before, mut expected, mut reported) = (hits().await, 0, 0);
    for number in 0..12 {
        let (rules, question) = (number % 3, number / 3);
        let rules = format!("Rule {rules} of the house: be brief, be polite, and speak of nothing but rule {rules}. ");
        let question = format!("Question {question}: what does the rule say, and to whom does it say it?");
        let body = request(MODEL, &[message("system", &rules.repeat(8)), message("user", &question)], 2);
        let (_, usage, id) = system.ask(&body).await;
        let chosen = system.overlap_when_chosen(&id).await;
        expected += chosen * BLOCK;
        reported += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let blocks = usage["prompt_tokens"].as_u64().expect("a number") / BLOCK;
        until("the blocks of the prompt in the index", SOON, || async {
            let best = system.best_overlap(&body).await;
            if best == blocks { Ok(()) } else { Err(format!("{best} of {blocks}")) }
        })
        .await;
    }
    let own = hits().await - before;
    println!("overlap seen by the router {expected} tokens, reused by vLLM {own}, told to clients {reported}");
    assert!(own >= 9 * 4 * BLOCK, "prompts with the same beginning share it: {own}");
    assert_eq!((expected, reported), (own, own));
}

/// A client that goes away takes its request with it.
async fn a_client_that_leaves_ends_its_request(system: &System, servers: &[Vllm; 2]) {
    const TOKENS: u32 = 1500;
    let sum = async |name: &str| {
        let [first, second] = [0, 1].map(|at| servers[at].metric(name));
        first.await + second.await
    };
    let before = sum("generation_tokens_total").await;
    let mut body = request(MODEL, &[message("user", "Tell a very long story.")], TOKENS);
    body["ignore_eos"] = true.into();
    let begun = system.router.begin(Method::POST, "/v1/chat/completions", Some(&body)).await;
    let (status, _, mut events) = begun.expect("begins");
    assert_eq!(status, StatusCode::OK);
    for _ in 0..4 {
        tokio::time::timeout(ANSWER, events.frame()).await.expect("in time").expect("an event").expect("no break");
    }
    drop(events);
    until("idle servers", SOON, || async {
        let running = sum("num_requests_running").await;
        if running == 0.0 { Ok(()) } else { Err(running) }
    })
    .await;
    let generated = sum("generation_tokens_total").await - before;
    assert!(generated < f64::from(TOKENS / 2), "{generated} tokens for nobody");
}

/// A stream that has begun: its worker, what has come, and the rest.
async fn begun(system: &System, body: &Value) -> (usize, String, Vec<u8>, Incoming) {
    let begun = system.router.begin(Method::POST, "/v1/chat/completions", Some(body)).await;
    let (_, worker, mut rest) = begun.expect("begins");
    let mut events = Vec::new();
    while String::from_utf8_lossy(&events).matches("\"content\"").count() < 4 {
        let frame = tokio::time::timeout(ANSWER, rest.frame()).await.expect("in time").expect("an event");
        events.extend_from_slice(&frame.expect("no break").into_data().unwrap_or_default());
    }
    let at = usize::from(worker == system.name(1));
    assert_eq!(worker, system.name(at));
    (at, worker, events, rest)
}

/// The rest of such a stream.
async fn ends(worker: String, mut events: Vec<u8>, rest: Incoming) {
    let rest = tokio::time::timeout(ANSWER, rest.collect()).await.expect("in time").expect("no break");
    events.extend_from_slice(&rest.to_bytes());
    let answer = read_stream(std::str::from_utf8(&events).expect("UTF-8"), worker).expect("a whole stream");
    assert_eq!((answer.finish_reason.as_str(), &answer.usage["completion_tokens"]), ("length", &json!(LONG)));
}

/// A request for [`LONG`] tokens.
fn endless(text: &str) -> Value {
    let mut body = request(MODEL, &[message("user", text)], LONG);
    body["ignore_eos"] = true.into();
    body
}

async fn workers(system: &System, expected: f64, limit: Duration) {
    until("the workers", limit, || async {
        let routable = system.metric("armature_router_workers_routable").await;
        let known = system.metric("armature_router_workers_known").await;
        if (known, routable) == (expected, expected) { Ok(()) } else { Err((known, routable)) }
    })
    .await;
}

/// Its engine stops, and its server goes on to say that it is well: the stream goes on at the other one.
async fn a_vllm_that_hangs_is_left_until_it_computes(system: &System, servers: &[Vllm; 2]) {
    let (at, worker, events, rest) = begun(system, &endless("Tell a story of a clock that stopped.")).await;
    let engine = servers[at].engine();
    signal_process(engine, Signal::STOP).expect("it runs");
    ends(worker, events, rest).await;
    workers(system, 1.0, SOON).await;
    let (status, _, _) = Router::new(&servers[at].url).send(Method::GET, "/health", None).await.expect("answers");
    assert_eq!(status, StatusCode::OK, "it does not know");
    signal_process(engine, Signal::CONT).expect("it runs");
    workers(system, 2.0, ANSWER).await;
    assert_eq!(system.agent_metric(at, "armature_worker_engine_hangs_total").await, 1.0);
}

/// Gives a server a prompt whose blocks the other one does not have; returns how many those are.
async fn only_at(system: &System, server: usize) -> u64 {
    let text = format!("Ship {server} has passed the lighthouse, and the keeper has written it down. ").repeat(40);
    let mut body = request(MODEL, &[message("user", &text)], 1);
    let explained = system.explain(&body).await;
    let row = explained["workers"].as_array().into_iter().flatten().find(|row| row["worker"] == system.name(server));
    let blocks = explained["prompt_tokens"].as_u64().expect("a number") / BLOCK;
    body["nvext"] = json!({"backend_instance_id": row.expect("its row")["worker_id"]});
    system.ask(&body).await;
    body.as_object_mut().expect("an object").remove("nvext");
    until("the blocks of the prompt in the index", SOON, || async {
        let best = system.best_overlap(&body).await;
        if best == blocks { Ok(()) } else { Err(format!("{best} of {blocks}")) }
    })
    .await;
    blocks
}

/// kill -9: the stream goes on at the other server, and the router knows nothing more of the dead one, nor of its blocks.
async fn a_killed_vllm_is_left(system: &System, servers: [Vllm; 2]) {
    let own = [only_at(system, 0).await, only_at(system, 1).await];
    let body = endless("Tell a story of a mill, and of the miller.");
    let (dead, worker, events, rest) = begun(system, &body).await;
    let [first, second] = servers;
    let (killed, left) = if dead == 0 { (first, second) } else { (second, first) };
    let indexed = system.metric("armature_router_index_blocks").await;
    drop(killed);
    workers(system, 1.0, SOON).await;
    // The stream that goes on adds some at the other one.
    let most = indexed - own[dead] as f64 + f64::from(LONG.div_ceil(BLOCK as u32) + 2);
    until("an index without the dead server's blocks", SOON, || async {
        let left = system.metric("armature_router_index_blocks").await;
        if left <= most { Ok(()) } else { Err(format!("{left} of {indexed}, {own:?}")) }
    })
    .await;
    ends(worker, events, rest).await;
    let explained = system.explain(&body).await;
    let rows = explained["workers"].as_array().expect("rows");
    assert!(rows.len() == 1 && rows[0]["worker"] == system.name(1 - dead), "{explained:#}");
    for _ in 0..3 {
        system.ask(&request(MODEL, &[message("user", "And who is left?")], 4)).await;
    }
    drop(left);
}
