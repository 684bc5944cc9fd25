//! What two workers say to each other while blocks move.
//!
//! A message is one frame: u32 big endian length, then a [`ToServer`] or a [`ToClient`]. The client greets, asks for blocks of
//! a lease, and ends the lease. Over TCP the bytes of a block follow its [`BlockHead`] raw, layer after layer as the arena has
//! them; over a Unix socket a [`BlockPlace`] says where they are, and the arena's descriptor follows the Welcome. For NIXL, which
//! reads memory and asks nobody, the places are asked for over TCP. A worker that speaks a newer version refuses an older one;
//! both are pods of one deployment.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prost::{Enumeration, Message, Oneof};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The version that [`Hello`] carries.
pub(super) const VERSION: u32 = 1;
/// Longest time in which blocks are fetched: 6 GB at 10 MB/s.
pub(super) const LONGEST_PULL: Duration = Duration::from_secs(600);
/// Longest message, in bytes: the hashes of 130,000 blocks.
const MAX_MESSAGE: usize = 1 << 20;

/// From the worker that fetches.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ToServer {
    #[prost(oneof = "Ask", tags = "1, 2, 3, 4, 5")]
    pub(super) ask: Option<Ask>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Ask {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    Pull(Pull),
    /// Ends a lease.
    #[prost(fixed64, tag = "3")]
    Release(u64),
    /// As [`Self::Pull`], but only the places are told, and the blocks held until the lease is ended.
    #[prost(message, tag = "4")]
    Locate(Pull),
    /// Asks who reads and serves the worker's memory.
    #[prost(message, tag = "5")]
    Agent(()),
}

/// The first message: who is meant, and what the blocks must be.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Hello {
    #[prost(uint32, tag = "1")]
    pub(super) version: u32,
    #[prost(string, tag = "2")]
    pub(super) boot_epoch: String,
    #[prost(string, tag = "3")]
    pub(super) revision: String,
    /// JSON of a `KvLayout`.
    #[prost(string, tag = "4")]
    pub(super) layout: String,
}

/// Asks for blocks of a lease, which are answered in the same order: the order they have in the lease.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Pull {
    #[prost(fixed64, tag = "1")]
    pub(super) lease: u64,
    #[prost(fixed64, repeated, tag = "2")]
    pub(super) blocks: Vec<u64>,
    /// For how long the client will go on, in milliseconds: so long the blocks stay where they are.
    #[prost(uint32, tag = "3")]
    pub(super) within_ms: u32,
}

/// From the worker that has the blocks.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ToClient {
    #[prost(oneof = "Answer", tags = "1, 2, 3, 4, 5")]
    pub(super) answer: Option<Answer>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Answer {
    #[prost(message, tag = "1")]
    Welcome(Welcome),
    #[prost(message, tag = "2")]
    Block(BlockHead),
    #[prost(message, tag = "3")]
    Refused(Refused),
    #[prost(message, tag = "4")]
    Place(BlockPlace),
    #[prost(message, tag = "5")]
    Agent(AgentHead),
}

/// Answers [`Hello`].
#[derive(Clone, PartialEq, Message)]
pub(super) struct Welcome {
    #[prost(uint32, tag = "1")]
    pub(super) version: u32,
}

/// Comes before a block's bytes.
#[derive(Clone, PartialEq, Message)]
pub(super) struct BlockHead {
    #[prost(fixed64, tag = "1")]
    pub(super) hash: u64,
    #[prost(uint32, tag = "2")]
    pub(super) bytes: u32,
    /// XXH3-64 of the bytes.
    #[prost(fixed64, tag = "3")]
    pub(super) checksum: u64,
}

/// Says where a block's bytes are; they stay there until the lease has ended, or the connection.
#[derive(Clone, PartialEq, Message)]
pub(super) struct BlockPlace {
    #[prost(fixed64, tag = "1")]
    pub(super) hash: u64,
    #[prost(uint32, tag = "2")]
    pub(super) bytes: u32,
    /// XXH3-64 of the bytes.
    #[prost(fixed64, tag = "3")]
    pub(super) checksum: u64,
    /// From the beginning of the arena's memory, in bytes.
    #[prost(uint64, tag = "4")]
    pub(super) offset: u64,
}

/// The worker's NIXL agent.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AgentHead {
    /// What another agent must load before it reads, in NIXL's own form.
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) metadata: Bytes,
    /// Where the arena begins in that agent's eyes.
    #[prost(fixed64, tag = "2")]
    pub(super) base: u64,
}

/// Answers what cannot be done.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Refused {
    #[prost(enumeration = "Refusal", tag = "1")]
    pub(super) refusal: i32,
    #[prost(string, tag = "2")]
    pub(super) message: String,
}

/// Why a worker refuses to send blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Refusal {
    /// It does not say.
    Unspecified = 0,
    /// The address belongs to another worker, or to another life of it.
    WrongWorker = 1,
    /// It speaks another version.
    Version = 2,
    /// Its blocks are of another model, shape or revision.
    Layout = 3,
    /// The lease has ended.
    LeaseGone = 4,
    /// The lease has no such block.
    UnknownBlock = 5,
    /// Too many fetch from it.
    Busy = 6,
    /// It shares its memory with others only.
    Stranger = 7,
    /// It has no NIXL agent.
    NoAgent = 8,
}

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{0}")]
    Malformed(String),
}

/// Reads one message, and not a byte of what follows it.
pub(super) async fn read<M: Message + Default>(from: &mut (impl AsyncRead + Unpin)) -> Result<M, WireError> {
    let len = from.read_u32().await? as usize;
    if len > MAX_MESSAGE {
        return Err(WireError::Malformed(format!("a message of {len} bytes")));
    }
    let mut bytes = BytesMut::zeroed(len);
    from.read_exact(&mut bytes).await?;
    M::decode(bytes).map_err(|error| WireError::Malformed(error.to_string()))
}
