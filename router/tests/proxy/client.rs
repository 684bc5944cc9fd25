//! An HTTP client that sees pieces of bodies.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Longest wait for anything here, on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// One connection to a router.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("the router listens");
        stream.set_nodelay(true).expect("a socket option");
        let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("an HTTP connection");
        Self { sender, connection: tokio::spawn(async move { connection.await.unwrap_or(()) }) }
    }

    pub async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response {
        let mut request = Request::builder().method(method).uri(path).header("host", "test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        let response = tokio::time::timeout(PATIENCE, self.sender.send_request(request));
        Response(response.await.expect("an answer in time").expect("an answer"))
    }

    pub async fn post(&mut self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string()).await
    }

    /// Closes the connection at once.
    pub fn hang_up(self) {
        self.connection.abort();
    }
}

/// A response whose body is still coming.
pub struct Response(hyper::Response<Incoming>);

impl Response {
    pub fn status(&self) -> StatusCode {
        self.0.status()
    }

    pub fn header(&self, name: &str) -> String {
        text(self.0.headers(), name)
    }

    /// The next piece of the body.
    pub async fn piece(&mut self) -> Option<String> {
        let frame = tokio::time::timeout(PATIENCE, self.0.body_mut().frame()).await.expect("a frame in time")?;
        let data = frame.expect("a whole body").into_data().expect("data");
        Some(String::from_utf8(data.to_vec()).expect("UTF-8"))
    }

    pub async fn whole(self) -> Answer {
        let (head, body) = self.0.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect()).await.expect("a body in time").expect("a body");
        let body = String::from_utf8(body.to_bytes().to_vec()).expect("UTF-8");
        Answer { status: head.status.as_u16(), headers: head.headers, body }
    }
}

/// A whole response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> String {
        text(&self.headers, name)
    }

    /// Status, param and code of an error.
    pub fn error(&self) -> (u16, Option<String>, Option<String>) {
        let error = &self.json()["error"];
        let field = |name: &str| error[name].as_str().map(str::to_owned);
        assert!(field("message").is_some_and(|message| !message.is_empty()), "{}", self.body);
        (self.status, field("param"), field("code"))
    }

    /// The events of a stream; the last one is `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> = self.body.split("\n\n").filter(|event| event.starts_with("data: ")).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).expect("JSON")).collect()
    }
}

fn text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).map_or("", |value| value.to_str().expect("text")).to_owned()
}
