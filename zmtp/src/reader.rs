//! The reading side of a connection: whole messages, within a size and a time.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::ZmtpError;
use super::message::{Decoder, Incoming};

/// Bytes asked for at once; a longer frame gets what it needs when it has announced itself.
const CHUNK: usize = 16 << 10;

/// A message of more needs room that the peers of a port share.
pub(super) const SMALL: usize = 64 << 10;

/// A message that has begun, and has room, must end within this time.
const WHOLE: Duration = Duration::from_secs(10);

/// A message or command, and the room that it takes, if it is large.
pub(super) type Taken = (Incoming, Option<OwnedSemaphorePermit>);

pub(super) struct Reader<R> {
    stream: R,
    buffer: BytesMut,
    decoder: Decoder,
    permit: Option<OwnedSemaphorePermit>,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// `buffer`: what came behind the handshake.
    pub(super) fn new(stream: R, buffer: BytesMut, limit: usize) -> Self {
        Self { stream, buffer, decoder: Decoder::new(limit), permit: None }
    }

    /// Waits, however long, for the beginning of the next message, and then for the rest of it. `room`: how many large ones all
    /// peers together may have here. May be dropped and called again.
    pub(super) async fn next(&mut self, room: Option<&Arc<Semaphore>>) -> Result<Taken, ZmtpError> {
        while self.buffer.is_empty() && self.decoder.is_between() {
            self.read(CHUNK).await?;
        }
        let mut due = Instant::now() + WHOLE;
        loop {
            let needed = match self.decoder.next(&mut self.buffer)? {
                Ok(incoming) => {
                    if self.permit.is_some() || self.buffer.capacity() > SMALL {
                        // What a large message lay in goes with it.
                        self.buffer = BytesMut::from(&self.buffer[..]);
                    }
                    return Ok((incoming, self.permit.take()));
                }
                Err(needed) => needed,
            };
            if let Some(room) = room
                && self.permit.is_none()
                && self.decoder.bytes() + needed > SMALL
            {
                // It is never closed.
                self.permit = Some(room.clone().acquire_owned().await.map_err(|_| ZmtpError::Closed)?);
                due = Instant::now() + WHOLE;
            }
            let missing = needed.saturating_sub(self.buffer.len());
            timeout_at(due, self.read(missing)).await.map_err(|_| ZmtpError::Stalled)??;
        }
    }

    async fn read(&mut self, room: usize) -> Result<(), ZmtpError> {
        self.buffer.reserve(room.max(CHUNK));
        if self.stream.read_buf(&mut self.buffer).await? == 0 { Err(ZmtpError::Closed) } else { Ok(()) }
    }
}
