//! A SUB socket on one publisher, until it is no good any more. What messages mean is the caller's business.

use std::time::Duration;

use bytes::Bytes;

use super::ZmtpError;
use super::dial::Dialed;
use super::handshake::subscription;

/// Pause between two sockets.
pub const PAUSE: Duration = Duration::from_millis(200);

/// A socket that has subscribed.
pub struct Subscriber {
    connection: Dialed,
    /// Longest time without a message.
    silence: Duration,
}

impl Subscriber {
    /// Subscribes to `topics` at `address` (`tcp://host:port`). `None` when nobody answers there yet.
    pub async fn connect(address: &str, topics: &[&str], silence: Duration) -> Option<Self> {
        match Self::open(address, topics, silence).await {
            Ok(subscriber) => Some(subscriber),
            Err(error) => {
                tracing::debug!(address, %error, "cannot subscribe yet");
                None
            }
        }
    }

    async fn open(address: &str, topics: &[&str], silence: Duration) -> Result<Self, ZmtpError> {
        let mut connection = Dialed::open(address, "SUB", &["PUB", "XPUB"]).await?;
        for topic in topics {
            connection.send(&[subscription(topic)]).await?;
        }
        Ok(Self { connection, silence })
    }

    /// The parts of the next message. After an error a new socket should be made.
    pub async fn next(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        self.connection.next(self.silence).await
    }
}
