//! KV events over a real ZeroMQ subscription, and recovery of what it missed over the request plane.

use std::collections::BTreeMap;

use kv_hashing::BlockHash;
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier};
use protocol::event_plane::{ActiveLoad, KV_EVENTS, KV_METRICS, decode_envelope, decode_events, decode_load};
use protocol::kv_event::{KvCacheEventData, RouterEvent, StorageTier};
use protocol::metadata;
use protocol::request_plane::{
    ErrorCode, KvBlock, KvQuery, KvSample, client_frame, kv_answer::Kind, server_frame::Body,
};
use worker_agent::engine::{ArenaEvent, EngineLoad};
use zeromq::{Socket, SocketRecv, SubSocket};

use crate::harness::*;

pub fn chain(engine_hashes: std::ops::Range<u64>) -> Vec<StoredBlock> {
    engine_hashes.map(|hash| StoredBlock { engine: EngineHash(hash), local: BlockHash(hash * 3) }).collect()
}

pub fn store(parent: Option<u64>, blocks: Vec<StoredBlock>) -> ArenaEvent {
    ArenaEvent { tier: Tier::Device, data: KvEventData::Stored { parent: parent.map(EngineHash), blocks } }
}

fn remove(engine_hash: u64) -> ArenaEvent {
    ArenaEvent { tier: Tier::Device, data: KvEventData::Removed { blocks: vec![EngineHash(engine_hash)] } }
}

/// The answer to a KV query, put together.
pub struct Answer {
    pub dump: bool,
    pub events: Vec<RouterEvent>,
    pub last_event_id: Option<u64>,
}

impl Router {
    pub async fn query(&mut self, id: u64, query: KvQuery) -> Answer {
        self.send(id, client_frame::Body::KvQuery(query)).await;
        let mut events = Vec::new();
        loop {
            match self.recv().await.body {
                Some(Body::KvAnswer(answer)) => {
                    events.extend(decode_events(&answer.events).expect("msgpack"));
                    if answer.end {
                        let dump = answer.kind() == Kind::Dump;
                        return Answer { dump, events, last_event_id: answer.last_event_id };
                    }
                }
                other => panic!("not a KvAnswer: {other:?}"),
            }
        }
    }
}

/// A message of either topic.
#[derive(Debug)]
enum Message {
    Events(Vec<RouterEvent>),
    Load(ActiveLoad),
}

struct Subscriber {
    socket: SubSocket,
    publisher_id: u64,
    sequences: BTreeMap<String, u64>,
}

impl Subscriber {
    /// Subscribes to both topics and waits until that has reached the worker.
    async fn new(worker: &Worker) -> Self {
        let mut socket = SubSocket::new();
        within("connecting", socket.connect(&worker.address("zmq"))).await.expect("the publisher listens");
        // The worker takes subscriptions in their order: a load report says that both are known.
        socket.subscribe(KV_EVENTS).await.expect("connected");
        socket.subscribe(KV_METRICS).await.expect("connected");
        let mut subscriber = Self { socket, publisher_id: worker.hello().instance_id, sequences: BTreeMap::new() };
        subscriber.load_where(|_| true).await;
        subscriber
    }

    async fn next(&mut self) -> Message {
        let message = within("an event message", self.socket.recv()).await.expect("connected").into_vec();
        let [topic, publisher, sequence, envelope] = &message[..] else { panic!("{} parts", message.len()) };
        let envelope = decode_envelope(envelope).expect("an envelope");
        assert_eq!(topic, envelope.topic.as_bytes());
        assert_eq!(publisher[..], self.publisher_id.to_be_bytes());
        assert_eq!(sequence[..], envelope.sequence.to_be_bytes());
        assert_eq!(envelope.publisher_id, self.publisher_id);
        let last = self.sequences.insert(envelope.topic.clone(), envelope.sequence);
        assert!(last.is_none_or(|last| envelope.sequence == last + 1), "{last:?} then {}", envelope.sequence);
        match envelope.topic.as_str() {
            KV_EVENTS => Message::Events(decode_events(&envelope.payload).expect("events")),
            KV_METRICS => Message::Load(decode_load(&envelope.payload).expect("a load report")),
            other => panic!("topic {other:?}"),
        }
    }

    /// Live events until `count` have come.
    async fn events(&mut self, count: usize) -> Vec<RouterEvent> {
        let mut events = Vec::new();
        while events.len() < count {
            if let Message::Events(more) = self.next().await {
                assert!(more.len() <= 128);
                events.extend(more);
            }
        }
        events
    }

    async fn load_where(&mut self, wanted: impl Fn(&ActiveLoad) -> bool) -> ActiveLoad {
        loop {
            if let Message::Load(load) = self.next().await
                && wanted(&load)
            {
                return load;
            }
        }
    }
}

/// What a router knows: engine hash to local hash.
#[derive(Default)]
struct View(BTreeMap<u64, u64>);

impl View {
    fn apply(&mut self, events: &[RouterEvent]) {
        for event in events {
            assert_eq!((event.storage_tier, event.residency_domain.as_deref()), (StorageTier::Device, Some("worker")));
            match &event.event.data {
                KvCacheEventData::Stored(stored) => {
                    let known = stored.parent_hash.is_none_or(|parent| self.0.contains_key(&parent));
                    assert!(known, "parent of {stored:?} is unknown");
                    self.0.extend(stored.blocks.iter().map(|block| (block.block_hash, block.tokens_hash)));
                }
                KvCacheEventData::Removed(removed) => {
                    self.0.retain(|hash, _| !removed.block_hashes.contains(hash));
                }
                KvCacheEventData::Cleared => self.0.clear(),
            }
        }
    }
}

fn ids(events: &[RouterEvent]) -> Vec<u64> {
    events.iter().map(|event| event.event.event_id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_events_carry_rising_ids_and_a_gap_is_recovered() {
    let worker = Worker::start(&[]).await;
    // Missed on purpose: nobody has subscribed yet.
    for at in 0..10u64 {
        worker.events.send(store(at.checked_sub(1), chain(at..at + 1))).expect("the publisher runs");
    }
    let mut subscriber = Subscriber::new(&worker).await;
    let load = subscriber.load_where(|load| load.last_event_id.is_some()).await;
    assert_eq!(load.last_event_id, Some(9), "the heartbeat tells what was missed");
    worker.events.send(store(Some(9), chain(10..13))).expect("the publisher runs");
    worker.events.send(remove(12)).expect("the publisher runs");
    let live = subscriber.events(2).await;
    assert_eq!(ids(&live), [10, 11]);

    let mut router = worker.router().await;
    let missed = router.query(1, KvQuery { dp_rank: 0, start: Some(0), end: Some(9) }).await;
    assert_eq!((missed.dump, ids(&missed.events), missed.last_event_id), (false, (0..10).collect(), Some(9)));
    let mut view = View::default();
    view.apply(&missed.events);
    view.apply(&live);
    let expected: BTreeMap<u64, u64> = (0..12).map(|hash| (hash, hash * 3)).collect();
    assert_eq!(view.0, expected);

    let dump = router.query(2, KvQuery::default()).await;
    assert_eq!((dump.dump, dump.last_event_id, dump.events.len()), (true, Some(11), 1));
    let mut view = View::default();
    view.apply(&dump.events);
    assert_eq!(view.0, expected);
    worker.stop().await.expect("a clean end");
}

#[tokio::test]
async fn queries_without_events_and_beyond_them_are_answered() {
    let worker = Worker::start(&[]).await;
    let mut router = worker.router().await;
    let dump = router.query(1, KvQuery::default()).await;
    assert_eq!((dump.dump, dump.events.len(), dump.last_event_id), (true, 0, None));
    let ahead = router.query(2, KvQuery { start: Some(40), ..Default::default() }).await;
    assert!(ahead.dump, "a cursor of another life is answered with everything");
    router.send(3, client_frame::Body::KvQuery(KvQuery { dp_rank: 1, ..Default::default() })).await;
    assert_eq!(router.failed(3).await.code(), ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn a_sample_tells_which_blocks_are_held_and_draws_others() {
    let worker = Worker::start(&[]).await;
    let mut subscriber = Subscriber::new(&worker).await;
    worker.events.send(store(None, chain(1..5))).expect("the publisher runs");
    worker.events.send(remove(4)).expect("the publisher runs");
    subscriber.load_where(|load| load.last_event_id == Some(1)).await;
    let card = worker.armature();
    assert!(card.answers_samples, "only then may it be asked");
    let size = kv_hashing::BlockSize::new(worker.card().kv_cache_block_size).expect("not zero");
    assert_eq!(card.block_hash_probe, metadata::block_hash_probe(size));

    let mut router = worker.router().await;
    let block = |tier, engine_hash| KvBlock { tier, engine_hash };
    let blocks = vec![block(0, 1), block(0, 4), block(1, 2), block(9, 3), block(0, 3)];
    router.send(1, client_frame::Body::KvSample(KvSample { dp_rank: 0, blocks, draw: 10 })).await;
    let Some(Body::KvSampled(sampled)) = router.recv().await.body else { panic!("not a KvSampled") };
    assert_eq!((sampled.held, sampled.last_event_id), (vec![true, false, false, false, true], Some(1)));
    let mut drawn: Vec<_> = sampled.drawn.iter().map(|block| (block.tier, block.engine_hash)).collect();
    drawn.sort_unstable();
    assert_eq!(drawn, [(0, 1), (0, 2), (0, 3)]);

    for wrong in [KvSample { dp_rank: 1, ..Default::default() }, KvSample { draw: 1025, ..Default::default() }] {
        let id = 2 + u64::from(wrong.draw > 0);
        router.send(id, client_frame::Body::KvSample(wrong)).await;
        assert_eq!(router.failed(id).await.code(), ErrorCode::InvalidRequest);
    }
}

#[tokio::test]
async fn load_is_reported_when_it_changes_and_when_it_does_not() {
    let worker = Worker::start(&[]).await;
    let mut subscriber = Subscriber::new(&worker).await;
    let (running, waiting, active_blocks, used_blocks, pending_prefill_tokens) = (3, 1, 40, 90, 128);
    *worker.engine.load.lock() = EngineLoad { running, waiting, active_blocks, used_blocks, pending_prefill_tokens };
    let load = subscriber.load_where(|load| load.running_requests == Some(3)).await;
    let expected = ActiveLoad {
        worker_id: worker.hello().instance_id,
        dp_rank: 0,
        active_decode_blocks: Some(40),
        active_prefill_tokens: Some(128),
        kv_used_blocks: Some(90),
        running_requests: Some(3),
        waiting_requests: Some(1),
        last_event_id: None,
        draining: false,
    };
    assert_eq!(load, expected);
    assert_eq!(subscriber.load_where(|_| true).await, expected, "the heartbeat repeats it");
    let metrics = worker.get("/metrics").await;
    assert!(metrics.contains("\narmature_worker_requests_running 3\n"), "{metrics}");
    assert!(metrics.contains("\narmature_worker_kv_blocks_active 40\n"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_worker_says_so_in_its_load() {
    let mut worker = Worker::start(&[]).await;
    let mut subscriber = Subscriber::new(&worker).await;
    let mut router = worker.router().await;
    router.generate(1).await;
    let submission = worker.next_submission().await;
    worker.shutdown.cancel();
    subscriber.load_where(|load| load.draining).await;
    submission.finish(0);
    worker.stop().await.expect("a clean end");
}
