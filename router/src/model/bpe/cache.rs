//! Ids of short pieces, for all threads at once and without a lock.
//!
//! Words repeat. A piece has one place in a fixed table and replaces what is there. An entry is one cache line with a
//! version before its contents: odd while somebody writes, and changed when somebody has written. A reader that meets a
//! writer takes the piece as new; a writer that meets another leaves.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Longest piece that is kept, in bytes.
const KEY_WORDS: usize = 4;
const KEY_BYTES: usize = KEY_WORDS * 8;

/// Most ids of a piece that is kept, two to a word.
const ID_WORDS: usize = 3;
const IDS: usize = ID_WORDS * 2;

/// 2 MB: room for the words that make up nearly all of any text.
const ENTRIES: usize = 1 << 15;

/// The table.
pub(super) struct PieceCache {
    entries: Box<[Entry]>,
    /// Random, so that nobody can prepare words that push each other out.
    seed: u64,
}

#[derive(Default)]
#[repr(align(64))]
struct Entry {
    /// Version in the upper 48 bits, length of the piece in the next 8, number of ids in the last 8. A piece is never
    /// empty, so an entry that was never written matches none.
    state: AtomicU64,
    key: [AtomicU64; KEY_WORDS],
    ids: [AtomicU64; ID_WORDS],
}

/// One version further.
const STEP: u64 = 1 << 16;

/// A piece that is not in the table, and its place there.
pub(super) struct Key {
    words: [u64; KEY_WORDS],
    len: u64,
    slot: usize,
}

impl PieceCache {
    pub(super) fn new() -> PieceCache {
        let entries = std::iter::repeat_with(Entry::default).take(ENTRIES).collect();
        PieceCache { entries, seed: rand::random() }
    }

    /// Appends the ids of a piece that is known; else returns how to keep it, unless it is too long for that.
    #[inline]
    pub(super) fn find(&self, piece: &[u8], out: &mut Vec<u32>) -> Result<(), Option<Key>> {
        if piece.len() > KEY_BYTES {
            return Err(None);
        }
        let mut bytes = [0; KEY_BYTES];
        bytes[..piece.len()].copy_from_slice(piece);
        let (words, _) = bytes.as_chunks();
        let words = std::array::from_fn(|at| u64::from_le_bytes(words[at]));
        let slot = xxh3_64_with_seed(piece, self.seed) as usize & (ENTRIES - 1);
        let key = Key { words, len: piece.len() as u64, slot };
        let (ids, count) = self.entries[slot].read(&key).ok_or(Some(key))?;
        out.extend_from_slice(&ids[..count]);
        Ok(())
    }

    /// Keeps the ids of a piece, if they are few enough.
    pub(super) fn keep(&self, key: Key, ids: &[u32]) {
        if ids.len() <= IDS {
            self.entries[key.slot].write(&key, ids);
        }
    }
}

impl Entry {
    #[inline]
    fn read(&self, key: &Key) -> Option<([u32; IDS], usize)> {
        let state = self.state.load(Ordering::Acquire);
        if state >> 8 & 0xff != key.len || state & STEP != 0 {
            return None;
        }
        let same = self.key.iter().zip(key.words).fold(0, |diff, (a, b)| diff | (a.load(Ordering::Relaxed) ^ b)) == 0;
        let mut ids = [0; IDS];
        for (pair, word) in ids.chunks_exact_mut(2).zip(&self.ids) {
            let word = word.load(Ordering::Relaxed);
            (pair[0], pair[1]) = (word as u32, (word >> 32) as u32);
        }
        // Pairs with the fence of `write`: whoever saw a word of a later version sees a changed state here.
        fence(Ordering::Acquire);
        let unchanged = self.state.load(Ordering::Relaxed) == state;
        (same && unchanged).then_some((ids, (state & 0xff) as usize))
    }

    fn write(&self, key: &Key, ids: &[u32]) {
        let state = self.state.load(Ordering::Relaxed);
        let busy = state.wrapping_add(STEP) & !(STEP - 1);
        if state & STEP != 0 || self.state.compare_exchange(state, busy, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return;
        }
        fence(Ordering::Release);
        for (word, value) in self.key.iter().zip(key.words) {
            word.store(value, Ordering::Relaxed);
        }
        for (word, pair) in self.ids.iter().zip(ids.chunks(2)) {
            let upper = pair.get(1).copied().unwrap_or_default();
            word.store(u64::from(upper) << 32 | u64::from(pair[0]), Ordering::Relaxed);
        }
        self.state.store(busy.wrapping_add(STEP) | key.len << 8 | ids.len() as u64, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(cache: &PieceCache, piece: &[u8], ids: &[u32]) {
        match cache.find(piece, &mut Vec::new()) {
            Err(Some(key)) => cache.keep(key, ids),
            Err(None) => {}
            Ok(()) => panic!("{piece:?} is known already"),
        }
    }

    fn find(cache: &PieceCache, piece: &[u8]) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        cache.find(piece, &mut ids).ok().map(|()| ids)
    }

    #[test]
    fn a_piece_is_found_by_all_its_bytes() {
        let cache = PieceCache::new();
        keep(&cache, b"word", &[1, 2, 3]);
        keep(&cache, b"word\0", &[4]);
        keep(&cache, b"none", &[]);
        assert_eq!(find(&cache, b"word"), Some(vec![1, 2, 3]));
        assert_eq!(find(&cache, b"word\0"), Some(vec![4]));
        assert_eq!(find(&cache, b"none"), Some(vec![]));
        assert_eq!(find(&cache, b"wor"), None);
    }

    #[test]
    fn what_is_too_long_is_not_kept() {
        let cache = PieceCache::new();
        keep(&cache, &[b'a'; KEY_BYTES], &[7; IDS]);
        keep(&cache, &[b'a'; KEY_BYTES + 1], &[7]);
        keep(&cache, b"many ids", &[7; IDS + 1]);
        assert_eq!(find(&cache, &[b'a'; KEY_BYTES]), Some(vec![7; IDS]));
        assert_eq!(find(&cache, &[b'a'; KEY_BYTES + 1]), None);
        assert_eq!(find(&cache, b"many ids"), None);
    }

    #[test]
    fn readers_among_writers_see_whole_entries() {
        let cache = PieceCache::new();
        // Two pieces for each place, so that threads replace each other's entries.
        let mut by_slot = std::collections::HashMap::new();
        let pairs: Vec<[u32; 2]> = (0u32..)
            .filter_map(|n| {
                let slot = xxh3_64_with_seed(&n.to_le_bytes(), cache.seed) as usize & (ENTRIES - 1);
                by_slot.insert(slot, n).map(|other| [other, n])
            })
            .take(4)
            .collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (cache, pairs) = (&cache, &pairs);
                scope.spawn(move || {
                    for round in 0..20_000 {
                        let n = pairs[round % pairs.len()][(round / 4 + thread) % 2];
                        let mut ids = Vec::new();
                        match cache.find(&n.to_le_bytes(), &mut ids) {
                            Ok(()) => assert_eq!(ids, [n; IDS]),
                            Err(key) => cache.keep(key.expect("short"), &[n; IDS]),
                        }
                    }
                });
            }
        });
    }
}
