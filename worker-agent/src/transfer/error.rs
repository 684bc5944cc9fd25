//! Why blocks did not come.

use std::io;
use std::time::Duration;

use super::metrics::Failure;
use super::wire::{Refusal, WireError};
use crate::engine::builtin::exchange::NoRoom;

/// The part of a transfer that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for other fetches.
    Turn,
    /// Connecting.
    Connect,
    /// The other worker lets us in.
    Hello,
    /// The blocks.
    Blocks,
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Turn => "waiting for a turn",
            Self::Connect => "connecting",
            Self::Hello => "greeting",
            Self::Blocks => "receiving blocks",
        })
    }
}

/// Why blocks did not come. Whatever it is, the prompt is computed instead.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The parameters are not what a worker of ours writes.
    #[error("disaggregated_params: {0}")]
    Params(String),
    /// Only ways that this worker does not know.
    #[error("this worker has none of the KV transports {0:?}")]
    Backend(Vec<String>),
    /// Another model, shape of blocks, or revision.
    #[error("the other worker's KV is of another model, layout or revision")]
    Layout,
    /// The offered blocks belong to other tokens.
    #[error("the offered blocks are not this prompt's")]
    OtherPrompt,
    /// There is no room here.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// Too slow.
    #[error("{stage} took longer than {} ms", .limit.as_millis())]
    Timeout {
        /// At what.
        stage: Stage,
        /// The time it had.
        limit: Duration,
    },
    /// The network, or the other worker's end.
    #[error("{stage}: {source}")]
    Io {
        /// At what.
        stage: Stage,
        /// What the system says.
        source: io::Error,
    },
    /// The other worker says no.
    #[error("refused by the other worker: {message}")]
    Refused {
        /// Why.
        refusal: Refusal,
        /// In words.
        message: String,
    },
    /// A block's bytes are not those that were sent.
    #[error("block {0:016x} came with another checksum")]
    Checksum(u64),
    /// The other side does not keep to the protocol.
    #[error("protocol: {0}")]
    Protocol(String),
    /// Nobody waits for the request any more.
    #[error("the request was cancelled")]
    Cancelled,
    /// The thread that moves blocks has ended.
    #[error("the transfer thread has ended")]
    Ended,
}

impl TransferError {
    pub(super) fn from_wire(stage: Stage, error: WireError) -> Self {
        match error {
            WireError::Io(source) => Self::Io { stage, source },
            WireError::Malformed(message) => Self::Protocol(message),
        }
    }

    /// As a metric's label.
    pub fn reason(&self) -> Failure {
        match self {
            Self::Params(_) | Self::Backend(_) | Self::OtherPrompt => Failure::params,
            Self::Layout | Self::Refused { refusal: Refusal::Layout, .. } => Failure::layout,
            Self::NoRoom(NoRoom::Blocks(_)) => Failure::no_blocks,
            Self::NoRoom(_) | Self::Ended => Failure::stopped,
            Self::Timeout { .. } => Failure::timeout,
            Self::Io { stage: Stage::Connect, .. } => Failure::connect,
            Self::Io { .. } => Failure::lost,
            Self::Refused { refusal: Refusal::LeaseGone, .. } => Failure::lease_gone,
            Self::Refused { .. } => Failure::refused,
            Self::Checksum(_) => Failure::checksum,
            Self::Protocol(_) => Failure::protocol,
            Self::Cancelled => Failure::cancelled,
        }
    }

    /// Whether this way does not lead to the other worker, and another may.
    pub(super) fn is_no_way(&self) -> bool {
        match self {
            Self::Io { stage, .. } | Self::Timeout { stage, .. } => *stage == Stage::Connect,
            Self::Refused { refusal, .. } => matches!(refusal, Refusal::Stranger | Refusal::NoAgent),
            _ => false,
        }
    }

    /// Whether the other worker may do later what it did not now.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { refusal: Refusal::Busy, .. })
    }

    /// Whether the other worker may still hold the blocks for us, and can be told that we do not want them.
    pub(super) fn leaves_lease(&self) -> bool {
        match self {
            Self::Params(_) | Self::Backend(_) => false,
            Self::Refused { .. } => self.is_busy(),
            Self::Io { stage, .. } | Self::Timeout { stage, .. } => *stage != Stage::Connect,
            _ => true,
        }
    }
}
