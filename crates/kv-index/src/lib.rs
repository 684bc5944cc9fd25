//! Which worker (rank, tier) holds which KV block: events in, overlap out.
//!
//! Pure: no clock, socket, task or wire format. `event` is the vocabulary and `overlap` the answers; `local` is what one worker
//! knows of itself; `tree` is what a router knows of all of them, and `predicted` what it guesses without events; `reference` is
//! the obvious index that `tree` is tested against; `runs` is a trie of sequences for what has few of them, and `hash` the
//! hasher of the tables.
#![deny(unsafe_code)]

pub mod event;
pub mod hash;
#[cfg(test)]
mod histories;
pub mod index;
pub mod local;
pub mod overlap;
pub mod predicted;
#[cfg(test)]
mod reference;
pub mod runs;
pub mod tree;

pub use event::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
pub use hash::HashBuilder;
pub use index::KvIndex;
pub use overlap::{Applied, Overlaps, PooledRun, TierBlocks};
pub use runs::Runs;

/// Most blocks of one rank, over all tiers, unless its index is told otherwise: 64 Mi tokens in blocks of 16. A broken
/// engine costs at most 4 Mi × 25 bytes = 105 MB.
pub const MAX_RANK_BLOCKS: usize = 4 << 20;
