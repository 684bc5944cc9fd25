//! One request to the hub: redirects, credentials that stay with their host, and a deadline for each step.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{AUTHORIZATION, HeaderValue, LOCATION, RANGE, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode, Uri, body::Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;

use super::SourceError;

/// Time to connect, TLS included.
const CONNECT: Duration = Duration::from_secs(10);
/// Time until an answer begins.
const ANSWER: Duration = Duration::from_secs(30);
/// Time without a byte of the body.
pub(super) const STALL: Duration = Duration::from_secs(60);
/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 5;
/// Longest JSON answer that is read, in bytes: a repository of 10,000 files lists in about 1 MB.
const MAX_JSON: usize = 8 << 20;

/// A client with the machine's certificate authorities.
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    token: Option<HeaderValue>,
}

/// Which redirects to follow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    /// All: the body is wanted, wherever it is kept.
    All,
    /// Only within the hub: its headers are wanted, not those of the storage behind it.
    SameHost,
}

impl Http {
    pub(super) fn new(token: Option<&str>) -> Result<Self, SourceError> {
        let network = |message: String| SourceError::Network {
            url: "https".into(),
            stage: "reading the machine's certificates",
            message,
        };
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.enforce_http(false);
        let https = HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(rustls::crypto::ring::default_provider())
            .map_err(|error| network(error.to_string()))?
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let token = token.map(|token| HeaderValue::try_from(format!("Bearer {token}")));
        let token =
            token.transpose().map_err(|_| network("HF_TOKEN contains characters that no header can carry".into()))?;
        Ok(Self { client: Client::builder(TokioExecutor::new()).build(https), token })
    }

    /// Sends a request, from byte `start` on, and follows redirects. The answer has whatever status the last host gave.
    pub(super) async fn send(
        &self,
        method: &Method,
        url: &str,
        start: u64,
        follow: Follow,
    ) -> Result<Response<Incoming>, SourceError> {
        let bad = |url: &str| SourceError::Refused { url: url.into(), reason: "not a valid address".into() };
        let first: Uri = url.parse().map_err(|_| bad(url))?;
        let mut at = first.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = Request::builder().method(method).uri(&at).header(USER_AGENT, "armature");
            if start > 0 {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| at.authority() == first.authority()) {
                request = request.header(AUTHORIZATION, token);
            }
            let request = request.body(Empty::new()).map_err(|_| bad(url))?;
            let stage = "waiting for an answer";
            let failed = |message: String| SourceError::Network { url: url.into(), stage, message };
            let answer = tokio::time::timeout(ANSWER, self.client.request(request))
                .await
                .map_err(|_| failed(format!("nothing for {} s", ANSWER.as_secs())))?
                .map_err(|error| failed(innermost(&error)))?;
            match redirect(&answer, &at) {
                Some(next) if follow == Follow::All || next.authority() == at.authority() => at = next,
                _ => return Ok(answer),
            }
        }
        Err(SourceError::Refused { url: url.into(), reason: format!("more than {MAX_REDIRECTS} redirects") })
    }

    /// GETs a JSON document.
    pub(super) async fn json<T: serde::de::DeserializeOwned>(&self, url: &str) -> Result<T, SourceError> {
        let answer = accepted(url, self.send(&Method::GET, url, 0, Follow::All).await?)?;
        let failed = |message: String| SourceError::Network { url: url.into(), stage: "reading the answer", message };
        let body = tokio::time::timeout(STALL, Limited::new(answer.into_body(), MAX_JSON).collect())
            .await
            .map_err(|_| failed(format!("not complete after {} s", STALL.as_secs())))?
            .map_err(|error| failed(error.to_string()))?;
        serde_json::from_slice(&body.to_bytes()).map_err(|error| failed(error.to_string()))
    }
}

/// The answer, unless its status says that there is none.
pub(super) fn accepted(url: &str, answer: Response<Incoming>) -> Result<Response<Incoming>, SourceError> {
    let status = answer.status();
    if status.is_success() || status.is_redirection() {
        return Ok(answer);
    }
    let reason = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            format!("{status}; no such repository, or it needs a token with access: set HF_TOKEN")
        }
        StatusCode::NOT_FOUND => format!("{status}; check repository, revision and file"),
        _ => status.to_string(),
    };
    Err(SourceError::Refused { url: url.into(), reason })
}

fn redirect(answer: &Response<Incoming>, at: &Uri) -> Option<Uri> {
    if !answer.status().is_redirection() {
        return None;
    }
    let location = answer.headers().get(LOCATION)?.to_str().ok()?;
    if location.starts_with('/') {
        return format!("{}://{}{location}", at.scheme_str()?, at.authority()?).parse().ok();
    }
    location.parse().ok()
}

/// The cause that says something: hyper's own message is only "client error (Connect)".
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
