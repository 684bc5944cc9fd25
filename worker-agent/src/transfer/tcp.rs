//! Fetches blocks over TCP, from the socket straight into the arena.

use std::future::Future;
use std::time::Duration;

use bytes::BytesMut;
use futures::future::BoxFuture;
use protocol::request_plane::encode_frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::wire::{Answer, Ask, BlockHead, Hello, Pull, Refusal, ToClient, ToServer, VERSION, WireError, read};
use super::{KvTransport, Source, Stage, TransferError};
use crate::engine::builtin::exchange::Reservation;

/// As [`Source::backend`] has it.
pub const BACKEND: &str = "tcp";

/// Longest wait for a connection and its greeting.
const GREETING: Duration = Duration::from_secs(1);
/// Time for a mebibyte of blocks: 20 MB/s, a slow network. At that speed 16 tokens of a small model (360 KiB) take 18 ms,
/// about a tenth of the time that computing them takes.
const PER_MIB: Duration = Duration::from_millis(50);
/// Time for ending a lease that is not fetched.
const RELEASE: Duration = Duration::from_secs(1);

/// The default transport.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    timeout: Duration,
}

impl Tcp {
    /// `timeout` is the time for a fetch beside that for its bytes.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout }
    }
}

impl KvTransport for Tcp {
    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn pull<'a>(
        &'a self,
        source: &'a Source,
        address: &'a str,
        into: &'a mut Reservation,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let mib = (into.missing().len() * into.block_bytes()).div_ceil(1 << 20) as u32;
            // A worker that cannot be reached must not hold a turn for as long as its bytes would take.
            let mut connection = Connection::open(source, address, Deadline::new(self.timeout.min(GREETING))).await?;
            connection.deadline = Deadline::new(self.timeout + PER_MIB * mib);
            connection.pull(source.lease, into).await?;
            if let Err(error) = connection.release(source.lease).await {
                // Nothing is missing here; there the lease expires.
                tracing::debug!(%error, "the lease was not ended");
            }
            Ok(())
        })
    }

    fn release<'a>(&'a self, source: &'a Source, address: &'a str) -> BoxFuture<'a, Result<(), TransferError>> {
        let open = Connection::open(source, address, Deadline::new(RELEASE));
        Box::pin(async move { open.await?.release(source.lease).await })
    }
}

/// One time limit over all stages.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    fn new(limit: Duration) -> Self {
        Self { at: Instant::now() + limit, limit }
    }

    async fn within<T, E>(self, stage: Stage, what: impl Future<Output = Result<T, E>>) -> Result<T, TransferError>
    where
        WireError: From<E>,
    {
        match tokio::time::timeout_at(self.at, what).await {
            Ok(done) => done.map_err(|error| TransferError::from_wire(stage, error.into())),
            Err(_) => Err(TransferError::Timeout { stage, limit: self.limit }),
        }
    }
}

/// A connection that was let in.
struct Connection {
    socket: TcpStream,
    deadline: Deadline,
}

impl Connection {
    async fn open(source: &Source, address: &str, deadline: Deadline) -> Result<Self, TransferError> {
        let socket = deadline.within(Stage::Connect, TcpStream::connect(address)).await?;
        deadline.within(Stage::Connect, async { socket.set_nodelay(true) }).await?;
        let mut connection = Self { socket, deadline };
        let hello = Hello {
            version: VERSION,
            boot_epoch: source.boot_epoch.clone(),
            revision: source.revision.clone(),
            layout: serde_json::to_string(&source.layout).expect("numbers are JSON"),
        };
        connection.send(Stage::Hello, Ask::Hello(hello)).await?;
        match connection.answer(Stage::Hello).await? {
            Answer::Welcome(_) => Ok(connection),
            other => Err(TransferError::Protocol(format!("{other:?} in place of Welcome"))),
        }
    }

    async fn pull(&mut self, lease: u64, into: &mut Reservation) -> Result<(), TransferError> {
        let blocks: Vec<u64> = into.missing().map(|hash| hash.0).collect();
        self.send(Stage::Blocks, Ask::Pull(Pull { lease, blocks: blocks.clone() })).await?;
        for hash in blocks {
            let head = match self.answer(Stage::Blocks).await? {
                Answer::Block(head) => head,
                other => return Err(TransferError::Protocol(format!("{other:?} in place of a block"))),
            };
            let bytes = into.next_bytes().ok_or_else(|| TransferError::Protocol("a block too many".into()))?;
            if (head.hash, head.bytes as usize) != (hash, bytes.len()) {
                return Err(TransferError::Protocol(format!("{head:?} in place of block {hash:016x}")));
            }
            self.fill(&head, bytes).await?;
            into.complete_next();
        }
        Ok(())
    }

    async fn fill(&mut self, head: &BlockHead, bytes: &mut [u8]) -> Result<(), TransferError> {
        self.deadline.within(Stage::Blocks, self.socket.read_exact(bytes)).await?;
        if xxh3_64(bytes) != head.checksum {
            return Err(TransferError::Checksum(head.hash));
        }
        Ok(())
    }

    async fn release(mut self, lease: u64) -> Result<(), TransferError> {
        self.send(Stage::Blocks, Ask::Release(lease)).await?;
        let closed = async { self.socket.shutdown().await };
        self.deadline.within(Stage::Blocks, closed).await
    }

    async fn send(&mut self, stage: Stage, ask: Ask) -> Result<(), TransferError> {
        let mut frame = BytesMut::new();
        encode_frame(&ToServer { ask: Some(ask) }, &mut frame);
        self.deadline.within(stage, self.socket.write_all(&frame)).await
    }

    async fn answer(&mut self, stage: Stage) -> Result<Answer, TransferError> {
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
