//! A SUB socket on one publisher of the event plane, until it is no good any more.
//!
//! The socket library waits in `connect` and backs off for long: use it in a task of its own, and make a new one when this one
//! ends. What messages mean is the caller's business.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;
use zeromq::{Socket, SocketOptions, SocketRecv, SubSocket};

/// Deadline of connecting; then a new socket tries again.
const CONNECT: Duration = Duration::from_secs(2);

/// Pause between two sockets.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);

/// Errors in a row after which a socket is given up.
const ERRORS: u32 = 16;

/// A socket that has subscribed.
pub(crate) struct Subscriber {
    socket: SubSocket,
    /// Longest time without a message.
    silence: Duration,
}

impl Subscriber {
    /// Subscribes to `topics` at `address` (`tcp://host:port`). `None` when nobody answers there yet.
    pub(crate) async fn connect(address: &str, topics: &[&str], silence: Duration) -> Option<Self> {
        let mut options = SocketOptions::default();
        options.connect_timeout(CONNECT);
        let mut socket = SubSocket::with_options(options);
        let connected = async {
            for topic in topics {
                socket.subscribe(topic).await?;
            }
            socket.connect(address).await
        };
        match timeout(CONNECT * 2, connected).await {
            Ok(Ok(())) => Some(Self { socket, silence }),
            Ok(Err(error)) => {
                tracing::debug!(address, %error, "cannot subscribe yet");
                None
            }
            Err(_) => None,
        }
    }

    /// The parts of the next message; `None` when a new socket should be made.
    pub(crate) async fn next(&mut self) -> Option<Vec<Bytes>> {
        for _ in 0..ERRORS {
            // An error is one bad frame, or a peer that left: the library goes on, unless it cannot.
            if let Ok(message) = timeout(self.silence, self.socket.recv()).await.ok()? {
                return Some(message.into_vec());
            }
        }
        None
    }
}
