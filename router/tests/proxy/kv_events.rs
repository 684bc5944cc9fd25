//! KV events of the servers' own engines: requests go where the engine says that their prompt is.

use integration_tests::byte_model;
use serde_json::{Value, json};

use crate::engine::*;
use crate::harness::*;
use crate::server::Server;

/// Four blocks of one byte each token.
const TEXT: &str = "It was a bright cold day in April, and the clocks were striking.";

/// Two servers, of which the first has an engine whose events the router follows.
struct Pair {
    first: Server,
    _second: Server,
    engine: Engine,
    router: Router,
    _model: tempfile::TempDir,
}

impl Pair {
    async fn start(replay: bool) -> Self {
        let engine = Engine::start().await;
        let source = match replay {
            true => format!("{};replay={}", engine.address, engine.replay),
            false => engine.address.clone(),
        };
        Self::with(engine, &source).await
    }

    async fn with(engine: Engine, source: &str) -> Self {
        let (first, second) = (Server::start("first").await, Server::start("second").await);
        let model = byte_model::directory();
        let events = format!("--kv-events-endpoints={}={source}", first.url());
        let path = format!("--model-path={}", model.path().display());
        let router = Router::start(&[&first, &second], &[&events, &path]).await;
        Self { first, _second: second, engine, router, _model: model }
    }

    /// Blocks of `text` that the first server is taken to hold.
    async fn reused(&self, text: &str) -> u32 {
        let answer = self.router.chat_at(&router_id(&self.first), &says(text)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.header("x-armature-reused-blocks").parse().expect("a number")
    }

    async fn until_reused(&self, text: &str, blocks: u32) {
        let reused = async {
            let mut ticks = tokio::time::interval(std::time::Duration::from_millis(10));
            while self.reused(text).await != blocks {
                ticks.tick().await;
            }
        };
        let waited = tokio::time::timeout(crate::client::PATIENCE, reused).await;
        assert!(waited.is_ok(), "waited in vain for {blocks} blocks\n{}", self.router.metrics().await);
    }

    /// Publishes until the router has subscribed, which nobody tells.
    async fn subscribed(&mut self) {
        let applied = "armature_router_kv_events_applied_total";
        let before = self.router.metric(applied).await;
        let reached = async {
            while self.router.metric(applied).await == before {
                self.engine.publish(json!([stored(&"~".repeat(BLOCK), 900, None)])).await;
            }
        };
        tokio::time::timeout(crate::client::PATIENCE, reached).await.expect("it subscribes in time");
    }
}

/// Instance id of a server: what its URL gives.
fn router_id(server: &Server) -> String {
    protocol::metadata::instance_id(&server.url()).to_string()
}

fn removed(hashes: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
}

#[tokio::test]
async fn requests_go_where_the_engine_says_their_prompt_is() {
    let mut pair = Pair::start(true).await;
    pair.engine.publish(json!([stored(TEXT, 1, None)])).await;
    pair.until_reused(TEXT, 4).await;
    let answer = pair.router.chat(says(TEXT)).await;
    assert_eq!(answer.header("x-armature-worker"), pair.first.name());
    // An older layout continues what a newer one began; a removed block cuts what follows it.
    let more = "A second sentence that goes on there.";
    let tokens: Vec<u32> = more.bytes().take(2 * BLOCK).map(u32::from).collect();
    pair.engine.publish(json!([["BlockStored", [5, 6], 4, tokens, BLOCK]])).await;
    pair.until_reused(&format!("{TEXT}{more}"), 6).await;
    pair.engine.publish(json!([removed(&[3])])).await;
    pair.until_reused(TEXT, 2).await;
    pair.engine.publish(json!([["AllBlocksCleared"]])).await;
    pair.until_reused(TEXT, 0).await;
}

#[tokio::test]
async fn what_happened_before_and_what_was_lost_is_replayed() {
    let mut engine = Engine::start().await;
    engine.lose(json!([stored(TEXT, 1, None)]));
    let source = format!("{};replay={}", engine.address, engine.replay);
    let mut pair = Pair::with(engine, &source).await;
    pair.until_reused(TEXT, 4).await;
    pair.subscribed().await;
    pair.engine.lose(json!([removed(&[2])]));
    pair.engine.publish(json!([stored(&"-".repeat(BLOCK), 50, None)])).await;
    pair.until_reused(&"-".repeat(BLOCK), 1).await;
    assert_eq!(pair.reused(TEXT).await, 1, "the removal was lost, and fetched");
    assert_eq!(pair.router.metric("armature_router_kv_event_gaps_total").await, 1.0);
}

#[tokio::test]
async fn what_cannot_be_had_again_makes_the_rest_void() {
    let mut pair = Pair::start(false).await;
    pair.subscribed().await;
    pair.engine.publish(json!([stored(TEXT, 1, None)])).await;
    pair.until_reused(TEXT, 4).await;
    pair.engine.lose(json!([removed(&[1])]));
    pair.engine.publish(json!([stored(&"-".repeat(BLOCK), 50, None)])).await;
    pair.until_reused(&"-".repeat(BLOCK), 1).await;
    assert_eq!(pair.reused(TEXT).await, 0, "who knows which of them are left");
}

#[tokio::test]
async fn an_engine_that_began_anew_holds_nothing() {
    for replay in [false, true] {
        let mut pair = Pair::start(replay).await;
        pair.subscribed().await;
        pair.engine.publish(json!([stored(TEXT, 1, None)])).await;
        pair.until_reused(TEXT, 4).await;
        pair.engine.restart();
        pair.engine.publish(json!([stored(&"-".repeat(BLOCK), 50, None)])).await;
        pair.until_reused(&"-".repeat(BLOCK), 1).await;
        assert_eq!(pair.reused(TEXT).await, 0, "with replay: {replay}");
    }
}

#[tokio::test]
async fn an_engine_may_connect_to_the_router() {
    // A port that is free now; nobody else takes it in these tests.
    let listener = std::net::TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    let (first, second) = (Server::start("first").await, Server::start("second").await);
    let model = byte_model::directory();
    let events = format!("--kv-events-endpoints={}=tcp://*:{port}", first.url());
    let path = format!("--model-path={}", model.path().display());
    let router = Router::start(&[&first, &second], &[&events, &path]).await;
    let engine = Engine::connect(&format!("tcp://127.0.0.1:{port}")).await;
    let mut pair = Pair { first, _second: second, engine, router, _model: model };
    pair.subscribed().await;
    pair.engine.publish(json!([stored(TEXT, 1, None)])).await;
    pair.until_reused(TEXT, 4).await;
}

#[tokio::test]
async fn events_that_are_of_no_use_are_counted_and_the_rest_goes_on() {
    let mut pair = Pair::start(true).await;
    let mut other_size = stored(TEXT, 1, None);
    other_size["block_size"] = 32.into();
    let mut other_layers = stored(TEXT, 10, None);
    other_layers["kv_cache_spec_kind"] = "sliding_window".into();
    let orphan = stored(TEXT, 20, Some(19));
    pair.engine.publish(json!([other_size, other_layers, orphan])).await;
    pair.engine.publish(json!("no events")).await;
    pair.engine.publish(json!([stored(TEXT, 30, None)])).await;
    pair.until_reused(TEXT, 4).await;
    for reason in ["block size", "unknown parent", "malformed"] {
        let series = format!("armature_router_kv_events_refused_total{{reason=\"{reason}\"}}");
        assert_eq!(pair.router.metric(&series).await, 1.0, "{reason}");
    }
    assert_eq!(pair.router.metric("armature_router_workers_event_mismatch").await, 0.0, "the last ones were of use");
}

/// What is wrong with the events of which server.
async fn warnings(router: &Router) -> Value {
    router.get("/health").await.json()["warnings"].clone()
}

fn trouble(reason: &str) -> String {
    format!("armature_router_workers_event_trouble{{reason=\"{reason}\"}}")
}

#[tokio::test]
async fn a_server_whose_blocks_are_of_another_size_is_told_until_they_are_not() {
    let mut pair = Pair::start(true).await;
    let mut other_size = stored(TEXT, 1, None);
    other_size["block_size"] = 64.into();
    pair.engine.publish(json!([other_size])).await;
    let series = trouble("block size differs");
    pair.router.until("it is counted", |metrics| value(metrics, &series) == 1.0).await;
    assert_eq!(pair.router.metric("armature_router_workers_event_mismatch").await, 1.0);
    let expected = json!([{"worker": pair.first.name(), "kv_events": "block size differs"}]);
    assert_eq!(warnings(&pair.router).await, expected);
    // An engine that is started again with another setting.
    pair.engine.restart();
    pair.engine.publish(json!([stored(TEXT, 1, None)])).await;
    pair.until_reused(TEXT, 4).await;
    pair.router.until("it is well", |metrics| value(metrics, &series) == 0.0).await;
    assert_eq!(warnings(&pair.router).await, json!([]));
}

/// Case 7, without an agent: a wrong port is no silent zero hit rate.
#[tokio::test]
async fn events_that_never_come_are_missed_until_they_do() {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    let (first, second) = (Server::start("first").await, Server::start("second").await);
    let model = byte_model::directory();
    let events = format!("--kv-events-endpoints={}=tcp://*:{port}", first.url());
    let path = format!("--model-path={}", model.path().display());
    let router = Router::start(&[&first, &second], &[&events, &path, "--router-index-check-secs=0.1"]).await;
    let series = trouble("no events");
    let mut asked = 0;
    while router.metric(&series).await == 0.0 {
        assert_eq!(router.chat_at(&router_id(&first), &says(&format!("{asked}. {TEXT}"))).await.status, 200);
        asked += 1;
        assert!(asked < 10_000, "nobody misses them");
    }
    assert!(asked >= 16, "a few requests say nothing");
    assert_eq!(warnings(&router).await, json!([{"worker": first.name(), "kv_events": "no events"}]));
    let mut engine = Engine::connect(&format!("tcp://127.0.0.1:{port}")).await;
    let heard = async {
        while router.metric(&series).await == 1.0 {
            engine.publish(json!([stored(TEXT, 1, None)])).await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, heard).await.expect("they are heard in time");
    assert_eq!(warnings(&router).await, json!([]));
}

#[tokio::test]
async fn beside_events_a_prompt_counts_as_held_until_its_events_come() {
    let (server, engine) = (Server::start("only").await, Engine::start().await);
    let model = byte_model::directory();
    let events = format!("--kv-events-endpoints={}={}", server.url(), engine.address);
    let path = format!("--model-path={}", model.path().display());
    let router = Router::start(&[&server], &[&events, &path, "--router-predicted-ttl-secs=100"]).await;
    let reused =
        async || -> u32 { router.chat(says(TEXT)).await.header("x-armature-reused-blocks").parse().expect("a number") };
    assert_eq!(reused().await, 0);
    let noted = async {
        let mut ticks = tokio::time::interval(std::time::Duration::from_millis(5));
        while reused().await < 4 {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, noted).await.expect("it is noted in time, though no event comes");
}
