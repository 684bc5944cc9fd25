//! The tokens of one running request, as a stream that frees everything when it is dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use kv_hashing::BlockHash;
use kv_index::WorkerRank;
use protocol::request_plane::{Output, server_frame};
use tokio::time::{Instant, Sleep, sleep};

use super::booking::Booking;
use super::{failure, stage};
use crate::backend::{DispatchError, StreamItem};
use crate::config::Deadlines;
use crate::index::Indexer;
use crate::request_plane::Stream;
use crate::workers::Life;

/// A running request.
///
/// Written by hand and not with `unfold`: it may be polled after its end. Dropping it cancels the request at the worker
/// (through the stream) and frees its booking.
pub(super) struct Reply {
    /// Absent after the end.
    running: Option<Running>,
    first: Option<server_frame::Body>,
    deadlines: Deadlines,
    silence: Pin<Box<Sleep>>,
}

struct Running {
    stream: Stream,
    booking: Booking,
    life: Arc<Life>,
    /// What was expected of the worker's cache, until the first output says what it did.
    expected: Option<Expected>,
}

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
    pub(super) fn new(
        stream: Stream,
        first: server_frame::Body,
        booking: Booking,
        life: Arc<Life>,
        expected: Option<Expected>,
        deadlines: Deadlines,
    ) -> Self {
        Self {
            running: Some(Running { stream, booking, life, expected }),
            first: Some(first),
            deadlines,
            silence: Box::pin(sleep(deadlines.token)),
        }
    }
}

impl futures::Stream for Reply {
    type Item = Result<StreamItem, DispatchError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(running) = &mut this.running else { return Poll::Ready(None) };
        let body = match this.first.take() {
            Some(body) => Some(body),
            None => match running.stream.poll_next(cx) {
                Poll::Ready(body) => body,
                Poll::Pending => {
                    ready!(this.silence.as_mut().poll(cx));
                    this.running = None;
                    let seconds = this.deadlines.token.as_secs();
                    return Poll::Ready(Some(Err(DispatchError::Deadline { stage: stage::GENERATING, seconds })));
                }
            },
        };
        this.silence.as_mut().reset(Instant::now() + this.deadlines.token);
        let item = running.item(body, &this.deadlines);
        if !matches!(item, Ok(StreamItem::Output(_))) {
            this.running = None;
        }
        Poll::Ready(Some(item))
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

impl Running {
    fn item(&mut self, body: Option<server_frame::Body>, deadlines: &Deadlines) -> Result<StreamItem, DispatchError> {
        let lost = |message| {
            Err(DispatchError::Worker { worker: self.life.spec().name.clone(), stage: stage::GENERATING, message })
        };
        match body {
            Some(server_frame::Body::Output(output)) => {
                if output.first
                    && let Some(expected) = self.expected.take()
                {
                    expected.compare(&self.life, &output);
                }
                self.booking.generated(output.token_ids.len());
                Ok(StreamItem::Output(output))
            }
            Some(server_frame::Body::Finished(finished)) => Ok(StreamItem::Finished(finished)),
            Some(server_frame::Body::Failed(failed)) => {
                Err(failure(&self.life.spec().name, stage::GENERATING, failed, deadlines))
            }
            Some(_) => lost("the worker answered with a frame of another kind".to_owned()),
            None => lost(self.stream.lost_reason()),
        }
    }
}
