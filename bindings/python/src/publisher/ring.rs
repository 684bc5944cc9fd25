//! The newest messages, kept for subscribers that missed some.

use std::collections::VecDeque;

use bytes::Bytes;

/// Most payload bytes, whatever the number of messages.
const MAX_BYTES: usize = 64 << 20;

/// A bounded history.
pub(super) struct Ring {
    messages: VecDeque<(u64, Bytes)>,
    bytes: usize,
    max_messages: usize,
}

impl Ring {
    /// An empty history of at most `max_messages` messages.
    pub(super) fn new(max_messages: usize) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, max_messages }
    }

    /// Adds the newest message and forgets the oldest ones.
    pub(super) fn push(&mut self, sequence: u64, payload: Bytes) {
        self.bytes += payload.len();
        self.messages.push_back((sequence, payload));
        while self.messages.len() > self.max_messages || self.bytes > MAX_BYTES {
            let Some((_, oldest)) = self.messages.pop_front() else { break };
            self.bytes -= oldest.len();
        }
    }

    /// What it still has from `start` on, oldest first.
    pub(super) fn since(&self, start: u64) -> Vec<(u64, Bytes)> {
        let first = self.messages.partition_point(|(sequence, _)| *sequence < start);
        self.messages.range(first..).cloned().collect()
    }
}
