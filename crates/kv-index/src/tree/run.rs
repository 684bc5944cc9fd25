//! A run: up to 64 consecutive blocks of one path, their local hashes behind a header of one cache line.
//!
//! Nothing ever moves and no run is ever split: a child may hang at any offset. One writer changes runs, any number of readers
//! follow. A version in the header, odd while the run is being changed, tells a reader afterwards whether what it read belongs
//! together. What only grows (a block appended, a bit set) is published by one store, without a new version.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use kv_hashing::BlockHash;

use super::arena::{Arena, GRANULE};
use super::pause;

/// Most blocks in a run: the bits of a coverage mask.
pub(super) const MAX_RUN: usize = 64;

/// A block's place: run × 64 + offset. Fits 32 bits because an arena has fewer than 2^26 granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place(u32);

impl Place {
    pub(super) fn new(run: u32, offset: usize) -> Self {
        Self(run << 6 | offset as u32)
    }

    pub(super) fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }

    pub(super) fn run(self) -> u32 {
        self.0 >> 6
    }

    pub(super) fn offset(self) -> usize {
        (self.0 & 63) as usize
    }

    /// The place `n` blocks later in the same run.
    pub(super) fn later(self, n: usize) -> Self {
        Self(self.0 + n as u32)
    }

    pub(super) fn bit(self) -> u64 {
        1 << self.offset()
    }
}

/// The low `n` bits.
#[inline]
pub(super) const fn low(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

/// First word of a header: version << 32 | parent offset << 16 | capacity << 8 | length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State(u64);

impl State {
    pub(super) fn len(self) -> usize {
        (self.0 & 0xff) as usize
    }

    /// Blocks there is room for; 0 for a free run.
    pub(super) fn capacity(self) -> usize {
        (self.0 >> 8 & 0xff) as usize
    }

    pub(super) fn parent_offset(self) -> usize {
        (self.0 >> 16 & 0xff) as usize
    }

    /// Whether a writer was at work.
    pub(super) fn is_changing(self) -> bool {
        self.0 >> 32 & 1 == 1
    }

    fn version(self) -> u64 {
        self.0 >> 32
    }
}

const STATE: usize = 0;
/// Parent run << 32 | next run: the child at the end of a full run.
const LINKS: usize = 1;
/// A bit for each offset at which children hang by the table; may stay set until the last of them is gone.
const BRANCHES: usize = 2;
/// (Slot + 1) << 48 | (slot + 1) << 32 | set: who owns, inline or in a set.
const OWNERS: usize = 3;
/// Masks of the two inline owners.
const MASKS: usize = 4;
/// Next run but one << 32 | era of the last use: hints, written by readers too, never trusted.
const HINTS: usize = 6;
/// List of owners in lower tiers << 32 | children, `next` included.
const BELOW: usize = 7;

/// One run, as words; valid or not, they can be read.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    header: &'a [AtomicU64; GRANULE],
    hashes: &'a [AtomicU64],
}

/// The owners of a run, where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnerWord(u64);

impl OwnerWord {
    pub(super) fn new(slots: [Option<u16>; 2], set: u32) -> Self {
        let code = |slot: Option<u16>| slot.map_or(0, |slot| u64::from(slot) + 1);
        Self(code(slots[0]) << 48 | code(slots[1]) << 32 | u64::from(set))
    }

    /// Inline owners.
    pub(super) fn slots(self) -> [Option<u16>; 2] {
        [(self.0 >> 48) as u16, (self.0 >> 32) as u16].map(|code| code.checked_sub(1))
    }

    /// The set of owners; 0 when they are inline.
    pub(super) fn set(self) -> u32 {
        self.0 as u32
    }
}

impl<'a> Run<'a> {
    /// The run with that number; `None` for a number never handed out.
    #[inline]
    pub(super) fn at(arena: &'a Arena, run: u32) -> Option<Self> {
        let (header, hashes) = arena.at(run)?.split_first_chunk()?;
        Some(Self { header, hashes: &hashes[..hashes.len().min(MAX_RUN)] })
    }

    fn get(&self, word: usize) -> u64 {
        self.header[word].load(Ordering::Relaxed)
    }

    fn put(&self, word: usize, value: u64) {
        pause::point();
        self.header[word].store(value, Ordering::Relaxed);
    }

    fn put_high(&self, word: usize, value: u32) {
        self.put(word, self.get(word) & 0xffff_ffff | u64::from(value) << 32);
    }

    fn put_low(&self, word: usize, value: u32) {
        self.put(word, self.get(word) & !0xffff_ffff | u64::from(value));
    }

    /// Version and lengths. What is read afterwards is at least as new.
    #[inline]
    pub(super) fn state(&self) -> State {
        State(self.header[STATE].load(Ordering::Acquire))
    }

    /// Whether nothing that was read since `state` can have been changed meanwhile.
    #[inline]
    pub(super) fn is_still(&self, state: State) -> bool {
        fence(Ordering::Acquire);
        State(self.get(STATE)).version() == state.version() || pause::checks_are_off()
    }

    pub(super) fn parent(&self) -> u32 {
        (self.get(LINKS) >> 32) as u32
    }

    pub(super) fn next(&self) -> u32 {
        // Acquire: whoever follows the link must see what it leads to.
        self.header[LINKS].load(Ordering::Acquire) as u32
    }

    pub(super) fn branches(&self) -> u64 {
        self.get(BRANCHES)
    }

    pub(super) fn owners(&self) -> OwnerWord {
        OwnerWord(self.header[OWNERS].load(Ordering::Acquire))
    }

    /// Mask of an inline owner.
    pub(super) fn mask(&self, owner: usize) -> u64 {
        self.get(MASKS + owner)
    }

    /// The list of owners in lower tiers; 0 for none.
    pub(super) fn below(&self) -> u32 {
        (self.get(BELOW) >> 32) as u32
    }

    pub(super) fn children(&self) -> u32 {
        self.get(BELOW) as u32
    }

    /// The next run but one, perhaps.
    pub(super) fn skip(&self) -> u32 {
        (self.get(HINTS) >> 32) as u32
    }

    pub(super) fn era(&self) -> u32 {
        self.get(HINTS) as u32
    }

    /// Marks the run as used. Readers do so too, at most once in an era.
    #[inline]
    pub(super) fn touch(&self, era: u32) {
        if self.era() != era {
            self.put_low(HINTS, era);
        }
    }

    /// Local hash of a block; of the run's memory, if it has fewer.
    #[inline]
    pub(super) fn local(&self, offset: usize) -> BlockHash {
        BlockHash(self.hashes.get(offset).map_or(0, |hash| hash.load(Ordering::Relaxed)))
    }

    /// How many of its first `len` blocks are those of `query`.
    #[inline]
    pub(super) fn common_prefix(&self, len: usize, query: &[BlockHash]) -> usize {
        let n = len.min(query.len()).min(self.hashes.len());
        let (own, query) = (&self.hashes[..n], &query[..n]);
        let mut equal = 0;
        for (own, query) in own.chunks_exact(8).zip(query.chunks_exact(8)) {
            let differing =
                own.iter().zip(query).fold(0, |bits, (own, query)| bits | (own.load(Ordering::Relaxed) ^ query.0));
            if differing != 0 {
                break;
            }
            equal += 8;
        }
        let rest = own[equal..].iter().zip(&query[equal..]);
        equal + rest.take_while(|(own, query)| own.load(Ordering::Relaxed) == query.0).count()
    }
}

/// What the writer does. Between [`Run::begin`] and [`Run::end`] readers wait.
impl Run<'_> {
    pub(super) fn begin(&self) {
        self.put(STATE, self.get(STATE).wrapping_add(1 << 32));
        fence(Ordering::Release);
    }

    pub(super) fn end(&self) {
        pause::point();
        self.header[STATE].store(self.get(STATE).wrapping_add(1 << 32), Ordering::Release);
    }

    /// A new life: an empty run below `parent`. Between begin and end.
    pub(super) fn reset(&self, parent: Option<Place>, capacity: usize, era: u32) {
        let (run, offset) = parent.map_or((0, 0), |parent| (parent.run(), parent.offset()));
        let version = self.get(STATE) & !0xffff_ffff;
        self.put(STATE, version | (offset as u64) << 16 | (capacity as u64) << 8);
        self.put(LINKS, u64::from(run) << 32);
        for word in [BRANCHES, OWNERS, MASKS, MASKS + 1, BELOW] {
            self.put(word, 0);
        }
        self.put(HINTS, u64::from(era));
    }

    /// Ends this life. Between begin and end.
    pub(super) fn vacate(&self) {
        self.put(STATE, self.get(STATE) & !0xffff_ffff);
        self.put(LINKS, 0);
        self.put(OWNERS, 0);
        self.put(BELOW, 0);
    }

    /// Appends a block; there is room.
    pub(super) fn push(&self, local: BlockHash) {
        let state = self.get(STATE);
        self.hashes[State(state).len()].store(local.0, Ordering::Relaxed);
        self.header[STATE].store(state + 1, Ordering::Release);
    }

    /// Appends blocks; there is room.
    #[inline]
    pub(super) fn extend(&self, locals: impl Iterator<Item = BlockHash>) {
        let mut state = self.get(STATE);
        for (hash, local) in self.hashes[State(state).len()..].iter().zip(locals) {
            hash.store(local.0, Ordering::Relaxed);
            state += 1;
        }
        self.header[STATE].store(state, Ordering::Release);
    }

    /// Cuts it to `len` blocks. Between begin and end.
    pub(super) fn truncate(&self, len: usize) {
        self.put(STATE, self.get(STATE) & !0xff | len as u64);
    }

    pub(super) fn set_next(&self, next: u32) {
        pause::point();
        let links = self.get(LINKS) & !0xffff_ffff | u64::from(next);
        self.header[LINKS].store(links, Ordering::Release);
    }

    pub(super) fn set_skip(&self, skip: u32) {
        self.put_high(HINTS, skip);
    }

    pub(super) fn set_branches(&self, branches: u64) {
        pause::point();
        self.header[BRANCHES].store(branches, Ordering::Release);
    }

    pub(super) fn set_children(&self, children: u32) {
        self.put_low(BELOW, children);
    }

    pub(super) fn set_below(&self, below: u32) {
        self.put_high(BELOW, below);
    }

    pub(super) fn set_owners(&self, owners: OwnerWord) {
        pause::point();
        self.header[OWNERS].store(owners.0, Ordering::Release);
    }

    pub(super) fn set_mask(&self, owner: usize, mask: u64) {
        pause::point();
        self.header[MASKS + owner].store(mask, Ordering::Release);
    }
}
