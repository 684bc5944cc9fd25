//! Fetches blocks of a worker on the same host, from its arena straight into ours: one copy, no socket in between.
//!
//! A Unix socket carries the questions, and at the beginning the descriptor of the other arena's memory. That this works
//! shows that both workers run on one kernel; where it does not (other hosts, and pods, whose network namespaces keep abstract
//! sockets apart), the next transport is tried. The memory is sealed: it cannot be cut short while it is read, and it outlives
//! the other worker until the fetch has ended.

use std::hash::Hasher;
use std::path::PathBuf;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::time::Instant;
use twox_hash::XxHash3_64;

use super::client::{Client, Deadline, Pace};
use super::wire::{Answer, Ask, BlockPlace};
use super::{KvTransport, PIECE, Source, Stage, TransferError};
use crate::engine::builtin::exchange::Reservation;

mod descriptor;
mod peer;
mod socket;

pub(super) use descriptor::send;
use peer::{Memory, Peer, Peers};
#[cfg(test)]
pub(super) use socket::path;
pub(super) use socket::{Listener, is_ours};

/// As [`super::Offer::backend`] has it.
pub(super) const BACKEND: &str = "shm";

/// The transport within a host.
#[derive(Clone)]
pub struct Shm {
    timeout: Duration,
    peers: Peers,
}

impl Shm {
    /// `timeout` is the time for a fetch beside that for its bytes.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, peers: Peers::default() }
    }
}

impl KvTransport for Shm {
    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn pull<'a>(
        &'a self,
        source: &'a Source,
        address: &'a str,
        into: &'a mut Reservation,
        until: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let mut peer = match self.peers.take(address) {
                Some(peer) => peer,
                None => connect(source, address, Deadline::greeting(self.timeout)).await?,
            };
            peer.client.deadline = Deadline::blocks(self.timeout, into, until);
            let mut pace = Pace::default();
            for hash in peer.client.ask(Ask::Pull, source.lease, into).await? {
                let place = match peer.client.answer(Stage::Blocks).await? {
                    Answer::Place(place) => place,
                    other => return Err(TransferError::Protocol(format!("{other:?} in place of a block"))),
                };
                copy(&peer, hash, &place, into)?;
                pace.moved(into).await;
            }
            if peer.client.end(source.lease).await {
                self.peers.keep(address, peer);
            }
            Ok(())
        })
    }

    fn release<'a>(&'a self, source: &'a Source, address: &'a str) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move { connect(source, address, Deadline::release()).await?.client.release(source.lease).await })
    }
}

async fn connect(source: &Source, address: &str, deadline: Deadline) -> Result<Peer, TransferError> {
    let path: PathBuf = socket::path(address);
    let socket = deadline.within(Stage::Connect, UnixStream::connect(path)).await?;
    deadline.within(Stage::Connect, async { is_ours(&socket) }).await?;
    let client = Client::greet(socket, source, deadline).await?;
    let memory = async { Memory::map(descriptor::receive(&client.socket).await?) };
    let memory = deadline.within(Stage::Connect, memory).await?;
    Ok(Peer { client, memory })
}

/// Copies the next block. It is hashed piece by piece while the pieces are in the cache.
fn copy(peer: &Peer, hash: u64, place: &BlockPlace, into: &mut Reservation) -> Result<(), TransferError> {
    let bytes = into.next_bytes().ok_or_else(|| TransferError::Protocol("a block too many".into()))?;
    if (place.hash, place.bytes as usize) != (hash, bytes.len()) {
        return Err(TransferError::Protocol(format!("{place:?} in place of block {hash:016x}")));
    }
    let mut sum = XxHash3_64::new();
    let mut offset = place.offset;
    for piece in bytes.chunks_mut(PIECE) {
        peer.client.deadline.check(Stage::Blocks)?;
        if !peer.memory.copy(offset, piece) {
            return Err(TransferError::Protocol(format!("{place:?} is not in the worker's memory")));
        }
        sum.write(piece);
        offset = offset.saturating_add(piece.len() as u64);
    }
    if sum.finish() != place.checksum {
        return Err(TransferError::Checksum(hash));
    }
    into.complete_next();
    Ok(())
}
