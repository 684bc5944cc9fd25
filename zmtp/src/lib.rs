//! ZeroMQ's wire protocol (ZMTP 3.0, no security) as far as publishers and subscribers need it, with everything bounded.
//!
//! The `zeromq` crate takes messages of any size from any number of peers, and keeps up to 100,000 for one that does not read.
//! Here a message has a size, a port has a number of peers, and what waits has a size in bytes; what does not fit is dropped
//! and counted, which readers see as a gap in the numbers. `message` is the encoding, `handshake` how a connection begins, `reader`
//! how it goes on; [`Subscriber`] reads one publisher, a [`Collector`] those that connect to us, a [`Publisher`] serves subscribers,
//! and [`Dialed`] asks a ROUTER. What messages mean is the callers' business.
#![forbid(unsafe_code)]

mod collector;
mod dial;
mod handshake;
mod message;
mod publisher;
mod reader;
mod subscriber;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use collector::{Collector, CollectorCounters};
pub use dial::Dialed;
pub use publisher::{Publisher, PublisherCounters};
pub use subscriber::{PAUSE, Subscriber};

/// Most bytes of a message, over all its parts: a batch of our own agents has 8,192 blocks and 350 KB, one of an engine the
/// tokens of what it stored, 5 bytes each.
const MAX_MESSAGE: usize = 8 << 20;

/// Deadline of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Why a connection ended, or did not begin.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The socket failed, or could not be connected in time.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The peer did not introduce itself in time.
    #[error("no handshake in {} s", HANDSHAKE.as_secs())]
    Handshake,
    /// The peer speaks something else, or the address is none.
    #[error("not a ZMTP 3 peer without security")]
    Protocol,
    /// The peer is a socket of the wrong kind.
    #[error("the peer is a {0} socket")]
    Peer(String),
    /// A message is over the limit, which is told.
    #[error("a message of over {0} bytes")]
    TooLarge(usize),
    /// The rest of a message did not come, or was not taken, in time.
    #[error("a message of which only a part came")]
    Stalled,
    /// Nothing came for as long as the caller waits.
    #[error("no message for too long")]
    Silent,
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
}
