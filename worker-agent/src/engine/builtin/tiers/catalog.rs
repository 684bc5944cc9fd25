//! Which block is in which tier below the arena, which goes when a tier is full, and what has to be moved for it.
//!
//! Pure: no bytes, file, clock or thread. Blocks come in when the arena evicts them ([`Catalog::offload`]) and are asked for
//! by sequences ([`Catalog::fetch`]); what follows are [`Move`]s, counts, and events in the pool's [`EventLog`].
//!
//! - A block that is taken into the arena again stays where it was: it costs nothing to evict it a second time.
//! - A block is in a tier from the moment when its readers are told until they are told that it is gone, and can be had
//!   for so long. On its way from host memory to disk it is in neither.
//! - A tier may hold a block whose parent is nowhere: nobody finds it then, but whoever computes the parent does. Children
//!   go before their parents as long as both are used together, so this is rare, except after a restart.

use std::collections::HashMap;
use std::time::Duration;

use kv_hashing::SequenceHash;
use kv_index::Tier;
use kv_index::local::{LocalIndexer, RingLimits};
use kv_index::{EngineHash, KvEventData};

use super::ranking::{Held, Ranking};
use super::{CachedBlock, DiskSlot, Done, Move, Policy, ReadFault, Slot, WriteFault};
use crate::engine::builtin::BlockId;
use crate::engine::builtin::pool::EventLog;

mod onboard;
mod room;
#[cfg(test)]
mod tests;

pub use onboard::Found;
use onboard::Read;
use room::DiskRoom;

/// Sizes of the tiers, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// In host memory.
    pub host: usize,
    /// On disk.
    pub disk: usize,
    /// On their way to disk: the bound of that queue.
    pub writes: usize,
    /// On their way from disk, or just come from there.
    pub reads: usize,
    /// Copied into the arena in one step, and for fetches between that and the one before; more wait for the next.
    pub per_step: usize,
}

impl Sizes {
    /// Slots of the slab: those of the host tier, and those of blocks on their way.
    pub fn slots(&self) -> usize {
        self.host + if self.disk > 0 { self.writes + self.reads } else { 0 }
    }
}

/// What has happened, counted in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Came into the tier.
    pub offloaded: u64,
    /// Copied from it into the arena.
    pub onboarded: u64,
    /// Should have come into the tier and did not: its queue was full, or it could not be written.
    pub dropped: u64,
}

/// Failures of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFaults {
    /// Writes that found no space.
    pub full: u64,
    /// Other writes.
    pub write: u64,
    /// Reads.
    pub read: u64,
    /// Blocks that were not what had been written.
    pub damaged: u64,
    /// Reads that took too long.
    pub late: u64,
    /// The disk's thread ended by itself.
    pub stopped: u64,
}

/// A snapshot of the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Blocks in host memory.
    pub host_blocks: usize,
    /// Blocks on disk.
    pub disk_blocks: usize,
    /// Of host memory.
    pub host: TierCounts,
    /// Of the disk.
    pub disk: TierCounts,
    /// Of the disk.
    pub faults: DiskFaults,
}

/// A block on its way to disk.
#[derive(Debug)]
struct Write {
    block: CachedBlock,
    from: Slot,
    to: DiskSlot,
    uses: u64,
    /// Every block was forgotten meanwhile.
    forgotten: bool,
}

/// What is below the arena. Every operation on a block is O(log blocks).
#[derive(Debug)]
pub struct Catalog {
    sizes: Sizes,
    host: Ranking<Slot>,
    disk: Ranking<DiskSlot>,
    /// Slots of the slab with nothing in them.
    free: Vec<Slot>,
    room: DiskRoom,
    writes: HashMap<SequenceHash, Write>,
    reads: HashMap<SequenceHash, Read>,
    /// Nobody reads or writes the disk any more.
    disk_stopped: bool,
    /// Reads that have taken too long and have not ended.
    overdue: usize,
    /// Blocks that may still be copied into the arena before the end of the next step.
    allowance: usize,
    /// Blocks to drop instead of writing them, of those that are being offloaded.
    to_drop: usize,
    /// Counts steps.
    step: u64,
    now: Duration,
    moves: Vec<Move>,
    host_counts: TierCounts,
    disk_counts: TierCounts,
    faults: DiskFaults,
}

impl Catalog {
    /// Tiers of these sizes, with what is on disk already.
    ///
    /// # Panics
    /// When there are more slots than a [`Slot`] can name, or blocks beyond the disk's size.
    pub fn new(sizes: Sizes, policy: Policy, on_disk: Vec<(DiskSlot, CachedBlock)>) -> Self {
        let slots = u32::try_from(sizes.slots()).expect("slots are numbered with 32 bits");
        let mut disk = Ranking::new(policy);
        let mut places = Vec::with_capacity(on_disk.len());
        for (place, block) in on_disk {
            // Of a block that is there twice, the place of one is free.
            if disk.place(block.hash).is_none() {
                disk.insert(Held { block, place, uses: 1, told: false });
                places.push(place);
            }
        }
        let room = DiskRoom::new(sizes.disk, places.into_iter());
        Self {
            sizes,
            host: Ranking::new(policy),
            disk,
            free: (0..slots).rev().map(Slot).collect(),
            room,
            writes: HashMap::new(),
            reads: HashMap::new(),
            disk_stopped: false,
            overdue: 0,
            allowance: sizes.per_step,
            to_drop: 0,
            step: 0,
            now: Duration::ZERO,
            moves: Vec::new(),
            host_counts: TierCounts::default(),
            disk_counts: TierCounts::default(),
            faults: DiskFaults::default(),
        }
    }

    /// Nothing below the arena.
    pub fn none() -> Self {
        Self::new(Sizes::default(), Policy::default(), Vec::new())
    }

    /// Whether there is a tier at all.
    pub fn any(&self) -> bool {
        self.sizes.host + self.sizes.disk > 0
    }

    /// Sizes in force.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// What is there and what has happened.
    pub fn usage(&self) -> TierUsage {
        TierUsage {
            host_blocks: self.host.len(),
            disk_blocks: self.disk.len(),
            host: self.host_counts,
            disk: self.disk_counts,
            faults: self.faults,
        }
    }

    /// What has to be done since the last call, in order.
    pub fn take_moves(&mut self) -> Vec<Move> {
        std::mem::take(&mut self.moves)
    }

    /// Tells what was on disk at the start: parents first, and in the order in which it shall stay, children going first.
    pub fn tell_disk(&mut self, log: &mut EventLog) {
        let mut indexer = LocalIndexer::new(0, RingLimits { events: 0, blocks: 0 });
        let held: Vec<_> = self.disk.drain().collect();
        for Held { block, .. } in &held {
            let parent = block.parent.map(|hash| EngineHash(hash.0));
            indexer.apply(Tier::Disk, KvEventData::Stored { parent, blocks: vec![block.stored()] });
        }
        let mut by_hash: HashMap<_, _> = held.into_iter().map(|held| (held.block.hash.0, held)).collect();
        let mut parents_first = Vec::with_capacity(by_hash.len());
        for event in indexer.dump().into_events() {
            let KvEventData::Stored { blocks, .. } = event.data else { continue };
            parents_first.extend(blocks.iter().filter_map(|block| by_hash.remove(&block.engine.0)));
        }
        parents_first.iter().for_each(|held| log.stored(Tier::Disk, held.block.parent, held.block.stored()));
        parents_first.into_iter().rev().for_each(|held| self.disk.insert(Held { told: true, ..held }));
    }

    /// Takes in blocks that the arena gives up, children before their parents; their bytes are still there, and are copied
    /// before anything else is written to them.
    ///
    /// When more of them have to go to disk than its queue takes, those that go first are dropped, which are tails: a head is of
    /// use without its tail, but not the other way round.
    pub fn offload(&mut self, evicted: &[(BlockId, CachedBlock)], log: &mut EventLog) {
        self.to_drop = self.beyond_queue(evicted);
        for &(from, block) in evicted {
            if self.sizes.host > 0 {
                self.keep_in_host(from, block, log);
            } else if self.sizes.disk > 0 {
                self.send_to_disk(from, block, log);
            }
        }
        for (_, block) in evicted.iter().rev() {
            // Only now, so that a run of blocks is one event, and what went at once is none.
            if let Some(block) = self.host.tell(block.hash) {
                log.stored(Tier::Host, block.parent, block.stored());
            }
        }
    }

    /// Blocks that will have to go to disk, beyond those that its queue takes.
    fn beyond_queue(&self, evicted: &[(BlockId, CachedBlock)]) -> usize {
        let new = evicted.iter().map(|(_, block)| block.hash).filter(|hash| self.host.place(*hash).is_none());
        let leaving = (self.host.len() + new.clone().count()).saturating_sub(self.sizes.host);
        let unwritten = |hash: &SequenceHash| self.disk.place(*hash).is_none() && !self.writes.contains_key(hash);
        let leaving = self.host.next_to_go().chain(new).take(leaving).filter(unwritten).count();
        leaving.saturating_sub(self.sizes.writes.saturating_sub(self.writes.len()))
    }

    fn keep_in_host(&mut self, from: BlockId, block: CachedBlock, log: &mut EventLog) {
        if self.host.touch(block.hash) {
            return;
        }
        if self.host.len() == self.sizes.host
            && let Some(victim) = self.host.pop()
        {
            if victim.told {
                log.removed(Tier::Host, victim.block.hash);
            }
            if !self.write(victim.block, victim.place, victim.uses, log) {
                self.free.push(victim.place);
            }
        }
        let to = self.free.pop().expect("there are slots for all of the host tier and all that is on its way");
        self.moves.push(Move::Offload { from, to });
        self.host.insert(Held { block, place: to, uses: 1, told: false });
        self.host_counts.offloaded += 1;
    }

    /// Without host memory there is only the queue between arena and disk.
    fn send_to_disk(&mut self, from: BlockId, block: CachedBlock, log: &mut EventLog) {
        if self.disk.touch(block.hash) {
            return;
        }
        let Some(&slot) = self.free.last() else { return self.dropped() };
        // The copy comes before the write; it is taken back if there is none.
        self.moves.push(Move::Offload { from, to: slot });
        if self.write(block, slot, 1, log) {
            self.free.pop();
        } else {
            self.moves.pop();
        }
    }

    /// Sends a block to disk unless it is there, or on its way; true when the slot is taken for that.
    fn write(&mut self, block: CachedBlock, from: Slot, uses: u64, log: &mut EventLog) -> bool {
        if self.sizes.disk == 0 || self.disk.touch(block.hash) || self.writes.contains_key(&block.hash) {
            return false;
        }
        if self.disk_stopped {
            self.dropped();
            return false;
        }
        let drops = self.to_drop > 0 || self.writes.len() >= self.sizes.writes;
        self.to_drop = self.to_drop.saturating_sub(1);
        let to = if drops { None } else { self.disk_slot(log) };
        let Some(to) = to else {
            self.dropped();
            return false;
        };
        self.moves.push(Move::Write { from, to, block });
        self.writes.insert(block.hash, Write { block, from, to, uses, forgotten: false });
        true
    }

    fn dropped(&mut self) {
        self.disk_counts.dropped += 1;
    }

    /// Room on disk, if need be that of a block which goes.
    fn disk_slot(&mut self, log: &mut EventLog) -> Option<DiskSlot> {
        if let Some(slot) = self.room.take(self.now) {
            return Some(slot);
        }
        let victim = self.disk.pop()?;
        log.removed(Tier::Disk, victim.block.hash);
        self.reads.entry(victim.block.hash).and_modify(|read| read.outdated = true);
        Some(victim.place)
    }

    /// A move of the disk has ended.
    pub fn done(&mut self, done: Done, log: &mut EventLog) {
        match done {
            Done::Written { hash, outcome } => self.written(hash, outcome, log),
            Done::Read { hash, outcome } => self.read_done(hash, outcome, log),
            Done::Stopped => self.disk_stopped(log),
        }
    }

    /// Nothing on disk is to be had any more, and nothing comes there: routers shall not count on it.
    fn disk_stopped(&mut self, log: &mut EventLog) {
        self.disk_stopped = true;
        self.faults.stopped += 1;
        // Tails first, as when they are evicted.
        for held in self.disk.drain() {
            log.removed(Tier::Disk, held.block.hash);
            self.room.give_back(held.place);
        }
        for write in std::mem::take(&mut self.writes).into_values() {
            self.free.push(write.from);
            self.room.give_back(write.to);
            self.disk_counts.dropped += u64::from(!write.forgotten);
        }
        self.overdue = 0;
        let free = &mut self.free;
        self.reads.retain(|_, read| {
            if !read.landed {
                free.push(read.to);
            }
            read.landed
        });
    }

    fn written(&mut self, hash: SequenceHash, outcome: Result<(), WriteFault>, log: &mut EventLog) {
        let Some(Write { block, from, to, uses, forgotten }) = self.writes.remove(&hash) else { return };
        self.free.push(from);
        match outcome {
            Ok(()) if forgotten => return self.room.give_back(to),
            Ok(()) => {
                self.disk.insert(Held { block, place: to, uses, told: true });
                self.disk_counts.offloaded += 1;
                log.stored(Tier::Disk, block.parent, block.stored());
                return;
            }
            Err(WriteFault::Full) => {
                self.faults.full += 1;
                self.room.refused(to, self.now);
            }
            Err(WriteFault::Failed) => {
                self.faults.write += 1;
                self.room.give_back(to);
            }
        }
        self.dropped();
    }

    fn read_done(&mut self, hash: SequenceHash, outcome: Result<(), ReadFault>, log: &mut EventLog) {
        let Some(read) = self.reads.get_mut(&hash) else { return };
        self.overdue -= usize::from(std::mem::take(&mut read.overdue));
        let Err(fault) = outcome else {
            read.landed = true;
            return;
        };
        let (slot, outdated) = (read.to, read.outdated);
        self.reads.remove(&hash);
        self.free.push(slot);
        // What was read had gone meanwhile: the place may be another's, and the block, if it is there again, is another copy.
        if outdated {
            return;
        }
        match fault {
            ReadFault::Damaged => self.faults.damaged += 1,
            ReadFault::Failed => self.faults.read += 1,
        }
        if let Some(held) = self.disk.remove(hash) {
            log.removed(Tier::Disk, hash);
            self.moves.push(Move::Erase(held.place));
            self.room.give_back(held.place);
        }
    }

    /// Forgets every block in every tier. What is on its way ends up nowhere; files stay as they are, for another life.
    pub fn clear(&mut self) {
        self.free.extend(self.host.drain().map(|held| held.place));
        self.disk.drain().for_each(|held| self.room.give_back(held.place));
        self.reads.values_mut().for_each(|read| read.outdated = true);
        self.writes.values_mut().for_each(|write| write.forgotten = true);
        self.end_step();
    }
}

#[cfg(test)]
impl Catalog {
    /// The blocks that a tier's readers know of, and where they are.
    pub(crate) fn contents(&self, tier: Tier) -> Vec<(SequenceHash, u32)> {
        match tier {
            Tier::Host => self.host.iter().map(|held| (held.block.hash, held.place.0)).collect(),
            Tier::Disk => self.disk.iter().map(|held| (held.block.hash, held.place.0)).collect(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn lose_from_host(&mut self, hash: SequenceHash, log: &mut EventLog) -> bool {
        let Some(held) = self.host.remove(hash) else { return false };
        self.free.push(held.place);
        log.removed(Tier::Host, hash);
        true
    }

    /// Every slot and every place on disk is in exactly one list, and no tier is over its size.
    pub(crate) fn check(&self) {
        let held = self.host.iter().map(|held| held.place);
        let moving = self.writes.values().map(|write| write.from).chain(self.reads.values().map(|read| read.to));
        let mut slots: Vec<_> = self.free.iter().copied().chain(held).chain(moving).collect();
        slots.sort();
        assert_eq!(
            slots,
            (0..self.sizes.slots() as u32).map(Slot).collect::<Vec<_>>(),
            "a slot is lost or given twice"
        );
        assert!(self.host.len() <= self.sizes.host && self.disk.len() <= self.sizes.disk);
        assert!(self.writes.len() <= self.sizes.writes && self.reads.len() <= self.sizes.reads);
        let held = self.disk.iter().map(|held| held.place).chain(self.writes.values().map(|write| write.to));
        self.room.check(held.collect());
        assert!(self.host.iter().all(|held| held.told) && self.disk.iter().all(|held| held.told));
        assert_eq!(self.overdue, self.reads.values().filter(|read| read.overdue).count());
    }
}
