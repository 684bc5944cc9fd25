//! Past events of an engine, from its replay socket: one request, then the messages that it still has, then an empty one.

use std::time::Duration;

use bytes::Bytes;
use protocol::vllm_events::{END_OF_REPLAY, decode_sequence};

use zmtp::{Dialed, ZmtpError};

/// Longest wait for each message.
const MESSAGE: Duration = Duration::from_secs(5);

/// Most bytes of an answer.
const LIMIT: usize = 256 << 20;

/// Why nothing was replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] ZmtpError),
    /// Something else came.
    #[error("an unreadable message")]
    Malformed,
    /// More than is taken at once.
    #[error("the answer is over {} MB", LIMIT >> 20)]
    TooLarge,
}

/// The messages from `start` on, with their numbers, in order.
pub(super) async fn ask(address: &str, start: u64) -> Result<Vec<(u64, Bytes)>, ReplayError> {
    let mut socket = Dialed::dealer(address).await?;
    // The empty part is what the engine's side takes for the end of an address.
    socket.send(&[Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())]).await?;
    let (mut messages, mut bytes) = (Vec::new(), 0);
    loop {
        let parts = socket.next(MESSAGE).await?;
        let [.., sequence, payload] = &parts[..] else { return Err(ReplayError::Malformed) };
        let sequence = decode_sequence(sequence).ok_or(ReplayError::Malformed)?;
        if sequence == END_OF_REPLAY {
            return Ok(messages);
        }
        bytes += payload.len();
        if bytes > LIMIT {
            return Err(ReplayError::TooLarge);
        }
        messages.push((sequence, payload.clone()));
    }
}
