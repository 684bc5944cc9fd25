//! An OpenAI server that does what it is told: answers, stalls, refuses, dies.

use std::convert::Infallible;
use std::io::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// What it does with requests.
#[derive(Clone, Debug)]
pub enum Behaviour {
    /// Answers with so many tokens.
    Tokens(usize),
    /// Sends this status and body.
    Status(u16, String),
    /// Says nothing.
    Silent,
    /// Closes the connection in place of an answer.
    DieAtOnce,
    /// Begins to stream, sends so many events and half of another, and closes the connection.
    DieAfter(usize),
    /// Sends these pieces of a stream, and goes on sending what [`Server::say`] says.
    Pieces(Vec<String>),
    /// Streams without end, as fast as it is read.
    Flood,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

struct State {
    name: String,
    models: Mutex<Value>,
    behaviour: Mutex<Behaviour>,
    health: Mutex<Option<u16>>,
    seen: Mutex<Vec<Seen>>,
    streams: Mutex<Vec<UnboundedSender<Bytes>>>,
    /// Requests whose answer nobody waits for any more, though it had not ended.
    abandoned: AtomicUsize,
    sent: Arc<AtomicUsize>,
    connections: AtomicUsize,
}

/// A running server.
pub struct Server {
    pub address: SocketAddr,
    /// Present where it speaks TLS.
    tls: Option<TlsAcceptor>,
    state: Arc<State>,
    task: Option<(CancellationToken, JoinHandle<()>)>,
}

impl Server {
    /// It serves the model `tiny`.
    pub async fn start(name: &str) -> Self {
        Self::start_over(name, None).await
    }

    /// The same over TLS.
    pub async fn start_tls(name: &str, tls: TlsAcceptor) -> Self {
        Self::start_over(name, Some(tls)).await
    }

    async fn start_over(name: &str, tls: Option<TlsAcceptor>) -> Self {
        let models = json!([{"id": "tiny", "object": "model", "max_model_len": 4096, "parent": null}]);
        let state = State {
            name: name.into(),
            models: Mutex::new(models),
            behaviour: Mutex::new(Behaviour::Tokens(3)),
            health: Mutex::new(Some(200)),
            seen: Mutex::default(),
            streams: Mutex::default(),
            abandoned: AtomicUsize::new(0),
            sent: Arc::default(),
            connections: AtomicUsize::new(0),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let mut server = Self { address, tls, state: Arc::new(state), task: None };
        server.serve(listener);
        server
    }

    fn serve(&mut self, listener: TcpListener) {
        let (stop, state, tls) = (CancellationToken::new(), self.state.clone(), self.tls.clone());
        let stopped = stop.clone();
        let accepting = async move {
            while let Ok((stream, _)) = listener.accept().await {
                stream.set_nodelay(true).expect("a socket option");
                state.connections.fetch_add(1, Ordering::Relaxed);
                let (state, stopped) = (state.clone(), stopped.clone());
                let service = service_fn(move |request| {
                    let state = state.clone();
                    async move { state.answer(request).await }
                });
                let tls = tls.clone();
                // How a connection ends is what the tests are about.
                let connection = async move {
                    let http = http1::Builder::new();
                    let _ = match tls {
                        None => http.serve_connection(TokioIo::new(stream), service).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => http.serve_connection(TokioIo::new(stream), service).await,
                            Err(_) => return,
                        },
                    };
                };
                tokio::spawn(async move { stopped.run_until_cancelled(connection).await });
            }
        };
        let stopping = stop.clone();
        let task = tokio::spawn(async move {
            stopping.run_until_cancelled(accepting).await;
        });
        self.task = Some((stop, task));
    }

    /// Closes everything at once; nobody listens any more.
    pub async fn kill(&mut self) {
        if let Some((stop, task)) = self.task.take() {
            stop.cancel();
            task.await.expect("it ends");
        }
    }

    /// Listens again where it did.
    pub async fn revive(&mut self) {
        let listener = TcpListener::bind(self.address).await.expect("its port is free");
        self.serve(listener);
    }

    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// As the router calls it.
    pub fn name(&self) -> String {
        self.address.to_string()
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.state.behaviour.lock() = behaviour;
    }

    /// What `/health` answers; `None`: it is stuck. 404: there is none.
    pub fn health(&self, status: Option<u16>) {
        *self.state.health.lock() = status;
    }

    pub fn models(&self, models: Value) {
        *self.state.models.lock() = models;
    }

    /// Requests so far, in order.
    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().clone()
    }

    /// Sends a piece on every open stream.
    pub fn say(&self, piece: &str) {
        self.state.streams.lock().retain(|stream| stream.unbounded_send(piece.to_owned().into()).is_ok());
    }

    /// Ends every open stream.
    pub fn end(&self) {
        self.state.streams.lock().clear();
    }

    pub fn abandoned(&self) -> usize {
        self.state.abandoned.load(Ordering::SeqCst)
    }

    /// Bytes that a flood has sent.
    pub fn sent(&self) -> usize {
        self.state.sent.load(Ordering::SeqCst)
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

type Body = BoxBody<Bytes, Error>;

/// Counts an answer that is dropped before its end.
struct Pending(Arc<State>, bool);

impl Pending {
    fn ended(&mut self) {
        self.1 = true;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.1 {
            self.0.abandoned.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl State {
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Error> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map_err(Error::other)?.to_bytes();
        match head.uri.path() {
            "/health" => {
                let health = *self.health.lock();
                match health {
                    Some(status) => return Ok(whole(status, String::new())),
                    None => std::future::pending::<()>().await,
                }
            }
            "/v1/models" => {
                let page = json!({"object": "list", "data": *self.models.lock()});
                return Ok(whole(200, page.to_string()));
            }
            _ => {}
        }
        let json: Value = serde_json::from_slice(&body).unwrap_or_default();
        let stream = json["stream"] == true;
        self.seen.lock().push(Seen { path: head.uri.path().into(), headers: head.headers, body });
        let behaviour = self.behaviour.lock().clone();
        let mut pending = Pending(self.clone(), false);
        let answer = match behaviour {
            Behaviour::Tokens(tokens) if stream => self.events((0..tokens).map(token).chain([finish(), done()])),
            Behaviour::Tokens(tokens) => whole(200, self.text(tokens)),
            Behaviour::Status(status, body) => whole(status, body),
            Behaviour::DieAtOnce => Err(Error::other("it dies"))?,
            Behaviour::DieAfter(tokens) => self.broken(tokens),
            Behaviour::Silent => std::future::pending().await,
            Behaviour::Pieces(pieces) => return Ok(self.open_stream(pieces, pending)),
            Behaviour::Flood => self.flood(),
        };
        pending.ended();
        Ok(answer)
    }

    fn text(&self, tokens: usize) -> String {
        let text: String = (0..tokens).map(|token| format!("t{token} ")).collect();
        json!({"id": self.name, "object": "chat.completion", "model": "tiny",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}})
        .to_string()
    }

    fn events(&self, events: impl Iterator<Item = String>) -> Response<Body> {
        let pieces: Vec<Result<Frame<Bytes>, Error>> = events.map(|event| Ok(Frame::data(event.into()))).collect();
        stream(futures::stream::iter(pieces))
    }

    fn broken(&self, tokens: usize) -> Response<Body> {
        let pieces = (0..tokens).map(token).chain(["data: {\"choices\":[{\"del".to_owned()]);
        let pieces = pieces.map(|piece| Ok(Frame::data(piece.into()))).chain([Err(Error::other("it dies"))]);
        // Each piece is sent before the next is made.
        let pieces = futures::stream::iter(pieces.collect::<Vec<_>>());
        stream(pieces.then(|piece| async move {
            tokio::task::yield_now().await;
            piece
        }))
    }

    fn open_stream(self: &Arc<Self>, pieces: Vec<String>, pending: Pending) -> Response<Body> {
        let (sender, receiver): (UnboundedSender<Bytes>, UnboundedReceiver<Bytes>) = unbounded();
        for piece in pieces {
            sender.unbounded_send(piece.into()).expect("it is open");
        }
        self.streams.lock().push(sender);
        let mut pending = pending;
        let end = futures::stream::poll_fn(move |_| {
            pending.ended();
            std::task::Poll::Ready(None)
        });
        stream(receiver.map(|piece| Ok(Frame::data(piece))).chain(end))
    }

    fn flood(&self) -> Response<Body> {
        let sent = self.sent.clone();
        let piece: Bytes = token(0).repeat(100).into();
        stream(futures::stream::repeat_with(move || {
            sent.fetch_add(piece.len(), Ordering::SeqCst);
            Ok(Frame::data(piece.clone()))
        }))
    }
}

/// An event with one token.
pub fn token(number: usize) -> String {
    let event = json!({"object": "chat.completion.chunk", "model": "tiny",
        "choices": [{"index": 0, "delta": {"content": format!("t{number} ")}, "finish_reason": null}]});
    format!("data: {event}\n\n")
}

pub fn finish() -> String {
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n".to_owned()
}

pub fn done() -> String {
    "data: [DONE]\n\n".to_owned()
}

fn whole(status: u16, body: String) -> Response<Body> {
    let body = Full::new(Bytes::from(body)).map_err(|never: Infallible| match never {}).boxed();
    let response =
        Response::builder().status(status).header("content-type", "application/json").header("x-server", "1");
    response.body(body).expect("a response")
}

fn stream(pieces: impl futures::Stream<Item = Result<Frame<Bytes>, Error>> + Send + Sync + 'static) -> Response<Body> {
    let response = Response::builder().header("content-type", "text/event-stream; charset=utf-8");
    response.body(BodyExt::boxed(StreamBody::new(pieces))).expect("a response")
}
