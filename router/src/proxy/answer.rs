//! A server's answer on its way to the client.
//!
//! Events are a response body that the connection polls: nothing is read from the server before the client has taken what
//! there is. A client that leaves drops the body, which closes the connection to the server. The events end as the server ends
//! them, or with an error event and `[DONE]`.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::Proxy;
use super::events::{EventTap, find_usage};
use super::forward::{self, Incoming, Served, said};
use super::key::Key;
use super::line::Answer;
use crate::backend::DispatchError;
use crate::http::metrics::RequestGuard;
use crate::openai::error::ApiError;

/// A server being found for a request.
pub(crate) type Starting = Pin<Box<dyn Future<Output = Result<Incoming, DispatchError>> + Send>>;

const GENERATING: &str = "generating";

const COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// Last bytes of a whole answer in which its usage is looked for: what servers put after it is short.
const USAGE_TAIL: usize = 4096;

/// Events on their way.
pub struct Forwarded {
    state: State,
    tap: EventTap,
    guard: RequestGuard,
    /// Goes out next.
    out: Bytes,
    /// Longest time between two pieces from the server.
    silence: Duration,
    /// Longest time between two frames to the client.
    keep_alive: Duration,
    last_piece: Instant,
    last_frame: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    abort: Pin<Box<WaitForCancellationFutureOwned>>,
}

enum State {
    /// No server has said anything yet.
    Starting(Starting),
    Running(Box<Running>),
    Ended,
}

struct Running {
    answer: Box<Answer>,
    served: Served,
}

impl Forwarded {
    /// The answer to a request, which [`Self::begin`] or [`Self::wait_for`] brings.
    pub(crate) fn new(
        proxy: &Proxy,
        key: &Key,
        guard: RequestGuard,
        keep_alive: Duration,
        abort: &CancellationToken,
    ) -> Self {
        let now = Instant::now();
        Self {
            state: State::Ended,
            tap: EventTap::new(key.silent_events, key.include_usage),
            guard,
            out: Bytes::new(),
            silence: proxy.deadlines.token,
            keep_alive,
            last_piece: now,
            last_frame: now,
            timer: None,
            abort: Box::pin(abort.clone().cancelled_owned()),
        }
    }

    /// A server has begun to answer.
    pub(crate) fn begin(&mut self, incoming: Incoming) {
        self.last_piece = Instant::now();
        let Incoming { status, body, served, .. } = incoming;
        match body {
            forward::Body::Events(first, answer) => {
                self.state = State::Running(Box::new(Running { answer, served }));
                self.take(first);
            }
            // The client has been promised events.
            forward::Body::Whole(body) => {
                let message = format!("{}: {}", status.as_u16(), said(&body));
                self.fail(
                    DispatchError::Worker { worker: served.server.name.to_string(), stage: GENERATING, message }.into(),
                );
            }
        }
    }

    /// No server has begun yet; the client hears a comment meanwhile.
    pub(crate) fn wait_for(&mut self, starting: Starting) {
        self.state = State::Starting(starting);
        self.out = COMMENT;
    }

    /// Takes a piece from the server.
    fn take(&mut self, piece: Bytes) {
        let passed = self.tap.pass(piece);
        self.guard.tokens(passed.tokens);
        if let State::Running(running) = &mut self.state {
            running.served.booking.generated(passed.tokens);
            if let Some(id) = self.tap.take_id() {
                running.served.id.answered_as(&id);
            }
        }
        self.out = passed.out;
    }

    /// Ready with something in `out`, or at the end.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.out.is_empty() {
            match &mut self.state {
                State::Ended => return Poll::Ready(()),
                State::Starting(starting) => match starting.as_mut().poll(cx) {
                    Poll::Ready(Ok(incoming)) => self.begin(incoming),
                    Poll::Ready(Err(error)) => self.fail(error.into()),
                    Poll::Pending => return self.poll_wait(cx),
                },
                State::Running(running) => match running.answer.poll_piece(cx) {
                    Poll::Ready(Some(Ok(piece))) => {
                        self.last_piece = Instant::now();
                        self.take(piece);
                    }
                    Poll::Ready(Some(Err(error))) => self.end(error.to_string()),
                    Poll::Ready(None) => self.end("its stream ended without a finish reason".to_owned()),
                    Poll::Pending => return self.poll_wait(cx),
                },
            }
        }
        Poll::Ready(())
    }

    /// Nothing comes at the moment: has it been too long, or must it end?
    fn poll_wait(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.abort.as_mut().poll(cx).is_ready() {
            self.fail(ApiError::shutting_down());
            return Poll::Ready(());
        }
        loop {
            let silent = self.last_piece + self.silence;
            let quiet = self.last_frame + self.keep_alive;
            let now = Instant::now();
            // While a server is being found, that has a deadline of its own.
            let running = matches!(self.state, State::Running(_));
            if running && now >= silent {
                self.fail(DispatchError::Deadline { stage: GENERATING, seconds: self.silence.as_secs() }.into());
                return Poll::Ready(());
            }
            if now >= quiet {
                self.last_frame = now;
                if self.tap.is_between_events() {
                    self.out = COMMENT;
                    return Poll::Ready(());
                }
                continue;
            }
            let due = if running { silent.min(quiet) } else { quiet };
            // The timer is moved only when it fires, not at every piece.
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            std::task::ready!(timer.as_mut().poll(cx));
            timer.as_mut().reset(due);
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }

    /// The server says no more; `otherwise` is what is wrong if that was not the end.
    fn end(&mut self, otherwise: String) {
        let State::Running(running) = &self.state else { return };
        if !self.tap.is_complete() && !self.tap.has_failed() {
            let worker = running.served.server.name.to_string();
            return self.fail(DispatchError::Worker { worker, stage: GENERATING, message: otherwise }.into());
        }
        if let Some(usage) = self.tap.usage() {
            self.guard.usage(&usage);
        }
        self.guard.finish(if self.tap.has_failed() { "worker_failed" } else { "success" });
        self.state = State::Ended;
    }

    fn fail(&mut self, error: ApiError) {
        tracing::warn!(status = error.label, message = %error.message, "a stream ended with an error");
        self.guard.finish(error.label);
        // This closes the connection to the server.
        self.state = State::Ended;
        if self.tap.is_done() {
            return;
        }
        let torn = if self.tap.is_between_events() { "" } else { "\n\n" };
        let body = error.body();
        self.out = [torn.as_bytes(), b"data: ", &body, b"\n\ndata: [DONE]\n\n"].concat().into();
    }
}

impl Body for Forwarded {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        std::task::ready!(this.poll_fill(cx));
        if this.out.is_empty() {
            return Poll::Ready(None);
        }
        this.last_frame = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut this.out)))))
    }

    fn is_end_stream(&self) -> bool {
        self.out.is_empty() && matches!(self.state, State::Ended)
    }
}

/// Records a whole answer: what it cost, and how it ended.
pub(crate) fn record_whole(guard: &mut RequestGuard, status: StatusCode, body: &[u8]) {
    if !status.is_success() {
        guard.finish(match status.as_u16() {
            404 => "not_found",
            400..500 => "invalid_request",
            _ => "worker_failed",
        });
        return;
    }
    let tail = &body[body.len().saturating_sub(USAGE_TAIL)..];
    if let Some(usage) = find_usage(tail) {
        guard.whole(usage.completion_tokens);
        guard.usage(&usage);
    }
    guard.finish("success");
}
