//! KV events of a vLLM as the worker tells them on.

use kv_index::{EngineHash, KvEventData};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;
use worker_agent::engine::remote::Remote;
use worker_agent::engine::remote::metrics::RemoteMetrics;
use worker_agent::engine::{ArenaEvent, Engine, EngineOutput};

use crate::server::*;

struct Pair {
    vllm: Server,
    publisher: Publisher,
    engine: Remote,
    metrics: RemoteMetrics,
    events: UnboundedReceiver<ArenaEvent>,
}

/// What is told of an event: the hashes stored, the hashes removed, or neither: all are gone.
#[derive(Debug, PartialEq)]
enum Told {
    Stored(Option<u64>, Vec<u64>),
    Removed(Vec<u64>),
    Cleared,
}

impl Pair {
    async fn start(replay: bool) -> Self {
        let (publisher, vllm) = (Publisher::bind().await, Server::start(Make::Vllm).await);
        let source = match replay {
            true => format!("{};replay={}", publisher.address, publisher.replay),
            false => publisher.address.clone(),
        };
        Self::with(publisher, vllm, &source).await
    }

    async fn with(publisher: Publisher, vllm: Server, source: &str) -> Self {
        let (engine, metrics) = vllm.engine(&["--vllm-kv-events", source]).await;
        let events = engine.take_events().expect("taken once");
        let mut pair = Self { vllm, publisher, engine, metrics, events };
        pair.publisher.subscribed(&pair.engine).await;
        pair
    }

    /// The next thing told, but for the block that shows that the engine listens.
    async fn told(&mut self) -> Told {
        let number = |hash: EngineHash| hash.0;
        loop {
            let event = within("an event", self.events.recv()).await.expect("the engine runs");
            let told = match event.data {
                KvEventData::Stored { parent, blocks } => {
                    Told::Stored(parent.map(number), blocks.iter().map(|block| block.engine.0).collect())
                }
                KvEventData::Removed { blocks } => Told::Removed(blocks.into_iter().map(number).collect()),
                KvEventData::Cleared => Told::Cleared,
            };
            if told != Told::Stored(None, vec![900]) {
                return told;
            }
        }
    }
}

fn tokens(from: u32, blocks: usize) -> Vec<u32> {
    (from..).take(blocks * BLOCK).collect()
}

fn removed(hashes: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
}

#[tokio::test]
async fn blocks_are_told_on_and_a_prompt_is_known_to_reuse_them() {
    let mut pair = Pair::start(true).await;
    pair.publisher.publish(json!([stored(&tokens(0, 2), 1, None)])).await;
    assert_eq!(pair.told().await, Told::Stored(None, vec![1, 2]));
    // An older layout, and hashes of another sign, go on where a newer one began.
    let older = json!(["BlockStored", [-3], 2, tokens(64, 1), BLOCK, null]);
    pair.publisher.publish(json!([older])).await;
    assert_eq!(pair.told().await, Told::Stored(Some(2), vec![(-3_i64) as u64]));
    let mut outputs = ask(&pair.engine, request(0..100, 9));
    let answer = pair.vllm.asked().await.stream();
    assert_eq!(pair.engine.load().pending_prefill_tokens, 4);
    answer.tokens(&[20]);
    let first = within("a token", outputs.recv()).await;
    assert!(matches!(first, Some(EngineOutput::First { reused_blocks: 3, prompt_blocks: 3, .. })), "{first:?}");
    pair.publisher.publish(json!([removed(&[(-3_i64) as u64]), {"type": "AllBlocksCleared"}])).await;
    assert_eq!((pair.told().await, pair.told().await), (Told::Removed(vec![(-3_i64) as u64]), Told::Cleared));
    assert_eq!(pair.engine.load().used_blocks, 0);
}

#[tokio::test]
async fn hashes_may_be_bytes() {
    let mut pair = Pair::start(false).await;
    let hash = |last: u64| [&[7; 24][..], &last.to_be_bytes()].concat();
    let event = rmp_serde::to_vec(&(2.0, [("BlockRemoved", [serde_bytes(&hash(900))])])).expect("serializable");
    let (sequence, _) = pair.publisher.lose(json!([]));
    pair.publisher.send(sequence, event.into()).await;
    assert_eq!(pair.told().await, Told::Removed(vec![900]), "the last 64 bits count");
}

/// As msgpack's type for bytes.
fn serde_bytes(bytes: &[u8]) -> impl serde::Serialize + '_ {
    struct Raw<'a>(&'a [u8]);
    impl serde::Serialize for Raw<'_> {
        fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            to.serialize_bytes(self.0)
        }
    }
    Raw(bytes)
}

#[tokio::test]
async fn what_was_lost_is_replayed() {
    let mut pair = Pair::start(true).await;
    pair.publisher.publish(json!([stored(&tokens(0, 2), 1, None)])).await;
    assert_eq!(pair.told().await, Told::Stored(None, vec![1, 2]));
    pair.publisher.lose(json!([removed(&[2])]));
    pair.publisher.publish(json!([stored(&tokens(500, 1), 50, None)])).await;
    assert_eq!((pair.told().await, pair.told().await), (Told::Removed(vec![2]), Told::Stored(None, vec![50])));
    assert_eq!((pair.metrics.event_gaps.get(), pair.metrics.event_resyncs.get()), (1, 0));
}

#[tokio::test]
async fn what_cannot_be_replayed_makes_the_rest_void_and_is_learned_anew() {
    for replay in [false, true] {
        let mut pair = Pair::start(replay).await;
        pair.publisher.publish(json!([stored(&tokens(0, 2), 1, None)])).await;
        assert_eq!(pair.told().await, Told::Stored(None, vec![1, 2]));
        pair.publisher.lose(json!([removed(&[2])]));
        // Its memory is short.
        pair.publisher.forget();
        let continues = stored(&tokens(64, 1), 3, Some(2));
        pair.publisher.publish(json!([continues, stored(&tokens(500, 1), 50, None)])).await;
        assert_eq!(pair.told().await, Told::Cleared, "with replay: {replay}");
        assert_eq!(pair.told().await, Told::Stored(None, vec![50]), "what goes on from nothing is left out");
        assert_eq!(pair.metrics.event_resyncs.get(), 1);
        // vLLM tells of a prefix when it is reused; then it is known again, and what follows it, too.
        pair.publisher.publish(json!([stored(&tokens(0, 2), 1, None), continues])).await;
        assert_eq!(
            (pair.told().await, pair.told().await),
            (Told::Stored(None, vec![1, 2]), Told::Stored(Some(2), vec![3]))
        );
    }
}

#[tokio::test]
async fn numbers_that_go_backwards_are_another_process() {
    let mut pair = Pair::start(true).await;
    pair.publisher.publish(json!([stored(&tokens(0, 2), 1, None)])).await;
    assert_eq!(pair.told().await, Told::Stored(None, vec![1, 2]));
    pair.publisher.restart();
    pair.publisher.publish(json!([stored(&tokens(500, 1), 50, None)])).await;
    assert_eq!((pair.told().await, pair.told().await), (Told::Cleared, Told::Stored(None, vec![50])));
    assert_eq!(pair.engine.load().used_blocks, 1);
}

#[tokio::test]
async fn vllm_may_connect_to_the_worker() {
    // A port that is free now; nobody else takes it in these tests.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    let vllm = Server::start(Make::Vllm).await;
    let (engine, metrics) = vllm.engine(&["--vllm-kv-events", &format!("tcp://*:{port}")]).await;
    let events = engine.take_events().expect("taken once");
    let publisher = Publisher::connect(&format!("tcp://127.0.0.1:{port}")).await;
    let mut pair = Pair { vllm, publisher, engine, metrics, events };
    pair.publisher.subscribed(&pair.engine).await;
    pair.publisher.publish(json!([stored(&tokens(0, 2), 1, None)])).await;
    assert_eq!(pair.told().await, Told::Stored(None, vec![1, 2]));
}

#[tokio::test]
async fn events_of_another_rank_or_size_are_left_out() {
    let mut pair = Pair::start(false).await;
    let mut small = stored(&tokens(0, 2), 1, None);
    small["block_size"] = 16.into();
    pair.publisher.publish(json!([small])).await;
    let (sequence, _) = pair.publisher.lose(json!([]));
    let other = json!([3.0, [stored(&tokens(0, 2), 1, None)], 1]);
    pair.publisher.send(sequence, rmp_serde::to_vec(&other).expect("serializable").into()).await;
    pair.publisher.publish(json!([stored(&tokens(500, 1), 50, None)])).await;
    assert_eq!(pair.told().await, Told::Stored(None, vec![50]));
}
