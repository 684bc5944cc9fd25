//! The generating endpoints over workers that are OpenAI servers themselves: a request goes on as it came.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, Response};

use super::admission::Room;
use super::body::{self, ResponseBody};
use super::generate::{INLINE_BYTES, REUSED_BLOCKS, WORKER, WORKER_ID};
use super::metrics::RequestGuard;
use super::routes::Frontend;
use crate::backend::Backend;
use crate::openai::Endpoint;
use crate::openai::error::ApiError;
use crate::openai::routing::HeaderHints;
use crate::proxy::answer::{Forwarded, Starting, record_whole};
use crate::proxy::{self, Key, Outgoing, Proxy, Served};

impl<B: Backend> Frontend<B> {
    /// `guard` is taken by an answer that outlives this call.
    pub(super) async fn forward(
        &self,
        proxy: &Arc<Proxy>,
        request: Request<Incoming>,
        (endpoint, hints): (Endpoint, HeaderHints),
        guard: &mut Option<RequestGuard>,
    ) -> Result<Response<ResponseBody>, ApiError> {
        let (head, incoming) = request.into_parts();
        let mut room = self.admission.room();
        let body = body::read(&head.headers, incoming, &self.config, &mut room).await?;
        let (key, room) = self.key(proxy, &body, endpoint, room).await?;
        let options = hints.with(key.hints.clone())?;
        if let Some(guard) = guard {
            guard.admitted(key.model(), key.prompt_tokens);
        }
        let outgoing = Outgoing::new(key, endpoint, head.headers, body, options);
        self.begin(proxy, Arc::new(outgoing), room, guard).await
    }

    /// Checks a body and finds out what it is to the router; on a blocking thread when that takes long. The room is given back
    /// when the last byte of the body has been sent.
    pub(super) async fn key(
        &self,
        proxy: &Arc<Proxy>,
        body: &Bytes,
        endpoint: Endpoint,
        mut room: Room,
    ) -> Result<(Key, Room), ApiError> {
        let max_choices = self.config.max_choices;
        if body.len() <= INLINE_BYTES {
            room.hold_values(body)?;
            return Ok((proxy.read(body, endpoint, max_choices)?, room));
        }
        let (job, proxy, body) = (self.admission.job()?, proxy.clone(), body.clone());
        // The work goes on when the client leaves, so it is the work that takes the room.
        let work = move || {
            let _job = job;
            room.hold_values(&body)?;
            let key = proxy.read(&body, endpoint, max_choices)?;
            room.shrink(body.len());
            Ok((key, room))
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) => Err(ApiError::internal(format!("preprocessing failed: {error}"))),
        }
    }

    /// Waits for a server's answer; when it is to be events, no longer than a client should wait for the head of a response.
    async fn begin(
        &self,
        proxy: &Arc<Proxy>,
        outgoing: Arc<Outgoing>,
        room: Room,
        guard: &mut Option<RequestGuard>,
    ) -> Result<Response<ResponseBody>, ApiError> {
        let keep_alive = Duration::from_millis(self.config.keep_alive_ms);
        let stream = outgoing.key().stream;
        let (sender, sent) = (proxy.clone(), outgoing.clone());
        let mut starting: Starting = Box::pin(async move {
            let _room = room;
            sender.forward(&sent).await
        });
        let begun = tokio::select! {
            biased;
            begun = &mut starting => Some(begun?),
            () = tokio::time::sleep(keep_alive), if stream => None,
            () = self.abort.cancelled() => return Err(ApiError::shutting_down()),
        };
        let Some(mut guard) = guard.take() else { return Err(ApiError::internal("the request has ended already")) };
        let Some(incoming) = begun else {
            let mut events = Forwarded::new(proxy, outgoing.key(), guard, keep_alive, &self.abort);
            events.wait_for(starting);
            return Ok(events_response(HeaderMap::new(), events));
        };
        let proxy::Incoming { status, mut headers, body, served } = incoming;
        worker_headers(&mut headers, &served);
        match body {
            proxy::Body::Whole(whole) => {
                record_whole(&mut guard, status, &whole);
                let mut response = Response::new(ResponseBody::from(whole));
                (*response.status_mut(), *response.headers_mut()) = (status, headers);
                Ok(response)
            }
            body => {
                let mut events = Forwarded::new(proxy, outgoing.key(), guard, keep_alive, &self.abort);
                events.begin(proxy::Incoming { status, headers: HeaderMap::new(), body, served });
                Ok(events_response(headers, events))
            }
        }
    }
}

/// When even the head could not wait for a server, `headers` has nothing of one.
fn events_response(mut headers: HeaderMap, events: Forwarded) -> Response<ResponseBody> {
    headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    let mut response = Response::new(ResponseBody::Forwarded(Box::new(events)));
    *response.headers_mut() = headers;
    response
}

/// Names the server, and the blocks it is expected to reuse.
fn worker_headers(headers: &mut HeaderMap, served: &Served) {
    headers.insert(WORKER, served.server_name());
    headers.insert(WORKER_ID, HeaderValue::from(served.server_id()));
    headers.insert(REUSED_BLOCKS, HeaderValue::from(served.overlap_blocks()));
}
