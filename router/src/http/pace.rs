//! Ends answers over HTTP/2 that their clients do not take.
//!
//! A client of HTTP/1 that does not read is noticed at its socket. One of HTTP/2 can leave a single stream without window,
//! and answer pings all the while: then nothing is polled any more, neither the body nor what it waits for. So the task of
//! each stream has a watch beside it, which drops the task, and with it the request, when a piece of the body has waited for
//! too long. Bodies go out in small pieces: what a client takes of them is progress.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use super::body::ResponseBody;

/// Largest piece: the frame size that every HTTP/2 client takes.
const PIECE: usize = 16 << 10;

tokio::task_local! {
    /// The watch of the stream whose task this is.
    static WATCH: Arc<Watch>;
}

/// When a piece was handed over after which nobody has asked for the next one yet.
#[derive(Default)]
struct Watch(Mutex<Option<Instant>>);

impl Watch {
    /// Ends when a piece has waited for `limit`, within another `limit`.
    async fn stuck(&self, limit: Duration) {
        let mut check = Instant::now() + limit;
        loop {
            sleep_until(check).await;
            let now = Instant::now();
            check = self.0.lock().unwrap_or(now) + limit;
            if check <= now {
                return;
            }
        }
    }
}

/// Runs the streams of HTTP/2 connections.
#[derive(Clone)]
pub(super) struct StreamExecutor {
    /// Longest time that a piece of an answer waits for its client.
    pub(super) limit: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let (watch, limit) = (Arc::new(Watch::default()), self.limit);
        tokio::spawn(WATCH.scope(watch.clone(), async move {
            let stream = pin!(stream);
            tokio::select! {
                biased;
                () = stream => {}
                () = watch.stuck(limit) => tracing::debug!("a client of HTTP/2 has taken nothing of an answer for too long"),
            }
        }));
    }
}

/// A response's body, watched where it has to be.
pub(super) struct PacedBody {
    body: ResponseBody,
    /// Left of the piece that the body gave last.
    rest: Bytes,
    watch: Option<Arc<Watch>>,
}

impl PacedBody {
    /// To be called in the task that will poll the body.
    pub(super) fn new(body: ResponseBody) -> PacedBody {
        PacedBody { body, rest: Bytes::new(), watch: WATCH.try_with(Arc::clone).ok() }
    }
}

impl Body for PacedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let Some(watch) = &this.watch else { return Pin::new(&mut this.body).poll_frame(cx) };
        if this.rest.is_empty() {
            let polled = Pin::new(&mut this.body).poll_frame(cx);
            match polled {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                waiting => {
                    *watch.0.lock() = None;
                    return waiting;
                }
            }
        }
        *watch.0.lock() = Some(Instant::now());
        Poll::Ready(Some(Ok(Frame::data(this.rest.split_to(this.rest.len().min(PIECE))))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
