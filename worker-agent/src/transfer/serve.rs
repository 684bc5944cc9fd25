//! Hands out leased blocks over TCP, straight from the arena: the engine's thread has no part in it.
//!
//! A client that is slow, silent or gone costs a task until its deadline, and a lease until that expires.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use kv_hashing::SequenceHash;
use protocol::request_plane::encode_frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::MissedTickBehavior;
use tokio_util::task::TaskTracker;
use xxhash_rust::xxh3::xxh3_64;

use super::metrics::TransferMetrics;
use super::wire::{
    Answer, Ask, BlockHead, Hello, Pull, Refusal, Refused, ToClient, ToServer, VERSION, Welcome, WireError, read,
};
use crate::drain::Drain;
use crate::engine::builtin::exchange::{Exchange, KvLayout, Lease};

/// Most connections at once: one for each fetch.
pub(super) const MAX_CONNECTIONS: usize = 256;
/// From accepting to the end of the greeting.
const HELLO: Duration = Duration::from_secs(2);
/// Longest wait for the next request on a connection.
const IDLE: Duration = Duration::from_secs(10);
/// Longest time in which a client takes none of [`PIECE`] bytes.
const STALL: Duration = Duration::from_secs(5);
/// Bytes written under one deadline.
const PIECE: usize = 1 << 20;
/// How often leases are looked at.
const EXPIRY: Duration = Duration::from_millis(250);
/// Longest wait, at the end, for blocks that are being sent.
const FLUSH: Duration = Duration::from_secs(2);
/// Longest wait for the end of a connection that is refused, and most that is read of it, in bytes.
const LINGER: Duration = Duration::from_millis(500);
const MAX_UNREAD: u64 = 1 << 20;
/// Pause after a failed accept (out of file descriptors, for one).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the connections serve.
pub struct Server {
    /// The blocks.
    pub exchange: Arc<Exchange>,
    /// This life of the worker.
    pub boot_epoch: String,
    /// Blocks move only between workers with the same one.
    pub revision: String,
    /// Counts.
    pub metrics: TransferMetrics,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("nothing came in time")]
    Silence,
    #[error("the client takes nothing")]
    Stall,
    #[error("refused: {0}")]
    Refused(String),
}

/// Serves, and lets leases expire, until the drain stops.
pub async fn serve(listener: TcpListener, server: Arc<Server>, drain: Arc<Drain>) {
    let connections = TaskTracker::new();
    let mut expiry = tokio::time::interval(EXPIRY);
    expiry.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = expiry.tick() => {
                server.expire();
                continue;
            }
            () = drain.stopped() => break,
        };
        match accepted {
            Ok((socket, peer)) => {
                let (server, drain, busy) = (server.clone(), drain.clone(), connections.len() >= MAX_CONNECTIONS);
                connections.spawn(async move { server.answer(socket, peer, busy, &drain).await });
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed on the transfer port");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    if tokio::time::timeout(FLUSH, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "KV transfers did not end in time");
    }
}

impl Server {
    fn expire(&self) {
        let expired = self.exchange.expire_leases(Instant::now());
        if expired > 0 {
            self.metrics.leases_expired.inc_by(expired as u64);
            tracing::warn!(leases = expired, "KV blocks of prompts were not fetched; their leases expired");
        }
        self.note_leases();
    }

    fn note_leases(&self) {
        let (leases, blocks) = self.exchange.leased();
        self.metrics.leases.set(leases as i64);
        self.metrics.leased_blocks.set(blocks as i64);
        self.metrics.reserved_blocks.set(self.exchange.reserved() as i64);
    }

    async fn answer(&self, mut socket: TcpStream, peer: SocketAddr, busy: bool, drain: &Drain) {
        let ended = self.converse(&mut socket, busy, drain).await;
        self.note_leases();
        match ended {
            Ok(()) => tracing::debug!(%peer, "transfer connection ended"),
            Err(error) => tracing::debug!(%peer, %error, "transfer connection failed"),
        }
    }

    async fn converse(&self, socket: &mut TcpStream, busy: bool, drain: &Drain) -> Result<(), Ended> {
        socket.set_nodelay(true)?;
        if busy {
            return refuse(socket, Refusal::Busy, "too many connections".into()).await;
        }
        let hello = tokio::time::timeout(HELLO, read::<ToServer>(socket)).await.map_err(|_| Ended::Silence)??;
        let Some(Ask::Hello(hello)) = hello.ask else {
            return Err(WireError::Malformed("the first message must be Hello".into()).into());
        };
        if let Err((refusal, message)) = self.check(&hello) {
            return refuse(socket, refusal, message).await;
        }
        send(socket, Answer::Welcome(Welcome { version: VERSION })).await?;
        loop {
            let message = tokio::select! {
                message = tokio::time::timeout(IDLE, read::<ToServer>(socket)) => message.map_err(|_| Ended::Silence)?,
                () = drain.stopped() => return Ok(()),
            };
            match message {
                Ok(ToServer { ask: Some(Ask::Pull(pull)) }) => self.send_blocks(socket, pull).await?,
                Ok(ToServer { ask: Some(Ask::Release(lease)) }) => self.exchange.end_lease(lease),
                Ok(_) => return Err(WireError::Malformed("neither Pull nor Release".into()).into()),
                Err(WireError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn check(&self, hello: &Hello) -> Result<(), (Refusal, String)> {
        if hello.version != VERSION {
            return Err((Refusal::Version, format!("version {}; this worker speaks {VERSION}", hello.version)));
        }
        if hello.boot_epoch != self.boot_epoch {
            return Err((Refusal::WrongWorker, format!("this is {}", self.boot_epoch)));
        }
        let own = self.exchange.layout();
        let same = serde_json::from_str::<KvLayout>(&hello.layout).is_ok_and(|layout| layout == own);
        if !same || hello.revision != self.revision {
            return Err((Refusal::Layout, format!("blocks here are {own:?} of revision {:?}", self.revision)));
        }
        Ok(())
    }

    async fn send_blocks(&self, socket: &mut TcpStream, pull: Pull) -> Result<(), Ended> {
        let lease = match self.exchange.lease(pull.lease) {
            Ok(lease) => lease,
            Err(gone) => return refuse(socket, Refusal::LeaseGone, gone.to_string()).await,
        };
        let Some(indexes) = find(&lease, &pull.blocks) else {
            return refuse(socket, Refusal::UnknownBlock, "the lease has no such block".into()).await;
        };
        for (index, hash) in indexes.into_iter().zip(pull.blocks) {
            let bytes = lease.bytes(index);
            let head = BlockHead { hash, bytes: bytes.len() as u32, checksum: xxh3_64(bytes) };
            let head = frame(Answer::Block(head));
            let (first, rest) = bytes.split_at(bytes.len().min(PIECE));
            write(socket, head.chain(first)).await?;
            for piece in rest.chunks(PIECE) {
                write(socket, piece).await?;
            }
            lease.touch();
            self.metrics.sent_bytes.inc_by(bytes.len() as u64);
        }
        Ok(())
    }
}

/// Where the blocks are in the lease; `None` when one is not, or not in this order.
fn find(lease: &Lease, blocks: &[u64]) -> Option<Vec<usize>> {
    let mut held = lease.blocks().enumerate();
    blocks.iter().map(|&hash| Some(held.find(|(_, held)| *held == SequenceHash(hash))?.0)).collect()
}

fn frame(answer: Answer) -> BytesMut {
    let mut out = BytesMut::new();
    encode_frame(&ToClient { answer: Some(answer) }, &mut out);
    out
}

async fn send(socket: &mut TcpStream, answer: Answer) -> Result<(), Ended> {
    write(socket, frame(answer)).await
}

/// Says why, and gives the client a moment to read it: closing with unread bytes would reset the connection, and what was
/// written with it.
async fn refuse(socket: &mut TcpStream, refusal: Refusal, message: String) -> Result<(), Ended> {
    send(socket, Answer::Refused(Refused { refusal: refusal.into(), message: message.clone() })).await?;
    let unread = async {
        socket.shutdown().await?;
        tokio::io::copy(&mut socket.take(MAX_UNREAD), &mut tokio::io::sink()).await
    };
    if let Ok(Err(error)) = tokio::time::timeout(LINGER, unread).await {
        tracing::debug!(%error, "a refused connection did not end");
    }
    Err(Ended::Refused(message))
}

async fn write(socket: &mut TcpStream, mut bytes: impl Buf) -> Result<(), Ended> {
    match tokio::time::timeout(STALL, socket.write_all_buf(&mut bytes)).await {
        Ok(written) => Ok(written?),
        Err(_) => Err(Ended::Stall),
    }
}
