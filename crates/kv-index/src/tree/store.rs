//! One event of one rank, applied: engine hashes to places, places to coverage.
//!
//! Coverage is changed run by run, not block by block: what an event adds to or takes from a run is collected first.

use std::sync::Arc;

use kv_hashing::{SequenceHash, chain};

use super::engines::{Engines, Entry, Vacancy};
use super::owners::Slot;
use super::pool::Pool;
use super::roster::{Counts, TIERS};
use super::run::Place;
use super::runs::Runs;
use super::strays::Stray;
use crate::event::{EngineHash, StoredBlock, Tier};
use crate::overlap::Applied;

/// Blocks whose lines are asked for ahead: about as many as a core fetches at a time.
pub(super) const AHEAD: usize = 16;

/// What the writer knows of a rank.
pub(super) struct Rank {
    /// By tier.
    pub(super) tiers: [Engines; 4],
    /// Its strays, over all tiers.
    pub(super) strays: usize,
    /// Most blocks, over all tiers.
    pub(super) limit: usize,
    /// Whether blocks that it holds were dropped for want of memory.
    pub(super) evicted: bool,
    pub(super) counts: Arc<Counts>,
}

impl Rank {
    pub(super) fn new(limit: usize) -> Self {
        let tiers = std::array::from_fn(|_| Engines::default());
        Self { tiers, strays: 0, limit, evicted: false, counts: Arc::default() }
    }

    /// Engine hashes over all tiers: what it costs in memory.
    pub(super) fn len(&self) -> usize {
        self.tiers.iter().map(Engines::len).sum::<usize>() + self.strays
    }
}

/// What a stored run continues.
#[derive(Clone, Copy)]
pub(super) enum Parent {
    /// Nothing: it starts a sequence.
    Start,
    /// A block of the rank in the tree; with its entry, when that is of the same tier.
    Block(Place, Option<Entry>),
    /// A prefix of which the tree does not know where it is.
    Prefix(SequenceHash),
}

/// The run that is being changed.
#[derive(Default)]
struct Open {
    /// 0 for none.
    run: u32,
    /// What the rank covers of it in the tier.
    held: u64,
    /// What it is going to get.
    fresh: u64,
    /// What it is going to lose.
    gone: u64,
}

/// One rank and tier at work.
pub(super) struct Hand<'a> {
    pub(super) runs: &'a mut Runs,
    pub(super) pool: &'a mut Pool,
    pub(super) rank: &'a mut Rank,
    pub(super) slot: Slot,
    pub(super) tier: Tier,
    open: Open,
    applied: Applied,
    /// New blocks that the rank may still get.
    room: usize,
    /// Set when there was no memory for an owner.
    exhausted: bool,
}

impl<'a> Hand<'a> {
    pub(super) fn new(runs: &'a mut Runs, pool: &'a mut Pool, rank: &'a mut Rank, slot: Slot, tier: Tier) -> Self {
        let room = rank.limit.saturating_sub(rank.len());
        let (open, applied) = (Open::default(), Applied::default());
        Self { runs, pool, rank, slot, tier, open, applied, room, exhausted: false }
    }

    fn engines(&mut self) -> &mut Engines {
        &mut self.rank.tiers[self.tier as usize]
    }

    /// Stores a run of blocks.
    pub(super) fn store(mut self, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Applied {
        let engines = &self.rank.tiers[self.tier as usize];
        blocks.iter().take(AHEAD).for_each(|block| engines.prefetch(block.engine.0));
        match self.resolve(parent, blocks) {
            Some(Parent::Prefix(prefix)) => self.store_strays(prefix, blocks),
            Some(Parent::Block(place, entry)) => self.store_run(Some(place), entry, blocks),
            Some(Parent::Start) => self.store_run(None, None, blocks),
            // What was dropped here cannot be continued, and asking the worker again would not help.
            None if self.rank.evicted => self.applied.refused = blocks.len(),
            None => self.applied.orphans = blocks.len(),
        }
        self.count();
        self.applied
    }

    /// Looks in the event's own tier first, then in the others: a block that moved down may continue one that did not.
    fn resolve(&self, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Option<Parent> {
        let Some(parent) = parent else { return Some(Parent::Start) };
        for tier in std::iter::once(self.tier).chain(TIERS) {
            let engines = &self.rank.tiers[tier as usize];
            if let Some(entry) = engines.find(parent.0) {
                return Some(Parent::Block(engines.place(entry), (tier == self.tier).then_some(entry)));
            }
            if let Some(stray) = self.stray(tier, parent) {
                return Some(Parent::Prefix(stray.sequence()));
            }
        }
        // That the child's own hash follows from it proves that the parent's is a sequence hash.
        let (named, first) = (SequenceHash(parent.0), blocks.first()?);
        (chain(Some(named), first.local).0 == first.engine.0).then_some(Parent::Prefix(named))
    }

    fn stray(&self, tier: Tier, engine: EngineHash) -> Option<Stray> {
        if self.rank.strays == 0 {
            return None;
        }
        self.runs.shared.strays().get(self.slot, tier, engine)
    }

    fn store_run(&mut self, mut at: Option<Place>, mut near: Option<Entry>, blocks: &[StoredBlock]) {
        let mut stored = 0;
        while stored < blocks.len() && !self.exhausted {
            let Some((first, count)) = self.runs.descend(at, &blocks[stored..]) else { break };
            let last = first.later(count - 1);
            self.runs.pin = Some(last);
            self.open(first.run());
            for n in 0..count {
                if let Some(later) = blocks.get(stored + n + AHEAD) {
                    self.rank.tiers[self.tier as usize].prefetch(later.engine.0);
                }
                near = self.store_block(blocks[stored + n].engine, first.later(n), near);
            }
            (at, stored) = (Some(last), stored + count);
        }
        self.flush();
        self.applied.refused += blocks.len() - stored;
        self.runs.pin = None;
        if let Some(at) = at
            && self.applied.refused > 0
        {
            self.runs.trim(at.run());
        }
    }

    /// One block of the open run; returns its entry, if it has one now.
    #[inline]
    fn store_block(&mut self, engine: EngineHash, place: Place, near: Option<Entry>) -> Option<Entry> {
        let engines = &self.rank.tiers[self.tier as usize];
        let beside = near.and_then(|near| engines.find_after(near, engine.0));
        let vacancy = match beside.map_or_else(|| engines.look(engine.0), Ok) {
            Ok(entry) if engines.place(entry) == place => return Some(entry),
            Ok(entry) => return self.move_here(engine, entry, place, near),
            Err(vacancy) => vacancy,
        };
        if let Some(stray) = self.stray(self.tier, engine) {
            return self.bring_home(engine, stray, place, near);
        }
        if self.room == 0 {
            self.applied.refused += 1;
            return None;
        }
        self.room -= 1;
        self.add(engine.0, place, near, vacancy)
    }

    fn open(&mut self, run: u32) {
        if self.open.run != run {
            self.flush();
            let held = self.runs.mask(run, self.slot, self.tier);
            self.open = Open { run, held, fresh: 0, gone: 0 };
        }
    }

    /// Puts into the tree what was collected.
    fn flush(&mut self) {
        let Open { run, fresh, gone, .. } = std::mem::take(&mut self.open);
        if fresh != 0 && !self.runs.cover(run, self.slot, self.tier, fresh) {
            let lost = fresh.count_ones() as usize;
            self.applied.added -= lost;
            self.applied.refused += lost;
            self.exhausted = true;
        }
        if gone != 0 {
            self.runs.uncover(run, self.slot, self.tier, gone);
        }
    }

    /// A hash that is not known, at a place of the open run.
    #[inline]
    fn add(&mut self, hash: u64, place: Place, near: Option<Entry>, vacancy: Vacancy) -> Option<Entry> {
        let engines = &mut self.rank.tiers[self.tier as usize];
        let Some(entry) = engines.insert(self.pool, hash, place, near, vacancy) else {
            self.applied.refused += 1;
            return None;
        };
        if (self.open.held | self.open.fresh) & place.bit() != 0 {
            engines.alias(place);
        } else {
            self.open.fresh |= place.bit();
            self.applied.added += 1;
        }
        Some(entry)
    }

    /// A hash that meant another place until now.
    fn move_here(&mut self, engine: EngineHash, entry: Entry, place: Place, near: Option<Entry>) -> Option<Entry> {
        let engines = &mut self.rank.tiers[self.tier as usize];
        let old = engines.place(entry);
        engines.remove(engine.0, entry);
        let near = near.filter(|near| *near != entry);
        let entry = self.add(engine.0, place, near, Vacancy::default());
        // First the new place, then the old: what hangs below the old one must not be cut off meanwhile.
        self.flush();
        self.forget(old);
        self.flush();
        self.open(place.run());
        entry
    }

    /// A stray that turned out to be at a place of the tree, or moved there.
    fn bring_home(&mut self, engine: EngineHash, stray: Stray, place: Place, near: Option<Entry>) -> Option<Entry> {
        let same = self.runs.sequence(place) == Some(stray.sequence());
        let entry = self.add(engine.0, place, near, Vacancy::default());
        self.flush();
        self.open(place.run());
        let gone = self.remove_stray(engine).is_some_and(|gone| gone);
        if same && gone {
            self.applied.added = self.applied.added.saturating_sub(1);
        } else {
            self.applied.removed += usize::from(gone);
        }
        entry
    }

    /// One engine hash of a place is gone; the content goes with the last of them.
    fn forget(&mut self, place: Place) {
        if self.engines().unalias(place) {
            return;
        }
        self.open(place.run());
        self.open.gone |= place.bit();
        self.applied.removed += 1;
    }

    /// Removes blocks.
    pub(super) fn remove(mut self, blocks: &[EngineHash]) -> Applied {
        let engines = &self.rank.tiers[self.tier as usize];
        blocks.iter().take(AHEAD).for_each(|block| engines.prefetch(block.0));
        let mut last = None;
        for (n, &engine) in blocks.iter().enumerate() {
            let engines = &mut self.rank.tiers[self.tier as usize];
            if let Some(later) = blocks.get(n + AHEAD) {
                engines.prefetch(later.0);
            }
            // Engines evict from the end: the neighbour is likely to be next.
            let beside = last.and_then(|last| engines.find_before(last, engine.0));
            last = beside.or_else(|| engines.find(engine.0));
            match last {
                Some(entry) => {
                    let place = engines.place(entry);
                    engines.remove(engine.0, entry);
                    self.forget(place);
                }
                None => match self.remove_stray(engine) {
                    Some(gone) => self.applied.removed += usize::from(gone),
                    None => self.applied.unknown += 1,
                },
            }
        }
        self.flush();
        self.count();
        self.applied
    }

    fn remove_stray(&mut self, engine: EngineHash) -> Option<bool> {
        if self.rank.strays == 0 {
            return None;
        }
        let (_, gone) = self.runs.shared.change_strays(|strays| strays.remove(self.slot, self.tier, engine))?;
        self.rank.strays -= 1;
        Some(gone)
    }

    fn store_strays(&mut self, mut prefix: SequenceHash, blocks: &[StoredBlock]) {
        for block in blocks {
            let stray = Stray { parent: prefix, local: block.local };
            prefix = stray.sequence();
            let entry = self.rank.tiers[self.tier as usize].find(block.engine.0);
            let known = self.stray(self.tier, block.engine);
            if known.is_some_and(|known| known.sequence() == prefix) {
                continue;
            }
            if let Some(entry) = entry {
                let place = self.engines().place(entry);
                if self.runs.sequence(place) == Some(prefix) {
                    continue;
                }
                self.rank.tiers[self.tier as usize].remove(block.engine.0, entry);
                self.forget(place);
                self.flush();
            } else if known.is_some() {
                self.applied.removed += usize::from(self.remove_stray(block.engine) == Some(true));
            } else if self.rank.len() >= self.rank.limit || self.runs.shared.strays().is_full() {
                self.applied.refused += 1;
                continue;
            }
            let (slot, tier) = (self.slot, self.tier);
            let new = self.runs.shared.change_strays(|strays| strays.insert(slot, tier, block.engine, stray));
            self.rank.strays += 1;
            self.applied.added += usize::from(new);
        }
    }

    fn count(&mut self) {
        let mut blocks = self.engines().distinct();
        if self.rank.strays > 0 {
            blocks += self.runs.shared.strays().blocks(self.slot, self.tier);
        }
        self.rank.counts.set(self.tier, blocks);
    }

    /// Drops everything that the rank holds in the tier.
    pub(super) fn clear(mut self) -> usize {
        let mut removed = self.engines().distinct();
        let engines = &self.rank.tiers[self.tier as usize];
        let mut touched: Vec<u32> = engines.segments().map(|(place, _)| place.run()).collect();
        touched.dedup();
        for (n, &run) in touched.iter().enumerate() {
            if let Some(&later) = touched.get(n + AHEAD / 2) {
                self.runs.shared.arena.prefetch(later, 1);
            }
            // The same run may come again, and may even be free by then.
            if self.runs.mask(run, self.slot, self.tier) != 0 {
                self.runs.uncover(run, self.slot, self.tier, u64::MAX);
            }
        }
        if self.rank.strays > 0 {
            let strays = self.runs.shared.strays().of(self.slot, self.tier);
            for (engine, _) in strays {
                removed += usize::from(self.remove_stray(engine) == Some(true));
            }
        }
        self.rank.tiers[self.tier as usize].release(self.pool);
        self.rank.counts.set(self.tier, 0);
        removed
    }
}
