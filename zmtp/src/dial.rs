//! Connecting to a peer: address, TCP, handshake.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, timeout, timeout_at};

use super::handshake::shake;
use super::message::{Incoming, encode};
use super::reader::Reader;
use super::{HANDSHAKE, MAX_MESSAGE, ZmtpError};

/// Deadline of connecting; then a new socket tries again.
const CONNECT: Duration = Duration::from_secs(2);

/// A connection that we made.
pub struct Dialed {
    reader: Reader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Dialed {
    /// Connects to a ROUTER socket at `address` (`tcp://host:port`) as a DEALER.
    pub async fn dealer(address: &str) -> Result<Self, ZmtpError> {
        Self::open(address, "DEALER", &["ROUTER", "REP", "DEALER"]).await
    }

    pub(super) async fn open(address: &str, own: &str, others: &[&str]) -> Result<Self, ZmtpError> {
        let peer = address.strip_prefix("tcp://").ok_or(ZmtpError::Protocol)?;
        let connected = timeout(CONNECT, TcpStream::connect(peer)).await;
        let mut stream = connected.map_err(|_| ZmtpError::Io(std::io::ErrorKind::TimedOut.into()))??;
        stream.set_nodelay(true)?;
        let rest = shake(&mut stream, own, others).await?;
        let (read, writer) = stream.into_split();
        Ok(Self { reader: Reader::new(read, rest, MAX_MESSAGE), writer })
    }

    /// Sends a message: a small one, which fits into what the kernel keeps.
    pub async fn send(&mut self, parts: &[Bytes]) -> Result<(), ZmtpError> {
        let sent = timeout(HANDSHAKE, self.writer.write_all(&encode(parts))).await;
        Ok(sent.map_err(|_| ZmtpError::Stalled)??)
    }

    /// The parts of the next message, which comes within `silence`. May be dropped and called again.
    pub async fn next(&mut self, silence: Duration) -> Result<Vec<Bytes>, ZmtpError> {
        let due = Instant::now() + silence;
        loop {
            let next = timeout_at(due, self.reader.next(None)).await;
            if let Incoming::Message(parts) = next.map_err(|_| ZmtpError::Silent)??.0 {
                return Ok(parts);
            }
        }
    }
}
