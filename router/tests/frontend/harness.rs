//! A server with a scripted backend, a small model, and an HTTP client that sees frames.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::registry::Registry;
use protocol::metadata::{ArmatureCard, ModelCard};
use router::http::metrics::FrontendMetrics;
use router::http::{FrontendConfig, serve};
use router::model::{Model, ModelFiles};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use crate::scripted::*;

/// Longest wait for anything in these tests.
pub const DEADLINE: Duration = Duration::from_secs(20);

pub const CHAT_ML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// First id after the 256 bytes and the merges.
pub const IM_START: u32 = 280;
pub const IM_END: u32 = 281;
pub const BOS: u32 = 282;
pub const CONTEXT: u32 = 512;
pub const VOCABULARY: u32 = 283;

/// A byte-level BPE tokenizer: token `b` is the byte `b`, then a few merges, then special tokens.
pub fn tokenizer_json() -> Vec<u8> {
    let merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("o", "r"),
        ("Ġw", "or"),
        ("l", "d"),
        ("Ġwor", "ld"),
        ("Ċ", "Ċ"),
        ("u", "s"),
        ("e", "r"),
        ("us", "er"),
        ("Ġ", "t"),
        ("Ġt", "he"),
        ("i", "n"),
        ("1", "2"),
        ("Ġ", "Ġ"),
        ("<", "|"),
        ("|", ">"),
        ("a", "n"),
        ("an", "d"),
        ("Ã", "©"),
        ("Ġ", "s"),
    ];
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255u8 {
        vocab.insert(byte_char(byte).to_string(), byte.into());
    }
    for (at, (a, b)) in merges.iter().enumerate() {
        vocab.insert(format!("{a}{b}"), (256 + at).into());
    }
    assert_eq!(vocab.len(), IM_START as usize);
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(IM_START, "<|im_start|>"), special(IM_END, "<|im_end|>"), special(BOS, "<|bos|>")],
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges.map(|(a, b)| format!("{a} {b}"))},
    })
    .to_string()
    .into_bytes()
}

fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match printable(byte) {
        true => byte as char,
        false => char::from_u32(0x100 + (0..byte).filter(|b| !printable(*b)).count() as u32).expect("a character"),
    }
}

pub fn card(name: &str) -> ModelCard {
    ModelCard {
        display_name: name.into(),
        context_length: CONTEXT,
        kv_cache_block_size: 16,
        armature: Some(ArmatureCard { eos_token_ids: vec![IM_END], bos_token_id: Some(BOS), ..Default::default() }),
        ..Default::default()
    }
}

pub fn model(chat_template: Option<&str>) -> Model {
    let files = ModelFiles {
        tokenizer_json: tokenizer_json(),
        chat_template: chat_template.map(str::to_owned),
        special_tokens: Some(br#"{"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}}"#.to_vec()),
    };
    Model::load(files, &card("m")).expect("the files are right")
}

/// A running server.
pub struct Server {
    pub address: SocketAddr,
    pub backend: Arc<Scripted>,
    pub shutdown: CancellationToken,
    pub task: JoinHandle<()>,
}

impl Server {
    pub async fn start() -> Server {
        Server::with(FrontendConfig::default(), vec![("m", model(Some(CHAT_ML)))]).await
    }

    pub async fn with(config: FrontendConfig, models: Vec<(&str, Model)>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let backend = Arc::new(Scripted::new(models));
        let shutdown = CancellationToken::new();
        let (metrics, mut registry) = (FrontendMetrics::default(), Registry::default());
        metrics.register(&mut registry);
        let serving = serve(listener, backend.clone(), config, Arc::new(metrics), Arc::new(registry), shutdown.clone());
        Server { address, backend, shutdown, task: tokio::spawn(serving) }
    }

    pub async fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).await.expect("the server listens");
        stream.set_nodelay(true).expect("a socket option");
        let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("an HTTP connection");
        Client { sender, connection: tokio::spawn(async move { connection.await.unwrap_or(()) }) }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string().into()).await
    }

    pub async fn chat(&self, mut fields: Value) -> Answer {
        chat_fields(&mut fields);
        self.post("/v1/chat/completions", fields).await
    }

    pub async fn complete(&self, mut fields: Value) -> Answer {
        let object = fields.as_object_mut().expect("an object");
        object.entry("model").or_insert("m".into());
        object.entry("prompt").or_insert("Hi".into());
        self.post("/v1/completions", fields).await
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
        let mut client = self.connect().await;
        client.send(method, path, headers, body).await.whole().await
    }
}

pub fn chat_fields(fields: &mut Value) {
    let object = fields.as_object_mut().expect("an object");
    object.entry("model").or_insert("m".into());
    object.entry("messages").or_insert(json!([{"role": "user", "content": "Hi"}]));
}

/// One connection.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
}

impl Client {
    pub async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Response {
        let mut request = Request::builder().method(method).uri(path).header("host", "test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body)).expect("a request");
        let response = tokio::time::timeout(DEADLINE, self.sender.send_request(request));
        Response(response.await.expect("an answer in time").expect("an answer"))
    }

    pub async fn stream_chat(&mut self, mut fields: Value) -> Response {
        chat_fields(&mut fields);
        fields["stream"] = true.into();
        self.send("POST", "/v1/chat/completions", &[], fields.to_string().into()).await
    }

    /// Closes the connection at once.
    pub fn hang_up(self) {
        self.connection.abort();
    }
}

/// A response whose body is still coming.
pub struct Response(hyper::Response<Incoming>);

impl Response {
    pub fn headers(&self) -> &HeaderMap {
        self.0.headers()
    }

    /// The next piece of the body.
    pub async fn piece(&mut self) -> Option<String> {
        let frame = tokio::time::timeout(DEADLINE, self.0.body_mut().frame()).await.expect("a frame in time")?;
        let data = frame.expect("a whole body").into_data().expect("data");
        Some(String::from_utf8(data.to_vec()).expect("UTF-8"))
    }

    pub async fn whole(self) -> Answer {
        let (head, body) = self.0.into_parts();
        let body = tokio::time::timeout(DEADLINE, body.collect()).await.expect("a body in time").expect("a body");
        let body = String::from_utf8(body.to_bytes().to_vec()).expect("UTF-8");
        Answer { status: head.status, headers: head.headers, body }
    }
}

/// A whole response.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// Status, type, param and code of an error.
    pub fn error(&self) -> (u16, String, Option<String>, Option<String>) {
        let error = &self.json()["error"];
        let field = |name: &str| error[name].as_str().map(str::to_owned);
        assert!(field("message").is_some_and(|message| !message.is_empty()), "{}", self.body);
        (self.status.as_u16(), field("type").expect("a type"), field("param"), field("code"))
    }

    /// The events of a stream; the last one is `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> = self.body.split("\n\n").filter(|event| event.starts_with("data: ")).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).expect("JSON")).collect()
    }
}

/// The text of choice `index` of a chat's events.
pub fn streamed_text(events: &[Value], index: u64) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().expect("choices"));
    let own = choices.filter(|choice| choice["index"] == index);
    own.filter_map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str())).collect()
}
