//! Which worker (rank, tier) holds which KV block: events in, overlap out.
//!
//! Pure: no clock, socket, task or wire format. `event` is the vocabulary; `local` is what one worker knows of itself; `prefix`
//! is what a router knows of all of them;
//! `hash` is the hasher of their tables.
#![forbid(unsafe_code)]

pub mod event;
pub mod hash;
pub mod local;
pub mod prefix;

pub use event::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
pub use hash::HashBuilder;
pub use prefix::{Applied, Overlaps, PrefixIndex, TierBlocks};
