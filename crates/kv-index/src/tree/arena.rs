//! Memory that readers may follow at any time: granules of 64 bytes, named by number, never moved and never given back.
//!
//! The only `unsafe` code of the crate. Everything in here is reached through checked indices as `AtomicU64`, so a reader that
//! follows a stale number reads some other node's words, never foreign memory; versions tell it so afterwards.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

/// Words in a granule: one cache line.
pub(super) const GRANULE: usize = 8;

/// Granules in a slab. 2^20 × 64 bytes = 64 MiB of address space, of which only what is used takes memory.
const SLAB_GRANULES: u32 = 1 << 20;

/// Words of `u64` that the kernel hands out zeroed, on first touch.
pub(super) struct Slab {
    words: Box<[AtomicU64]>,
    /// Words to skip so that granules are cache lines.
    skew: usize,
}

const _: () = assert!(align_of::<AtomicU64>() == align_of::<u64>() && size_of::<AtomicU64>() == size_of::<u64>());

impl Slab {
    /// `granules` of zeroes.
    fn new(granules: u32) -> Self {
        let words: Box<[u64]> = vec![0; (granules as usize + 1) * GRANULE].into_boxed_slice();
        // SAFETY: the box is unique and goes straight back into one; the two types have the same size and alignment (asserted
        // above) and every bit pattern is valid for both.
        let words = unsafe { Box::from_raw(Box::into_raw(words) as *mut [AtomicU64]) };
        let skew = words.as_ptr().addr().wrapping_neg() / size_of::<u64>() % GRANULE;
        let slab = Self { words, skew };
        slab.advise();
        slab
    }

    /// Asks for huge pages: with small ones most of a random access is the page walk.
    #[cfg(target_os = "linux")]
    fn advise(&self) {
        const HUGE: usize = 2 << 20;
        let bytes = size_of_val(&*self.words);
        let start = self.words.as_ptr().addr();
        let (first, last) = (start.next_multiple_of(HUGE), (start + bytes) / HUGE * HUGE);
        if first < last {
            let at = self.words.as_ptr().cast::<u8>().wrapping_add(first - start);
            // SAFETY: whole pages inside of an allocation that lives as long as `self`; this advice changes no contents. That it
            // may be refused is no error: it is only faster.
            let _ =
                unsafe { rustix::mm::madvise(at.cast_mut().cast(), last - first, rustix::mm::Advice::LinuxHugepage) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self) {}

    /// From a granule to the end of the slab.
    fn from(&self, granule: u32) -> Option<&[AtomicU64]> {
        self.words.get(self.skew + granule as usize * GRANULE..)
    }
}

/// Address space for granules, filled slab by slab.
pub(super) struct Arena {
    slabs: Box<[OnceLock<Slab>]>,
}

impl Arena {
    /// Room for about `bytes`: at least one slab, at most 256 GiB, so that a granule's number fits 32 bits.
    pub(super) fn new(bytes: usize) -> Self {
        let slab = SLAB_GRANULES as usize * GRANULE * size_of::<u64>();
        let count = bytes.div_ceil(slab).clamp(1, 4096);
        Self { slabs: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// The words from a granule to the end of its slab; `None` for a number never handed out.
    #[inline]
    pub(super) fn at(&self, granule: u32) -> Option<&[AtomicU64]> {
        self.slabs.get((granule / SLAB_GRANULES) as usize)?.get()?.from(granule % SLAB_GRANULES)
    }

    /// Asks the processor to fetch `lines` cache lines from a granule on.
    #[inline]
    pub(super) fn prefetch(&self, granule: u32, lines: usize) {
        if let Some(words) = self.at(granule) {
            for line in words.chunks(GRANULE).take(lines) {
                prefetch(&line[0]);
            }
        }
    }

    /// Makes a granule's slab usable; false beyond the end of the arena.
    fn grow(&self, granule: u32) -> bool {
        let Some(slab) = self.slabs.get((granule / SLAB_GRANULES) as usize) else { return false };
        slab.get_or_init(|| Slab::new(SLAB_GRANULES));
        true
    }
}

/// Hands out granules. A block freed is handed out again only with the same class, so that what was a node's header stays one.
pub(super) struct Allocator {
    next: u32,
    /// First granule that may not be handed out, for now and ever.
    limit: u32,
    end: u32,
    free: [Vec<u32>; CLASSES],
    live: usize,
}

/// Sizes of blocks: four of nodes, then powers of two for sets of owners.
pub(super) const CLASSES: usize = NODE_GRANULES.len() + 16;

/// Granules of a node with room for 8, 16, 32, 64 blocks: one of header, eight hashes in each other.
const NODE_GRANULES: [u32; 4] = [2, 3, 5, 9];

/// Size class of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(u8);

impl Class {
    /// The node with room for `capacity` blocks, a power of two from 8 to 64.
    pub(super) fn node(capacity: usize) -> Self {
        Self((capacity.trailing_zeros() - 3) as u8)
    }

    /// The least set of at least `words`; `None` beyond 2^15 granules.
    pub(super) fn set(words: usize) -> Option<Self> {
        let log = words.div_ceil(GRANULE).next_power_of_two().trailing_zeros() as usize;
        (log < CLASSES - NODE_GRANULES.len()).then_some(Self((NODE_GRANULES.len() + log) as u8))
    }

    /// As stored in a block.
    pub(super) fn number(self) -> u8 {
        self.0
    }

    /// The class with that number.
    pub(super) fn from_number(number: u8) -> Self {
        Self(number.min(CLASSES as u8 - 1))
    }

    /// Words of a set of this class.
    pub(super) fn words(self) -> usize {
        self.granules() as usize * GRANULE
    }

    fn granules(self) -> u32 {
        match NODE_GRANULES.get(usize::from(self.0)) {
            Some(granules) => *granules,
            None => 1 << (usize::from(self.0) - NODE_GRANULES.len()),
        }
    }
}

impl Allocator {
    /// At most `bytes`, and 4 GiB, so that a place fits 32 bits.
    pub(super) fn new(bytes: usize) -> Self {
        let end = (bytes / (GRANULE * size_of::<u64>())).clamp(4096, 1 << 26) as u32;
        Self { next: 1, limit: end, end, free: std::array::from_fn(|_| Vec::new()), live: 0 }
    }

    /// Lets at most `bytes` of fresh memory be taken for nodes from now on.
    pub(super) fn allow(&mut self, bytes: usize) {
        let granules = u32::try_from(bytes / (GRANULE * size_of::<u64>())).unwrap_or(u32::MAX);
        self.limit = self.next.saturating_add(granules).min(self.end - self.end / 16);
    }

    /// A node, and the blocks it has room for, with whatever words its last tenant left. When there is no fresh memory, any
    /// free one will do.
    pub(super) fn take_node(&mut self, arena: &Arena, capacity: usize) -> Option<(u32, usize)> {
        let class = Class::node(capacity);
        if let Some(at) = self.take(arena, class, self.limit) {
            return Some((at, capacity));
        }
        let other = (0..NODE_GRANULES.len()).rev().find(|class| !self.free[*class].is_empty())?;
        let at = self.take(arena, Class(other as u8), 0)?;
        Some((at, 8 << other))
    }

    /// A set of owners. It may take memory past what is allowed for nodes, because a removal may need one.
    pub(super) fn take_set(&mut self, arena: &Arena, class: Class) -> Option<u32> {
        self.take(arena, class, self.end)
    }

    fn take(&mut self, arena: &Arena, class: Class, limit: u32) -> Option<u32> {
        let granules = class.granules();
        let at = match self.free[usize::from(class.0)].pop() {
            Some(at) => at,
            None => {
                let mut at = self.next;
                if at % SLAB_GRANULES + granules > SLAB_GRANULES {
                    at = at.next_multiple_of(SLAB_GRANULES);
                }
                if at.checked_add(granules)? > limit || !arena.grow(at) {
                    return None;
                }
                self.next = at + granules;
                at
            }
        };
        self.live += granules as usize;
        Some(at)
    }

    /// Takes a block back.
    pub(super) fn give(&mut self, at: u32, class: Class) {
        self.live -= class.granules() as usize;
        self.free[usize::from(class.0)].push(at);
    }

    /// Bytes ever handed out.
    pub(super) fn taken(&self) -> usize {
        self.next as usize * GRANULE * 8
    }

    /// The same, and the lists of free blocks.
    pub(super) fn resident(&self) -> usize {
        self.taken() + self.free.iter().map(|list| list.capacity() * 4).sum::<usize>()
    }

    /// Bytes handed out now.
    pub(super) fn live(&self) -> usize {
        self.live * GRANULE * 8
    }
}

/// Lines in a chunk: 256 × 64 bytes = 16 KiB. It divides the granules of a slab.
pub(super) const CHUNK: usize = 256;

/// A cache line.
pub(super) type Line = [AtomicU64; GRANULE];

/// A piece of a slab that one owner has.
pub(super) struct Chunk {
    lines: NonNull<[Line; CHUNK]>,
    /// What `lines` points into.
    _slab: Arc<Slab>,
}

// SAFETY: it gives out shared references to atomics only, and keeps alive what they are in.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl std::ops::Deref for Chunk {
    type Target = [Line; CHUNK];

    #[inline]
    fn deref(&self) -> &Self::Target {
        // SAFETY: `Chunks::take` made it from a reference into the slab, which is neither moved nor freed while `_slab` is held.
        unsafe { self.lines.as_ref() }
    }
}

/// Hands out chunks.
pub(super) struct Chunks {
    slab: Option<Arc<Slab>>,
    /// Chunks of `slab` that are out.
    used: usize,
}

impl Chunks {
    pub(super) fn new() -> Self {
        Self { slab: None, used: 0 }
    }

    /// A fresh chunk, all zero.
    pub(super) fn take(&mut self) -> Chunk {
        let slab = match &self.slab {
            Some(slab) if (self.used + 1) * CHUNK <= SLAB_GRANULES as usize => slab.clone(),
            _ => {
                self.used = 0;
                self.slab.insert(Arc::new(Slab::new(SLAB_GRANULES))).clone()
            }
        };
        let words = slab.from((self.used * CHUNK) as u32).unwrap_or_default();
        let (lines, _) = words.as_chunks::<GRANULE>();
        let lines = NonNull::from(lines.first_chunk().expect("a slab has room for whole chunks"));
        self.used += 1;
        Chunk { lines, _slab: slab }
    }
}

/// Asks the processor to fetch the line that `word` begins in.
#[inline]
pub(super) fn prefetch(word: &AtomicU64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint without effect on memory, and the address is that of a live reference.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}
