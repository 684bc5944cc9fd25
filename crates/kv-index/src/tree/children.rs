//! The table of branches: (parent place, first local hash) to run. Straight continuations are not in it.
//!
//! Open addressing, 16 bytes an entry, in order of hash, so that growth copies from one end to the other. Adding an entry is
//! one store. Removals move others and growth changes the table: both give it a new version, and a reader that found nothing
//! looks at it again. Old tables stay; together they are smaller than the present one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use kv_hashing::BlockHash;

use super::pause;
use super::run::Place;

/// Entries of the first table.
const FIRST: usize = 1 << 10;

/// Each table has twice the entries of the one before: 2^10 × 2^20 is more than an arena has runs.
const LEVELS: usize = 20;

/// Hash of (parent, local hash): its high bits are the home, all of it is compared. The run's own header has the last word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u32);

impl Key {
    /// Below `None` hang the first blocks of all sequences.
    #[inline]
    pub(super) fn new(parent: Option<Place>, local: BlockHash) -> Self {
        let place = u64::from(parent.map_or(0, Place::bits));
        let product = u128::from(local.0 ^ place << 32 ^ place) * 0x9e37_79b9_7f4a_7c15;
        let folded = (product as u64 ^ (product >> 64) as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
        Self((folded >> 32) as u32)
    }
}

/// What the table says of a branch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Branch {
    pub(super) run: u32,
    /// The run's next one and the one after: to be fetched early, not to be trusted.
    pub(super) hints: [u32; 2],
}

/// The table.
pub(super) struct Children {
    /// Odd while entries move.
    version: AtomicU64,
    level: AtomicUsize,
    /// Pairs of words: key << 32 | run, then the hints. No run, no entry.
    levels: [OnceLock<Box<[AtomicU64]>>; LEVELS],
    len: AtomicUsize,
}

impl Children {
    pub(super) fn new() -> Self {
        let levels = std::array::from_fn(|_| OnceLock::new());
        let table = Self { version: AtomicU64::new(0), level: AtomicUsize::new(0), levels, len: AtomicUsize::new(0) };
        table.words(0);
        table
    }

    /// Bytes of all tables.
    pub(super) fn bytes(&self) -> usize {
        self.levels.iter().filter_map(OnceLock::get).map(|words| words.len() * 8).sum()
    }

    fn words(&self, level: usize) -> &[AtomicU64] {
        self.levels[level].get_or_init(|| (0..(2 * FIRST) << level).map(|_| AtomicU64::new(0)).collect())
    }

    #[inline]
    fn current(&self) -> &[AtomicU64] {
        self.words(self.level.load(Ordering::Acquire))
    }

    /// The branch that `is` accepts. `Err` when entries moved meanwhile: look again.
    #[inline]
    pub(super) fn find<E>(
        &self,
        key: Key,
        moved: E,
        mut is: impl FnMut(Branch) -> Result<bool, E>,
    ) -> Result<Option<Branch>, E> {
        let version = self.version.load(Ordering::Acquire);
        let words = self.current();
        let entries = words.len() / 2;
        let mut at = home(key, entries);
        for _ in 0..entries {
            let entry = words[2 * at].load(Ordering::Acquire);
            pause::point();
            if entry as u32 == 0 {
                break;
            }
            if (entry >> 32) as u32 == key.0 {
                let hints = words[2 * at + 1].load(Ordering::Relaxed);
                let branch = Branch { run: entry as u32, hints: [(hints >> 32) as u32, hints as u32] };
                if is(branch)? {
                    return Ok(Some(branch));
                }
            }
            at = (at + 1) & (entries - 1);
        }
        fence(Ordering::Acquire);
        let unmoved = version & 1 == 0 && self.version.load(Ordering::Relaxed) == version;
        if unmoved || pause::checks_are_off() { Ok(None) } else { Err(moved) }
    }

    fn change(&self, change: impl FnOnce()) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        pause::point();
        change();
        pause::point();
        self.version.store(version + 2, Ordering::Release);
    }

    /// Adds a run that is ready for readers. False when the table is full.
    pub(super) fn insert(&self, key: Key, run: u32) -> bool {
        let len = self.len.load(Ordering::Relaxed) + 1;
        let entries = self.current().len() / 2;
        // At most 5/8 full: probes stay short.
        if len * 8 > entries * 5 {
            self.grow();
        }
        let words = self.current();
        if len >= words.len() / 2 {
            return false;
        }
        self.len.store(len, Ordering::Relaxed);
        put(words, key, run, 0);
        true
    }

    fn grow(&self) {
        let level = self.level.load(Ordering::Relaxed);
        if level + 1 == LEVELS {
            return;
        }
        let (old, new) = (self.words(level), self.words(level + 1));
        for entry in old.chunks_exact(2) {
            let word = entry[0].load(Ordering::Relaxed);
            if word as u32 != 0 {
                put(new, Key((word >> 32) as u32), word as u32, entry[1].load(Ordering::Relaxed));
            }
        }
        self.change(|| self.level.store(level + 1, Ordering::Release));
    }

    /// Takes a run out.
    pub(super) fn remove(&self, key: Key, run: u32) {
        let words = self.current();
        let entries = words.len() / 2;
        let Some(mut hole) = position(words, key, run) else { return };
        self.len.store(self.len.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        self.change(|| {
            let mut at = hole;
            loop {
                at = (at + 1) & (entries - 1);
                let entry = words[2 * at].load(Ordering::Relaxed);
                if entry as u32 == 0 {
                    break;
                }
                let from_home = at.wrapping_sub(home(Key((entry >> 32) as u32), entries)) & (entries - 1);
                if from_home >= at.wrapping_sub(hole) & (entries - 1) {
                    words[2 * hole + 1].store(words[2 * at + 1].load(Ordering::Relaxed), Ordering::Relaxed);
                    words[2 * hole].store(entry, Ordering::Relaxed);
                    pause::point();
                    hole = at;
                }
            }
            words[2 * hole].store(0, Ordering::Relaxed);
        });
    }

    /// Sets one of a branch's two hints.
    pub(super) fn hint(&self, key: Key, run: u32, which: usize, hint: u32) {
        let words = self.current();
        if let Some(at) = position(words, key, run) {
            let hints = words[2 * at + 1].load(Ordering::Relaxed);
            let hints = match which {
                0 => hints & 0xffff_ffff | u64::from(hint) << 32,
                _ => hints & !0xffff_ffff | u64::from(hint),
            };
            words[2 * at + 1].store(hints, Ordering::Relaxed);
        }
    }
}

#[inline]
fn home(key: Key, entries: usize) -> usize {
    ((u64::from(key.0) * entries as u64) >> 32) as usize
}

fn put(words: &[AtomicU64], key: Key, run: u32, hints: u64) {
    let entries = words.len() / 2;
    let mut at = home(key, entries);
    while words[2 * at].load(Ordering::Relaxed) as u32 != 0 {
        at = (at + 1) & (entries - 1);
    }
    words[2 * at + 1].store(hints, Ordering::Relaxed);
    words[2 * at].store(u64::from(key.0) << 32 | u64::from(run), Ordering::Release);
}

fn position(words: &[AtomicU64], key: Key, run: u32) -> Option<usize> {
    let entries = words.len() / 2;
    let wanted = u64::from(key.0) << 32 | u64::from(run);
    let mut at = home(key, entries);
    for _ in 0..entries {
        let entry = words[2 * at].load(Ordering::Relaxed);
        if entry == wanted {
            return Some(at);
        }
        if entry as u32 == 0 {
            return None;
        }
        at = (at + 1) & (entries - 1);
    }
    None
}
