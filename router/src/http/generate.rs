//! The two endpoints that generate: from a body to a checked request, to workers, to an answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use protocol::request_plane::Generate;

use super::admission::Room;
use super::body::{self, ResponseBody};
use super::metrics::RequestGuard;
use super::routes::{Frontend, REQUEST_ID, error_response, json_response, random_id};
use crate::backend::{Backend, RouteOptions, ServedModel};
use crate::openai::error::ApiError;
use crate::openai::routing::HeaderHints;
use crate::openai::validate::Params;
use crate::openai::{Endpoint, parse, request};
use crate::preprocess::{Prepared, generates, prepare};
use crate::stream::choice::{Choice, Echo};
use crate::stream::encode::{Encoder, Usage};
use crate::stream::events::EventStream;
use crate::stream::whole;

/// Name of the worker, in answers.
pub(super) const WORKER: HeaderName = HeaderName::from_static("x-armature-worker");
/// Instance id of the worker.
pub(super) const WORKER_ID: HeaderName = HeaderName::from_static("x-armature-worker-id");
/// Prompt blocks reused.
pub(super) const REUSED_BLOCKS: HeaderName = HeaderName::from_static("x-armature-reused-blocks");

/// Bodies above this are read and tokenized on a blocking thread: about 1 ms of work.
pub(super) const INLINE_BYTES: usize = 32 << 10;

impl<B: Backend> Frontend<B> {
    /// Serves one request of a generating endpoint.
    pub(super) async fn generate(&self, request: Request<Incoming>, endpoint: Endpoint) -> Response<ResponseBody> {
        let mut guard = Some(RequestGuard::new(self.metrics.clone(), endpoint));
        match self.answer(request, endpoint, &mut guard).await {
            Ok(response) => response,
            Err(error) => {
                if let Some(mut guard) = guard {
                    guard.finish(error.label);
                }
                tracing::debug!(status = error.label, param = ?error.param, message = %error.message, "refused");
                error_response(&error)
            }
        }
    }

    /// `guard` is taken by an answer that outlives this call.
    async fn answer(
        &self,
        request: Request<Incoming>,
        endpoint: Endpoint,
        guard: &mut Option<RequestGuard>,
    ) -> Result<Response<ResponseBody>, ApiError> {
        check_content_type(request.headers())?;
        let hints = HeaderHints::read(request.headers())?;
        if let Some(proxy) = self.backend.proxy() {
            return self.forward(proxy, request, (endpoint, hints), guard).await;
        }
        let (head, incoming) = request.into_parts();
        let mut room = self.admission.room();
        let body = body::read(&head.headers, incoming, &self.config, &mut room).await?;
        let (served, Prepared { params, prompts: tokens, echo }) = self.admit(body, room, endpoint).await?;
        let mut options = hints.with(params.routing.clone())?;
        let prompts: Vec<usize> = tokens.iter().map(Vec::len).collect();
        if let Some(guard) = guard {
            guard.admitted(&served.card.display_name, prompts.iter().sum());
        }
        let id = [endpoint.id_prefix(), &random_id()].concat();
        let given = head.headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
        options.known_as = [id.as_str().into(), given.into()].into();
        let encoder = Encoder::new(
            endpoint,
            &id,
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            &served.card.display_name,
            served.model.vocabulary().clone(),
            (params.logprobs.is_some(), params.stream && params.include_usage),
        );
        let (n, stream) = (params.n, params.stream);
        let generates = generates(tokens, &params, &id, &served, endpoint)?;
        let Some(mut guard) = guard.take() else { return Err(ApiError::internal("the request has ended already")) };
        let mut choices = self.start(generates, &options, &served, (&params, &echo));
        if stream {
            let keep_alive = Duration::from_millis(self.config.keep_alive_ms);
            let mut events = EventStream::new(choices, encoder, (prompts, n), guard, keep_alive, &self.abort);
            events.begin().await?;
            return Ok(stream_response(events));
        }
        if let Err(error) = whole(&mut choices, &mut guard, &self.abort).await {
            guard.finish(error.label);
            return Err(error);
        }
        let usage = Usage::of(prompts, &choices, n);
        guard.usage(&usage);
        guard.finish("success");
        let mut response = json_response(StatusCode::OK, encoder.response(&choices, &usage));
        worker_headers(response.headers_mut(), &choices);
        Ok(response)
    }

    /// Has workers take the request: one `Generate` for each choice, each on its own.
    fn start(
        &self,
        generates: Vec<Generate>,
        options: &RouteOptions,
        served: &ServedModel,
        (params, echo): (&Params, &[Arc<Echo>]),
    ) -> Vec<Choice> {
        let choice = |(index, generate): (usize, Generate)| {
            let (tokens, echo) = (generate.token_ids.len(), echo.get(index / params.n).cloned());
            let backend = self.backend.clone();
            let options = RouteOptions { model: Some(served.model.clone()), ..options.clone() };
            let starting = Box::pin(async move { backend.generate(generate, options).await });
            Choice::new(starting, served, params, tokens, echo)
        };
        generates.into_iter().enumerate().map(choice).collect()
    }

    /// Reads, checks and tokenizes a body; no worker is involved yet.
    pub(super) async fn admit(
        &self,
        body: Bytes,
        mut room: Room,
        endpoint: Endpoint,
    ) -> Result<(Arc<ServedModel>, Prepared), ApiError> {
        let (backend, max_choices) = (self.backend.clone(), self.config.max_choices);
        let job = (body.len() > INLINE_BYTES).then(|| self.admission.job()).transpose()?;
        let large = job.is_some();
        // The work goes on when the client leaves, so it is the work that takes the room.
        let work = move || {
            let _job = job;
            room.hold_values(&body)?;
            let request: request::Request = parse::parse(&body)?;
            let served = served_model(&*backend, &request)?;
            let prepared = prepare(&served, &request, endpoint, max_choices)?;
            Ok((served, prepared))
        };
        if !large {
            return work();
        }
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) => Err(ApiError::internal(format!("preprocessing failed: {error}"))),
        }
    }
}

fn served_model(backend: &impl Backend, request: &request::Request) -> Result<Arc<ServedModel>, ApiError> {
    let name = request.model.as_deref().unwrap_or_default();
    if name.is_empty() {
        return Err(ApiError::invalid("model", "model is required"));
    }
    backend.model(name).ok_or_else(|| match backend.known(name) || backend.models().is_empty() {
        // Its workers have gone, or with no model at all the client is early: neither is the client's mistake.
        true => crate::backend::DispatchError::NoWorker { model: name.to_owned() }.into(),
        false => ApiError::model_not_found(name),
    })
}

pub(super) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(kind) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let kind = kind.to_str().unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::invalid("content-type", format!("content-type must be application/json, not {kind:?}")))
}

/// When even the head could not wait for a worker, it names none.
fn stream_response(events: EventStream) -> Response<ResponseBody> {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    worker_headers(&mut headers, events.choices());
    let mut response = Response::new(ResponseBody::Events(Box::new(events)));
    *response.headers_mut() = headers;
    response
}

/// Names the worker of the first choice that has one. The blocks are what it said, or, before it has said anything,
/// what the router expects.
fn worker_headers(headers: &mut HeaderMap, choices: &[Choice]) {
    let served = choices.iter().find_map(|choice| Some((choice.served_by()?, choice.reused_blocks())));
    let Some((served_by, reused)) = served else { return };
    if let Ok(name) = HeaderValue::try_from(&served_by.name) {
        headers.insert(WORKER, name);
    }
    headers.reserve(2);
    headers.insert(WORKER_ID, HeaderValue::from(served_by.id));
    headers.insert(REUSED_BLOCKS, HeaderValue::from(reused.unwrap_or(served_by.overlap_blocks)));
}
