//! Where a reader stands in the numbered messages of one publisher.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

/// Messages remembered to tell one that came twice from one of a publisher that began anew.
const RECENT: usize = 256;

/// What a message is, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The one that is waited for.
    Next,
    /// It came before.
    Duplicate,
    /// Others are missing before it.
    Gap,
    /// The numbering began again.
    Restarted,
}

/// The place in the numbering. Before the first message every number is the next one: what came before is unknown anyway.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    next: Option<u64>,
    recent: VecDeque<(u64, u64)>,
}

impl Cursor {
    /// The first number that has not been seen.
    pub(super) fn next(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    /// What a message is; changes nothing.
    pub(super) fn look(&self, sequence: u64, payload: &[u8]) -> Step {
        match self.next {
            None => Step::Next,
            Some(next) if sequence == next => Step::Next,
            Some(next) if sequence > next => Step::Gap,
            // Batches carry the time: no two of them are equal.
            Some(_) if self.recent.contains(&(sequence, xxh3_64(payload))) => Step::Duplicate,
            Some(_) => Step::Restarted,
        }
    }

    /// Goes on behind a message.
    pub(super) fn advance(&mut self, sequence: u64, payload: &[u8]) {
        if self.look(sequence, payload) != Step::Next {
            self.recent.clear();
        }
        self.next = sequence.checked_add(1);
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((sequence, xxh3_64(payload)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_tell_losses_repeats_and_restarts() {
        let mut cursor = Cursor::default();
        assert_eq!((cursor.next(), cursor.look(12, b"a")), (0, Step::Next), "it joined late");
        for (sequence, payload) in [(12, b"a"), (13, b"b")] {
            assert_eq!(cursor.look(sequence, payload), Step::Next);
            cursor.advance(sequence, payload);
        }
        assert_eq!(cursor.next(), 14);
        assert_eq!((cursor.look(12, b"a"), cursor.look(13, b"b")), (Step::Duplicate, Step::Duplicate));
        assert_eq!(
            (cursor.look(16, b"e"), cursor.look(0, b"x"), cursor.look(13, b"x")),
            (Step::Gap, Step::Restarted, Step::Restarted)
        );
        cursor.advance(0, b"x");
        assert_eq!((cursor.next(), cursor.look(1, b"y")), (1, Step::Next));
        assert_eq!(cursor.look(0, b"a"), Step::Restarted, "the old ones are forgotten");
    }
}
