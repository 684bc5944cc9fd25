//! The fetching side of a connection, whatever it runs over: greeting, questions, answers, and one time limit over them all.

use std::future::Future;
use std::time::Duration;

use bytes::BytesMut;
use protocol::request_plane::encode_frame;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::Instant;

use super::wire::{Answer, Ask, Hello, LONGEST_PULL, Pull, Refusal, ToClient, ToServer, VERSION, WireError, read};
use super::{Source, Stage, TransferError};
use crate::engine::builtin::exchange::Reservation;

/// Longest wait for a connection and its greeting.
const GREETING: Duration = Duration::from_secs(1);
/// Time for a mebibyte of blocks: 10 MB/s, a slow network or a machine without an idle core. At that speed 16 tokens of a small
/// model (360 KiB) take 36 ms, less than computing them takes.
const PER_MIB: Duration = Duration::from_millis(100);
/// Time for ending a lease that is not fetched.
const RELEASE: Duration = Duration::from_secs(1);

/// Bytes that come at full speed beside running sequences, and the pause after them. That is some hundreds of megabytes per
/// second: more would cost a step that waits for memory more than its share.
pub(super) const BURST: usize = 1 << 20;
const PAUSE: Duration = Duration::from_millis(1);

/// Keeps the memory free for running sequences.
#[derive(Default)]
pub(super) struct Pace {
    burst: usize,
}

impl Pace {
    /// After each block. Others move blocks on this thread, too; and the request may be cancelled.
    pub(super) async fn moved(&mut self, into: &Reservation) {
        self.burst += into.block_bytes();
        if self.burst < BURST || !into.is_beside_others() {
            return tokio::task::yield_now().await;
        }
        self.burst = 0;
        tokio::time::sleep(PAUSE).await;
    }
}

/// One time limit over all stages.
#[derive(Clone, Copy)]
pub(super) struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    pub(super) fn new(limit: Duration) -> Self {
        Self { at: Instant::now() + limit, limit }
    }

    /// For a connection, so that a worker that cannot be reached holds no turn for as long as its bytes would take.
    pub(super) fn greeting(timeout: Duration) -> Self {
        Self::new(timeout.min(GREETING))
    }

    /// For the missing blocks, and not beyond `until`.
    pub(super) fn blocks(timeout: Duration, of: &Reservation, until: Instant) -> Self {
        let mib = (of.missing().len() * of.block_bytes()).div_ceil(1 << 20) as u32;
        let left = until.saturating_duration_since(Instant::now());
        Self::new((timeout + PER_MIB * mib).min(LONGEST_PULL).min(left))
    }

    /// Time that is left.
    pub(super) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    pub(super) fn release() -> Self {
        Self::new(RELEASE)
    }

    pub(super) async fn within<T, E>(
        self,
        stage: Stage,
        what: impl Future<Output = Result<T, E>>,
    ) -> Result<T, TransferError>
    where
        WireError: From<E>,
    {
        match tokio::time::timeout_at(self.at, what).await {
            Ok(done) => done.map_err(|error| TransferError::from_wire(stage, error.into())),
            Err(_) => Err(TransferError::Timeout { stage, limit: self.limit }),
        }
    }

    /// As [`Self::within`], for what does not wait.
    pub(super) fn check(self, stage: Stage) -> Result<(), TransferError> {
        if Instant::now() < self.at { Ok(()) } else { Err(TransferError::Timeout { stage, limit: self.limit }) }
    }
}

/// A connection.
pub(super) struct Client<S> {
    pub(super) socket: S,
    pub(super) deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    /// Asks the worker that the source means to let us in.
    pub(super) async fn greet(socket: S, source: &Source, deadline: Deadline) -> Result<Self, TransferError> {
        let mut client = Self { socket, deadline };
        let hello = Hello {
            version: VERSION,
            boot_epoch: source.boot_epoch.clone(),
            revision: source.revision.clone(),
            layout: serde_json::to_string(&source.layout).expect("numbers are JSON"),
        };
        client.send(Stage::Hello, Ask::Hello(hello)).await?;
        match client.answer(Stage::Hello).await? {
            Answer::Welcome(_) => Ok(client),
            other => Err(TransferError::Protocol(format!("{other:?} in place of Welcome"))),
        }
    }

    /// Asks for all blocks that are missing; they are answered in this order.
    pub(super) async fn ask(
        &mut self,
        how: impl Fn(Pull) -> Ask,
        lease: u64,
        missing: &Reservation,
    ) -> Result<Vec<u64>, TransferError> {
        let blocks: Vec<u64> = missing.missing().map(|hash| hash.0).collect();
        let within_ms = self.deadline.left().as_millis() as u32;
        self.send(Stage::Blocks, how(Pull { lease, blocks: blocks.clone(), within_ms })).await?;
        Ok(blocks)
    }

    /// Ends the lease.
    pub(super) async fn release(mut self, lease: u64) -> Result<(), TransferError> {
        self.send(Stage::Blocks, Ask::Release(lease)).await?;
        let closed = async { self.socket.shutdown().await };
        self.deadline.within(Stage::Blocks, closed).await
    }

    /// Ends the lease of blocks that are all here; if that fails, it expires. Whether the connection can be used again.
    pub(super) async fn end(&mut self, lease: u64) -> bool {
        let sent = self.send(Stage::Blocks, Ask::Release(lease)).await;
        sent.inspect_err(|error| tracing::debug!(%error, "the lease was not ended")).is_ok()
    }

    pub(super) async fn send(&mut self, stage: Stage, ask: Ask) -> Result<(), TransferError> {
        let mut frame = BytesMut::new();
        encode_frame(&ToServer { ask: Some(ask) }, &mut frame);
        self.deadline.within(stage, self.socket.write_all(&frame)).await
    }

    pub(super) async fn answer(&mut self, stage: Stage) -> Result<Answer, TransferError> {
        let message: ToClient = self.deadline.within(stage, read(&mut self.socket)).await?;
        match message.answer {
            Some(Answer::Refused(refused)) => Err(TransferError::Refused {
                refusal: Refusal::try_from(refused.refusal).unwrap_or(Refusal::Unspecified),
                message: refused.message,
            }),
            Some(answer) => Ok(answer),
            None => Err(TransferError::Protocol("an empty message".into())),
        }
    }
}
