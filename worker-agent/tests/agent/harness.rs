//! An agent around a scripted engine, and the router's side of its request plane.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use clap::Parser;
use kv_hashing::BlockSize;
use parking_lot::Mutex;
use protocol::metadata::{ArmatureCard, ModelCard, WorkerMetadata};
use protocol::request_plane::{
    Cancel, ClientFrame, Credit, Failed, FinishReason, Generate, Hello, Output, PROTOCOL_VERSION, Ping, ServerFrame,
    client_frame, decode_frame, encode_frame, server_frame::Body,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use worker_agent::agent::{AgentError, Listeners, ModelInfo, run};
use worker_agent::config::Config;
use worker_agent::engine::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, Finish, SubmitError};

/// Longest wait for anything that should come.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Waits for `future`, at most [`DEADLINE`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("{what}: nothing within {DEADLINE:?}"))
}

/// Waits until `condition` returns something, at most [`DEADLINE`].
pub async fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let mut look = tokio::time::interval(Duration::from_millis(2));
    within(what, async {
        loop {
            look.tick().await;
            if let Some(found) = condition() {
                return found;
            }
        }
    })
    .await
}

/// One request that reached the engine, and the means to answer it.
pub struct Submission {
    pub request: Generate,
    pub outputs: mpsc::UnboundedSender<EngineOutput>,
}

impl Submission {
    pub fn first(&self, token: u32) {
        let first =
            EngineOutput::First { token, logprobs: None, reused_blocks: 2, prompt_blocks: 3, prompt_logprobs: vec![] };
        self.outputs.send(first).expect("the stream is open");
    }

    pub fn token(&self, token: u32) {
        self.outputs.send(EngineOutput::Token { token, logprobs: None }).expect("the stream is open");
    }

    pub fn finish(&self, completion_tokens: usize) {
        let (prompt_tokens, reused_tokens) = (self.request.token_ids.len(), 1);
        let reason = FinishReason::Eos;
        let finish =
            Finish { reason, prompt_tokens, completion_tokens, reused_tokens, stop_string: None, stop_token: None };
        self.outputs.send(EngineOutput::Finished(finish)).expect("the stream is open");
    }

    pub async fn cancelled(&self) {
        within("cancellation of the request", self.outputs.closed()).await;
    }
}

/// An engine that does what the test says.
pub struct ScriptedEngine {
    info: EngineInfo,
    pub load: Mutex<EngineLoad>,
    pub refuse: Mutex<Option<SubmitError>>,
    submissions: mpsc::UnboundedSender<Submission>,
    events: Mutex<Option<mpsc::UnboundedReceiver<ArenaEvent>>>,
}

impl Engine for ScriptedEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn submit(&self, request: Generate) -> Result<mpsc::UnboundedReceiver<EngineOutput>, SubmitError> {
        if let Some(error) = self.refuse.lock().take() {
            return Err(error);
        }
        let (outputs, receiver) = mpsc::unbounded_channel();
        self.submissions.send(Submission { request, outputs }).map_err(|_| SubmitError::Stopped)?;
        Ok(receiver)
    }

    fn load(&self) -> EngineLoad {
        *self.load.lock()
    }

    fn take_events(&self) -> Option<mpsc::UnboundedReceiver<ArenaEvent>> {
        self.events.lock().take()
    }
}

/// Settings as the command line gives them: file discovery in `dir`, free ports.
pub fn config(dir: &std::path::Path, more: &[&str]) -> Config {
    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }
    let dir = dir.to_str().expect("a UTF-8 path");
    let base = ["worker", "--name", "w0", "--namespace", "test", "--discovery-backend", "file", "--discovery-dir", dir];
    let ports = ["--port", "0", "--event-port", "0", "--admin-port", "0"];
    Cli::parse_from([&base[..], &ports, more].concat()).config
}

/// A scripted engine, what reaches it, and its events.
type Scripted = (Arc<ScriptedEngine>, mpsc::UnboundedReceiver<Submission>, mpsc::UnboundedSender<ArenaEvent>);

pub fn engine() -> Scripted {
    let (submissions, submitted) = mpsc::unbounded_channel();
    let (events, receiver) = mpsc::unbounded_channel();
    let engine = ScriptedEngine {
        info: EngineInfo {
            block_size: BlockSize::new(16).expect("not zero"),
            total_blocks: 512,
            max_num_seqs: 32,
            max_num_batched_tokens: 256,
            context_length: 2048,
        },
        load: Mutex::default(),
        refuse: Mutex::default(),
        submissions,
        events: Mutex::new(Some(receiver)),
    };
    (Arc::new(engine), submitted, events)
}

/// A model with one file of a few chunks.
pub fn model() -> ModelInfo {
    let tokenizer: Bytes = (0..200_000u32).map(|at| (at * 7) as u8).collect::<Vec<_>>().into();
    let files = BTreeMap::from([("tokenizer.json".to_owned(), tokenizer), ("empty".to_owned(), Bytes::new())]);
    ModelInfo { name: "scripted".into(), files, eos_token_ids: vec![2], bos_token_id: Some(1) }
}

/// A running agent.
pub struct Worker {
    pub engine: Arc<ScriptedEngine>,
    pub submitted: mpsc::UnboundedReceiver<Submission>,
    pub events: mpsc::UnboundedSender<ArenaEvent>,
    pub admin: SocketAddr,
    pub shutdown: CancellationToken,
    pub running: JoinHandle<Result<(), AgentError>>,
    pub dir: tempfile::TempDir,
}

impl Worker {
    pub async fn start(more: &[&str]) -> Self {
        let scripted = engine();
        Self::around(scripted.0.clone(), scripted, more).await
    }

    /// An agent around an engine that does what it does; nobody asks the scripted one.
    pub async fn with_engine(real: Arc<dyn Engine>, more: &[&str]) -> Self {
        Self::around(real, engine(), more).await
    }

    async fn around(runs: Arc<dyn Engine>, (engine, submitted, events): Scripted, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let config = config(dir.path(), more);
        let listeners = Listeners::bind(&config.settings().expect("valid")).await.expect("free ports");
        let admin = listeners.admin.local_addr().expect("bound");
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(run(config, runs, model(), listeners, shutdown.clone()));
        let worker = Self { engine, submitted, events, admin, shutdown, running, dir };
        until("registration", || worker.metadata()).await;
        worker
    }

    /// Where the worker is registered, if it is.
    pub fn file(&self) -> Option<PathBuf> {
        let mut paths = std::fs::read_dir(self.dir.path()).ok()?.flatten().map(|entry| entry.path());
        paths.find(|path| path.extension().is_some_and(|extension| extension == "json"))
    }

    /// What the worker has registered.
    pub fn metadata(&self) -> Option<WorkerMetadata> {
        let text = std::fs::read(self.file()?).ok()?;
        let mut value: serde_json::Value = serde_json::from_slice(&text).expect("a whole JSON file");
        assert_eq!(value["name"], "w0");
        Some(serde_json::from_value(value["metadata"].take()).expect("worker metadata"))
    }

    pub fn card(&self) -> ModelCard {
        let metadata = self.metadata().expect("registered");
        metadata.model_cards.into_values().next().expect("one card").card_json
    }

    pub fn armature(&self) -> ArmatureCard {
        self.card().armature.expect("our own worker")
    }

    /// The address that routers find, of endpoint or event channel.
    pub fn address(&self, transport: &str) -> String {
        let metadata = self.metadata().expect("registered");
        let endpoints = metadata.endpoints.into_values().map(|endpoint| endpoint.transport);
        let channels = metadata.event_channels.into_values().map(|channel| channel.transport);
        let found = endpoints.chain(channels).find_map(|transports| transports.get(transport).cloned());
        found.and_then(|address| Some(address.as_str()?.to_owned())).expect("the transport is registered")
    }

    pub fn hello(&self) -> Hello {
        let metadata = self.metadata().expect("registered");
        let instance_id = metadata.endpoints.values().next().expect("one endpoint").instance_id;
        Hello {
            protocol_version: PROTOCOL_VERSION,
            router_id: "r".into(),
            instance_id,
            boot_epoch: self.armature().boot_epoch,
        }
    }

    pub async fn next_submission(&mut self) -> Submission {
        within("a submission", self.submitted.recv()).await.expect("the agent runs")
    }

    /// A router that has shaken hands.
    pub async fn router(&self) -> Router {
        let mut router = self.stranger().await;
        router.send(0, client_frame::Body::Hello(self.hello())).await;
        match router.recv().await {
            ServerFrame { stream_id: 0, body: Some(Body::Welcome(_)) } => router,
            other => panic!("not a Welcome: {other:?}"),
        }
    }

    /// A connection without a handshake. Its small receive buffer keeps little in flight.
    pub async fn stranger(&self) -> Router {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(32 << 10).expect("a small buffer");
        let address = self.address("tcp").parse().expect("an address");
        let socket = socket.connect(address).await.expect("the agent listens");
        socket.set_nodelay(true).expect("a TCP socket");
        Router { socket, inbox: BytesMut::new() }
    }

    /// Body of an admin answer, with its status line.
    pub async fn get(&self, path: &str) -> String {
        let mut socket = TcpStream::connect(self.admin).await.expect("the admin server listens");
        let request = format!("GET {path} HTTP/1.1\r\nhost: w\r\nconnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        within(path, socket.read_to_string(&mut answer)).await.expect("an answer");
        answer
    }

    /// Shuts the agent down and waits for its end.
    pub async fn stop(self) -> Result<(), AgentError> {
        self.shutdown.cancel();
        within("the agent's end", self.running).await.expect("no panic")
    }
}

/// The router's side of a connection.
pub struct Router {
    pub socket: TcpStream,
    inbox: BytesMut,
}

impl Router {
    pub async fn send(&mut self, stream_id: u64, body: client_frame::Body) {
        let mut bytes = BytesMut::new();
        encode_frame(&ClientFrame { stream_id, body: Some(body) }, &mut bytes);
        self.socket.write_all(&bytes).await.expect("the connection is open");
    }

    pub async fn generate(&mut self, stream_id: u64) {
        self.send(stream_id, client_frame::Body::Generate(request(stream_id))).await;
    }

    pub async fn cancel(&mut self, stream_id: u64) {
        self.send(stream_id, client_frame::Body::Cancel(Cancel {})).await;
    }

    pub async fn credit(&mut self, stream_id: u64, frames: u32) {
        self.send(stream_id, client_frame::Body::Credit(Credit { frames })).await;
    }

    /// The next frame; `None` at the end of the connection.
    pub async fn recv_or_end(&mut self) -> Option<ServerFrame> {
        within("a frame", async {
            loop {
                if let Some(frame) = decode_frame(&mut self.inbox).expect("a valid frame") {
                    return Some(frame);
                }
                match self.socket.read_buf(&mut self.inbox).await {
                    Ok(0) | Err(_) => return None,
                    Ok(_) => {}
                }
            }
        })
        .await
    }

    pub async fn recv(&mut self) -> ServerFrame {
        self.recv_or_end().await.expect("the connection is open")
    }

    /// The next frame, which must be an Output of this stream.
    pub async fn output(&mut self, stream_id: u64) -> Output {
        match self.recv().await {
            ServerFrame { stream_id: id, body: Some(Body::Output(output)) } if id == stream_id => output,
            other => panic!("not an Output of stream {stream_id}: {other:?}"),
        }
    }

    /// The next frame, which must be a Failed of this stream.
    pub async fn failed(&mut self, stream_id: u64) -> Failed {
        match self.recv().await {
            ServerFrame { stream_id: id, body: Some(Body::Failed(failed)) } if id == stream_id => failed,
            other => panic!("not a Failed of stream {stream_id}: {other:?}"),
        }
    }

    /// Sends a Ping and takes its Pong, which must be the next frame: the worker has nothing else to say.
    pub async fn nothing_more(&mut self) {
        let nonce = rand::random();
        self.send(0, client_frame::Body::Ping(Ping { nonce })).await;
        match self.recv().await.body {
            Some(Body::Pong(pong)) => assert_eq!(pong.nonce, nonce),
            other => panic!("unexpected: {other:?}"),
        }
    }
}

pub fn request(stream_id: u64) -> Generate {
    Generate {
        request_id: format!("r{stream_id}"),
        model: "scripted".into(),
        token_ids: vec![1, 5, 6],
        ..Default::default()
    }
}
