//! A server that speaks as vLLM, SGLang or TensorRT-LLM do, as far as a worker beside it asks, and does what a test says.
//!
//! What the real vLLM says is tested with `cargo xtask test --stage vllm`; the other two are played from their documented
//! interfaces.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::Response;
use axum::routing::{get, post};
use futures::stream;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

use crate::wait::within;

/// Tokens of a block.
pub const BLOCK: usize = 32;

/// What the server speaks as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Make {
    /// `vllm serve`.
    Vllm,
    /// `trtllm-serve`.
    TensorRtLlm,
    /// SGLang, with this `disaggregation_mode`.
    Sglang(&'static str),
}

impl Make {
    /// Flags of a worker beside it.
    pub fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Vllm => &["--engine", "vllm"],
            Self::Sglang(_) => &["--engine", "sglang"],
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
    /// Where.
    pub path: String,
    /// What.
    pub body: Value,
    /// With which headers.
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
    /// One event.
    pub fn say(&self, event: Value) {
        self.raw(format!("data: {event}\n\n"));
    }

    /// Bytes as they are.
    pub fn raw(&self, text: impl Into<Bytes>) {
        self.0.send(text.into()).expect("somebody reads");
    }

    /// An event of a completion, with these tokens.
    pub fn tokens(&self, tokens: &[u32]) {
        self.say(json!({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": null}]}));
    }

    /// The last tokens of a completion, and why.
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
    /// `None`: it does not answer with the page.
    metrics: Mutex<Option<String>>,
    /// KV events that nobody has asked for yet.
    events: Mutex<Vec<Value>>,
    health: Mutex<StatusCode>,
}

/// The server; dropping it ends all its connections, as a killed process does.
pub struct Server {
    make: Make,
    /// Where it listens.
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
    /// Starts one that is ready and idle.
    pub async fn start(make: Make) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (sender, asked) = mpsc::unbounded_channel();
        let (metrics, health) = (Mutex::new(Some(make.metrics().to_owned())), Mutex::new(StatusCode::OK));
        let shared = Arc::new(Shared { asked: sender, metrics, events: Mutex::default(), health });
        let model = json!({"data": [{"id": "lora", "parent": "m", "max_model_len": 2048},
                {"id": "m", "parent": null, "max_model_len": 2048}]});
        let routes = axum::Router::new()
            .route("/health", get(async |State(shared): State<Arc<Shared>>| *shared.health.lock()))
            .route("/metrics", get(metrics_page))
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
                    .route("/get_load", get(metrics_page))
                    .route("/generate", post(asked_for))
                    .route("/abort_request", post(asked_for))
            }
        };
        let serving = tokio::spawn(serve(listener, routes.with_state(shared.clone())));
        Self { make, address, asked, shared, serving }
    }

    /// What it speaks as.
    pub fn make(&self) -> Make {
        self.make
    }

    /// The next request.
    pub async fn asked(&mut self) -> Asked {
        within("a request", self.asked.recv()).await.expect("the server runs")
    }

    /// Adds to the page of metrics.
    pub fn say_metrics(&self, more: &str) {
        self.shared.metrics.lock().get_or_insert_default().push_str(more);
    }

    /// Its page of metrics is empty from now on.
    pub fn forget_metrics(&self) {
        self.set_metrics("");
    }

    /// It fails to answer with its page of metrics from now on.
    pub fn refuse_metrics(&self) {
        *self.shared.metrics.lock() = None;
    }

    /// Replaces the page of metrics.
    pub fn set_metrics(&self, page: &str) {
        *self.shared.metrics.lock() = Some(page.to_owned());
    }

    /// Whoever asks next is told of these.
    pub fn say_events(&self, events: impl IntoIterator<Item = Value>) {
        self.shared.events.lock().extend(events);
    }

    /// What it says of its health from now on.
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
}

async fn metrics_page(State(shared): State<Arc<Shared>>) -> Result<String, StatusCode> {
    shared.metrics.lock().clone().ok_or(StatusCode::INTERNAL_SERVER_ERROR)
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
