//! Notices that prompts repeat and nothing is ever found: the index may be blind as a whole, for whatever reason.
//!
//! Remembers when the first blocks of recent prompts came, in a small table without locks: a newer prompt takes an older one's
//! place, so what is remembered is a sample. A prompt that begins like one half a minute old, of which the index knows no block on
//! any worker, is a miss; many of them in a row, without a single hit, are no accident.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use kv_hashing::BlockHash;

/// Prompts remembered: 32 KiB.
const PLACES: usize = 4096;

/// Age from which the blocks of a prompt should be known: even a long one has been computed, and its events have come.
const SETTLED: Duration = Duration::from_secs(30);

/// Age from which they may well be gone again.
const STALE: Duration = Duration::from_secs(120);

/// Misses in a row that are no accident.
const MISSES: u32 = 32;

/// Bits of an entry that are seconds; the rest are of the hash.
const TIME_BITS: u32 = 24;

/// Watches the decisions of one router.
pub(super) struct HitWatch {
    places: Box<[AtomicU64]>,
    misses: AtomicU32,
    none: AtomicBool,
}

impl HitWatch {
    pub(super) fn new() -> Self {
        let places = (0..PLACES).map(|_| AtomicU64::new(0)).collect();
        Self { places, misses: AtomicU32::new(0), none: AtomicBool::new(false) }
    }

    /// A prompt that begins with this block was matched, with or without success; `now` is since any fixed origin. Says when it
    /// begins or ends that nothing is found. Requests may race here: then a miss counts twice, or not.
    pub(super) fn matched(&self, first: BlockHash, found: bool, now: Duration) -> Option<bool> {
        if found {
            self.misses.store(0, Relaxed);
            return (self.none.load(Relaxed) && self.none.swap(false, Relaxed)).then_some(false);
        }
        if !self.came_before(first, now) || self.misses.fetch_add(1, Relaxed) + 1 < MISSES {
            return None;
        }
        (!self.none.swap(true, Relaxed)).then_some(true)
    }

    /// Whether nothing is found at present.
    pub(super) fn none(&self) -> bool {
        self.none.load(Relaxed)
    }

    /// Whether a prompt that begins alike should be known by now; else it is remembered.
    fn came_before(&self, first: BlockHash, now: Duration) -> bool {
        // Never 0, which is an empty place.
        let second = (now.as_secs() + 1) & ((1 << TIME_BITS) - 1);
        let place = &self.places[first.0 as usize % PLACES];
        let entry = place.load(Relaxed);
        if entry >> TIME_BITS == first.0 >> TIME_BITS && entry != 0 {
            let age = Duration::from_secs(second.saturating_sub(entry & ((1 << TIME_BITS) - 1)));
            if age < STALE {
                return age >= SETTLED;
            }
        }
        place.store(first.0 >> TIME_BITS << TIME_BITS | second, Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn only_repeated_prompts_that_are_never_found_are_told() {
        let watch = HitWatch::new();
        let hash = |n: u64| BlockHash(n << 40 | n);
        for n in 0..1000 {
            assert_eq!(watch.matched(hash(n), false, seconds(n)), None, "each is new");
        }
        let watch = HitWatch::new();
        assert_eq!(watch.matched(hash(1), false, seconds(0)), None);
        for _ in 0..1000 {
            assert_eq!(watch.matched(hash(1), false, seconds(2)), None, "its events may be on their way");
        }
        let told = |from: u64, found_at: u64| {
            (from..from + 100).find_map(|at| watch.matched(hash(1), at == found_at, seconds(10 + at % 100)))
        };
        assert_eq!(told(0, 20), Some(true), "after a hit it takes as many misses again");
        assert!(watch.none());
        assert_eq!(watch.matched(hash(1), false, seconds(60)), None, "told once");
        assert_eq!(watch.matched(hash(2), true, seconds(60)), Some(false));
        assert!(!watch.none());
    }

    #[test]
    fn what_is_long_ago_may_be_gone() {
        let watch = HitWatch::new();
        for round in 0..100 {
            assert_eq!(watch.matched(BlockHash(7 << 30), false, seconds(round * 200)), None);
        }
    }
}
