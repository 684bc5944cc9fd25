//! One request onto one server: decide, book, send as it came, and try another server while nothing has come back.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::Full;
use hyper::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::response::Parts;
use hyper::{Method, Request, StatusCode};
use kv_hashing::BlockHash;
use routing::RequestNames;
use tokio::time::{Instant, timeout_at};

use super::Proxy;
use super::events::answer_id;
use super::key::Key;
use super::line::{Answer, LineError};
use super::server::Server;
use crate::backend::{DispatchError, RouteOptions};
use crate::dispatch::ask::Ask;
use crate::dispatch::booking::Booking;
use crate::dispatch::find::Found;
use crate::metrics::ReasonLabels;
use crate::openai::Endpoint;

/// Most servers tried for one request.
const ATTEMPTS: usize = 4;

/// Most bytes of an answer that is not a stream of events: it is taken in whole, so that a server that dies on the way can
/// still be replaced.
const WHOLE: usize = 64 << 20;

/// Most bytes of what a server says about a failure.
const COMPLAINT: usize = 16 << 10;

/// Longest text of a server's that is handed on in an error, in characters.
const MESSAGE: usize = 500;

/// Stages, as errors name them.
mod stage {
    pub(super) const ANSWER: &str = "waiting for the answer";
    pub(super) const FIRST_TOKEN: &str = "waiting for the first token";
}

/// Headers that belong to one connection, or that the router sets itself.
const OWN: [HeaderName; 12] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    CONTENT_LENGTH,
    EXPECT,
    HOST,
];

/// A request to send on.
pub(crate) struct Outgoing {
    key: Key,
    endpoint: Endpoint,
    headers: HeaderMap,
    body: Bytes,
    options: RouteOptions,
}

impl Outgoing {
    /// A request as it came, and what it is to the router.
    pub(crate) fn new(key: Key, endpoint: Endpoint, headers: HeaderMap, body: Bytes, options: RouteOptions) -> Self {
        let mut headers = end_to_end(headers);
        // Compressed events could not be counted.
        headers.remove(ACCEPT_ENCODING);
        let ours = |name: &&HeaderName| name.as_str().starts_with("x-armature-");
        let ours: Vec<HeaderName> = headers.keys().filter(ours).cloned().collect();
        ours.iter().for_each(|name| drop(headers.remove(name)));
        headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        Self { key, endpoint, headers, body, options }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Its id, as the client and the servers know it.
    fn id(&self) -> &str {
        self.headers.get("x-request-id").and_then(|id| id.to_str().ok()).unwrap_or_default()
    }

    fn request(&self, server: &Server) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = server.uri(self.endpoint);
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// Leaves out what belongs to one connection.
fn end_to_end(mut headers: HeaderMap) -> HeaderMap {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&OWN) {
        headers.remove(name);
    }
    headers
}

/// What a server answers.
pub(crate) struct Incoming {
    pub(crate) status: StatusCode,
    /// Those that are the client's business.
    pub(crate) headers: HeaderMap,
    pub(crate) body: Body,
    pub(crate) served: Served,
}

/// The body of an answer.
pub(crate) enum Body {
    /// All of it.
    Whole(Bytes),
    /// Events: the first piece, and those to come.
    Events(Bytes, Box<Answer>),
}

/// Who answers, and the request's place in the load.
pub(crate) struct Served {
    pub(super) server: Arc<Server>,
    pub(super) booking: Booking,
    /// What the request is called.
    pub(super) id: RequestNames,
    overlap_blocks: u32,
}

impl Served {
    /// Its name, for people.
    pub(crate) fn server_name(&self) -> HeaderValue {
        self.server.name_header.clone()
    }

    /// Its instance id.
    pub(crate) fn server_id(&self) -> u64 {
        self.server.id.0
    }

    /// Prompt blocks that it is expected to reuse.
    pub(crate) fn overlap_blocks(&self) -> u32 {
        self.overlap_blocks
    }
}

/// Why an attempt failed.
enum Failure {
    /// Another server may do.
    Retry { reason: &'static str, error: Option<DispatchError> },
    /// No other would.
    Final(DispatchError),
}

pub(super) async fn run(proxy: &Proxy, outgoing: &Outgoing) -> Result<Incoming, DispatchError> {
    let key = &outgoing.key;
    let prompt = (key.blocks.clone(), key.prompt.clone());
    let mut ask = Ask::of(outgoing.id(), key.model(), prompt, &outgoing.options, &proxy.cost)?;
    let (workers, overlaps) = (|| proxy.workers(key.model()), |blocks: &[BlockHash]| proxy.overlaps(blocks));
    let mut last_error = None;
    for _ in 0..ATTEMPTS {
        let placed = proxy.placement.find(&proxy.cluster, &ask, &workers, |set| &**set, &overlaps).await?;
        let Some(Found { decision, booking, held, .. }) = placed else { break };
        proxy.routed(&ask, &decision, &held);
        let worker = decision.rank.worker;
        ask.failed_at(worker);
        let Some(server) = proxy.servers.get(&worker) else { continue };
        match exchange_in_time(proxy, server, outgoing).await {
            Ok((head, body)) => {
                let overlap_blocks = decision.terms.overlap.total();
                let (status, headers) = (head.status, end_to_end(head.headers));
                if status.is_success() {
                    proxy.answered(server, &key.prompt, &decision);
                }
                if let Body::Whole(answer) = &body {
                    answer_id(answer).inspect(|id| ask.id.answered_as(id));
                }
                let served = Served { server: server.clone(), booking, overlap_blocks, id: ask.id };
                return Ok(Incoming { status, headers, body, served });
            }
            Err(Failure::Final(error)) => return Err(error),
            Err(Failure::Retry { reason, error }) => {
                proxy.cluster.metrics.retries.get_or_create(&ReasonLabels { reason }).inc();
                tracing::debug!(reason, worker = %server.name, "trying another server");
                last_error = error.or(last_error);
            }
        }
    }
    Err(last_error.unwrap_or_else(|| DispatchError::NoWorker { model: key.model().to_owned() }))
}

/// Sends the request and waits for what can be handed on: a whole answer, or the first piece of one.
async fn exchange_in_time(proxy: &Proxy, server: &Arc<Server>, outgoing: &Outgoing) -> Result<(Parts, Body), Failure> {
    let (stage, limit) = match outgoing.key.stream {
        true => (stage::FIRST_TOKEN, proxy.deadlines.first_token),
        false => (stage::ANSWER, proxy.settings.answer),
    };
    match timeout_at(Instant::now() + limit, exchange(server, outgoing, stage)).await {
        Ok(exchanged) => exchanged,
        Err(_) => Err(Failure::Final(DispatchError::Deadline { stage, seconds: limit.as_secs() })),
    }
}

async fn exchange(server: &Arc<Server>, outgoing: &Outgoing, stage: &'static str) -> Result<(Parts, Body), Failure> {
    let lost = |error: LineError| {
        let unreachable = error.is_of_dial();
        if unreachable {
            server.suspect.notify_one();
        }
        Failure::Retry {
            reason: if unreachable { "unreachable" } else { "lost" },
            error: (!unreachable).then(|| failed(server, stage, error.to_string())),
        }
    };
    let (head, mut answer) = server.send(|| outgoing.request(server)).await.map_err(lost)?.into_parts();
    if let Some(reason) = retryable(head.status) {
        let (begin, _) = collect(&mut answer, COMPLAINT).await.map_err(lost)?;
        return Err(complaint(server, stage, head.status, reason, &begin));
    }
    if is_events(&head.headers) {
        return match answer.piece().await {
            Some(Ok(first)) => Ok((head, Body::Events(first, Box::new(answer)))),
            Some(Err(error)) => Err(lost(error)),
            None => Err(lost(LineError::Closed)),
        };
    }
    match collect(&mut answer, WHOLE).await.map_err(lost)? {
        (whole, true) => Ok((head, Body::Whole(whole))),
        (_, false) => Err(Failure::Final(failed(server, stage, format!("its answer is over {} MB", WHOLE >> 20)))),
    }
}

fn failed(server: &Server, stage: &'static str, message: String) -> DispatchError {
    DispatchError::Worker { worker: server.name.to_string(), stage, message }
}

/// Statuses that say more of the server than of the request.
fn retryable(status: StatusCode) -> Option<&'static str> {
    match status.as_u16() {
        429 => Some("overloaded"),
        500 | 502..=504 => Some("failed"),
        _ => None,
    }
}

fn complaint(server: &Server, stage: &'static str, status: StatusCode, reason: &'static str, body: &[u8]) -> Failure {
    let message = format!("{}: {}", status.as_u16(), said(body));
    let error = match status {
        StatusCode::TOO_MANY_REQUESTS => DispatchError::Overloaded(message),
        _ => failed(server, stage, message),
    };
    Failure::Retry { reason, error: Some(error) }
}

/// What a server says of an error: the message in OpenAI's shape or in one near it, or the text as it is.
pub(super) fn said(body: &[u8]) -> String {
    let json: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = [&json["error"]["message"], &json["message"], &json["detail"], &json["error"]];
    let text = message.iter().find_map(|message| message.as_str().map(str::to_owned));
    text.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned()).chars().take(MESSAGE).collect()
}

fn is_events(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case("text/event-stream"))
}

/// At most `limit` bytes of a body, and whether that is all of it.
async fn collect(answer: &mut Answer, limit: usize) -> Result<(Bytes, bool), LineError> {
    let Some(mut whole) = answer.piece().await.transpose()? else { return Ok((Bytes::new(), true)) };
    let mut more = BytesMut::new();
    while let Some(piece) = answer.piece().await.transpose()? {
        if more.is_empty() {
            more.reserve(
                answer.size_hint().exact().map_or(0, |rest| limit.min(rest as usize)) + whole.len() + piece.len(),
            );
            more.extend_from_slice(&whole);
        }
        more.extend_from_slice(&piece);
        if more.len() > limit {
            return Ok((more.freeze(), false));
        }
    }
    if !more.is_empty() {
        whole = more.freeze();
    }
    Ok((whole, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn what_belongs_to_a_connection_stays_there() {
        let left = end_to_end(headers(&[
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("host", "router"),
            ("content-length", "9"),
            ("transfer-encoding", "chunked"),
            ("authorization", "Bearer k"),
            ("x-request-id", "r"),
        ]));
        assert_eq!(left, headers(&[("authorization", "Bearer k"), ("x-request-id", "r")]));
    }

    #[test]
    fn complaints_are_read_in_every_shape() {
        for (body, expected) in [
            (r#"{"error":{"message":"m","type":"t"}}"#, "m"),
            (r#"{"object":"error","message":"m"}"#, "m"),
            (r#"{"detail":"m"}"#, "m"),
            (r#"{"error":"m"}"#, "m"),
            (" plain\n", "plain"),
            (r#"{"x":1}"#, r#"{"x":1}"#),
        ] {
            assert_eq!(said(body.as_bytes()), expected);
        }
        assert_eq!(said("é".repeat(2 * MESSAGE).as_bytes()).chars().count(), MESSAGE);
    }
}
