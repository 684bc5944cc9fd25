//! A worker of the same host: a connection that was let in, and its arena, mapped to be read.
//!
//! Both are kept for a moment after a fetch. Pages of the other arena are mapped when they are first read, which takes longer
//! than copying them; and a map keeps the other worker's memory, even if that worker is gone.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use parking_lot::Mutex;
use rustix::fs::{SealFlags, fcntl_get_seals};
use tokio::net::UnixStream;

use crate::transfer::client::Client;

/// How long a worker is kept after a fetch; less than it waits for the next question.
const KEEP: Duration = Duration::from_secs(5);

/// The memory of another worker's arena.
pub(super) struct Memory(MmapRaw);

impl Memory {
    /// Maps memory that can be trusted to stay as long as it is: what is cut short while it is read would end this process.
    pub(super) fn map(memory: OwnedFd) -> io::Result<Self> {
        if !fcntl_get_seals(&memory)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "memory that is not sealed"));
        }
        Ok(Self(MmapOptions::new().map_raw_read_only(&File::from(memory))?))
    }

    /// Copies what is at `offset`; false where that is not in the memory.
    pub(super) fn copy(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(at) = usize::try_from(offset).ok().filter(|at| self.0.len().saturating_sub(*at) >= to.len()) else {
            return false;
        };
        // SAFETY: in bounds, by the check; `to` is memory of ours. The other worker writes to none of the blocks that it has
        // leased to us; should it do so, bytes are what they are, and their checksum is not the one that was given.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr().add(at), to.as_mut_ptr(), to.len()) };
        true
    }
}

/// A worker that let us in.
pub(super) struct Peer {
    pub(super) client: Client<UnixStream>,
    pub(super) memory: Memory,
}

impl Peer {
    /// Whether the worker has neither left nor said anything that was not asked for.
    fn is_quiet(&self) -> bool {
        matches!(self.client.socket.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Workers between two fetches, by address; one connection of each.
#[derive(Clone, Default)]
pub(super) struct Peers(Arc<Mutex<HashMap<String, (Instant, Peer)>>>);

impl Peers {
    pub(super) fn take(&self, address: &str) -> Option<Peer> {
        let (_, peer) = self.0.lock().remove(address)?;
        peer.is_quiet().then_some(peer)
    }

    /// Keeps a worker for the next fetch, if that comes soon. Must be called inside a Tokio runtime.
    pub(super) fn keep(&self, address: &str, peer: Peer) {
        let (peers, address) = (self.clone(), address.to_owned());
        peers.0.lock().insert(address.clone(), (Instant::now(), peer));
        tokio::spawn(async move {
            tokio::time::sleep(KEEP).await;
            // Unless it has been used meanwhile.
            let old = |(since, _): &mut (Instant, Peer)| since.elapsed() >= KEEP;
            let _gone = match peers.0.lock().entry(address) {
                Entry::Occupied(mut kept) => old(kept.get_mut()).then(|| kept.remove()),
                Entry::Vacant(_) => None,
            };
        });
    }
}
