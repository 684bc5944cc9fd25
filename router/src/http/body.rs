//! Bodies: how a request's is read, and what a response's may be.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::HeaderMap;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::EXPECT;
use tokio::time::Instant;

use super::FrontendConfig;
use super::admission::Room;
use crate::openai::error::ApiError;
use crate::proxy::answer::Forwarded;
use crate::stream::events::EventStream;

/// Body of a response.
pub(super) enum ResponseBody {
    /// Known as a whole.
    Whole(Option<Bytes>),
    /// Events as they come.
    Events(Box<EventStream>),
    /// Another server's events as they come.
    Forwarded(Box<Forwarded>),
}

impl From<Bytes> for ResponseBody {
    fn from(bytes: Bytes) -> ResponseBody {
        ResponseBody::Whole(Some(bytes))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            ResponseBody::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            ResponseBody::Events(events) => Pin::new(&mut **events).poll_frame(cx),
            ResponseBody::Forwarded(events) => Pin::new(&mut **events).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseBody::Whole(bytes) => bytes.is_none(),
            ResponseBody::Events(events) => events.is_end_stream(),
            ResponseBody::Forwarded(events) => events.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            ResponseBody::Events(_) | ResponseBody::Forwarded(_) => SizeHint::default(),
        }
    }
}

/// The part of the time for a body in which some of it must arrive: one of so many.
const STALLS: u32 = 6;

/// Fewer bytes in that part of the time are none: 1 KiB/s with the default of 60 s.
const STALL_BYTES: usize = 10 << 10;

/// Most bytes read of a body that has been refused.
const DISCARDED_BYTES: usize = 64 << 20;

/// Longest time that reading them goes on.
const DISCARDING: Duration = Duration::from_secs(5);

/// Reads a body, for which `room` is taken as it arrives.
///
/// Of one that is refused a little more is read, beside the answer: a client that is still sending does not look at the
/// answer before it is through, and what it sends to a closed connection takes the answer away from it.
pub(super) async fn read(
    headers: &HeaderMap,
    mut body: Incoming,
    config: &FrontendConfig,
    room: &mut Room,
) -> Result<Bytes, ApiError> {
    let read = collect(&mut body, config, room).await;
    // Who waits to be asked for the body is not asked.
    if read.is_err() && !body.is_end_stream() && !headers.contains_key(EXPECT) {
        tokio::spawn(tokio::time::timeout(DISCARDING, discard(body)));
    }
    read
}

async fn collect(body: &mut Incoming, config: &FrontendConfig, room: &mut Room) -> Result<Bytes, ApiError> {
    let (limit, timeout) = (config.body_limit_bytes, Duration::from_secs(config.body_timeout_s));
    let said = body.size_hint();
    if said.lower() > limit as u64 {
        return Err(ApiError::body_too_large(limit));
    }
    let (mut first, mut whole, mut len) = (Bytes::new(), BytesMut::new(), 0);
    let now = Instant::now();
    let (due, mut stall, mut seen) = (now + timeout, now + timeout / STALLS, 0);
    loop {
        let frame = match tokio::time::timeout_at(stall.min(due), body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => {
                return Err(ApiError::bad_request(format!("request body could not be read: {}", causes(&error))));
            }
            Ok(None) => break,
            Err(_) if Instant::now() >= due => return Err(ApiError::body_timeout(timeout.as_secs())),
            Err(_) if len - seen < STALL_BYTES => return Err(ApiError::body_stalled()),
            Err(_) => {
                (stall, seen) = (Instant::now() + timeout / STALLS, len);
                continue;
            }
        };
        // Trailers say nothing to us.
        let Ok(data) = frame.into_data() else { continue };
        len += data.len();
        if len > limit {
            return Err(ApiError::body_too_large(limit));
        }
        room.hold(len)?;
        if first.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole.reserve(said.exact().map_or(2 * len, |exact| exact as usize));
            whole.extend_from_slice(&first);
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() { first } else { whole.freeze() })
}

async fn discard(mut body: Incoming) {
    let mut left = DISCARDED_BYTES;
    while left > 0 {
        let Some(Ok(frame)) = body.frame().await else { return };
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
    }
}

/// An error with everything that led to it.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}
