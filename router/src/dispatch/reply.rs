//! The tokens of one running request, as a stream that frees everything when it is dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use kv_hashing::BlockHash;
use kv_index::{WorkerId, WorkerRank};
use protocol::request_plane::{FinishReason, Finished, Output, server_frame};
use tokio::time::{Instant, Sleep, sleep_until};

use super::attempts::{Leg, failure};
use super::migration::{Cause, FirstHalf, Migration};
use super::stage;
use crate::backend::{DispatchError, StreamItem};
use crate::config::Deadlines;
use crate::index::Indexer;
use crate::workers::Life;

/// A running request.
///
/// Written by hand and not with `unfold`: it may be polled after its end. Dropping it cancels the request at the worker
/// (through the stream) and frees its booking; while it moves from one worker to the next, it ends that.
pub(super) struct Reply {
    state: State,
    deadlines: Deadlines,
    /// Ends when the next token is due.
    silence: Pin<Box<Sleep>>,
    /// The first token was delivered.
    begun: bool,
}

enum State {
    Running(Box<Leg>, Migration),
    /// Its worker is lost, and another one is being found.
    Moving(Moving),
    Ended,
}

type Moving = Pin<Box<dyn Future<Output = (Migration, Result<Leg, DispatchError>)> + Send>>;

/// What the index promised of a request.
pub(super) struct Expected {
    /// Where it runs.
    pub(super) rank: WorkerRank,
    /// Blocks that the index gave the rank when it was chosen.
    pub(super) blocks: u32,
    /// The prompt's first block: a rank that holds any prefix of it holds this one.
    pub(super) first_block: BlockHash,
    pub(super) index: Arc<Indexer>,
}

impl Reply {
    pub(super) fn new(leg: Leg, migration: Migration, deadlines: Deadlines) -> Self {
        // A first half may leave the first token to the second.
        let silence = Box::pin(sleep_until(leg.due));
        Self { state: State::Running(Box::new(leg), migration), deadlines, silence, begun: false }
    }

    /// Lets the worker go, and with it what it held of the request; begins to look for another one, if the request may move.
    fn leave(&mut self, cause: Cause, error: DispatchError) -> Result<(), DispatchError> {
        let State::Running(leg, mut migration) = std::mem::replace(&mut self.state, State::Ended) else {
            return Err(error);
        };
        drop(leg);
        if !migration.may_move(cause) {
            return Err(error);
        }
        self.state = State::Moving(Box::pin(migration.go(cause, error, self.silence.deadline())));
        Ok(())
    }

    /// Lets the worker of the first half go, and begins to look for one for the second.
    fn hand_over(&mut self, params: String) {
        if let State::Running(leg, migration) = std::mem::replace(&mut self.state, State::Ended) {
            let Leg { stream, booking, life, .. } = *leg;
            let worker = WorkerId(life.spec().identity.instance_id);
            // Without a token the prompt is still being computed there, until the second half has one.
            let booking = (!migration.has_begun()).then_some(booking);
            let half = FirstHalf { worker, params, kv: life.kv_format(), kept: stream.keep(), booking };
            self.state = State::Moving(Box::pin(migration.hand_over(half, self.silence.deadline())));
        }
    }

    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<StreamItem, DispatchError>>> {
        loop {
            let (cause, error) = match &mut self.state {
                State::Ended => return Poll::Ready(None),
                State::Moving(moving) => {
                    let (migration, leg) = ready!(moving.as_mut().poll(cx));
                    match leg {
                        Ok(leg) => self.state = State::Running(Box::new(leg), migration),
                        Err(error) => return Poll::Ready(Some(Err(error))),
                    }
                    continue;
                }
                State::Running(leg, migration) => match ready!(leg.poll_item(cx, migration, &self.deadlines)) {
                    Ok(StreamItem::Finished(half)) if is_handed_over(&half, migration) => {
                        self.hand_over(half.disaggregated_params);
                        continue;
                    }
                    Ok(item) => return Poll::Ready(Some(Ok(item))),
                    Err((None, error)) => return Poll::Ready(Some(Err(error))),
                    Err((Some(cause), error)) => match migration.complete() {
                        Some(finished) => return Poll::Ready(Some(Ok(StreamItem::Finished(finished)))),
                        None => (cause, error),
                    },
                },
            };
            if let Err(error) = self.leave(cause, error) {
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}

/// Whether this is only the end of the first half: the answer did not end with it, so that there is no reason.
fn is_handed_over(half: &Finished, migration: &Migration) -> bool {
    migration.is_first_half() && half.reason() == FinishReason::Unspecified
}

impl futures::Stream for Reply {
    type Item = Result<StreamItem, DispatchError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let item = match this.poll_item(cx) {
            Poll::Ready(item) => item,
            Poll::Pending => {
                ready!(this.silence.as_mut().poll(cx));
                let (stage, limit) = match this.state {
                    _ if !this.begun => (stage::FIRST_TOKEN, this.deadlines.first_token),
                    State::Moving(_) => (stage::MOVING, this.deadlines.token),
                    _ => (stage::GENERATING, this.deadlines.token),
                };
                Some(Err(DispatchError::Deadline { stage, seconds: limit.as_secs() }))
            }
        };
        match item {
            Some(Ok(StreamItem::Output(_))) => {
                this.begun = true;
                this.silence.as_mut().reset(Instant::now() + this.deadlines.token);
            }
            _ => this.state = State::Ended,
        }
        Poll::Ready(item)
    }
}

impl Expected {
    /// Reuse that was not expected may only mean that the events came after the decision: the index is asked again, now.
    fn compare(self, life: &Life, output: &Output) {
        life.prefilled(output);
        if output.reused_blocks > 0 {
            life.compare_reuse(self.blocks > 0 || self.index.holds(self.rank, &[self.first_block]));
        }
    }
}

impl Leg {
    /// What the worker says next; with an error, why it has to be left, if another one may do.
    fn poll_item(
        &mut self,
        cx: &mut Context<'_>,
        migration: &mut Migration,
        deadlines: &Deadlines,
    ) -> Poll<Result<StreamItem, (Option<Cause>, DispatchError)>> {
        let body = match self.first.take() {
            Some(first) => Some(first),
            None => ready!(self.stream.poll_next(cx)),
        };
        let lost = |message| DispatchError::Worker {
            worker: self.life.spec().name.clone(),
            stage: stage::GENERATING,
            message,
        };
        Poll::Ready(match body {
            Some(server_frame::Body::Output(mut output)) => {
                if output.first
                    && let Some(expected) = self.expected.take()
                {
                    expected.compare(&self.life, &output);
                }
                self.booking.generated(output.token_ids.len());
                migration.delivered(&mut output);
                Ok(StreamItem::Output(output))
            }
            Some(server_frame::Body::Finished(mut finished)) => {
                migration.finished(&mut finished);
                Ok(StreamItem::Finished(finished))
            }
            Some(server_frame::Body::Failed(failed)) => {
                let cause = Cause::of(failed.code());
                Err((cause, failure(&self.life.spec().name, stage::GENERATING, failed, deadlines)))
            }
            Some(_) => Err((None, lost("the worker answered with a frame of another kind".to_owned()))),
            None => Err((Some(Cause::Lost), lost(self.stream.lost_reason()))),
        })
    }
}
