//! The bounded queue between the engine's threads and the sending thread: pushing never waits, and a loss keeps its number.
//!
//! Every event takes the next sequence number, also one that finds the queue full: subscribers see the hole. When nothing
//! follows a lost event, an empty message takes one more number, so that the hole shows at once and not with the next event.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::layout::Event;

/// Most token ids and halves of hashes in the queue, whatever the number of events: 4 Mi × 4 bytes = 16 MiB.
const MAX_WORDS: usize = 4 << 20;

/// A numbered message.
pub(super) struct Message {
    pub(super) sequence: u64,
    pub(super) at: SystemTime,
    /// `None`: a message without events.
    pub(super) event: Option<Event>,
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    Queued,
    /// The queue was full.
    Dropped,
    /// Nothing is taken any more.
    Closed,
}

/// The queue.
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Notify,
    max_events: usize,
    published: AtomicU64,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Message>,
    /// Over all events in the queue.
    words: usize,
    next: u64,
    dropped: u64,
    /// The newest number belongs to a lost event.
    hole_at_the_end: bool,
    closed: bool,
}

impl Outbox {
    /// An empty queue of at most `max_events` events.
    pub(super) fn new(max_events: usize) -> Self {
        Self { state: Mutex::default(), changed: Notify::new(), max_events, published: AtomicU64::new(0) }
    }

    /// Takes an event of so many words (4 bytes each).
    pub(super) fn push(&self, event: Event, words: usize) -> Pushed {
        let at = SystemTime::now();
        let mut state = self.state.lock();
        if state.closed {
            return Pushed::Closed;
        }
        let sequence = state.next;
        state.next += 1;
        // One event alone may be larger than the bound: it is bounded by the engine that has its blocks.
        let full = state.queue.len() >= self.max_events || (state.words > 0 && state.words + words > MAX_WORDS);
        state.hole_at_the_end = full;
        if full {
            state.dropped += 1;
            return Pushed::Dropped;
        }
        state.words += words;
        state.queue.push_back(Message { sequence, at, event: Some(event) });
        drop(state);
        self.changed.notify_one();
        Pushed::Queued
    }

    /// Waits for messages and takes all there are; `None` when it is closed and empty.
    pub(super) async fn take(&self) -> Option<VecDeque<Message>> {
        loop {
            // Registered before the look at the queue: what comes in between wakes us.
            let changed = self.changed.notified();
            {
                let mut state = self.state.lock();
                if !state.queue.is_empty() {
                    return Some(state.take());
                }
                if state.closed {
                    return None;
                }
            }
            changed.await;
        }
    }

    /// Takes no more events.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_one();
    }

    /// One event went to the socket.
    pub(super) fn count_published(&self) {
        self.published.fetch_add(1, Ordering::Relaxed);
    }

    /// Events that went to the socket.
    pub(super) fn published(&self) -> u64 {
        self.published.load(Ordering::Relaxed)
    }

    /// Events lost.
    pub(super) fn dropped(&self) -> u64 {
        self.state.lock().dropped
    }

    /// Events waiting.
    pub(super) fn queued(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// Whether nothing is taken any more.
    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }
}

impl State {
    fn take(&mut self) -> VecDeque<Message> {
        self.words = 0;
        let mut taken = std::mem::take(&mut self.queue);
        // A full queue is never empty, so a hole is always taken together with what stands before it.
        if std::mem::take(&mut self.hole_at_the_end) {
            taken.push_back(Message { sequence: self.next, at: SystemTime::now(), event: None });
            self.next += 1;
        }
        taken
    }
}
