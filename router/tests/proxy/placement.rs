//! Where requests go without KV events: by load, and by what was sent where.

use serde_json::json;

use crate::client::{Answer, Client, PATIENCE};
use crate::harness::*;
use crate::server::{Behaviour, Server, token};

/// A conversation that takes this many turns so far; its text is long enough for blocks.
fn conversation(topic: &str, turns: usize) -> serde_json::Value {
    let turn = |at: usize| {
        let text =
            format!("In turn {at} of this conversation we talk about {topic}, and about nothing else. ").repeat(4);
        json!({"role": if at.is_multiple_of(2) { "user" } else { "assistant" }, "content": text})
    };
    json!({"messages": (0..turns).map(turn).collect::<Vec<_>>()})
}

/// Waits until a conversation is taken to be on a worker, in so many blocks at least. Guesses are noted beside the requests.
async fn until_noted(router: &Router, worker: &str, conversation: &serde_json::Value, blocks: u32) {
    let noted = async {
        let mut ticks = tokio::time::interval(std::time::Duration::from_millis(5));
        while reused(&router.chat_at(worker, conversation).await) < blocks {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(PATIENCE, noted).await.expect("it is noted in time");
}

fn reused(answer: &Answer) -> u32 {
    answer.header("x-armature-reused-blocks").parse().expect("a number")
}

#[tokio::test]
async fn a_conversation_stays_where_it_began() {
    let servers = [Server::start("a").await, Server::start("b").await, Server::start("c").await];
    let router = Router::start(&servers.each_ref(), &[]).await;
    for topic in ["whales", "trains", "ferns", "glass"] {
        let first = router.chat(conversation(topic, 1)).await;
        assert_eq!(reused(&first), 0);
        let home = first.header("x-armature-worker-id");
        // 4 texts of some 80 bytes a turn, in blocks of 16 times 4 bytes.
        until_noted(&router, &home, &conversation(topic, 1), 4).await;
        let second = router.chat(conversation(topic, 3)).await;
        assert_eq!((second.header("x-armature-worker-id"), reused(&second) >= 4), (home, true), "{topic}");
    }
}

#[tokio::test]
async fn a_server_that_began_anew_is_taken_to_hold_nothing() {
    let mut server = Server::start("a").await;
    let router = Router::start(&[&server], &[]).await;
    let worker = router.chat(conversation("whales", 1)).await.header("x-armature-worker-id");
    until_noted(&router, &worker, &conversation("whales", 1), 4).await;
    server.kill().await;
    router.until_routable(0).await;
    server.revive().await;
    router.until_routable(1).await;
    assert_eq!(reused(&router.chat(conversation("whales", 1)).await), 0);
}

#[tokio::test]
async fn requests_that_come_together_are_spread() {
    let (a, b) = (Server::start("a").await, Server::start("b").await);
    let router = Router::start(&[&a, &b], &[]).await;
    let mut open = Vec::new();
    for server in [&a, &b] {
        server.behave(Behaviour::Pieces(vec![token(0)]));
    }
    for topic in ["whales", "trains", "ferns", "glass"] {
        let mut fields = conversation(topic, 1);
        fields["stream"] = true.into();
        let mut response = router.open(fields).await;
        assert_eq!(response.piece().await, Some(token(0)));
        open.push(response);
    }
    assert_eq!((a.seen().len(), b.seen().len()), (2, 2));
    assert_eq!(router.metric("armature_router_requests_in_flight").await, 4.0);
    drop(open);
    router.until("all are freed", |metrics| value(metrics, "armature_router_requests_in_flight") == 0.0).await;
}

#[tokio::test]
async fn an_adapter_is_asked_of_servers_that_have_it() {
    let (plain, tuned) = (Server::start("plain").await, Server::start("tuned").await);
    tuned.models(json!([{"id": "tiny", "max_model_len": 4096}, {"id": "poet", "root": "/a", "parent": "tiny"}]));
    let router = Router::start(&[&plain, &tuned], &[]).await;
    let mut fields = conversation("whales", 1);
    fields["model"] = "poet".into();
    let answer = router.chat(fields.clone()).await;
    assert_eq!(answer.header("x-armature-worker"), tuned.name());
    let worker = answer.header("x-armature-worker-id");
    until_noted(&router, &worker, &fields, 4).await;
    // The base model's blocks are others, though the text is the same.
    assert_eq!(reused(&router.chat_at(&worker, &conversation("whales", 1)).await), 0);
}

#[tokio::test]
async fn hints_in_a_body_count_as_those_in_headers_do() {
    let (a, b) = (Server::start("a").await, Server::start("b").await);
    let router = Router::start(&[&a, &b], &[]).await;
    let id = router.chat(json!({})).await.header("x-armature-worker-id");
    let number: u64 = id.parse().expect("a number");
    let pin = json!({"nvext": {"backend_instance_id": number}});
    let exclude = json!({"nvext": {"routing_constraints": {"excluded_workers": [number]}}});
    for _ in 0..3 {
        assert_eq!(router.chat(pin.clone()).await.header("x-armature-worker-id"), id);
        assert_ne!(router.chat(exclude.clone()).await.header("x-armature-worker-id"), id);
    }
    assert_eq!(router.chat_at("12345", &pin).await.error().0, 400, "header and body name different workers");
    let nobody = router.chat(json!({"nvext": {"backend_instance_id": 12345}})).await.error();
    assert_eq!((nobody.0, nobody.1.as_deref()), (400, Some("nvext.backend_instance_id")));
    let bad = router.chat(json!({"nvext": {"router": {"temperature": -1}}})).await;
    assert_eq!(bad.error().1.as_deref(), Some("nvext.router.temperature"));
    let seen = a.seen().into_iter().chain(b.seen()).any(|seen| seen.body.windows(5).any(|part| part == b"nvext"));
    assert!(seen, "the body goes on as it came");
}

#[tokio::test]
async fn a_request_can_be_pinned() {
    let (a, b) = (Server::start("a").await, Server::start("b").await);
    let router = Router::start(&[&a, &b], &[]).await;
    let id = router.chat(json!({})).await.header("x-armature-worker-id");
    let seen = |server: &Server| server.seen().len();
    let before = (seen(&a), seen(&b));
    for _ in 0..3 {
        let answer = router.chat_at(&id, &json!({})).await;
        assert_eq!((answer.status, answer.header("x-armature-worker-id")), (200, id.clone()));
    }
    assert_eq!(seen(&a).abs_diff(before.0) + seen(&b).abs_diff(before.1), 3);
    assert!(seen(&a) == before.0 || seen(&b) == before.1, "all three went to one");
    let last = a.seen().pop().or(b.seen().pop()).expect("one of them");
    assert!(!last.headers.contains_key("x-armature-worker"));
    let nobody = router.chat_at("12345", &json!({})).await.error();
    assert_eq!((nobody.0, nobody.1.as_deref()), (400, Some("x-armature-worker")));
}

#[tokio::test]
async fn the_page_for_people_shows_the_servers() {
    let (a, b) = (Server::start("a").await, Server::start("b").await);
    let router = Router::start(&[&a, &b], &[]).await;
    let page = router.get("/").await.body;
    assert!(page.contains(&a.name()) && page.contains(&b.name()), "{page}");
}

#[tokio::test]
async fn in_direct_mode_a_request_without_a_worker_is_told_how_to_name_one() {
    let server = Server::start("a").await;
    let router = Router::start(&[&server], &["--router-mode=direct"]).await;
    let error = router.chat(json!({})).await.error();
    assert_eq!((error.0, error.1.as_deref()), (400, Some("x-armature-worker")));
    assert_eq!(
        router.chat_at(&protocol::metadata::instance_id(&server.url()).to_string(), &json!({})).await.status,
        200
    );
}

#[tokio::test]
async fn a_decision_is_found_by_every_id_that_the_client_sees() {
    let server = Server::start("chatcmpl-a").await;
    let router = Router::start(&[&server], &[]).await;
    let attempts = async |id: &str| {
        let answer = router.get(&format!("/debug/decisions/{id}")).await;
        if answer.status == 200 { answer.json()["attempts"].as_array().expect("a list").clone() } else { Vec::new() }
    };
    let answer = router.chat(json!({})).await;
    let request = answer.header("x-request-id");
    assert_eq!(answer.json()["id"], "chatcmpl-a");
    for id in [request.as_str(), "chatcmpl-a"] {
        let found = attempts(id).await;
        assert_eq!((found.len(), &found[0]["request"]), (1, &json!(request)), "{id}");
        assert_eq!(found[0]["outcome"]["worker"], server.name());
    }
    let event = "data: {\"id\":\"chatcmpl-s\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"}}]}\n\n";
    server.behave(Behaviour::Pieces(vec![event.into()]));
    let mut stream = router.open(json!({"stream": true})).await;
    assert_eq!(stream.piece().await.as_deref(), Some(event));
    assert_eq!(attempts("chatcmpl-s").await, attempts(&stream.header("x-request-id")).await);
    assert_eq!((attempts("chatcmpl-s").await.len(), attempts("chatcmpl-t").await.len()), (1, 0));
    server.behave(Behaviour::Tokens(1));
    let headers = [("x-request-id", "a b/c"), ("content-type", "application/json")];
    let body = chat(json!({})).to_string();
    router.client().await.send("POST", "/v1/chat/completions", &headers, body).await.whole().await;
    assert_eq!(attempts("a%20b%2Fc").await.len(), 1);
}

#[tokio::test]
async fn requests_wait_where_the_batch_of_every_server_is_full() {
    let server = Server::start("a").await;
    let flags = ["--router-queue-threshold=1", "--worker-max-batched-tokens=16"];
    let router = Router::start(&[&server], &flags).await;
    server.behave(Behaviour::Pieces(Vec::new()));
    let send = |mut client: Client, topic: &str| {
        let mut fields = conversation(topic, 1);
        fields["stream"] = true.into();
        tokio::spawn(async move { client.post("/v1/chat/completions", &chat(fields)).await.piece().await })
    };
    let first = send(router.client().await, "whales");
    until("it is there", || server.seen().len() == 1).await;
    server.behave(Behaviour::Pieces(vec![token(7)]));
    let second = send(router.client().await, "trains");
    router.until("it waits", |metrics| value(metrics, "armature_router_queue_requests") == 1.0).await;
    assert_eq!(server.seen().len(), 1);
    server.say(&token(0));
    assert_eq!(first.await.expect("no panic"), Some(token(0)));
    let answered = tokio::time::timeout(PATIENCE, second).await.expect("its turn comes").expect("no panic");
    assert_eq!(answered, Some(token(7)));
}

#[tokio::test]
async fn a_server_is_guessed_to_hold_no_more_than_it_has_room_for() {
    let mut server = Server::start("a").await;
    let router = Router::start(&[&server], &["--router-approximate-cache-policy=lru", "--worker-kv-blocks=6"]).await;
    let worker = protocol::metadata::instance_id(&server.url()).to_string();
    for _ in 0..2 {
        for topic in ["whales", "trains"] {
            until_noted(&router, &worker, &conversation(topic, 1), 4).await;
        }
        let left = reused(&router.chat_at(&worker, &conversation("whales", 1)).await);
        assert!(left < 4, "{left} blocks, though the others take 4 of 6");
        // What it has room for is known of the next one, too.
        server.kill().await;
        router.until_routable(0).await;
        server.revive().await;
        router.until_routable(1).await;
    }
}
