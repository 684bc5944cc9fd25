//! A worker that speaks the real protocols and computes nothing: it answers each prompt with a few tokens, and holds the
//! blocks that it was told to hold.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use kv_hashing::{BlockHash, BlockSize, HashSpace, sequence_hashes};
use kv_index::local::{Answer, LocalIndexer, RingLimits};
use kv_index::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier};
use parking_lot::Mutex;
use protocol::event_plane::{self, ActiveLoad, Envelope, KV_EVENTS, KV_METRICS};
use protocol::kv_event as wire;
use protocol::metadata::{self, REQUEST_CODEC, artifact, artifact_digest, entry_key};
use protocol::request_plane::{
    ArtifactChunk, ClientFrame, Draining, ErrorCode, Failed, FinishReason, Finished, Generate, KvAnswer, KvBlock,
    KvQuery, KvSample, KvSampled, Output, Pong, ServerFrame, Welcome, client_frame, decode_frame, encode_frame,
    kv_answer::Kind, server_frame::Body,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use xxhash_rust::xxh3::xxh3_64;
use zeromq::{PubSocket, Socket, SocketSend};

use crate::harness::{BLOCK, MODEL};

/// Who a worker is.
#[derive(Clone, Debug)]
pub struct Life {
    pub name: String,
    pub instance_id: u64,
    pub boot_epoch: String,
    /// What its card says; the blocks it stores are always of [`BLOCK`] tokens.
    pub block_size: u32,
    /// Number of its tokenizer: another one has other files.
    pub tokenizer: u32,
    /// What its card says of its block hashes, in place of the truth.
    pub probe: Option<Vec<u64>>,
    /// What else its card says, and of which adapter; the blocks it stores are that one's,
    pub card: serde_json::Value,
    /// and the part of it that is ours.
    pub own: serde_json::Value,
    /// Its labels.
    pub labels: serde_json::Value,
}

impl Life {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            instance_id: metadata::instance_id(name),
            boot_epoch: format!("{name}-1"),
            block_size: BLOCK,
            tokenizer: 0,
            probe: None,
            card: json!({}),
            own: json!({}),
            labels: json!({}),
        }
    }
}

/// How requests are answered. The n-th token of an answer is `n`, whoever generated those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Three tokens in all, and the end; where only the prompt is wanted, the first one, and what is to be told the next worker.
    Answer,
    /// Like [`Self::Answer`], but where only the prompt is wanted, no token.
    HandOverAtOnce,
    /// One token, and the end of the answer.
    EndAtFirst,
    /// A refusal.
    Refuse(ErrorCode),
    /// A failure, after which whatever the worker was to fetch is used up.
    Fail(ErrorCode),
    /// One such failure, and answers from then on.
    FailOnce(ErrorCode),
    /// One token, then the connection is closed.
    DieAfterFirst,
    /// All tokens, but the connection is closed before the end is told.
    DieBeforeEnd,
    /// One token, then a failure.
    FailAfterFirst(ErrorCode),
    /// The connection is closed instead of an answer.
    DieAtOnce,
    /// One token, then nothing.
    Stall,
    /// Nothing at all.
    Silence,
    /// Frames of all kinds with anything in them, the same for the same number, and a failure of any kind; sometimes what is no frame.
    Babble(u64),
}

/// What happens to an event message on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Deliver,
    Lose,
    Twice,
    /// After the next one.
    Late,
    /// As an event of the same number that tells of other blocks.
    Garble,
}

struct State {
    indexer: LocalIndexer,
    /// Whose blocks it stores.
    space: HashSpace,
    /// Prefixes held, by the sequence hash of their last block.
    prefixes: HashMap<u64, Vec<u32>>,
    behaviour: Behaviour,
    fates: VecDeque<Fate>,
    late: Vec<Arc<KvEvent>>,
    requests: Vec<Generate>,
    greet_as: Option<Life>,
    /// Whether it keeps the blocks of prompts that it computes for others.
    keeps: bool,
    /// Where its events say that blocks are.
    tier: wire::StorageTier,
    /// What its heartbeats say of its load.
    load: ActiveLoad,
    /// It takes frames and answers none.
    stuck: bool,
}

pub struct Worker {
    pub life: Life,
    pub address: String,
    events: String,
    state: Arc<Mutex<State>>,
    publish: mpsc::UnboundedSender<Vec<Arc<KvEvent>>>,
    /// Whether it keeps its answers to KV queries back.
    pub holding: watch::Sender<bool>,
    /// Requests that the router cancelled.
    pub cancelled: Arc<AtomicUsize>,
    stop: CancellationToken,
    _stop_on_drop: DropGuard,
}

impl Worker {
    pub async fn start(life: Life) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self::start_at(life, listener).await
    }

    pub async fn start_at(life: Life, listener: TcpListener) -> Self {
        let address = listener.local_addr().expect("bound").to_string();
        let mut socket = PubSocket::new();
        let events = socket.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
        let state = Arc::new(Mutex::new(State {
            indexer: LocalIndexer::new(0, RingLimits { events: 64, blocks: 1024 }),
            space: HashSpace::new(life.card["lora"]["name"].as_str(), None),
            prefixes: HashMap::new(),
            behaviour: Behaviour::Answer,
            fates: VecDeque::new(),
            late: Vec::new(),
            requests: Vec::new(),
            greet_as: None,
            keeps: true,
            tier: wire::StorageTier::Device,
            load: ActiveLoad::default(),
            stuck: false,
        }));
        let holding = watch::Sender::new(false);
        let stop = CancellationToken::new();
        let cancelled = Arc::<AtomicUsize>::default();
        let (publish, batches) = mpsc::unbounded_channel();
        tokio::spawn(stop.clone().run_until_cancelled_owned(publisher(socket, life.clone(), state.clone(), batches)));
        let served = (life.clone(), state.clone(), cancelled.clone(), holding.subscribe(), stop.clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (life, state, cancelled, holding, stop) = served.clone();
                tokio::spawn(stop.run_until_cancelled_owned(async move {
                    // A connection that breaks is the router's business.
                    let (out, held) = Default::default();
                    let _ = Connection { stream, life, state, cancelled, holding, held, out }.serve().await;
                }));
            }
        }));
        let _stop_on_drop = stop.clone().drop_guard();
        Self { life, address, events, state, publish, holding, cancelled, stop, _stop_on_drop }
    }

    /// Stops at once; the registration stays, as after a crash.
    pub fn kill(&self) {
        self.stop.cancel();
    }

    /// Writes the file that discovery reads, and keeps it fresh.
    pub fn register(&self, directory: &Path) {
        let path = self.path(directory);
        self.register_once(directory);
        tokio::spawn(self.stop.clone().run_until_cancelled_owned(async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(500));
            loop {
                ticks.tick().await;
                let Ok(file) = std::fs::File::options().append(true).open(&path) else { return };
                file.set_modified(SystemTime::now()).expect("the file can be touched");
            }
        }));
    }

    /// Writes that file, but cannot touch it later.
    pub fn register_once(&self, directory: &Path) {
        write(&self.path(directory), &json!({"name": self.life.name, "metadata": self.metadata()}));
    }

    pub fn unregister(&self, directory: &Path) {
        std::fs::remove_file(self.path(directory)).expect("it was registered");
    }

    fn path(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}.json", self.life.name))
    }

    fn metadata(&self) -> serde_json::Value {
        let id = self.life.instance_id;
        let entry = |endpoint: &str, key: &str, value: serde_json::Value| {
            let mut entry =
                json!({"namespace": "default", "component": "backend", "endpoint": endpoint, "instance_id": id});
            entry[key] = value;
            entry
        };
        let mut endpoint = entry("generate", "transport", json!({"tcp": self.address}));
        endpoint["request_plane_codec"] = json!(REQUEST_CODEC);
        let artifacts = json!({artifact::TOKENIZER: artifact_digest(xxh3_64(&tokenizer_json(self.life.tokenizer)))});
        let true_probe = || metadata::block_hash_probe(BlockSize::new(self.life.block_size).expect("not zero"));
        let probe = self.life.probe.clone().unwrap_or_else(true_probe);
        let mut card = json!({
            "display_name": MODEL, "context_length": 1000, "kv_cache_block_size": self.life.block_size,
            "armature": {"boot_epoch": self.life.boot_epoch, "artifacts": artifacts, "eos_token_ids": [0],
                         "labels": self.life.labels, "answers_samples": true,
                         "block_hash_probe": probe},
        });
        for (name, value) in self.life.card.as_object().expect("an object") {
            card[name] = value.clone();
        }
        for (name, value) in self.life.own.as_object().expect("an object") {
            card["armature"][name] = value.clone();
        }
        let channel = entry("events", "transport", json!({"zmq": self.events}));
        let key = |endpoint| entry_key("default", "backend", endpoint, id);
        json!({
            "endpoints": {(key("generate")): endpoint},
            "model_cards": {(key("generate")): entry("generate", "card_json", card)},
            "event_channels": {(key("events")): channel},
        })
    }

    pub fn behave(&self, behaviour: Behaviour) {
        self.state.lock().behaviour = behaviour;
    }

    /// From now on has no room for blocks of prompts that it computes for others.
    pub fn keep_nothing(&self) {
        self.state.lock().keeps = false;
    }

    /// From now on answers as if another worker had taken over the address.
    pub fn greet_as(&self, other: Life) {
        self.state.lock().greet_as = Some(other);
    }

    /// From now on takes what is sent to it, and answers nothing.
    pub fn get_stuck(&self) {
        self.state.lock().stuck = true;
    }

    /// What happens to the next event messages.
    pub fn fates(&self, fates: impl IntoIterator<Item = Fate>) {
        self.state.lock().fates.extend(fates);
    }

    /// Requests received, in order.
    pub fn requests(&self) -> Vec<Generate> {
        self.state.lock().requests.clone()
    }

    /// Their tokens.
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        self.requests().into_iter().map(|request| request.token_ids).collect()
    }

    /// Holds the blocks of `tokens` that it does not hold yet, and says so.
    pub fn store(&self, tokens: &[u32]) {
        store(&mut self.state.lock(), &self.publish, tokens);
    }

    /// Drops the last block of `tokens`, and says so.
    pub fn evict(&self, tokens: &[u32]) {
        let mut state = self.state.lock();
        let engine = hashes(state.space, tokens).last().expect("a full block").engine;
        state.prefixes.remove(&engine.0);
        let events = state.indexer.apply(Tier::Device, KvEventData::Removed { blocks: vec![engine] });
        self.publish.send(events).expect("the publisher runs");
    }

    /// Where its events say that blocks are from now on.
    pub fn store_in(&self, tier: wire::StorageTier) {
        self.state.lock().tier = tier;
    }

    /// What its heartbeats say of its load from now on.
    pub fn report(&self, load: ActiveLoad) {
        self.state.lock().load = load;
    }

    /// Holds a sequence of so many blocks without saying so: a router learns of them by a dump.
    pub fn hold_silently(&self, blocks: u64) {
        let blocks = (0..blocks).map(|n| StoredBlock { engine: EngineHash(n), local: BlockHash(n) }).collect();
        self.state.lock().indexer.apply(Tier::Device, KvEventData::Stored { parent: None, blocks });
    }

    /// The engine inside starts anew: nothing held, events from 0, the same process.
    pub fn restart_engine(&self) {
        let mut state = self.state.lock();
        state.indexer = LocalIndexer::new(0, RingLimits { events: 64, blocks: 1024 });
        state.prefixes.clear();
    }

    /// Every prefix it holds, as tokens.
    pub fn held_prefixes(&self) -> Vec<Vec<u32>> {
        self.state.lock().prefixes.values().cloned().collect()
    }
}

fn write(path: &Path, value: &serde_json::Value) {
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, value.to_string()).expect("a writable directory");
    std::fs::rename(temporary, path).expect("the same directory");
}

fn hashes(space: HashSpace, tokens: &[u32]) -> Vec<StoredBlock> {
    let size = BlockSize::new(BLOCK).expect("not zero");
    let locals: Vec<BlockHash> = space.blocks(tokens, size);
    let sequence = sequence_hashes(&locals);
    locals.iter().zip(sequence).map(|(local, hash)| StoredBlock { engine: EngineHash(hash.0), local: *local }).collect()
}

fn store(state: &mut State, publish: &mpsc::UnboundedSender<Vec<Arc<KvEvent>>>, tokens: &[u32]) {
    let blocks = hashes(state.space, tokens);
    let held = blocks.iter().take_while(|block| state.prefixes.contains_key(&block.engine.0)).count();
    if held == blocks.len() {
        return;
    }
    for (at, block) in blocks.iter().enumerate().skip(held) {
        state.prefixes.insert(block.engine.0, tokens[..(at + 1) * BLOCK as usize].to_vec());
    }
    let parent = held.checked_sub(1).map(|last| blocks[last].engine);
    let events = state.indexer.apply(Tier::Device, KvEventData::Stored { parent, blocks: blocks[held..].to_vec() });
    publish.send(events).expect("the publisher runs");
}

async fn publisher(
    mut socket: PubSocket,
    life: Life,
    state: Arc<Mutex<State>>,
    mut batches: mpsc::UnboundedReceiver<Vec<Arc<KvEvent>>>,
) {
    let mut heartbeat = tokio::time::interval(Duration::from_millis(200));
    let mut sequence = 0;
    loop {
        tokio::select! {
            batch = batches.recv() => {
                let Some(batch) = batch else { return };
                for event in batch {
                    let (messages, tier) = {
                        let mut state = state.lock();
                        (fated(&mut state, event), state.tier)
                    };
                    for message in messages {
                        let payload = event_plane::encode_events(&[router_event(life.instance_id, tier, &message)]);
                        sequence += 1;
                        send(&mut socket, &life, KV_EVENTS, sequence, payload).await;
                    }
                }
            }
            _ = heartbeat.tick() => {
                let load = {
                    let state = state.lock();
                    let last_event_id = state.indexer.last_id();
                    ActiveLoad { worker_id: life.instance_id, last_event_id, ..state.load.clone() }
                };
                send(&mut socket, &life, KV_METRICS, 0, event_plane::encode_load(&load)).await;
            }
        }
    }
}

/// What really goes out for one event.
fn fated(state: &mut State, event: Arc<KvEvent>) -> Vec<Arc<KvEvent>> {
    let mut out = match state.fates.pop_front().unwrap_or(Fate::Deliver) {
        Fate::Deliver => vec![event],
        Fate::Lose => Vec::new(),
        Fate::Twice => vec![event.clone(), event],
        Fate::Late => {
            state.late.push(event);
            return Vec::new();
        }
        Fate::Garble => {
            let blocks = vec![StoredBlock { engine: EngineHash(event.id + 1), local: BlockHash(event.id + 1) }];
            let data = KvEventData::Stored { parent: None, blocks };
            vec![Arc::new(KvEvent { data, ..KvEvent::clone(&event) })]
        }
    };
    out.append(&mut state.late);
    out
}

async fn send(socket: &mut PubSocket, life: &Life, topic: &str, sequence: u64, payload: Vec<u8>) {
    let publisher_id = life.instance_id;
    let envelope = Envelope { publisher_id, sequence, published_at: 0, topic: topic.into(), payload };
    let parts = [
        Bytes::copy_from_slice(topic.as_bytes()),
        Bytes::copy_from_slice(&publisher_id.to_be_bytes()),
        Bytes::copy_from_slice(&sequence.to_be_bytes()),
        event_plane::encode_envelope(&envelope).into(),
    ];
    let message = VecDeque::from(parts).try_into().expect("not empty");
    socket.send(message).await.expect("a bound socket");
}

fn router_event(worker_id: u64, storage_tier: wire::StorageTier, event: &KvEvent) -> wire::RouterEvent {
    let data = match &event.data {
        KvEventData::Stored { parent, blocks } => wire::KvCacheEventData::Stored(wire::Stored {
            parent_hash: parent.map(|p| p.0),
            start_position: None,
            blocks: blocks
                .iter()
                .map(|b| wire::StoredBlock { block_hash: b.engine.0, tokens_hash: b.local.0 })
                .collect(),
        }),
        KvEventData::Removed { blocks } => {
            wire::KvCacheEventData::Removed(wire::Removed { block_hashes: blocks.iter().map(|b| b.0).collect() })
        }
        KvEventData::Cleared => wire::KvCacheEventData::Cleared,
    };
    let event = wire::KvCacheEvent { event_id: event.id, data, dp_rank: event.dp_rank };
    let residency_domain = Some("worker".into());
    wire::RouterEvent { worker_id, storage_tier, residency_domain, event }
}

/// One router's connection.
struct Connection {
    stream: TcpStream,
    life: Life,
    state: Arc<Mutex<State>>,
    cancelled: Arc<AtomicUsize>,
    holding: watch::Receiver<bool>,
    /// KV queries whose answers are kept back.
    held: Vec<(u64, KvQuery)>,
    out: BytesMut,
}

impl Connection {
    async fn serve(mut self) -> std::io::Result<()> {
        let mut buffer = BytesMut::new();
        loop {
            while let Some(frame) = decode_frame::<ClientFrame>(&mut buffer).expect("the router sends valid frames") {
                let goes_on = self.handle(frame);
                self.stream.write_all_buf(&mut self.out).await?;
                if !goes_on {
                    return Ok(());
                }
            }
            let held = !self.held.is_empty();
            let released = tokio::select! {
                read = self.stream.read_buf(&mut buffer) => match read? {
                    0 => return Ok(()),
                    _ => false,
                },
                released = async { self.holding.wait_for(|holding| !holding).await.is_ok() }, if held => released,
            };
            if released {
                for (id, query) in std::mem::take(&mut self.held) {
                    self.answer_query(id, query.start, query.end);
                }
                self.stream.write_all_buf(&mut self.out).await?;
            }
        }
    }

    fn put(&mut self, stream_id: u64, body: Body) {
        encode_frame(&ServerFrame { stream_id, body: Some(body) }, &mut self.out);
    }

    fn fail(&mut self, stream_id: u64, code: ErrorCode, message: &str) {
        self.put(stream_id, Body::Failed(Failed { code: code.into(), message: message.into(), not_begun: false }));
    }

    fn refuse(&mut self, stream_id: u64, code: ErrorCode) {
        self.put(stream_id, Body::Failed(Failed { code: code.into(), message: "not now".into(), not_begun: true }));
    }

    /// False when the connection ends here.
    fn handle(&mut self, frame: ClientFrame) -> bool {
        let id = frame.stream_id;
        if self.state.lock().stuck {
            return true;
        }
        match frame.body.expect("a body") {
            client_frame::Body::Hello(hello) => {
                let life = self.state.lock().greet_as.clone().unwrap_or_else(|| self.life.clone());
                if (hello.instance_id, &hello.boot_epoch) != (life.instance_id, &life.boot_epoch) {
                    self.fail(0, ErrorCode::WrongWorker, "I am somebody else");
                    return false;
                }
                let (instance_id, boot_epoch) = (life.instance_id, life.boot_epoch);
                self.put(0, Body::Welcome(Welcome { instance_id, boot_epoch, initial_credit: 4 }));
            }
            client_frame::Body::Ping(ping) => self.put(0, Body::Pong(Pong { nonce: ping.nonce })),
            client_frame::Body::Cancel(_) => {
                self.cancelled.fetch_add(1, Ordering::SeqCst);
            }
            client_frame::Body::Credit(_) => {}
            client_frame::Body::ArtifactGet(get) => match get.name.as_str() {
                artifact::TOKENIZER => {
                    let data: Bytes = tokenizer_json(self.life.tokenizer).into();
                    let (head, tail) = (data.slice(..data.len() / 2), data.slice(data.len() / 2..));
                    self.put(id, Body::ArtifactChunk(ArtifactChunk { data: head, end: false }));
                    self.put(id, Body::ArtifactChunk(ArtifactChunk { data: tail, end: true }));
                }
                _ => self.fail(id, ErrorCode::NotFound, "no such file"),
            },
            client_frame::Body::KvSample(sample) => self.answer_sample(id, &sample),
            client_frame::Body::KvQuery(query) if *self.holding.borrow() => self.held.push((id, query)),
            client_frame::Body::KvQuery(query) => self.answer_query(id, query.start, query.end),
            client_frame::Body::Generate(generate) => return self.generate(id, generate),
        }
        true
    }

    fn answer_query(&mut self, id: u64, start: Option<u64>, end: Option<u64>) {
        let answer = {
            let state = self.state.lock();
            match start {
                Some(start) => state.indexer.range(start, end),
                None => Answer::Dump(state.indexer.dump()),
            }
        };
        let (kind, events, last_event_id) = match answer {
            Answer::Events { events, last_id } => (Kind::Events, events, last_id),
            Answer::Dump(snapshot) => {
                let last_id = snapshot.last_id();
                (Kind::Dump, snapshot.into_events().into_iter().map(Arc::new).collect(), last_id)
            }
        };
        let tier = self.state.lock().tier;
        let events: Vec<_> = events.iter().map(|event| router_event(self.life.instance_id, tier, event)).collect();
        let events = event_plane::encode_events(&events).into();
        self.put(id, Body::KvAnswer(KvAnswer { kind: kind.into(), events, last_event_id, end: true }));
    }

    fn answer_sample(&mut self, id: u64, sample: &KvSample) {
        let state = self.state.lock();
        let held = sample.blocks.iter();
        let held = held.map(|block| state.indexer.holds(Tier::Device, EngineHash(block.engine_hash))).collect();
        let drawn = state.indexer.draw(rand::random(), sample.draw as usize).into_iter();
        let drawn = drawn.map(|(tier, engine)| KvBlock { tier: tier as u32, engine_hash: engine.0 }).collect();
        let last_event_id = state.indexer.last_id();
        drop(state);
        self.put(id, Body::KvSampled(KvSampled { held, drawn, last_event_id }));
    }

    fn generate(&mut self, id: u64, request: Generate) -> bool {
        let (prompt_blocks, generated) = (request.token_ids.len() as u32 / BLOCK, request.generated);
        let prompt_tokens = request.token_ids.len() as u32 - generated;
        let prefill_only = request.prefill_only;
        let behaviour = {
            let mut state = self.state.lock();
            state.requests.push(request);
            state.behaviour
        };
        let output = |token| {
            let first = token == generated + 1;
            let prompt_blocks = if first { prompt_blocks } else { 0 };
            Body::Output(Output { token_ids: vec![token], first, prompt_blocks, ..Output::default() })
        };
        match behaviour {
            Behaviour::DieAtOnce => return false,
            Behaviour::Refuse(code) => {
                if code == ErrorCode::Draining {
                    self.put(0, Body::Draining(Draining {}));
                }
                self.refuse(id, code);
            }
            Behaviour::Fail(code) => self.fail(id, code, "lost on the way"),
            Behaviour::FailOnce(code) => {
                self.state.lock().behaviour = Behaviour::Answer;
                self.fail(id, code, "lost on the way");
            }
            Behaviour::DieAfterFirst => {
                self.put(id, output(generated + 1));
                return false;
            }
            Behaviour::FailAfterFirst(code) => {
                self.put(id, output(generated + 1));
                self.fail(id, code, "no more");
            }
            Behaviour::EndAtFirst => {
                self.put(id, output(generated + 1));
                let reason = FinishReason::Eos.into();
                let completion_tokens = generated + 1;
                let end = Finished { reason, prompt_tokens, completion_tokens, ..Finished::default() };
                self.put(id, Body::Finished(end));
            }
            Behaviour::Answer | Behaviour::HandOverAtOnce if prefill_only => {
                let tokens = u32::from(behaviour == Behaviour::Answer);
                if tokens > 0 {
                    self.put(id, output(generated + 1));
                }
                let disaggregated_params = self.state.lock().keeps.then(|| format!("kept by {}", self.life.name));
                self.put(
                    id,
                    Body::Finished(Finished {
                        prompt_tokens,
                        completion_tokens: generated + tokens,
                        disaggregated_params: disaggregated_params.unwrap_or_default(),
                        ..Finished::default()
                    }),
                );
            }
            Behaviour::Stall => self.put(id, output(generated + 1)),
            Behaviour::Silence => {}
            Behaviour::Babble(seed) => {
                let mut rng = StdRng::seed_from_u64(seed);
                (0..rng.random_range(0..6)).for_each(|_| self.put(id, babble(&mut rng)));
                if seed % 25 == 24 {
                    // A length, and bytes that decode to nothing.
                    self.out.extend_from_slice(&[0, 0, 0, 3, 255, 255, 255]);
                }
                self.put(id, Body::Failed(Failed { code: any(&mut rng).cast_signed(), ..Failed::default() }));
            }
            Behaviour::DieBeforeEnd | Behaviour::Answer | Behaviour::HandOverAtOnce => {
                for token in generated + 1..=3 {
                    self.put(id, output(token));
                }
                if behaviour == Behaviour::DieBeforeEnd {
                    return false;
                }
                let reason = FinishReason::Length.into();
                self.put(
                    id,
                    Body::Finished(Finished { reason, prompt_tokens, completion_tokens: 3, ..Finished::default() }),
                );
            }
        }
        true
    }
}

/// Something that may come where an answer is expected.
fn babble(rng: &mut StdRng) -> Body {
    match rng.random_range(0..6) {
        0 | 1 => Body::Output(Output {
            token_ids: (0..rng.random_range(0..4)).map(|_| any(rng)).collect(),
            first: rng.random(),
            reused_blocks: any(rng),
            prompt_blocks: any(rng),
            ..Output::default()
        }),
        2 => Body::Finished(Finished {
            reason: any(rng).cast_signed(),
            prompt_tokens: any(rng),
            completion_tokens: any(rng),
            reused_tokens: any(rng),
            disaggregated_params: if rng.random() { "{".into() } else { String::new() },
            ..Finished::default()
        }),
        3 => Body::Pong(Pong { nonce: 0 }),
        4 => Body::Welcome(Welcome { instance_id: 1, boot_epoch: String::new(), initial_credit: any(rng) }),
        _ => Body::KvAnswer(KvAnswer { kind: any(rng).cast_signed(), end: true, ..KvAnswer::default() }),
    }
}

fn any(rng: &mut StdRng) -> u32 {
    [0, 1, 2, 255, 256, u32::MAX][rng.random_range(0..6)]
}

/// A byte-level tokenizer without merges: token `b` is the byte `b`.
///
/// `number` makes the file another one, by blanks at its end.
fn tokenizer_json(number: u32) -> Vec<u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    let mut character = |byte: u8| {
        if printable(byte) { byte as char } else { char::from_u32(others.next().expect("endless")).expect("valid") }
    };
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..=255).map(|byte| (character(byte).to_string(), byte.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [],
    });
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level, "model": model,
    });
    format!("{json}{}", " ".repeat(number as usize)).into_bytes()
}
