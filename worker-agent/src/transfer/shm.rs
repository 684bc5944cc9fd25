//! Fetches blocks of a worker on the same host, from its arena straight into ours: one copy, no socket in between.
//!
//! A Unix socket carries the questions, and at the beginning the descriptor of the other arena's memory. That this works
//! shows that both workers run on one kernel; where it does not (other hosts, and pods, whose network namespaces keep abstract
//! sockets apart), the next transport is tried. Blocks are read with `pread`: nothing is mapped, so that whatever the other
//! worker does, this one cannot fault; and its memory, which the descriptor keeps, outlives it until the fetch has ended.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::UnixStream;
use xxhash_rust::xxh3::Xxh3;

use super::client::{Client, Deadline, Pace};
use super::wire::{Answer, BlockPlace};
use super::{KvTransport, PIECE, Source, Stage, TransferError};
use crate::engine::builtin::exchange::Reservation;

mod descriptor;
mod socket;

pub(super) use descriptor::send;
pub(super) use socket::{Listener, is_ours};

/// As [`super::Offer::backend`] has it.
pub(super) const BACKEND: &str = "shm";

/// The transport within a host.
#[derive(Clone, Copy, Debug)]
pub struct Shm {
    timeout: Duration,
}

impl Shm {
    /// `timeout` is the time for a fetch beside that for its bytes.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout }
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
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let (mut client, memory) = connect(source, address, Deadline::greeting(self.timeout)).await?;
            client.deadline = Deadline::blocks(self.timeout, into);
            let mut pace = Pace::default();
            for hash in client.ask(source.lease, into).await? {
                let place = match client.answer(Stage::Blocks).await? {
                    Answer::Place(place) => place,
                    other => return Err(TransferError::Protocol(format!("{other:?} in place of a block"))),
                };
                copy(&memory, hash, &place, into, client.deadline)?;
                pace.moved(into).await;
            }
            client.finish(source.lease).await;
            Ok(())
        })
    }

    fn release<'a>(&'a self, source: &'a Source, address: &'a str) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move { connect(source, address, Deadline::release()).await?.0.release(source.lease).await })
    }
}

/// A connection that was let in, and the memory of the other arena.
async fn connect(
    source: &Source,
    address: &str,
    deadline: Deadline,
) -> Result<(Client<UnixStream>, File), TransferError> {
    let path: PathBuf = socket::path(address);
    let socket = deadline.within(Stage::Connect, UnixStream::connect(path)).await?;
    deadline.within(Stage::Connect, async { is_ours(&socket) }).await?;
    let client = Client::greet(socket, source, deadline).await?;
    let memory = deadline.within(Stage::Connect, descriptor::receive(&client.socket)).await?;
    Ok((client, File::from(memory)))
}

/// Copies the next block. It is hashed piece by piece while the pieces are in the cache.
fn copy(
    memory: &File,
    hash: u64,
    place: &BlockPlace,
    into: &mut Reservation,
    deadline: Deadline,
) -> Result<(), TransferError> {
    let bytes = into.next_bytes().ok_or_else(|| TransferError::Protocol("a block too many".into()))?;
    if (place.hash, place.bytes as usize) != (hash, bytes.len()) {
        return Err(TransferError::Protocol(format!("{place:?} in place of block {hash:016x}")));
    }
    let mut sum = Xxh3::new();
    let mut offset = place.offset;
    for piece in bytes.chunks_mut(PIECE) {
        deadline.check(Stage::Blocks)?;
        let read = memory.read_exact_at(piece, offset);
        read.map_err(|source| TransferError::Io { stage: Stage::Blocks, source })?;
        sum.update(piece);
        offset += piece.len() as u64;
    }
    if sum.digest() != place.checksum {
        return Err(TransferError::Checksum(hash));
    }
    into.complete_next();
    Ok(())
}
