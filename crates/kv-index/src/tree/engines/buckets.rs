//! A table of cache lines: twelve tags and twelve entries each, and how many entries went past it.
//!
//! It knows entries by their tags alone; whose entry it is, its user tells.

use std::sync::atomic::Ordering::Relaxed;

use crate::tree::arena::Line;
use crate::tree::pool::{Lines, Pool};

/// Entries of a bucket: 12 tags + 4 bytes of counters + 12 × 4 bytes of references = 64.
pub(super) const BUCKET: usize = 12;

const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;

/// One entry: segment × 8 + lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tree) struct Entry(u32);

impl Entry {
    pub(super) fn new(segment: usize, lane: usize) -> Self {
        Self((segment * 8 + lane) as u32)
    }

    pub(super) fn segment(self) -> usize {
        self.0 as usize / 8
    }

    pub(super) fn lane(self) -> usize {
        self.0 as usize % 8
    }
}

/// A hash, spread: its high bits choose the bucket, others the tag. Engines may send small numbers.
#[derive(Clone, Copy)]
pub(super) struct Spread(u64);

impl Spread {
    #[inline]
    pub(super) fn of(hash: u64) -> Self {
        let product = u128::from(hash) * 0x9e37_79b9_7f4a_7c15;
        Self(product as u64 ^ (product >> 64) as u64)
    }

    #[inline]
    pub(super) fn bucket(self, buckets: usize) -> usize {
        ((u128::from(self.0) * buckets as u128) >> 64) as usize
    }

    /// Never 0, which marks an empty lane.
    #[inline]
    pub(super) fn tag(self) -> u8 {
        ((self.0 >> 16) as u8).max(1)
    }
}

/// A table of buckets.
#[derive(Default)]
pub(super) struct Buckets {
    pub(super) lines: Lines,
    pub(super) count: usize,
}

impl Buckets {
    pub(super) fn new(pool: &mut Pool, count: usize) -> Option<Self> {
        let count = count.max(1);
        let mut lines = Lines::default();
        if !lines.grow(pool, count) {
            lines.release(pool);
            return None;
        }
        lines.clear();
        Some(Self { lines, count })
    }

    pub(super) fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.count { 0 } else { bucket + 1 }
    }

    /// Bucket, lane and entry.
    #[inline]
    pub(super) fn find(&self, spread: Spread, is: impl Fn(Entry) -> bool) -> Option<(usize, usize, Entry)> {
        if self.count == 0 {
            return None;
        }
        let mut bucket = spread.bucket(self.count);
        for _ in 0..self.count {
            let line = self.lines.line(bucket);
            let mut lanes = lanes_with(line, spread.tag());
            while lanes != 0 {
                let lane = first(&mut lanes);
                let entry = entry(line, lane);
                if is(entry) {
                    return Some((bucket, lane, entry));
                }
            }
            if passed(line) == 0 {
                return None;
            }
            bucket = self.after(bucket);
        }
        None
    }

    #[inline]
    pub(super) fn fill(&self, bucket: usize, lane: usize, tag: u8, entry: Entry) {
        let line = self.lines.line(bucket);
        set_tag(line, lane, tag);
        let (word, shift) = (2 + lane / 2, 32 * (lane % 2));
        let kept = line[word].load(Relaxed) & !(0xffff_ffff << shift);
        line[word].store(kept | u64::from(entry.0) << shift, Relaxed);
    }

    pub(super) fn insert(&self, spread: Spread, entry: Entry) {
        let mut bucket = spread.bucket(self.count);
        loop {
            let line = self.lines.line(bucket);
            let mut empty = lanes_with(line, 0);
            if empty != 0 {
                return self.fill(bucket, first(&mut empty), spread.tag(), entry);
            }
            set_passed(line, passed(line).saturating_add(1));
            bucket = self.after(bucket);
        }
    }

    #[inline]
    pub(super) fn remove(&self, spread: Spread, entry: Entry) {
        if let Some((bucket, lane, _)) = self.find(spread, |other| other == entry) {
            self.take_lane(spread.bucket(self.count), bucket, lane);
        }
    }

    pub(super) fn take_lane(&self, home: usize, at: usize, lane: usize) {
        set_tag(self.lines.line(at), lane, 0);
        let mut bucket = home;
        while bucket != at {
            let line = self.lines.line(bucket);
            // A counter that ever was at its end stays there: it may stand for more.
            if passed(line) != u16::MAX {
                set_passed(line, passed(line) - 1);
            }
            bucket = self.after(bucket);
        }
    }
}

// A bucket's words: tags 0..8; tags 8..12 below the count of entries that passed by; six of two references each.

/// A bit for each lane with the tag: bit 7 of byte n for lane n < 8, bit 6 of byte n - 8 for the others.
#[inline]
pub(super) fn lanes_with(line: &Line, tag: u8) -> u64 {
    let pattern = u64::from_ne_bytes([tag; 8]);
    // The high bit of each byte that is zero, exactly: adding 0x7f carries into it unless the low bits are zero.
    let zero = |x: u64| !(((x & LOW_BITS) + LOW_BITS) | x | LOW_BITS);
    let high = (line[1].load(Relaxed) ^ pattern) & 0xffff_ffff;
    zero(line[0].load(Relaxed) ^ pattern) | (zero(high) & 0xffff_ffff) >> 1
}

#[inline]
pub(super) fn first(lanes: &mut u64) -> usize {
    let bit = lanes.trailing_zeros() as usize;
    *lanes &= *lanes - 1;
    bit / 8 + if bit % 8 == 7 { 0 } else { 8 }
}

#[inline]
pub(super) fn entry(line: &Line, lane: usize) -> Entry {
    Entry((line[2 + lane / 2].load(Relaxed) >> (32 * (lane % 2))) as u32)
}

#[inline]
pub(super) fn tag(line: &Line, lane: usize) -> u8 {
    (line[lane / 8].load(Relaxed) >> (8 * (lane % 8))) as u8
}

#[inline]
pub(super) fn set_tag(line: &Line, lane: usize, tag: u8) {
    let (word, shift) = (lane / 8, 8 * (lane % 8));
    let kept = line[word].load(Relaxed) & !(0xff << shift);
    line[word].store(kept | u64::from(tag) << shift, Relaxed);
}

/// Entries whose home is this bucket or an earlier one and that lie behind it.
#[inline]
pub(super) fn passed(line: &Line) -> u16 {
    (line[1].load(Relaxed) >> 32) as u16
}

#[inline]
pub(super) fn set_passed(line: &Line, count: u16) {
    let kept = line[1].load(Relaxed) & 0xffff_ffff;
    line[1].store(kept | u64::from(count) << 32, Relaxed);
}
