//! The scheduler's side of the tiers below the arena: sequences ask them for blocks before a step is chosen.

use std::time::Duration;

use kv_hashing::{BlockHash, SequenceHash};

use super::Scheduler;
use super::sequence::Loaded;
use crate::engine::builtin::BlockId;
use crate::engine::builtin::tiers::catalog::TierUsage;
use crate::engine::builtin::tiers::{Done, Move};

impl Scheduler {
    /// Sets the time since a fixed moment. Waits for the tiers end by it.
    pub fn tick(&mut self, now: Duration) {
        self.now = now;
        self.pool.tick(now);
    }

    /// What has to be done with blocks' bytes, in order, before a step is computed or anybody else writes to the arena.
    pub fn take_moves(&mut self) -> Vec<Move> {
        self.pool.take_moves()
    }

    /// A move of the disk has ended.
    pub fn done(&mut self, done: Done) {
        self.pool.done(done);
    }

    /// What is in the tiers below the arena.
    pub fn tiers(&self) -> TierUsage {
        self.pool.tiers()
    }

    /// Sequences that wait for no more blocks from below since the last call, and how long they have waited by the clock of
    /// [`Self::tick`].
    pub fn take_loaded(&mut self) -> Vec<Loaded> {
        std::mem::take(&mut self.loaded)
    }

    /// Lets every sequence that computes a prompt ask for its next blocks, by rank.
    pub(super) fn fetch_blocks(&mut self) {
        if !self.pool.has_tiers() {
            return;
        }
        self.pool.tiers_mut().begin_step();
        for sequence in self.running.iter_mut().filter(|sequence| !sequence.decodes()) {
            self.loaded.extend(sequence.load(&mut self.pool, self.now));
        }
        self.pool.tiers_mut().end_step();
    }

    /// Copies the blocks of a reserved table from host memory, from `here` on, as many as may be copied for all reservations
    /// between two steps; returns how many leading blocks have their content then.
    pub(super) fn fill_from_host(
        &mut self,
        blocks: &[(BlockHash, SequenceHash)],
        table: &mut [BlockId],
        here: usize,
    ) -> usize {
        let mut filled = here;
        for (index, &(local, hash)) in blocks.iter().enumerate().skip(here) {
            if !self.pool.tiers_mut().fetch_from_host(hash, table[index]) {
                break;
            }
            let parent = index.checked_sub(1).map(|parent| blocks[parent].1);
            table[index] = self.pool.commit(table[index], parent, hash, local);
            filled = index + 1;
        }
        filled
    }
}
