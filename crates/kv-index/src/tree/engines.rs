//! What one rank holds in one tier: engine hash to place, exactly, in about 16 bytes a block.
//!
//! The hashes themselves lie in segments: eight neighbouring places of one run in one cache line, so that a run's blocks are
//! stored, verified and removed line by line. A table of buckets finds them: a bucket is one cache line of twelve tags and
//! twelve references, and an absent hash costs that line alone (or a second one, for one hash in twenty). A bucket counts the
//! entries that had to go past it, so nothing is left behind by removals. The table grows bucket by bucket.

mod buckets;

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use super::arena::CHUNK;
use super::pool::{Lines, Pool};
use super::run::Place;
use super::store::AHEAD;
use crate::hash::HashBuilder;
pub(super) use buckets::Entry;
use buckets::{BUCKET, Buckets, Spread, entry, first, lanes_with, passed, tag};

/// Entries per bucket that a table is sized for: few buckets are full then (Poisson of mean 8: 6 %).
const SIZED_FOR: usize = 8;

/// Entries per bucket, on average, at which it grows; by half.
const FULL: usize = 9;

/// A segment without a run.
const NOWHERE: u32 = u32::MAX;

/// Engine hashes of one (rank, tier).
#[derive(Default)]
pub(super) struct Engines {
    hashes: Lines,
    /// Place of each segment's first lane, or [`NOWHERE`].
    bases: Vec<u32>,
    /// Lanes in use, by segment.
    lanes: Vec<u8>,
    free: Vec<u32>,
    table: Buckets,
    /// The table that entries are moving out of, and the first bucket of it that has not moved.
    moving: Option<(Buckets, usize)>,
    len: usize,
    /// Content under more than one engine hash: how many beyond the first. Empty in practice.
    aliases: HashMap<Place, u32, HashBuilder>,
}

/// Where a hash that is not there would go.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Vacancy {
    home: usize,
    /// A free lane of its home, if there is one.
    lane: Option<usize>,
}

impl Engines {
    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Different blocks.
    pub(super) fn distinct(&self) -> usize {
        self.len - self.aliases.values().map(|n| *n as usize).sum::<usize>()
    }

    /// Bytes outside of the pool.
    pub(super) fn list_bytes(&self) -> usize {
        let lists = (self.bases.capacity() + self.free.capacity()) * 4 + self.lanes.capacity();
        let moving = self.moving.as_ref().map_or(0, |(old, _)| old.lines.list_bytes());
        lists + self.hashes.list_bytes() + self.table.lines.list_bytes() + moving + self.aliases.capacity() * 16
    }

    /// Makes room for `blocks` at once, if it is empty; a hint.
    pub(super) fn expect(&mut self, pool: &mut Pool, blocks: usize) {
        if self.len == 0 && self.table.count < blocks.div_ceil(SIZED_FOR) {
            self.release(pool);
            self.table = Buckets::new(pool, blocks.div_ceil(SIZED_FOR)).unwrap_or_default();
            self.bases.reserve_exact(blocks / 8);
            self.lanes.reserve_exact(blocks / 8);
        }
    }

    /// Gives all memory back.
    pub(super) fn release(&mut self, pool: &mut Pool) {
        self.hashes.release(pool);
        self.table.lines.release(pool);
        if let Some((mut old, _)) = self.moving.take() {
            old.lines.release(pool);
        }
        *self = Self::default();
    }

    /// Gives memory back, if a quarter of the segments is empty: everything is stored again, in order of place.
    pub(super) fn compact(&mut self, pool: &mut Pool) {
        if self.free.len() * 4 <= self.bases.len() || self.hashes.len() <= CHUNK {
            return;
        }
        let all = self.by_place();
        let aliases = std::mem::take(&mut self.aliases);
        self.release(pool);
        self.expect(pool, all.len() + all.len() / 8);
        let mut near = None;
        for (place, hash) in all {
            near = self.insert(pool, hash, place, near, Vacancy::default());
        }
        self.aliases = aliases;
    }

    /// Asks the processor for the line that a hash's entry is in.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        if self.table.count > 0 {
            self.table.lines.prefetch(Spread::of(hash).bucket(self.table.count));
        }
    }

    /// The entry of a hash.
    #[inline]
    pub(super) fn find(&self, hash: u64) -> Option<Entry> {
        let spread = Spread::of(hash);
        self.table_of(spread).find(spread, |entry| self.hash(entry) == hash).map(|(_, _, entry)| entry)
    }

    /// The same, or where it would go.
    #[inline]
    pub(super) fn look(&self, hash: u64) -> Result<Entry, Vacancy> {
        let spread = Spread::of(hash);
        let table = self.table_of(spread);
        if table.count == 0 {
            return Err(Vacancy::default());
        }
        let home = spread.bucket(table.count);
        let line = table.lines.line(home);
        let mut lanes = lanes_with(line, spread.tag());
        while lanes != 0 {
            let entry = entry(line, first(&mut lanes));
            if self.hash(entry) == hash {
                return Ok(entry);
            }
        }
        if passed(line) != 0
            && let Some(entry) = self.find(hash)
        {
            return Ok(entry);
        }
        let mut empty = lanes_with(line, 0);
        Err(Vacancy { home, lane: (empty != 0).then(|| first(&mut empty)) })
    }

    /// The entry of a hash, if it is that of the place after another one.
    #[inline]
    pub(super) fn find_after(&self, before: Entry, hash: u64) -> Option<Entry> {
        self.find_at(before.lane() + 1, before, hash)
    }

    /// The same for the place before.
    #[inline]
    pub(super) fn find_before(&self, after: Entry, hash: u64) -> Option<Entry> {
        self.find_at(after.lane().wrapping_sub(1), after, hash)
    }

    #[inline]
    fn find_at(&self, lane: usize, beside: Entry, hash: u64) -> Option<Entry> {
        let segment = beside.segment();
        let used = lane < 8 && self.lanes[segment] >> lane & 1 == 1;
        (used && self.hashes.line(segment)[lane].load(Relaxed) == hash).then(|| Entry::new(segment, lane))
    }

    /// Where an entry's block is.
    pub(super) fn place(&self, entry: Entry) -> Place {
        Place::from_bits(self.bases[entry.segment()] + entry.lane() as u32)
    }

    /// The engine hash of an entry.
    #[inline]
    pub(super) fn hash(&self, entry: Entry) -> u64 {
        self.hashes.line(entry.segment())[entry.lane()].load(Relaxed)
    }

    /// Every entry, segment by segment.
    pub(super) fn entries(&self) -> impl Iterator<Item = (Entry, Place)> + '_ {
        let segments = self.bases.iter().zip(&self.lanes).enumerate().filter(|(_, (base, _))| **base != NOWHERE);
        segments.flat_map(|(segment, (&base, &lanes))| {
            let used = (0..8_u32).filter(move |lane| lanes >> lane & 1 == 1);
            used.map(move |lane| (Entry::new(segment, lane as usize), Place::from_bits(base + lane)))
        })
    }

    /// Every place with its hashes, in order: the segments are sorted, and so nearly all of their lanes.
    pub(super) fn by_place(&self) -> Vec<(Place, u64)> {
        let used = self.bases.iter().zip(&self.lanes).enumerate().filter(|(_, (base, _))| **base != NOWHERE);
        let mut segments: Vec<(u32, u32)> = used.map(|(segment, (&base, _))| (base, segment as u32)).collect();
        segments.sort_unstable();
        let mut all = Vec::with_capacity(self.len);
        for (n, &(base, segment)) in segments.iter().enumerate() {
            if let Some(&(_, later)) = segments.get(n + AHEAD) {
                self.hashes.prefetch(later as usize);
            }
            let (line, lanes) = (self.hashes.line(segment as usize), self.lanes[segment as usize]);
            let used = (0..8).filter(|lane| lanes >> lane & 1 == 1);
            all.extend(used.map(|lane| (Place::from_bits(base + lane), line[lane as usize].load(Relaxed))));
        }
        // Out of order is only what lies in several segments at one place: the stable sort merges what is in order.
        all.sort();
        all
    }

    /// A hash chosen by a random number, which may fall on nothing.
    pub(super) fn draw(&self, random: u64) -> Option<u64> {
        let segment = ((u128::from(random) * self.bases.len() as u128) >> 64) as usize;
        let lanes = self.lanes.get(segment).copied().filter(|lanes| *lanes != 0)?;
        // The first one in use from a random lane on.
        let start = random as u32 % 8;
        let lane = (start + lanes.rotate_right(start).trailing_zeros()) as usize % 8;
        Some(self.hash(Entry::new(segment, lane)))
    }

    /// Every segment: the place of its first lane, and its lanes in use. A place may be in several.
    pub(super) fn segments(&self) -> impl Iterator<Item = (Place, u8)> + '_ {
        let segments = self.bases.iter().zip(&self.lanes).filter(|(base, _)| **base != NOWHERE);
        segments.map(|(&base, &lanes)| (Place::from_bits(base), lanes))
    }

    /// Another engine hash for content that is held already.
    pub(super) fn alias(&mut self, place: Place) {
        *self.aliases.entry(place).or_default() += 1;
    }

    /// One engine hash of a place is gone; true when another one still names it.
    #[inline]
    pub(super) fn unalias(&mut self, place: Place) -> bool {
        if self.aliases.is_empty() {
            return false;
        }
        let Some(count) = self.aliases.get_mut(&place) else { return false };
        *count -= 1;
        if *count == 0 {
            self.aliases.remove(&place);
        }
        true
    }

    /// Adds a hash that is not there; `near` is an entry likely to be its neighbour, `vacancy` what was found instead of it, if
    /// nothing has changed since. `None` when the pool is exhausted.
    #[inline]
    pub(super) fn insert(
        &mut self,
        pool: &mut Pool,
        hash: u64,
        place: Place,
        near: Option<Entry>,
        mut vacancy: Vacancy,
    ) -> Option<Entry> {
        if self.moving.is_some() || self.len >= self.table.count * FULL {
            self.make_room(pool);
            vacancy.lane = None;
        }
        let spread = Spread::of(hash);
        // A table that could not grow still takes one more entry a bucket while the next one moves it.
        if self.len >= self.table.count * (BUCKET - 2) {
            return None;
        }
        let segment = self.segment(pool, place, near)?;
        let lane = (place.bits() % 8) as usize;
        self.lanes[segment] |= 1 << lane;
        self.hashes.line(segment)[lane].store(hash, Relaxed);
        let entry = Entry::new(segment, lane);
        let table = self.table_of(spread);
        match vacancy.lane {
            Some(lane) => table.fill(vacancy.home, lane, spread.tag(), entry),
            None => table.insert(spread, entry),
        }
        self.len += 1;
        Some(entry)
    }

    #[cold]
    fn make_room(&mut self, pool: &mut Pool) {
        if self.moving.is_some() {
            self.move_bucket(pool);
        } else {
            self.grow(pool);
        }
    }

    /// Takes an entry out of the table and its segment.
    pub(super) fn remove(&mut self, hash: u64, entry: Entry) {
        let spread = Spread::of(hash);
        self.table_of(spread).remove(spread, entry);
        let segment = entry.segment();
        self.lanes[segment] &= !(1 << entry.lane());
        if self.lanes[segment] == 0 {
            self.bases[segment] = NOWHERE;
            self.free.push(segment as u32);
        }
        self.len -= 1;
    }

    /// The segment for a place: its neighbour's, if that has the lane free.
    #[inline]
    fn segment(&mut self, pool: &mut Pool, place: Place, near: Option<Entry>) -> Option<usize> {
        let (base, lane) = (place.bits() & !7, place.bits() & 7);
        if let Some(near) = near {
            let segment = near.segment();
            if self.bases[segment] == base && self.lanes[segment] >> lane & 1 == 0 {
                return Some(segment);
            }
        }
        if let Some(segment) = self.free.pop() {
            self.bases[segment as usize] = base;
            return Some(segment as usize);
        }
        let segment = self.bases.len();
        // An entry's number has 32 bits, eight entries a segment.
        if segment >= 1 << 29 || !self.hashes.grow(pool, segment + 1) {
            return None;
        }
        self.bases.push(base);
        self.lanes.push(0);
        Some(segment)
    }

    #[inline]
    fn table_of(&self, spread: Spread) -> &Buckets {
        match &self.moving {
            Some((old, next)) if spread.bucket(old.count) >= *next => old,
            _ => &self.table,
        }
    }

    /// Starts to move into a larger table. Without memory for one, the old one fills up.
    fn grow(&mut self, pool: &mut Pool) {
        let count = if self.table.count == 0 { 16 } else { self.table.count + self.table.count.div_ceil(2) };
        let Some(table) = Buckets::new(pool, count) else { return };
        let old = std::mem::replace(&mut self.table, table);
        if old.count > 0 {
            self.moving = Some((old, 0));
        }
    }

    /// Moves one bucket's entries. As a table grows by half, and each insertion moves a bucket, one move is over long before
    /// the next can begin.
    fn move_bucket(&mut self, pool: &mut Pool) {
        let Some((mut old, bucket)) = self.moving.take() else { return };
        let mut at = bucket;
        for _ in 0..old.count {
            let line = old.lines.line(at);
            for lane in (0..BUCKET).filter(|&lane| tag(line, lane) != 0) {
                let entry = entry(line, lane);
                let spread = Spread::of(self.hash(entry));
                if spread.bucket(old.count) == bucket {
                    old.take_lane(bucket, at, lane);
                    self.table.insert(spread, entry);
                }
            }
            if passed(line) == 0 {
                break;
            }
            at = old.after(at);
        }
        if bucket + 1 < old.count {
            // Their hashes are needed with the next insertion.
            let line = old.lines.line(bucket + 1);
            let next = (0..BUCKET).filter(|&lane| tag(line, lane) != 0);
            next.for_each(|lane| self.hashes.prefetch(entry(line, lane).segment()));
            self.moving = Some((old, bucket + 1));
        } else {
            old.lines.release(pool);
        }
    }
}
