//! Engines beside servers that a test plays, and what such servers publish.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
pub use integration_tests::engine::{Asked, BLOCK, Make, Server};
pub use integration_tests::wait::within;
use parking_lot::Mutex;
use protocol::request_plane::{ErrorCode, Generate, Stop};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use worker_agent::config::{Config, RemoteSettings};
use worker_agent::engine::remote::Remote;
use worker_agent::engine::remote::metrics::RemoteMetrics;
use worker_agent::engine::remote::wait;
use worker_agent::engine::{Engine, EngineOutput};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Ends answers.
pub const EOS: u32 = 2;

/// Waits until `condition` holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let mut look = tokio::time::interval(Duration::from_millis(5));
    within(what, async {
        while !condition() {
            look.tick().await;
        }
    })
    .await;
}

/// A worker's side of a server.
pub trait Beside {
    fn settings(&self, more: &[&str]) -> RemoteSettings;
    fn engine(&self, more: &[&str]) -> impl Future<Output = (Remote, RemoteMetrics)>;
}

impl Beside for Server {
    fn settings(&self, more: &[&str]) -> RemoteSettings {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            config: Config,
        }
        let url = format!("http://{}", self.address);
        // By its first name, which goes on to work.
        let base = ["worker", "--name", "w", "--host", "10.0.0.7", "--model-path", "m", "--vllm-url", &url];
        Cli::parse_from([&base[..], self.make().flags(), more].concat()).config.remote_settings().expect("valid")
    }

    async fn engine(&self, more: &[&str]) -> (Remote, RemoteMetrics) {
        let metrics = RemoteMetrics::default();
        let settings = self.settings(more);
        let ready = within("the engine", wait(&settings)).await.expect("it is ready");
        assert_eq!(ready.model, "m");
        (ready.start(&settings, vec![EOS], metrics.clone()), metrics)
    }
}

/// A request of these tokens for up to `max_tokens` more.
pub fn request(tokens: impl IntoIterator<Item = u32>, max_tokens: u32) -> Generate {
    Generate {
        request_id: "r".into(),
        token_ids: tokens.into_iter().collect(),
        stop: Some(Stop { max_tokens, ..Stop::default() }),
        ..Generate::default()
    }
}

/// Everything that an engine says of a request.
pub async fn all(mut outputs: mpsc::UnboundedReceiver<EngineOutput>) -> Vec<EngineOutput> {
    let mut found = Vec::new();
    within("the last output", async {
        while let Some(output) = outputs.recv().await {
            found.push(output);
        }
    })
    .await;
    found
}

/// The tokens of an answer, and how it ended.
pub async fn answer(outputs: mpsc::UnboundedReceiver<EngineOutput>) -> (Vec<u32>, EngineOutput) {
    let mut found = all(outputs).await;
    let last = found.pop().expect("a last output");
    let token = |output: &EngineOutput| match output {
        EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => *token,
        other => panic!("{other:?}"),
    };
    (found.iter().map(token).collect(), last)
}

/// The code of a request that was not answered.
pub fn code(last: EngineOutput) -> (ErrorCode, String) {
    match last {
        EngineOutput::Failed(message) => (ErrorCode::Engine, message),
        EngineOutput::Refused { code, message, .. } => (code, message),
        other => panic!("{other:?}"),
    }
}

/// Asks an engine whose server a test plays.
pub fn ask(engine: &Remote, request: Generate) -> mpsc::UnboundedReceiver<EngineOutput> {
    engine.submit(request).expect("accepted")
}

/// The event side: a publisher, and its replay socket.
pub struct Publisher {
    socket: PubSocket,
    pub address: String,
    pub replay: String,
    kept: Arc<Mutex<VecDeque<(u64, Bytes)>>>,
    next: u64,
    replaying: JoinHandle<()>,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.replaying.abort();
    }
}

impl Publisher {
    pub async fn bind() -> Self {
        let mut socket = PubSocket::new();
        let address = socket.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
        Self::with(socket, address).await
    }

    /// It connects to whoever wants its events, as vLLM does where its address names a host.
    pub async fn connect(address: &str) -> Self {
        let mut socket = PubSocket::new();
        let connected = async {
            while socket.connect(address).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        within("the subscriber", connected).await;
        Self::with(socket, address.to_owned()).await
    }

    async fn with(socket: PubSocket, address: String) -> Self {
        let kept = Arc::<Mutex<VecDeque<(u64, Bytes)>>>::default();
        let mut router = RouterSocket::new();
        let replay = router.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
        let replaying = tokio::spawn(replay_for_ever(router, kept.clone()));
        Self { socket, address, replay, kept, next: 0, replaying }
    }

    /// Numbers a batch and keeps it for replay, and does not publish it.
    pub fn lose(&mut self, events: Value) -> (u64, Bytes) {
        let sequence = self.next;
        self.next += 1;
        // The time makes each batch another one.
        let batch = json!([1.0 + sequence as f64, events, 0]);
        let payload = Bytes::from(rmp_serde::to_vec(&batch).expect("serializable"));
        self.kept.lock().push_back((sequence, payload.clone()));
        (sequence, payload)
    }

    pub async fn publish(&mut self, events: Value) {
        let (sequence, payload) = self.lose(events);
        self.send(sequence, payload).await;
    }

    pub async fn send(&mut self, sequence: u64, payload: Bytes) {
        let mut message = ZmqMessage::from("kv-events");
        message.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
        message.push_back(payload);
        self.socket.send(message).await.expect("it is published");
    }

    /// What it kept is gone; numbers go on.
    pub fn forget(&mut self) {
        self.kept.lock().clear();
    }

    /// Numbers from 0 again, as a new process does.
    pub fn restart(&mut self) {
        self.forget();
        self.next = 0;
    }

    /// Publishes until the engine has subscribed, which nobody tells.
    pub async fn subscribed(&mut self, engine: &Remote) {
        let mut look = tokio::time::interval(Duration::from_millis(10));
        within("a subscription", async {
            while engine.load().used_blocks == 0 {
                self.publish(json!([stored(&[9; BLOCK], 900, None)])).await;
                look.tick().await;
            }
        })
        .await;
    }
}

async fn replay_for_ever(mut socket: RouterSocket, kept: Arc<Mutex<VecDeque<(u64, Bytes)>>>) {
    while let Ok(request) = socket.recv().await {
        let parts = request.into_vec();
        let [identity, _, start] = &parts[..] else { continue };
        let start = u64::from_be_bytes(start[..].try_into().expect("a number"));
        let messages: Vec<_> = kept.lock().iter().filter(|(sequence, _)| *sequence >= start).cloned().collect();
        for (sequence, payload) in messages.into_iter().chain([(u64::MAX, Bytes::new())]) {
            let mut answer = ZmqMessage::from(identity.clone());
            answer.push_back(Bytes::new());
            answer.push_back(Bytes::from_static(b"kv-events"));
            answer.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
            answer.push_back(payload);
            if socket.send(answer).await.is_err() {
                break;
            }
        }
    }
}

/// Blocks of `tokens`, of which the first gets the engine hash `first`.
pub fn stored(tokens: &[u32], first: u64, parent: Option<u64>) -> Value {
    let blocks = tokens.len() / BLOCK;
    let hashes: Vec<u64> = (first..first + blocks as u64).collect();
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens[..blocks * BLOCK], "block_size": BLOCK, "lora_id": null, "medium": "GPU"})
}
