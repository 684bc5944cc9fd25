//! Fetches blocks with NIXL: reads from the other worker's arena straight into ours, by whatever UCX finds between the two, which
//! may be RDMA, NVLink, shared memory or TCP.
//!
//! NIXL knows memory, and nothing else. Who is meant, the lease, where blocks are and what their checksums are goes over the TCP
//! connection that blocks would otherwise come over. Everything here but [`agent`] is the same in builds without NIXL.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::TcpStream;
use tokio::time::Instant;
use twox_hash::XxHash3_64;

use super::client::{BURST, Client, Deadline, Pace};
use super::wire::{Answer, Ask, BlockPlace};
use super::{KvTransport, Source, Stage, TransferError, tcp};
use crate::engine::builtin::exchange::{Exchange, Reservation};

#[cfg_attr(not(feature = "nixl"), path = "nixl/absent.rs")]
mod agent;
mod read;
mod remote;

pub(super) use agent::{Agent, available};
pub(super) use read::Read;
#[cfg(all(test, feature = "nixl"))]
pub(super) use remote::MOST_LEFT;
pub(super) use remote::{Remote, Remotes};

/// As [`super::Offer::backend`] has it.
pub(super) const BACKEND: &str = "nixl";

/// Most bytes of a read. It is also what is lost when one fails, and what one holds on to that nobody waits for any more.
const READ: usize = 4 << 20;

/// The transport for networks that read memory by themselves.
#[derive(Clone)]
pub struct Nixl {
    timeout: Duration,
    pub(super) agent: Arc<Agent>,
    pub(super) remotes: Arc<Remotes>,
}

impl Nixl {
    /// Starts an agent for the memory of `exchange`, which serves others as well. `timeout` is the time for a fetch beside that
    /// for its bytes. Fails in a build without NIXL, without its library, and without its plugin for UCX.
    pub fn start(exchange: &Exchange, timeout: Duration) -> io::Result<Self> {
        let agent = Arc::new(Agent::start(exchange.arena().clone())?);
        Ok(Self { timeout, remotes: Arc::new(Remotes::new(agent.clone())), agent })
    }

    /// The other worker's agent: known, or asked for.
    async fn remote(&self, client: &mut Client<TcpStream>, source: &Source) -> Result<Arc<Remote>, TransferError> {
        let connect = |source| TransferError::Io { stage: Stage::Connect, source };
        if let Some(known) = self.remotes.get(&source.boot_epoch).map_err(connect)? {
            return Ok(known);
        }
        client.send(Stage::Hello, Ask::Agent(())).await?;
        match client.answer(Stage::Hello).await? {
            Answer::Agent(head) => self.remotes.load(&source.boot_epoch, &head).map_err(connect),
            other => Err(TransferError::Protocol(format!("{other:?} in place of an agent"))),
        }
    }
}

impl KvTransport for Nixl {
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
            let mut client = tcp::connect(source, address, Deadline::greeting(self.timeout)).await?;
            let remote = self.remote(&mut client, source).await?;
            client.deadline = Deadline::blocks(self.timeout, into, until);
            let places = locate(&mut client, source.lease, into).await?;
            let (mut pace, mut places) = (Pace::default(), &places[..]);
            while !places.is_empty() {
                let next;
                (next, places) = places.split_at(places.len().min(at_once(into)));
                read(&remote, next, client.deadline, into).await?;
                for _ in next {
                    pace.moved(into).await;
                }
            }
            client.end(source.lease).await;
            Ok(())
        })
    }

    fn release<'a>(&'a self, source: &'a Source, address: &'a str) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move { tcp::connect(source, address, Deadline::release()).await?.release(source.lease).await })
    }
}

/// Blocks of one read: few beside running sequences, since nobody can slow a read down once it has begun.
fn at_once(into: &Reservation) -> usize {
    let bytes = if into.is_beside_others() { BURST } else { READ };
    (bytes / into.block_bytes()).max(1)
}

/// Asks where the missing blocks are. They stay there while the connection lasts and the lease is not ended.
async fn locate(
    client: &mut Client<TcpStream>,
    lease: u64,
    missing: &Reservation,
) -> Result<Vec<BlockPlace>, TransferError> {
    let blocks = client.ask(Ask::Locate, lease, missing).await?;
    let mut places = Vec::with_capacity(blocks.len());
    for hash in blocks {
        match client.answer(Stage::Blocks).await? {
            Answer::Place(place) if (place.hash, place.bytes as usize) == (hash, missing.block_bytes()) => {
                places.push(place);
            }
            other => return Err(TransferError::Protocol(format!("{other:?} in place of block {hash:016x}"))),
        }
    }
    Ok(places)
}

/// Reads the next missing blocks and verifies them.
async fn read(
    remote: &Arc<Remote>,
    places: &[BlockPlace],
    deadline: Deadline,
    into: &mut Reservation,
) -> Result<(), TransferError> {
    let blocks = |source| TransferError::Io { stage: Stage::Blocks, source };
    let room = into.take_room(places.len()).ok_or_else(|| TransferError::Protocol("a block too many".into()))?;
    let room = Read::begin(remote, room, places).map_err(blocks)?.ended(deadline).await?;
    let is_whole = |(index, place): &(usize, &BlockPlace)| {
        // SAFETY: the read has ended, and nobody else has the room.
        XxHash3_64::oneshot(unsafe { room.bytes(*index) }) == place.checksum
    };
    let whole = places.iter().enumerate().take_while(is_whole).count();
    into.put_back(room, whole);
    places.get(whole).map_or(Ok(()), |place| Err(TransferError::Checksum(place.hash)))
}
