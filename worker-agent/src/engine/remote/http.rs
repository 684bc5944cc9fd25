//! Requests to the server: HTTP/1.1 without TLS over kept connections, each stage with a deadline that names it.
//!
//! A call that is dropped before its answer has ended closes its connection; that is how the server learns to give it up.

use std::fmt;
use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::timeout;

use super::dialect::Call;

/// Time to connect.
const CONNECT: Duration = Duration::from_secs(2);
/// Longest time a connection waits for its next request: many servers close idle ones after 5 s.
const IDLE: Duration = Duration::from_secs(4);
/// Time for a page (health, metrics, models), from the request to the end.
const PAGE: Duration = Duration::from_secs(5);
/// Most bytes of a page; metrics of a server with many models have some 100 KB.
const MAX_PAGE: usize = 8 << 20;
/// Most bytes of a whole answer, or of what an error says.
const MAX_ANSWER: usize = 32 << 20;

/// Where a request stood when its time was up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Until the answer begins.
    Answer,
    /// Until the first token.
    FirstToken,
    /// Between two tokens.
    Generating,
    /// A page about the server.
    Page,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Answer => "waiting for the engine's answer",
            Self::FirstToken => "waiting for the engine's first token",
            Self::Generating => "generating",
            Self::Page => "asking the engine how it is",
        })
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    /// Nobody listens there.
    #[error("nobody listens there")]
    Refused,
    /// The connection could not be made, or broke.
    #[error("{0}")]
    Broken(String),
    /// It took too long.
    #[error("nothing for {} s while {stage}", limit.as_secs())]
    Deadline {
        /// Where.
        stage: Stage,
        /// How long.
        limit: Duration,
    },
    /// The answer has more bytes than are taken.
    #[error("an answer of over {0} bytes")]
    TooLarge(usize),
    /// The server answered with this status.
    #[error("{path} answers {status}")]
    Status {
        /// What was asked for.
        path: &'static str,
        /// The status.
        status: u16,
    },
}

/// The server.
pub(super) struct Server {
    url: String,
    headers: HeaderMap,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl Server {
    /// At `url`, which is `http://HOST:PORT` and perhaps a path; `headers` go with every call.
    pub(super) fn new(url: &str, headers: HeaderMap) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        let mut client = Client::builder(TokioExecutor::new());
        let client = client.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE).build(connector);
        Self { url: url.to_owned(), headers, client }
    }

    /// Sends a call, and waits for its answer to begin.
    pub(super) async fn call(
        &self,
        call: &Call,
        stage: Stage,
        limit: Duration,
    ) -> Result<Response<Incoming>, HttpError> {
        let mut request = self.request(Method::POST, call.path, call.body.clone())?;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        request.headers_mut().extend(self.headers.clone());
        let answer = timeout(limit, self.client.request(request)).await;
        answer.map_err(|_| HttpError::Deadline { stage, limit })?.map_err(|error| broken(&error))
    }

    /// GETs a page.
    pub(super) async fn page(&self, path: &'static str) -> Result<Bytes, HttpError> {
        let page = async {
            let request = self.request(Method::GET, path, Bytes::new())?;
            let answer = self.client.request(request).await.map_err(|error| broken(&error))?;
            let status = answer.status();
            let body = whole(answer.into_body(), MAX_PAGE).await?;
            if status.is_success() { Ok(body) } else { Err(HttpError::Status { path, status: status.as_u16() }) }
        };
        timeout(PAGE, page).await.unwrap_or(Err(HttpError::Deadline { stage: Stage::Page, limit: PAGE }))
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, HttpError> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url)).body(Full::new(body));
        request.map_err(|error| HttpError::Broken(error.to_string()))
    }
}

/// All of an answer.
pub(super) async fn read_whole(body: Incoming, stage: Stage, limit: Duration) -> Result<Bytes, HttpError> {
    timeout(limit, whole(body, MAX_ANSWER)).await.unwrap_or(Err(HttpError::Deadline { stage, limit }))
}

async fn whole(body: Incoming, limit: usize) -> Result<Bytes, HttpError> {
    let body = Limited::new(body, limit).collect().await.map_err(|error| {
        if error.is::<http_body_util::LengthLimitError>() {
            return HttpError::TooLarge(limit);
        }
        broken(&*error)
    })?;
    Ok(body.to_bytes())
}

/// The next bytes of an answer; `None` at its end.
pub(super) async fn next_bytes(body: &mut Incoming, stage: Stage, limit: Duration) -> Result<Option<Bytes>, HttpError> {
    loop {
        let frame = timeout(limit, body.frame()).await.map_err(|_| HttpError::Deadline { stage, limit })?;
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(broken(&error)),
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

/// The cause that says something: hyper's own message is only "client error (Connect)".
fn broken(error: &(dyn std::error::Error + 'static)) -> HttpError {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    match error.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
        Some(ErrorKind::ConnectionRefused) => HttpError::Refused,
        _ => HttpError::Broken(error.to_string()),
    }
}
