//! Whether the KV events that a server is said to publish come, and can be used.
//!
//! There is no agent to say what a request computed: a prompt of which the index knows little is taken for computed, unless the
//! same prompt came to the server a moment ago.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kv_hashing::SequenceHash;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::workers::{Silence, Trouble};

/// Prompts remembered: those that are told apart in a row are more than a silence takes.
const RECENT: usize = 32;

/// Watches the events of one server.
pub(super) struct EventWatch {
    silence: Silence,
    /// Whether its blocks are of another size than those that prompts are cut into, as far as is known.
    other_size: Mutex<Option<bool>>,
    /// Last blocks of the prompts counted lately, which stand for all before them.
    counted: Mutex<VecDeque<SequenceHash>>,
    /// Notified when something begins or ends to be wrong.
    changed: Arc<Notify>,
}

impl EventWatch {
    /// Nothing is wrong. Events may be on their way for as long as `patience`.
    pub(super) fn new(patience: Duration, changed: Arc<Notify>) -> Self {
        let silence = Silence::new(patience, changed.clone());
        Self { silence, other_size: Mutex::default(), counted: Mutex::default(), changed }
    }

    /// The server has answered a prompt of these blocks, of which it was known to hold the first `known`. The last block is computed
    /// again even if it is held. True when it is noticed just now that events are missing.
    pub(super) fn answered(&self, prompt: &[SequenceHash], known: u32) -> bool {
        let Some(last) = prompt.last().filter(|_| prompt.len() > known as usize + 1) else { return false };
        {
            let mut counted = self.counted.lock();
            if counted.contains(last) {
                return false;
            }
            if counted.len() == RECENT {
                counted.pop_front();
            }
            counted.push_back(*last);
        }
        self.silence.computed()
    }

    /// Events of blocks came, of use or not.
    pub(super) fn heard(&self) {
        self.silence.heard();
    }

    /// Stored blocks were of the size that prompts are cut into, or of another one. True when that is another one just now. One of
    /// our size settles it: others beside it are of a tier that counts otherwise.
    pub(super) fn note_size(&self, other: bool) -> bool {
        let mut known = self.other_size.lock();
        if *known == Some(other) || *known == Some(false) {
            return false;
        }
        if known.replace(other).is_some() || other {
            self.changed.notify_one();
        }
        other
    }

    /// It may be another engine now.
    pub(super) fn forget_size(&self) {
        if self.other_size.lock().take() == Some(true) {
            self.changed.notify_one();
        }
    }

    /// What is wrong.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        match *self.other_size.lock() {
            Some(true) => Some(Trouble::BlockSize),
            _ => self.silence.is_silent().then_some(Trouble::Silence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_different_prompts_that_are_not_known_are_missed() {
        let watch = EventWatch::new(Duration::ZERO, Arc::default());
        let prompt = |n: u64| [SequenceHash(n), SequenceHash(n + 1000), SequenceHash(n + 2000)];
        for n in 0..100 {
            assert!(!watch.answered(&prompt(n % 8), 0), "the engine may hold all of them");
            assert!(!watch.answered(&prompt(n + 100), 2), "the last block is computed in any case");
            assert!(!watch.answered(&[], 0));
        }
        assert!((100..200).any(|n| watch.answered(&prompt(n), 1)), "each of them is new");
        assert_eq!(watch.trouble(), Some(Trouble::Silence));
        watch.heard();
        assert_eq!(watch.trouble(), None);
    }

    #[test]
    fn another_size_is_told_when_it_begins_and_ends() {
        let watch = EventWatch::new(Duration::ZERO, Arc::default());
        assert!(watch.note_size(true) && !watch.note_size(true));
        assert_eq!(watch.trouble(), Some(Trouble::BlockSize));
        assert!(!watch.note_size(false) && !watch.note_size(true), "ours came: the others are of a lower tier");
        assert_eq!(watch.trouble(), None);
        watch.forget_size();
        assert!(watch.note_size(true));
        watch.forget_size();
        assert_eq!(watch.trouble(), None);
    }
}
