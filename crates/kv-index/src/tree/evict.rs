//! The byte budget: what was least recently stored or matched goes first.
//!
//! Victims are whole runs from which nothing hangs. Runs do not know the engine hashes of their blocks, so each rank's map is
//! swept for them, at once: an entry left behind could later clear a bit of the run's next tenant.

use std::collections::HashSet;

use super::Writer;
use super::owners::Slot;
use super::roster::TIERS;
use super::store::Rank;
use crate::event::Tier;
use crate::hash::HashBuilder;

/// Events between two looks at the budget; an event takes a few hundred kilobytes at most.
const LOOK_EVERY: u64 = 16;

/// Events between two looks at what lies outside of arena and pool; that means a look at every rank.
const COUNT_EVERY: u64 = 256;

/// Shares of the budget, in 32nds: past `HIGH` runs are dropped until `LOW`; `RESERVE` is kept for lists and the table of branches.
const HIGH: usize = 29;
const LOW: usize = 27;
const RESERVE: usize = 1;

impl Writer {
    /// Keeps to the budget: drops what is used least, and bounds what may be taken until the next look.
    pub(super) fn keep_budget(&mut self) {
        if !self.events.is_multiple_of(LOOK_EVERY) {
            return;
        }
        if self.events.is_multiple_of(COUNT_EVERY) {
            self.lists = self.list_bytes();
        }
        let budget = self.limits.bytes / 32;
        let live = self.runs.allocator.live() + self.pool.live() + self.lists;
        if live > HIGH * budget {
            self.evict(live - LOW * budget);
        } else if std::mem::take(&mut self.starved) {
            // All has been taken, though not all is in use: what is free has other sizes than what is wanted.
            self.evict((HIGH - LOW) * budget);
        }
        let taken = self.runs.allocator.resident() + self.pool.resident() + self.lists;
        let room = (self.limits.bytes - RESERVE * budget).saturating_sub(taken);
        self.runs.allocator.allow(room / 2);
        self.pool.allow(room / 2);
    }

    /// Drops runs worth about `bytes`. Cost: a pass over the maps of all ranks for each level of the tree that is dropped; it is
    /// paid once for a sixteenth of the budget.
    fn evict(&mut self, bytes: usize) {
        let mut left = bytes as isize;
        while left > 0 {
            let before = self.runs.allocator.live() + self.pool.live();
            let victims = self.victims(left as usize);
            if victims.is_empty() {
                return;
            }
            for slot in 0..self.ranks.len() {
                self.drop_runs(slot as Slot, &victims);
            }
            let after = self.runs.allocator.live() + self.pool.live();
            left -= before.saturating_sub(after).max(1) as isize;
        }
    }

    /// The least recently used runs from which nothing hangs.
    fn victims(&self, bytes: usize) -> HashSet<u32, HashBuilder> {
        let era = self.runs.era;
        let segments = self.ranks.iter().flatten().flat_map(|rank| &rank.tiers).flat_map(|engines| engines.segments());
        let mut runs: Vec<u32> = segments.map(|(place, _)| place.run()).collect();
        runs.sort_unstable();
        runs.dedup();
        let leaf = |run: &u32| self.runs.run(*run).children() == 0;
        let mut leaves: Vec<(u32, u32)> =
            runs.into_iter().filter(leaf).map(|run| (era.wrapping_sub(self.runs.run(run).era()), run)).collect();
        leaves.sort_unstable_by(|a, b| b.cmp(a));
        let mut freed = 0;
        let enough = |(_, run): &(u32, u32)| {
            let go_on = freed < bytes;
            // A header, and for each block its local hash and an entry of some rank's map.
            freed += 64 + self.runs.run(*run).state().len() * 24;
            go_on
        };
        leaves.into_iter().take_while(enough).map(|(_, run)| run).collect()
    }

    fn drop_runs(&mut self, slot: Slot, victims: &HashSet<u32, HashBuilder>) {
        let Self { runs, pool, ranks, evicted_blocks, .. } = self;
        let Some(rank) = &mut ranks[usize::from(slot)] else { return };
        for tier in TIERS {
            let engines = &mut rank.tiers[tier as usize];
            let doomed: Vec<_> = engines.entries().filter(|(_, place)| victims.contains(&place.run())).collect();
            let mut touched = Vec::new();
            for (entry, place) in doomed {
                let hash = engines.hash(entry);
                engines.remove(hash, entry);
                *evicted_blocks += u64::from(!engines.unalias(place));
                touched.push(place.run());
            }
            touched.sort_unstable();
            touched.dedup();
            rank.evicted |= !touched.is_empty();
            touched.into_iter().for_each(|run| runs.uncover(run, slot, tier, u64::MAX));
            engines.compact(pool);
            count(rank, tier);
        }
    }
}

fn count(rank: &Rank, tier: Tier) {
    // Strays are few, and none of them went.
    rank.counts.set(tier, rank.tiers[tier as usize].distinct());
}
