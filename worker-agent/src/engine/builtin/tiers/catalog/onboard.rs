//! The way back: blocks that sequences ask for.
//!
//! A block in host memory is copied into the arena in the step that asks for it, as far as that step's allowance goes. One on
//! disk is first read into a slot, which takes some steps; it is dropped from there when nobody asks for it any more.

use std::time::Duration;

use kv_hashing::SequenceHash;
use kv_index::Tier;

use super::Catalog;
use crate::engine::builtin::BlockId;
use crate::engine::builtin::tiers::{DiskSlot, Move, Slot};

/// A read of the disk that takes longer is not waited for; nor is any other before it has ended.
const READ: Duration = Duration::from_secs(2);

/// A block on its way from disk, or come from there.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) to: Slot,
    pub(super) landed: bool,
    pub(super) overdue: bool,
    since: Duration,
    /// The last step in which somebody asked for it.
    wanted: u64,
    /// The copy that is read has gone from the tier since.
    pub(super) outdated: bool,
}

/// So many times what one step copies, 1 GB, comes from a slow disk while a sequence waits for it.
const IN_TIME: usize = 32;

/// What a sequence learns of the block that it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is copied into the arena before the step.
    Here(Tier),
    /// It comes in a later step; who waits asks in every step.
    Later,
    /// It is nowhere, or does not come in time.
    Nowhere,
}

impl Catalog {
    /// Time since a fixed moment.
    pub fn tick(&mut self, now: Duration) {
        self.now = now;
        for read in self.reads.values_mut().filter(|read| !read.landed && !read.overdue) {
            read.overdue = now.saturating_sub(read.since) > READ;
            self.overdue += usize::from(read.overdue);
            self.faults.late += u64::from(read.overdue);
        }
    }

    /// A step begins, for which sequences ask for blocks.
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// All have asked: what came from disk and is wanted no more goes. From here on, until the end of the next step, as much is
    /// copied again.
    pub fn end_step(&mut self) {
        self.allowance = self.sizes.per_step;
        let (step, free) = (self.step, &mut self.free);
        self.reads.retain(|_, read| {
            let keep = !read.landed || read.wanted == step;
            if !keep {
                free.push(read.to);
            }
            keep
        });
    }

    /// Whether [`Self::fetch`] has any hope. Cost: a few lookups.
    pub fn has(&self, hash: SequenceHash) -> bool {
        let landed = || self.reads.get(&hash).is_some_and(|read| read.landed);
        self.host.place(hash).is_some() || landed() || (self.overdue == 0 && self.disk.place(hash).is_some())
    }

    /// Brings a block into the arena, to where the caller alone writes.
    pub fn fetch(&mut self, hash: SequenceHash, to: BlockId) -> Found {
        if let Some(from) = self.host.place(hash) {
            if self.allowance == 0 {
                return Found::Later;
            }
            self.copy(from, to);
            self.host_counts.onboarded += 1;
            return Found::Here(Tier::Host);
        }
        if self.reads.get(&hash).is_some_and(|read| read.landed) {
            return self.take_landed(hash, to);
        }
        if self.overdue > 0 || !self.read(hash) {
            return Found::Nowhere;
        }
        Found::Later
    }

    /// Whether all these blocks can be had while a sequence waits, and some of them from disk alone.
    pub fn all_below_and_some_on_disk(&self, mut blocks: impl Iterator<Item = SequenceHash>) -> bool {
        let mut on_disk = 0;
        blocks.all(|hash| {
            on_disk += usize::from(self.host.place(hash).is_none());
            self.has(hash)
        }) && (1..=IN_TIME * self.sizes.per_step).contains(&on_disk)
    }

    /// Begins to read a block that the caller will soon ask for, if it is on disk only; false when there is no use in asking
    /// for those behind it.
    pub fn read_ahead(&mut self, hash: SequenceHash) -> bool {
        if self.host.place(hash).is_some() {
            return true;
        }
        if let Some(read) = self.reads.get_mut(&hash) {
            read.wanted = self.step;
            return true;
        }
        self.overdue == 0 && self.disk.place(hash).is_some() && self.begin_read(hash)
    }

    /// Blocks of one sequence were used; the first block of the sequence comes last, so that it stays longest.
    pub fn touch(&mut self, last_to_first: impl Iterator<Item = SequenceHash>) {
        for hash in last_to_first {
            self.host.touch(hash);
            self.disk.touch(hash);
        }
    }

    /// As [`Self::fetch`], of host memory alone, and between two steps.
    pub fn fetch_from_host(&mut self, hash: SequenceHash, to: BlockId) -> bool {
        let Some(from) = self.host.place(hash).filter(|_| self.allowance > 0) else { return false };
        self.copy(from, to);
        self.host_counts.onboarded += 1;
        true
    }

    fn copy(&mut self, from: Slot, to: BlockId) {
        self.allowance -= 1;
        self.moves.push(Move::Onboard { from, to });
    }

    fn take_landed(&mut self, hash: SequenceHash, to: BlockId) -> Found {
        if self.allowance == 0 {
            self.reads.entry(hash).and_modify(|read| read.wanted = self.step);
            return Found::Later;
        }
        if let Some(read) = self.reads.remove(&hash) {
            self.copy(read.to, to);
            self.free.push(read.to);
        }
        self.disk_counts.onboarded += 1;
        Found::Here(Tier::Disk)
    }

    /// Whether the block is on disk and can be waited for.
    fn read(&mut self, hash: SequenceHash) -> bool {
        if let Some(read) = self.reads.get_mut(&hash) {
            read.wanted = self.step;
            return true;
        }
        if self.disk.place(hash).is_none() {
            return false;
        }
        // With all slots taken the caller waits for one: those who have them use them or lose them.
        self.begin_read(hash);
        true
    }

    fn begin_read(&mut self, hash: SequenceHash) -> bool {
        let Some(from) = self.disk.place(hash) else { return false };
        if self.reads.len() >= self.sizes.reads {
            return false;
        }
        let to = self.free.pop().expect("there are slots for all reads");
        self.start_read(hash, from, to);
        true
    }

    fn start_read(&mut self, hash: SequenceHash, from: DiskSlot, to: Slot) {
        self.moves.push(Move::Read { from, to, hash });
        let (since, wanted) = (self.now, self.step);
        self.reads.insert(hash, Read { to, landed: false, overdue: false, since, wanted, outdated: false });
    }
}
