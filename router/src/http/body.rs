//! Bodies: how a request's is read, and what a response's may be.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::openai::error::ApiError;
use crate::stream::events::EventStream;

/// Body of a response.
pub(super) enum ResponseBody {
    /// Known as a whole.
    Whole(Option<Bytes>),
    /// Events as they come.
    Events(Box<EventStream>),
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
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseBody::Whole(bytes) => bytes.is_none(),
            ResponseBody::Events(events) => events.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            ResponseBody::Events(_) => SizeHint::default(),
        }
    }
}

/// Bytes that `body` may have: what it says, or `limit`.
pub(super) fn expected(body: &Incoming, limit: usize) -> Result<usize, ApiError> {
    let hint = body.size_hint();
    if hint.lower() > limit as u64 {
        return Err(ApiError::body_too_large(limit));
    }
    Ok(hint.upper().map_or(limit, |upper| upper.min(limit as u64) as usize))
}

/// Reads a body of at most `limit` bytes within `timeout`.
pub(super) async fn read(body: Incoming, limit: usize, timeout: Duration) -> Result<Bytes, ApiError> {
    match tokio::time::timeout(timeout, Limited::new(body, limit).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::body_too_large(limit)),
        Ok(Err(error)) => Err(ApiError::bad_request(format!("request body could not be read: {error}"))),
        Err(_) => Err(ApiError::body_timeout(timeout.as_secs())),
    }
}
