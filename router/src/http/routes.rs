//! Which path is served by what, request ids, and errors as responses.

use std::fmt::Write;
use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use super::admission::Admission;
use super::body::ResponseBody;
use super::metrics::FrontendMetrics;
use super::{FrontendConfig, pages, status};
use crate::backend::Backend;
use crate::openai::Endpoint;
use crate::openai::error::ApiError;

/// What every request needs.
pub(super) struct Frontend<B> {
    pub(super) backend: Arc<B>,
    pub(super) config: FrontendConfig,
    pub(super) admission: Arc<Admission>,
    pub(super) metrics: Arc<FrontendMetrics>,
    pub(super) registry: Arc<Registry>,
    /// The server is going down: not ready.
    pub(super) draining: CancellationToken,
    /// The drain has run out: end what is open.
    pub(super) abort: CancellationToken,
}

/// Id of the request, from the client or made here.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Below it is what was decided about each request.
const DECISIONS: &str = "/debug/decisions/";

/// Longest request id taken over, in bytes.
const MAX_REQUEST_ID: usize = 128;

impl<B: Backend> Frontend<B> {
    /// Answers one request.
    pub(super) async fn handle(&self, mut request: Request<Incoming>) -> Response<ResponseBody> {
        let id = request_id(&request);
        // Servers behind us call the request the same.
        request.headers_mut().insert(REQUEST_ID, id.clone());
        let mut response = self.route(request).await;
        response.headers_mut().insert(REQUEST_ID, id);
        response
    }

    async fn route(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let path = request.uri().path();
        let post = request.method() == Method::POST;
        let get = request.method() == Method::GET || request.method() == Method::HEAD;
        let allowed = match path {
            "/v1/chat/completions" if post => return self.generate(request, Endpoint::Chat).await,
            "/v1/completions" if post => return self.generate(request, Endpoint::Completions).await,
            "/v1/route/explain" if post => return self.explain(request).await,
            "/v1/chat/completions" | "/v1/completions" | "/v1/route/explain" => "POST",
            _ => match self.page(path) {
                Some(response) if get => return response,
                Some(_) => "GET",
                None => return error_response(&ApiError::no_route(path)),
            },
        };
        let mut response = error_response(&ApiError::method_not_allowed(request.method().as_str(), path, allowed));
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        response
    }

    /// What is read with GET; `None` for a path that is not there.
    fn page(&self, path: &str) -> Option<Response<ResponseBody>> {
        let backend = &*self.backend;
        let ready = backend.synced() && !self.draining.is_cancelled();
        Some(match path {
            "/" => text_response(StatusCode::OK, "text/html; charset=utf-8", status::page(backend, ready)),
            "/live" => json_response(StatusCode::OK, r#"{"status":"live"}"#),
            "/ready" if ready => json_response(StatusCode::OK, r#"{"status":"ready"}"#),
            "/ready" => json_response(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"not ready"}"#),
            "/health" => {
                let (healthy, body) = pages::health(backend, ready);
                json_response(if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, body)
            }
            "/metrics" => match pages::metrics(&self.registry) {
                Ok(text) => {
                    text_response(StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text)
                }
                Err(error) => error_response(&error),
            },
            "/v1/models" => json_response(StatusCode::OK, pages::models(backend)),
            _ if path.starts_with(DECISIONS) => self.decisions(&pages::percent_decode(&path[DECISIONS.len()..])),
            _ => match pages::model(backend, path.strip_prefix("/v1/models/")?) {
                Ok(body) => json_response(StatusCode::OK, body),
                Err(error) => error_response(&error),
            },
        })
    }
}

fn request_id(request: &Request<Incoming>) -> HeaderValue {
    let given = request.headers().get(REQUEST_ID);
    let usable = given.filter(|id| (1..=MAX_REQUEST_ID).contains(&id.len()) && id.to_str().is_ok());
    usable
        .cloned()
        .unwrap_or_else(|| HeaderValue::try_from(random_id()).expect("hexadecimal digits are a header value"))
}

/// 128 random bits in hexadecimal digits.
pub(super) fn random_id() -> String {
    let mut id = String::with_capacity(32);
    write!(id, "{:032x}", rand::random::<u128>()).expect("a string takes everything");
    id
}

pub(super) fn json_response(status: StatusCode, body: impl Into<Bytes>) -> Response<ResponseBody> {
    text_response(status, "application/json", body)
}

fn text_response(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::from(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(super) fn error_response(error: &ApiError) -> Response<ResponseBody> {
    let mut response = json_response(error.status, error.body());
    if matches!(error.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}
