//! Blocks that are kept for whoever fetches them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kv_hashing::SequenceHash;
use parking_lot::Mutex;
use tokio::sync::Notify;
use twox_hash::XxHash3_64;

use crate::engine::builtin::BlockId;
use crate::engine::builtin::arena::KvArena;
use crate::engine::builtin::service::inbox::{Errand, Shared};

/// Most leases at once: each is one request between its prefill and its decode.
const MAX_LEASES: usize = 4096;

/// Says what whoever fetches the blocks must be told. Called on the engine's thread for each lease that begins.
pub type Describe = dyn Fn(&Arc<Lease>) -> String + Send + Sync;

/// A lease that has begun.
pub(in crate::engine::builtin) struct Granted {
    pub(in crate::engine::builtin) lease: u64,
    /// What whoever fetches the blocks must be told.
    pub(in crate::engine::builtin) params: String,
}

/// How blocks are leased.
pub struct Terms {
    /// How long a lease lasts from its last progress.
    pub lifetime: Duration,
    /// What a request's next worker is told.
    pub describe: Box<Describe>,
}

/// The lease has ended, or never was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease has ended")]
pub struct LeaseGone;

/// Holds a prompt's blocks. They are free when the lease has ended and nobody reads them any more.
pub struct Lease {
    id: u64,
    blocks: Vec<(SequenceHash, BlockId)>,
    arena: Arc<KvArena>,
    shared: Arc<Shared>,
    progress: Mutex<Instant>,
    /// Parallel to `blocks`.
    checksums: Vec<OnceLock<u64>>,
}

impl Lease {
    pub(super) fn new(id: u64, blocks: Vec<(SequenceHash, BlockId)>, arena: Arc<KvArena>, shared: Arc<Shared>) -> Self {
        let checksums = blocks.iter().map(|_| OnceLock::new()).collect();
        Self { id, blocks, arena, shared, progress: Mutex::new(Instant::now()), checksums }
    }

    /// Names the lease; not to be guessed.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The blocks, in order.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = SequenceHash> {
        self.blocks.iter().map(|block| block.0)
    }

    /// Bytes of the block at `index`.
    ///
    /// # Panics
    /// When there are not so many blocks.
    pub fn bytes(&self, index: usize) -> &[u8] {
        // SAFETY: the block was computed, cached and held when the lease was made, and the lease holds it: nobody writes to it
        // before the lease is dropped, which the slice borrows.
        unsafe { self.arena.block(self.blocks[index].1) }
    }

    /// XXH3-64 of the block at `index`, computed when it is first wanted.
    ///
    /// # Panics
    /// When there are not so many blocks.
    pub fn checksum(&self, index: usize) -> u64 {
        *self.checksums[index].get_or_init(|| XxHash3_64::oneshot(self.bytes(index)))
    }

    /// Where the block at `index` begins in the arena's memory, in bytes.
    ///
    /// # Panics
    /// When there are not so many blocks.
    pub fn offset(&self, index: usize) -> u64 {
        self.arena.offset(self.blocks[index].1)
    }

    /// Somebody is fetching.
    pub fn touch(&self) {
        *self.progress.lock() = Instant::now();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let table = self.blocks.drain(..).map(|block| block.1).collect();
        self.shared.send(Errand::Release(table));
    }
}

/// All leases of an engine.
pub(super) struct Leases {
    max_blocks: usize,
    terms: OnceLock<Terms>,
    held: Mutex<Held>,
    /// Told when the last lease has ended.
    empty: Notify,
}

#[derive(Default)]
struct Held {
    by_id: HashMap<u64, Arc<Lease>>,
    /// Blocks under leases, and under how many: prompts share their beginnings.
    blocks: HashMap<BlockId, u32>,
    closed: bool,
}

impl Held {
    fn insert(&mut self, lease: Arc<Lease>) {
        for (_, block) in &lease.blocks {
            *self.blocks.entry(*block).or_default() += 1;
        }
        self.by_id.insert(lease.id, lease);
    }

    fn remove(&mut self, id: u64) -> Option<Arc<Lease>> {
        let lease = self.by_id.remove(&id)?;
        for (_, block) in &lease.blocks {
            if let Entry::Occupied(mut leases) = self.blocks.entry(*block) {
                *leases.get_mut() -= 1;
                if *leases.get() == 0 {
                    leases.remove();
                }
            }
        }
        Some(lease)
    }
}

impl Leases {
    pub(super) fn new(max_blocks: usize) -> Self {
        Self { max_blocks, terms: OnceLock::new(), held: Mutex::default(), empty: Notify::new() }
    }

    pub(super) fn open(&self, terms: Terms) {
        self.terms.get_or_init(|| terms);
    }

    /// The lease that `make` makes of `table`, and its description; gives `table` back when there is no room, or nobody to serve it.
    pub(super) fn grant(&self, make: impl FnOnce(u64) -> Lease, table: Vec<BlockId>) -> Result<Granted, Vec<BlockId>> {
        let Some(terms) = self.terms.get() else { return Err(table) };
        let mut held = self.held.lock();
        let fresh = table.iter().filter(|block| !held.blocks.contains_key(block)).count();
        let full = held.by_id.len() >= MAX_LEASES || held.blocks.len() + fresh > self.max_blocks;
        if full || held.closed {
            return Err(table);
        }
        let lease = Arc::new(make(rand::random()));
        held.insert(lease.clone());
        drop(held);
        Ok(Granted { lease: lease.id, params: (terms.describe)(&lease) })
    }

    pub(super) fn get(&self, id: u64) -> Result<Arc<Lease>, LeaseGone> {
        let lease = self.held.lock().by_id.get(&id).cloned().ok_or(LeaseGone)?;
        lease.touch();
        Ok(lease)
    }

    pub(super) fn end(&self, id: u64) {
        // Dropped after the lock is free.
        let _lease = self.held.lock().remove(id);
        self.note_empty();
    }

    pub(super) fn expire(&self, now: Instant) -> usize {
        let Some(terms) = self.terms.get() else { return 0 };
        let mut held = self.held.lock();
        // Whoever reads it now has a deadline of its own.
        let idle = |lease: &Arc<Lease>| {
            Arc::strong_count(lease) == 1 && now.saturating_duration_since(*lease.progress.lock()) > terms.lifetime
        };
        let ids: Vec<u64> = held.by_id.values().filter(|lease| idle(lease)).map(|lease| lease.id).collect();
        let gone: Vec<_> = ids.into_iter().filter_map(|id| held.remove(id)).collect();
        drop(held);
        self.note_empty();
        gone.len()
    }

    fn note_empty(&self) {
        if self.held.lock().by_id.is_empty() {
            self.empty.notify_waiters();
        }
    }

    pub(super) async fn ended(&self) {
        loop {
            let empty = self.empty.notified();
            if self.held.lock().by_id.is_empty() {
                return;
            }
            empty.await;
        }
    }

    pub(super) fn held(&self) -> (usize, usize) {
        let held = self.held.lock();
        (held.by_id.len(), held.blocks.len())
    }

    pub(super) fn close(&self) {
        let mut held = self.held.lock();
        held.closed = true;
        held.blocks.clear();
        let gone = std::mem::take(&mut held.by_id);
        drop(held);
        drop(gone);
        self.note_empty();
    }
}
