//! Fetches blocks over TCP, from the socket straight into the arena.

use std::hash::Hasher;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::Instant;
use twox_hash::XxHash3_64;

use super::client::{Client, Deadline, Pace};
use super::wire::{Answer, Ask};
use super::{KvTransport, PIECE, Source, Stage, TransferError};
use crate::engine::builtin::exchange::Reservation;

/// As [`super::Offer::backend`] has it.
pub(super) const BACKEND: &str = "tcp";

/// The transport between hosts.
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
        until: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let mut client = connect(source, address, Deadline::greeting(self.timeout)).await?;
            client.deadline = Deadline::blocks(self.timeout, into, until);
            let mut pace = Pace::default();
            for hash in client.ask(Ask::Pull, source.lease, into).await? {
                receive(&mut client, hash, into).await?;
                pace.moved(into).await;
            }
            client.end(source.lease).await;
            Ok(())
        })
    }

    fn release<'a>(&'a self, source: &'a Source, address: &'a str) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move { connect(source, address, Deadline::release()).await?.release(source.lease).await })
    }
}

/// Connects to the worker that has the blocks.
pub(super) async fn connect(
    source: &Source,
    address: &str,
    deadline: Deadline,
) -> Result<Client<TcpStream>, TransferError> {
    let socket = deadline.within(Stage::Connect, TcpStream::connect(address)).await?;
    deadline.within(Stage::Connect, async { socket.set_nodelay(true) }).await?;
    Client::greet(socket, source, deadline).await
}

/// Takes the next block. It is hashed piece by piece while the pieces are in the cache.
async fn receive(client: &mut Client<TcpStream>, hash: u64, into: &mut Reservation) -> Result<(), TransferError> {
    let head = match client.answer(Stage::Blocks).await? {
        Answer::Block(head) => head,
        other => return Err(TransferError::Protocol(format!("{other:?} in place of a block"))),
    };
    let bytes = into.next_bytes().ok_or_else(|| TransferError::Protocol("a block too many".into()))?;
    if (head.hash, head.bytes as usize) != (hash, bytes.len()) {
        return Err(TransferError::Protocol(format!("{head:?} in place of block {hash:016x}")));
    }
    let mut sum = XxHash3_64::new();
    for piece in bytes.chunks_mut(PIECE) {
        client.deadline.within(Stage::Blocks, client.socket.read_exact(piece)).await?;
        sum.write(piece);
    }
    if sum.finish() != head.checksum {
        return Err(TransferError::Checksum(hash));
    }
    into.complete_next();
    Ok(())
}
