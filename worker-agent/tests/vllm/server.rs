//! A server that speaks as vLLM or another engine does and does what the test says, and the engine that uses it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::Response;
use axum::routing::{get, post};
use clap::Parser;
use futures::stream;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use protocol::request_plane::{ErrorCode, Generate, Stop};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use worker_agent::config::{Config, RemoteSettings};
use worker_agent::engine::remote::Remote;
use worker_agent::engine::remote::metrics::RemoteMetrics;
use worker_agent::engine::remote::wait;
use worker_agent::engine::{Engine, EngineOutput};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Tokens of a block.
pub const BLOCK: usize = 32;
/// Ends answers.
pub const EOS: u32 = 2;

/// Longest wait for anything that should come.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Waits for `future`, at most [`DEADLINE`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("{what}: nothing within {DEADLINE:?}"))
}

/// Waits until `condition` holds, at most [`DEADLINE`].
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let mut look = tokio::time::interval(Duration::from_millis(5));
    within(what, async {
        while !condition() {
            look.tick().await;
        }
    })
    .await;
}

/// What the server speaks as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Make {
    Vllm,
    TensorRtLlm,
    /// With this `disaggregation_mode`.
    Sglang(&'static str),
}

impl Make {
    /// Flags of a worker beside it.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Vllm => &["--engine", "vllm"],
            Self::Sglang(_) => &["--engine", "sglang", "--host", "10.0.0.7"],
            Self::TensorRtLlm => &[
                "--engine",
                "tensorrt-llm",
                "--engine-block-size",
                "32",
                "--engine-kv-blocks",
                "100",
                "--engine-context-length",
                "2048",
            ],
        }
    }

    /// Its first page of metrics.
    fn metrics(self) -> &'static str {
        match self {
            Self::Vllm => "vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"100\"} 1.0\n",
            Self::TensorRtLlm | Self::Sglang(_) => "[]",
        }
    }
}

/// A request that reached the server.
pub struct Asked {
    pub path: String,
    pub body: Value,
    pub headers: HeaderMap,
    answer: oneshot::Sender<Response>,
}

/// An answer that the server is sending.
pub struct Events(mpsc::UnboundedSender<Bytes>);

impl Asked {
    /// One document.
    pub fn answer(self, status: u16, body: Value) {
        let response = Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
        let response = response.body(Body::from(body.to_string())).expect("a response");
        assert!(self.answer.send(response).is_ok(), "somebody waits");
    }

    /// A stream of events.
    pub fn stream(self) -> Events {
        assert_eq!(self.body["stream"], true, "{}", self.body);
        let (sender, receiver) = mpsc::unbounded_channel();
        let bytes = stream::unfold(receiver, async |mut receiver: mpsc::UnboundedReceiver<Bytes>| {
            Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
        });
        let response = Response::builder().header(header::CONTENT_TYPE, "text/event-stream");
        let response = response.body(Body::from_stream(Box::pin(bytes))).expect("a response");
        assert!(self.answer.send(response).is_ok(), "somebody waits");
        Events(sender)
    }

    /// Waits until nobody waits for an answer.
    pub async fn given_up(mut self) {
        within("the end of the connection", self.answer.closed()).await;
    }
}

impl Events {
    pub fn say(&self, event: Value) {
        self.raw(format!("data: {event}\n\n"));
    }

    pub fn raw(&self, text: impl Into<Bytes>) {
        self.0.send(text.into()).expect("somebody reads");
    }

    pub fn tokens(&self, tokens: &[u32]) {
        self.say(json!({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": null}]}));
    }

    /// The last tokens, and why.
    pub fn end(self, tokens: &[u32], reason: &str, stop: Value) {
        let choice = json!({"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason, "stop_reason": stop});
        self.say(json!({"choices": [choice]}));
        self.say(json!({"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 7}}}));
        self.raw("data: [DONE]\n\n");
    }

    /// Waits until nobody reads any more.
    pub async fn given_up(self) {
        within("the end of the connection", self.0.closed()).await;
    }
}

struct Shared {
    asked: mpsc::UnboundedSender<Asked>,
    metrics: Mutex<String>,
    /// KV events that nobody has asked for yet.
    events: Mutex<Vec<Value>>,
    health: Mutex<StatusCode>,
}

/// The server; dropping it ends all its connections, as a killed process does.
pub struct Server {
    make: Make,
    pub address: SocketAddr,
    asked: mpsc::UnboundedReceiver<Asked>,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Server {
    pub async fn start(make: Make) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (sender, asked) = mpsc::unbounded_channel();
        let (metrics, health) = (Mutex::new(make.metrics().to_owned()), Mutex::new(StatusCode::OK));
        let shared = Arc::new(Shared { asked: sender, metrics, events: Mutex::default(), health });
        let model = json!({"data": [{"id": "lora", "parent": "m", "max_model_len": 2048},
                {"id": "m", "parent": null, "max_model_len": 2048}]});
        let routes = axum::Router::new()
            .route("/health", get(async |State(shared): State<Arc<Shared>>| *shared.health.lock()))
            .route("/metrics", get(async |State(shared): State<Arc<Shared>>| shared.metrics.lock().clone()))
            .route("/v1/completions", post(asked_for));
        let routes = match make {
            Make::Vllm => routes.route("/v1/models", get(async move || model.to_string())),
            Make::TensorRtLlm => routes
                .route("/v1/models", get(async || json!({"object": "list", "data": [{"id": "m"}]}).to_string()))
                .route("/kv_cache_events", post(kv_cache_events)),
            Make::Sglang(mode) => {
                let info = json!({"model_path": "org/m", "served_model_name": "m", "page_size": 32, "context_length": null,
                    "max_total_num_tokens": 3200, "dp_size": 1, "disaggregation_mode": mode,
                    "disaggregation_bootstrap_port": 8997});
                routes
                    .route("/v1/models", get(async move || model.to_string()))
                    .route("/get_server_info", get(async move || info.to_string()))
                    .route("/get_load", get(async |State(shared): State<Arc<Shared>>| shared.metrics.lock().clone()))
                    .route("/generate", post(asked_for))
                    .route("/abort_request", post(asked_for))
            }
        };
        let serving = tokio::spawn(serve(listener, routes.with_state(shared.clone())));
        Self { make, address, asked, shared, serving }
    }

    /// The next request.
    pub async fn asked(&mut self) -> Asked {
        within("a request", self.asked.recv()).await.expect("the server runs")
    }

    pub fn say_metrics(&self, more: &str) {
        self.shared.metrics.lock().push_str(more);
    }

    /// Its page of metrics is empty from now on.
    pub fn forget_metrics(&self) {
        self.shared.metrics.lock().clear();
    }

    /// Replaces the page of metrics.
    pub fn set_metrics(&self, page: &str) {
        *self.shared.metrics.lock() = page.to_owned();
    }

    /// Whoever asks next is told of these.
    pub fn say_events(&self, events: impl IntoIterator<Item = Value>) {
        self.shared.events.lock().extend(events);
    }

    pub fn say_health(&self, status: StatusCode) {
        *self.shared.health.lock() = status;
    }

    /// Ends it, and waits until nobody listens at its address.
    pub async fn kill(self) {
        self.serving.abort();
        let address = self.address;
        drop(self);
        within("the end of the server", async {
            while tokio::net::TcpStream::connect(address).await.is_ok() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    pub fn settings(&self, more: &[&str]) -> RemoteSettings {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            config: Config,
        }
        let url = format!("http://{}", self.address);
        // By its first name, which goes on to work.
        let base = ["worker", "--name", "w", "--model-path", "m", "--vllm-url", &url];
        Cli::parse_from([&base[..], self.make.flags(), more].concat()).config.remote_settings().expect("valid")
    }

    pub async fn engine(&self, more: &[&str]) -> (Remote, RemoteMetrics) {
        let metrics = RemoteMetrics::default();
        let settings = self.settings(more);
        let ready = within("the engine", wait(&settings)).await.expect("it is ready");
        assert_eq!(ready.model, "m");
        (ready.start(&settings, vec![EOS], metrics.clone()), metrics)
    }
}

/// As `trtllm-serve` does: what has been told is forgotten.
async fn kv_cache_events(State(shared): State<Arc<Shared>>) -> String {
    Value::Array(std::mem::take(&mut *shared.events.lock())).to_string()
}

async fn asked_for(State(shared): State<Arc<Shared>>, uri: Uri, headers: HeaderMap, body: String) -> Response {
    let (answer, answered) = oneshot::channel();
    let body = serde_json::from_str(&body).expect("JSON");
    shared.asked.send(Asked { path: uri.path().to_owned(), body, headers, answer }).expect("the test runs");
    // A test that drops it leaves the request without an answer.
    answered.await.unwrap_or_default()
}

async fn serve(listener: TcpListener, routes: axum::Router) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((socket, _)) = listener.accept().await else { return };
        let service = TowerToHyperService::new(routes.clone());
        connections.spawn(async move {
            let served = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service);
            _ = served.await;
        });
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
        EngineOutput::Refused { code, message } => (code, message),
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
