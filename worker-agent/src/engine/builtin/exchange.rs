//! KV blocks that other engines fetch from this one, and that come into it from others.
//!
//! A [`Lease`] keeps blocks that were computed here until somebody has fetched them; a [`Reservation`] is room for blocks that
//! are on their way. Both are held in the pool, so nothing else writes to their memory, and both give their blocks back when
//! they are dropped, wherever that is. Bytes are moved by the callers: the engine's thread only keeps the books, between
//! two steps. How bytes travel is not known here.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kv_hashing::{BlockHash, SequenceHash};
use protocol::request_plane::Generate;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use super::BlockId;
use super::Kv;
use super::arena::{KvArena, KvShape};
use super::service::inbox::{Errand, Shared};
use crate::engine::{EngineOutput, SubmitError};

mod lease;
pub(super) mod queue;
mod reservation;

pub use super::service::inbox::Place;
pub(super) use lease::Granted;
use lease::Leases;
pub use lease::{Describe, Lease, LeaseGone, Terms};
use queue::Ask;
use reservation::Share;
pub use reservation::{Import, Reservation, Room};

/// Number of the meaning of a block's bytes beyond its shape: order, element type, rotation of keys. Whoever changes one of them
/// counts it up.
const FORMAT: u32 = 1;

/// What two engines must have in common to exchange blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Number of what the bytes mean beyond that, as the build has it.
    pub format: u32,
    /// Names the weights, as [`super::gguf::Gguf::fingerprint`] does.
    #[serde(with = "hex")]
    pub model: u64,
    /// What the bytes of a block mean; elements are little-endian half-precision floats.
    #[serde(flatten)]
    pub shape: KvShape,
}

/// Stable, and equal for equal layouts only.
impl std::fmt::Display for KvLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let KvShape { layers, kv_heads, head_dim, block_size } = self.shape;
        let (format, model) = (self.format, self.model);
        write!(f, "f16-v{format}/{model:016x}/{layers}x{kv_heads}x{head_dim}/{block_size}")
    }
}

/// 64 bits as 16 hex digits: JSON numbers hold 53.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(from)?, 16).map_err(D::Error::custom)
    }
}

/// Why no blocks are reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// For so long the blocks would have had to be taken from sequences, or from other fetches.
    #[error("no KV blocks became free within {} ms", .0.as_millis())]
    Blocks(Duration),
    /// The engine's thread did not answer in time.
    #[error("the engine has been in one step for {} s", .0.as_secs())]
    Step(Duration),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// Longest wait for the end of the step that an engine is in: some hundred times what a step takes.
const STEP: Duration = Duration::from_secs(60);

/// The blocks of one engine, as far as others are concerned.
pub struct Exchange {
    shared: Arc<Shared>,
    arena: Arc<KvArena>,
    layout: KvLayout,
    leases: Leases,
    /// Blocks that are reserved for fetches now.
    reserved: Arc<AtomicUsize>,
}

impl Exchange {
    pub(super) fn new(kv: Kv, shared: Arc<Shared>) -> Self {
        let layout = KvLayout { format: FORMAT, model: kv.model, shape: kv.arena.shape() };
        let leases = Leases::new(kv.arena.blocks() / 2);
        Self { shared, arena: kv.arena, layout, leases, reserved: Arc::default() }
    }

    /// What the blocks are.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// From now on the engine leases the blocks of prompts that it computes for others. Once only; later terms are ignored.
    pub fn open(&self, terms: Terms) {
        self.leases.open(terms);
    }

    /// Leases a prompt's blocks, which are held and cached, and says how they are fetched. Gives them back when there is no
    /// room for them.
    pub(super) fn grant(&self, hashes: Vec<SequenceHash>, table: Vec<BlockId>) -> Result<Granted, Vec<BlockId>> {
        let blocks = hashes.into_iter().zip(table.iter().copied()).collect();
        self.leases.grant(|id| Lease::new(id, blocks, self.arena.clone(), self.shared.clone()), table)
    }

    /// The blocks under a lease; fetching them keeps it alive.
    pub fn lease(&self, id: u64) -> Result<Arc<Lease>, LeaseGone> {
        self.leases.get(id)
    }

    /// Ends a lease: nobody begins to fetch its blocks any more.
    pub fn end_lease(&self, id: u64) {
        self.leases.end(id);
    }

    /// Ends the leases that have seen no progress for longer than the terms allow; returns how many.
    pub fn expire_leases(&self, now: Instant) -> usize {
        self.leases.expire(now)
    }

    /// Leases, and the blocks under them; a block under two counts once.
    pub fn leased(&self) -> (usize, usize) {
        self.leases.held()
    }

    /// Waits until no lease is left: all are fetched, given up or expired.
    pub async fn unleased(&self) {
        self.leases.ended().await;
    }

    /// The memory that all blocks are in, at the offsets that [`Lease::offset`] says; `None` where it cannot be shared.
    pub fn memory(&self) -> Option<BorrowedFd<'_>> {
        self.arena.memory()
    }

    /// What the blocks are in.
    pub(crate) fn arena(&self) -> &Arc<KvArena> {
        &self.arena
    }

    /// Blocks that are reserved for fetches now, and not cached yet.
    pub fn reserved(&self) -> usize {
        self.reserved.load(Relaxed)
    }

    /// Most blocks that fetches may reserve: the other half is for sequences.
    pub(super) fn max_reserved(&self) -> usize {
        (self.arena.blocks() / 2).max(1)
    }

    /// Blocks that may be reserved now.
    pub(super) fn reservable(&self) -> usize {
        self.max_reserved().saturating_sub(self.reserved())
    }

    /// No more leases: the engine ends.
    pub(super) fn close(&self) {
        self.leases.close();
    }

    /// Takes a place in the queue for a request whose blocks are fetched first; none when it had ended before it came here.
    pub fn place(&self, request: Generate) -> Result<(Option<Place>, UnboundedReceiver<EngineOutput>), SubmitError> {
        self.shared.place(request)
    }

    /// Holds the blocks of a prefix that are here, and reserves room for the others: behind those that asked before, and within
    /// `patience`. Of a prefix that could never have room it reserves what could. Waits for the end of the engine's step.
    pub async fn reserve(
        &self,
        blocks: Vec<(BlockHash, SequenceHash)>,
        patience: Duration,
    ) -> Result<Reservation, NoRoom> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Errand::Reserve(Ask { blocks, patience, reply }));
        match tokio::time::timeout(STEP + patience, answer).await {
            Ok(Ok(reserved)) => reserved,
            Ok(Err(_)) => Err(NoRoom::Stopped),
            Err(_) => Err(NoRoom::Step(STEP)),
        }
    }

    /// The guard of blocks that the scheduler holds for a prefix: the first `cached` of them were, the first `here` have their
    /// content.
    pub(super) fn reservation(
        &self,
        blocks: Vec<(BlockHash, SequenceHash)>,
        table: Vec<BlockId>,
        cached: usize,
        here: usize,
    ) -> Reservation {
        let share = Share::new(self.reserved.clone(), table.len() - cached);
        Reservation::new(self.shared.clone(), self.arena.clone(), share, blocks, table, here)
    }
}
