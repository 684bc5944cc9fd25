//! The answer as server-sent events: a response body that the connection polls.
//!
//! Everything that workers have said by the time of a poll goes out in one piece. Comments keep the connection alive,
//! also before the first token, so that a client that has gone is noticed. The events always end with `[DONE]`, after
//! a finish reason for each choice or an error.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::choice::Choice;
use super::encode::{Encoder, Usage};
use crate::http::metrics::RequestGuard;
use crate::openai::error::ApiError;

/// A streamed answer.
pub struct EventStream {
    choices: Vec<Choice>,
    /// What each choice has sent.
    sent: Vec<Sent>,
    encoder: Encoder,
    /// Tokens of each prompt.
    prompts: Vec<usize>,
    n: usize,
    guard: RequestGuard,
    out: BytesMut,
    /// The response's head has gone out: errors are events from now on.
    started: bool,
    ended: bool,
    keep_alive: Duration,
    last_frame: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    abort: Pin<Box<WaitForCancellationFutureOwned>>,
}

#[derive(Clone, Copy, Default)]
struct Sent {
    role: bool,
    finish: bool,
}

/// Text taken in before it is handed on: bounds the memory of a stream whose client reads slowly.
const MAX_DELTA_BYTES: usize = 16 << 10;

const COMMENT: &[u8] = b": keep-alive\n\n";

impl EventStream {
    /// Each choice streams as soon as its own worker says something, whether the others have one yet or not.
    /// `prompts` are the token counts of the prompts; the choices come in groups of `n` for each.
    pub fn new(
        choices: Vec<Choice>,
        encoder: Encoder,
        (prompts, n): (Vec<usize>, usize),
        guard: RequestGuard,
        keep_alive: Duration,
        abort: &CancellationToken,
    ) -> EventStream {
        EventStream {
            sent: vec![Sent::default(); choices.len()],
            choices,
            encoder,
            prompts,
            n,
            guard,
            out: BytesMut::with_capacity(1024),
            started: false,
            ended: false,
            keep_alive,
            last_frame: Instant::now(),
            timer: None,
            abort: Box::pin(abort.clone().cancelled_owned()),
        }
    }

    /// Waits for the first event, an error, or the keep-alive interval, whichever is first. After it the head can be
    /// sent: an error up to here is an HTTP status, later ones are events.
    pub async fn begin(&mut self) -> Result<(), ApiError> {
        let keep_alive = self.keep_alive;
        let begun = tokio::time::timeout(keep_alive, std::future::poll_fn(|cx| self.poll_fill(cx))).await;
        match begun {
            Ok(Err(error)) => {
                self.guard.finish(error.label);
                return Err(error);
            }
            Ok(Ok(())) => {}
            Err(_) => self.out.put_slice(COMMENT),
        }
        self.started = true;
        self.last_frame = Instant::now();
        Ok(())
    }

    /// The answers in the making.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Fills `out`. Ready with something in it, or at the end.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
        if self.ended {
            return Poll::Ready(Ok(()));
        }
        if let Err(error) = self.advance(cx) {
            return self.fail(error);
        }
        if self.choices.iter().all(|choice| choice.finish().is_some()) {
            let usage = Usage::of(self.prompts.iter().copied(), &self.choices, self.n);
            self.encoder.done(&mut self.out, &usage);
            self.guard.usage(&usage);
            self.guard.finish("success");
            self.ended = true;
        }
        if !self.out.is_empty() {
            return Poll::Ready(Ok(()));
        }
        match self.abort.as_mut().poll(cx) {
            Poll::Ready(()) => self.fail(ApiError::shutting_down()),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Takes in what the workers have said and writes the events for it.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<(), ApiError> {
        for (index, (choice, sent)) in self.choices.iter_mut().zip(&mut self.sent).enumerate() {
            if sent.finish {
                continue;
            }
            let before = choice.tokens();
            let mut failure = None;
            while choice.finish().is_none() && choice.delta().text.len() < MAX_DELTA_BYTES {
                match choice.poll_advance(cx) {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => {
                        failure = Some(error);
                        break;
                    }
                    Poll::Pending => break,
                }
            }
            self.guard.tokens(choice.tokens() - before);
            if !sent.role && (choice.tokens() > 0 || choice.finish().is_some()) {
                self.encoder.role(&mut self.out, index);
                sent.role = true;
            }
            if !choice.delta().is_empty() {
                self.encoder.delta(&mut self.out, index, choice.delta());
                choice.clear_delta();
            }
            if let Some(reason) = choice.finish() {
                self.encoder.finish(&mut self.out, index, reason);
                sent.finish = true;
            }
            if let Some(error) = failure {
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn fail(&mut self, error: ApiError) -> Poll<Result<(), ApiError>> {
        if !self.started {
            return Poll::Ready(Err(error));
        }
        tracing::warn!(status = error.label, message = %error.message, "a stream ended with an error");
        self.encoder.error(&mut self.out, &error);
        self.guard.finish(error.label);
        // This cancels what still runs.
        self.choices.clear();
        self.ended = true;
        Poll::Ready(Ok(()))
    }

    /// Ready when the client has heard nothing for the keep-alive interval.
    fn poll_quiet(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let due = self.last_frame + self.keep_alive;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        // The timer is moved only when it fires, not at every frame.
        while timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= due {
                timer.as_mut().reset(Instant::now() + self.keep_alive);
                return Poll::Ready(());
            }
            timer.as_mut().reset(due);
        }
        Poll::Pending
    }
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.out.is_empty() {
            if this.ended {
                return Poll::Ready(None);
            }
            // Once the head is out, failures are events: `poll_fill` has no error to return.
            if this.poll_fill(cx).is_pending() {
                std::task::ready!(this.poll_quiet(cx));
                this.out.put_slice(COMMENT);
            }
        }
        this.last_frame = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.out.is_empty()
    }
}
