//! Frames waiting to be written: encoded at once into one buffer, which the writer takes whole.

use bytes::BytesMut;
use parking_lot::Mutex;
use prost::Message;
use protocol::request_plane::encode_frame;
use tokio::sync::Notify;

/// Bytes that may wait before new requests are refused: a worker that lets this much pile up does not read.
const LIMIT: usize = 8 << 20;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    pending: Mutex<BytesMut>,
    wake: Notify,
}

impl Outbox {
    /// Adds the first frame of a stream; false when too much is waiting already.
    pub(super) fn offer<M: Message>(&self, frame: &M) -> bool {
        let mut pending = self.pending.lock();
        if pending.len() >= LIMIT {
            return false;
        }
        encode_frame(frame, &mut pending);
        drop(pending);
        self.wake.notify_one();
        true
    }

    /// Adds a small frame about a stream that is open, or about the connection: bounded by the number of streams.
    pub(super) fn push<M: Message>(&self, frame: &M) {
        encode_frame(frame, &mut self.pending.lock());
        self.wake.notify_one();
    }

    /// Waits for bytes.
    pub(super) async fn filled(&self) {
        while self.is_empty() {
            self.wake.notified().await;
        }
    }

    /// Whether none wait.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.lock().is_empty()
    }

    /// Takes all bytes that wait.
    pub(super) fn take(&self) -> BytesMut {
        self.pending.lock().split()
    }
}
