//! Hands out leased blocks: their bytes over TCP, straight from the arena, or the places where they are, to whom can read the
//! memory itself: within the host, or with NIXL. The engine's thread has no part in it.
//!
//! A client that is slow, silent or gone costs a task until its deadline, and a lease until that expires.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use kv_hashing::SequenceHash;
use protocol::request_plane::encode_frame;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::MissedTickBehavior;
use tokio_util::task::TaskTracker;

use super::lane::Lane;
use super::metrics::TransferMetrics;
use super::wire::{
    Answer, Ask, BlockHead, BlockPlace, Hello, LONGEST_PULL, Pull, Refusal, Refused, ToClient, ToServer, VERSION,
    Welcome, WireError, read,
};
use super::{PIECE, nixl, shm, tcp};
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
/// Bytes of blocks whose places are told at once.
const BATCH: usize = 1 << 20;
/// How much longer than a client says that it copies its source is held: until its last word is here.
const GRACE: Duration = Duration::from_secs(1);
/// How often leases are looked at.
const EXPIRY: Duration = Duration::from_millis(250);
/// Longest wait, at the end, for blocks that are being sent.
const FLUSH: Duration = Duration::from_secs(2);
/// Longest wait for the end of a connection that is refused, and most that is read of it, in bytes.
const LINGER: Duration = Duration::from_millis(500);
const MAX_UNREAD: u64 = 1 << 20;
/// Pause after a failed accept (out of file descriptors, for one).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The listening sockets, and what they serve.
pub struct Server {
    pub(super) tcp: Option<TcpListener>,
    pub(super) shm: Option<shm::Listener>,
    pub(super) lane: Arc<Lane>,
    pub(super) desk: Arc<Desk>,
}

/// What the connections serve.
pub(super) struct Desk {
    /// The blocks.
    pub(super) exchange: Arc<Exchange>,
    /// This life of the worker.
    pub(super) boot_epoch: String,
    /// Blocks move only between workers with the same one.
    pub(super) revision: String,
    /// Who lets other workers read the memory that the blocks are in.
    pub(super) agent: Option<Arc<nixl::Agent>>,
    /// Counts.
    pub(super) metrics: TransferMetrics,
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

/// A connection that was accepted.
enum Accepted {
    Tcp(TcpStream, SocketAddr),
    Shm(UnixStream),
}

impl Server {
    async fn accept(&self) -> io::Result<Accepted> {
        let over_tcp = async {
            match &self.tcp {
                Some(listener) => listener.accept().await.map(|(socket, peer)| Accepted::Tcp(socket, peer)),
                None => std::future::pending().await,
            }
        };
        let here = async {
            match &self.shm {
                Some(listener) => listener.socket.accept().await.map(|(socket, _)| Accepted::Shm(socket)),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = over_tcp => accepted,
            accepted = here => accepted,
        }
    }
}

/// Serves, and lets leases expire, until the drain stops.
pub async fn serve(server: Server, drain: Arc<Drain>) {
    let connections = TaskTracker::new();
    let mut expiry = tokio::time::interval(EXPIRY);
    expiry.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            accepted = server.accept() => accepted,
            _ = expiry.tick() => {
                server.desk.expire();
                continue;
            }
            () = drain.stopped() => break,
        };
        match accepted {
            Ok(accepted) => {
                let (desk, drain, busy) = (server.desk.clone(), drain.clone(), connections.len() >= MAX_CONNECTIONS);
                connections.spawn_on(async move { desk.answer(accepted, busy, &drain).await }, server.lane.handle());
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

impl Desk {
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

    async fn answer(&self, accepted: Accepted, busy: bool, drain: &Drain) {
        let ended = match accepted {
            Accepted::Tcp(socket, peer) => {
                tracing::debug!(%peer, "transfer connection");
                self.over_tcp(socket, busy, drain).await
            }
            Accepted::Shm(socket) => self.within_host(socket, busy, drain).await,
        };
        self.note_leases();
        match ended {
            Ok(()) => tracing::debug!("transfer connection ended"),
            Err(error) => tracing::debug!(%error, "transfer connection failed"),
        }
    }

    async fn over_tcp(&self, socket: TcpStream, busy: bool, drain: &Drain) -> Result<(), Ended> {
        // From the runtime that accepted it to the one that serves it.
        let mut socket = TcpStream::from_std(socket.into_std()?)?;
        socket.set_nodelay(true)?;
        self.greet(&mut socket, busy).await?;
        let (mut held, mut limit) = (None, IDLE);
        while let Some(ask) = next(&mut socket, limit, drain).await? {
            match ask {
                Ask::Pull(pull) => self.send_blocks(&mut socket, pull).await?,
                Ask::Agent(()) => self.introduce(&mut socket).await?,
                Ask::Locate(pull) => (held, limit) = self.tell_places(&mut socket, pull, nixl::BACKEND).await?,
                ask => {
                    self.release(ask)?;
                    (held, limit) = (None, IDLE);
                }
            }
        }
        drop(held);
        Ok(())
    }

    /// Says who the memory's agent is.
    async fn introduce(&self, socket: &mut TcpStream) -> Result<(), Ended> {
        match &self.agent {
            Some(agent) => send(socket, Answer::Agent(agent.head())).await,
            None => refuse(socket, Refusal::NoAgent, "this worker does not use NIXL".into()).await,
        }
    }

    /// Gives the client our memory's descriptor, and holds the blocks that it asks for while it copies them.
    async fn within_host(&self, socket: UnixStream, busy: bool, drain: &Drain) -> Result<(), Ended> {
        let mut socket = UnixStream::from_std(socket.into_std()?)?;
        let (Ok(()), Some(memory)) = (shm::is_ours(&socket), self.exchange.memory()) else {
            return refuse(&mut socket, Refusal::Stranger, "memory is shared with others only".into()).await;
        };
        self.greet(&mut socket, busy).await?;
        shm::send(&socket, memory).await?;
        let (mut held, mut limit) = (None, IDLE);
        while let Some(ask) = next(&mut socket, limit, drain).await? {
            match ask {
                Ask::Pull(pull) => (held, limit) = self.tell_places(&mut socket, pull, shm::BACKEND).await?,
                ask => {
                    self.release(ask)?;
                    (held, limit) = (None, IDLE);
                }
            }
        }
        drop(held);
        Ok(())
    }

    async fn greet(&self, socket: &mut (impl AsyncRead + AsyncWrite + Unpin), busy: bool) -> Result<(), Ended> {
        if busy {
            return refuse(socket, Refusal::Busy, "too many connections".into()).await;
        }
        let hello = tokio::time::timeout(HELLO, read::<ToServer>(socket)).await.map_err(|_| Ended::Silence)??;
        let Some(Ask::Hello(hello)) = hello.ask else {
            return Err(WireError::Malformed("the first message must be Hello".into()).into());
        };
        match self.check(&hello) {
            Ok(()) => send(socket, Answer::Welcome(Welcome { version: VERSION })).await,
            Err((refusal, message)) => refuse(socket, refusal, message).await,
        }
    }

    fn release(&self, ask: Ask) -> Result<(), Ended> {
        match ask {
            Ask::Release(lease) => {
                self.exchange.end_lease(lease);
                Ok(())
            }
            _ => Err(WireError::Malformed("a question that is none here".into()).into()),
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

    /// The lease, and where in it the blocks are.
    async fn find(
        &self,
        socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
        pull: &Pull,
    ) -> Result<(Arc<Lease>, Vec<usize>), Ended> {
        let refused = match self.exchange.lease(pull.lease) {
            Ok(lease) => match find(&lease, &pull.blocks) {
                Some(indexes) => return Ok((lease, indexes)),
                None => refuse(socket, Refusal::UnknownBlock, "the lease has no such block".into()).await,
            },
            Err(gone) => refuse(socket, Refusal::LeaseGone, gone.to_string()).await,
        };
        Err(refused.err().unwrap_or(Ended::Silence))
    }

    async fn send_blocks(&self, socket: &mut TcpStream, pull: Pull) -> Result<(), Ended> {
        let (lease, indexes) = self.find(socket, &pull).await?;
        let sent = self.metrics.sent_bytes(tcp::BACKEND);
        for (index, hash) in indexes.into_iter().zip(pull.blocks) {
            let bytes = lease.bytes(index);
            let head =
                frame(Answer::Block(BlockHead { hash, bytes: bytes.len() as u32, checksum: lease.checksum(index) }));
            let (first, rest) = bytes.split_at(bytes.len().min(PIECE));
            write(socket, head.chain(first)).await?;
            for piece in rest.chunks(PIECE) {
                write(socket, piece).await?;
            }
            lease.touch();
            sent.inc_by(bytes.len() as u64);
        }
        Ok(())
    }

    /// Says where the blocks are. They stay there while the lease that is returned lives: so long the client may read them.
    async fn tell_places(
        &self,
        socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
        pull: Pull,
        backend: &'static str,
    ) -> Result<(Option<Arc<Lease>>, Duration), Ended> {
        let limit = copies(&pull);
        let (lease, indexes) = self.find(socket, &pull).await?;
        let sent = self.metrics.sent_bytes(backend);
        // The client copies what it has been told while the next checksums are computed. Not each place for itself: many small
        // writes would fill the socket, since the client takes one between two copies.
        let (mut places, mut told) = (BytesMut::new(), 0);
        for (index, hash) in indexes.into_iter().zip(pull.blocks) {
            let bytes = lease.bytes(index).len();
            let (offset, checksum) = (lease.offset(index), lease.checksum(index));
            let place = BlockPlace { hash, bytes: bytes as u32, checksum, offset };
            encode_frame(&ToClient { answer: Some(Answer::Place(place)) }, &mut places);
            told += bytes;
            if told >= BATCH {
                sent.inc_by(told as u64);
                write_within(socket, places.split(), limit).await?;
                told = 0;
            }
        }
        sent.inc_by(told as u64);
        write_within(socket, places, limit).await?;
        Ok((Some(lease), limit))
    }
}

/// How long a client that reads the memory itself may do so.
fn copies(pull: &Pull) -> Duration {
    Duration::from_millis(pull.within_ms.into()).min(LONGEST_PULL) + GRACE
}

/// The next question; `None` at the end, which is the client's or the server's.
async fn next(socket: &mut (impl AsyncRead + Unpin), limit: Duration, drain: &Drain) -> Result<Option<Ask>, Ended> {
    let message = tokio::select! {
        message = tokio::time::timeout(limit, read::<ToServer>(socket)) => message.map_err(|_| Ended::Silence)?,
        () = drain.stopped() => return Ok(None),
    };
    match message {
        Ok(ToServer { ask: Some(ask) }) => Ok(Some(ask)),
        Ok(ToServer { ask: None }) => Err(WireError::Malformed("an empty message".into()).into()),
        Err(WireError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error.into()),
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

async fn send(socket: &mut (impl AsyncWrite + Unpin), answer: Answer) -> Result<(), Ended> {
    write(socket, frame(answer)).await
}

/// Says why, and gives the client a moment to read it: closing with unread bytes would reset the connection, and what was
/// written with it.
async fn refuse(
    socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
    refusal: Refusal,
    message: String,
) -> Result<(), Ended> {
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

async fn write(socket: &mut (impl AsyncWrite + Unpin), bytes: impl Buf) -> Result<(), Ended> {
    write_within(socket, bytes, STALL).await
}

async fn write_within(
    socket: &mut (impl AsyncWrite + Unpin),
    mut bytes: impl Buf,
    limit: Duration,
) -> Result<(), Ended> {
    match tokio::time::timeout(limit, socket.write_all_buf(&mut bytes)).await {
        Ok(written) => Ok(written?),
        Err(_) => Err(Ended::Stall),
    }
}
