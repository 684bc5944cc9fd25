//! The tree as the writer changes it: blocks appended, branches hung, ends cut, runs freed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kv_hashing::{BlockHash, SequenceHash, chain};

use super::Shared;
use super::arena::{Allocator, Class};
use super::children::Key;
use super::owners::{self, Slot};
use super::run::{MAX_RUN, Place, Run, low};
use crate::event::{StoredBlock, Tier};

/// The writer's side of the tree.
pub(super) struct Runs {
    pub(super) shared: Arc<Shared>,
    pub(super) allocator: Allocator,
    /// Stamp of what is stored or matched now.
    pub(super) era: u32,
    /// End of what is being stored: its run is not cut before it is owned.
    pub(super) pin: Option<Place>,
}

impl Runs {
    /// A run that is in use.
    #[inline]
    pub(super) fn run(&self, run: u32) -> Run<'_> {
        Run::at(&self.shared.arena, run).expect("a run in use lies in a slab in use")
    }

    /// The place of `local` behind `at`, if the tree has it.
    pub(super) fn child(&self, at: Option<Place>, local: BlockHash) -> Option<Place> {
        if let Some(at) = at {
            let run = self.run(at.run());
            let (len, after) = (run.state().len(), at.offset() + 1);
            if after < len && run.local(after) == local {
                return Some(Place::new(at.run(), after));
            }
            if after == len && run.next() != 0 && self.run(run.next()).local(0) == local {
                return Some(Place::new(run.next(), 0));
            }
            if run.branches() & at.bit() == 0 {
                return None;
            }
        }
        self.branch(at, local).map(|run| Place::new(run, 0))
    }

    fn branch(&self, at: Option<Place>, local: BlockHash) -> Option<u32> {
        let parent = at.map_or((0, 0), |at| (at.run(), at.offset()));
        // The writer never meets entries on the move.
        let found = self.shared.children.find(Key::new(at, local), (), |branch| {
            let run = self.run(branch.run);
            Ok((run.parent(), run.state().parent_offset()) == parent && run.local(0) == local)
        });
        found.ok().flatten().map(|branch| branch.run)
    }

    /// The place of the first of `blocks` behind `at`, made if it is not there, and how many of them follow in the same run.
    /// `None` when there is no memory.
    #[inline]
    pub(super) fn descend(&mut self, at: Option<Place>, blocks: &[StoredBlock]) -> Option<(Place, usize)> {
        let first = self.descend_one(at, blocks.first()?.local, blocks.len() - 1)?;
        let run = self.run(first.run());
        let (state, start) = (run.state(), first.offset());
        let mut count = 1;
        while count < blocks.len() && start + count < state.len() && run.local(start + count) == blocks[count].local {
            count += 1;
        }
        if start + count == state.len() && run.next() == 0 && run.branches() >> (state.len() - 1) & 1 == 0 {
            let fit = blocks.len().min(state.capacity() - start);
            run.extend(blocks[count..fit.max(count)].iter().map(|block| block.local));
            count = fit.max(count);
        }
        Some((first, count))
    }

    #[inline]
    fn descend_one(&mut self, at: Option<Place>, local: BlockHash, ahead: usize) -> Option<Place> {
        if let Some(place) = self.child(at, local) {
            return Some(place);
        }
        if let Some(at) = at {
            let run = self.run(at.run());
            let state = run.state();
            if at.offset() + 1 == state.len() {
                // A run with room has no next one: that is made when it is full, and keeps it full.
                if state.len() < state.capacity() {
                    run.push(local);
                    return Some(Place::new(at.run(), at.offset() + 1));
                }
                if run.next() == 0 {
                    return self.continue_run(at, local, ahead);
                }
            }
        }
        self.hang(at, local, ahead)
    }

    /// A new run right behind a full one.
    fn continue_run(&mut self, at: Place, local: BlockHash, ahead: usize) -> Option<Place> {
        let (capacity, parent, offset) = {
            let run = self.run(at.run());
            (run.state().capacity(), run.parent(), run.state().parent_offset())
        };
        let before = (parent != 0).then(|| self.run(parent)).filter(|before| before.next() == at.run());
        // Twice the room with each run of a chain: short chains stay small, long ones get few runs.
        let room = if before.is_some() { (2 * capacity).min(MAX_RUN) } else { capacity };
        let new = self.create(Some(at), local, room.max(capacity_for(ahead + 1)))?;
        let run = self.run(at.run());
        run.set_next(new);
        run.set_children(run.children() + 1);
        self.hint(at.run(), 0, new);
        if parent != 0 && self.run(parent).next() == at.run() && offset + 1 == self.run(parent).state().len() {
            self.run(parent).set_skip(new);
            self.hint(parent, 1, new);
        }
        Some(Place::new(new, 0))
    }

    /// Tells a branch's entry in the table which run comes `which` + 1 runs later.
    fn hint(&self, run: u32, which: usize, later: u32) {
        let (view, state) = (self.run(run), self.run(run).state());
        let is_next = view.parent() != 0 && self.run(view.parent()).next() == run;
        if !is_next {
            let parent = (view.parent() != 0).then(|| Place::new(view.parent(), state.parent_offset()));
            self.shared.children.hint(Key::new(parent, view.local(0)), run, which, later);
        }
    }

    /// A new run as a branch.
    fn hang(&mut self, at: Option<Place>, local: BlockHash, ahead: usize) -> Option<Place> {
        let new = self.create(at, local, capacity_for(ahead + 1))?;
        if !self.shared.children.insert(Key::new(at, local), new) {
            self.vacate(new);
            return None;
        }
        if let Some(at) = at {
            let run = self.run(at.run());
            run.set_children(run.children() + 1);
            run.set_branches(run.branches() | at.bit());
        }
        Some(Place::new(new, 0))
    }

    fn create(&mut self, parent: Option<Place>, local: BlockHash, capacity: usize) -> Option<u32> {
        let (new, capacity) = self.allocator.take_node(&self.shared.arena, capacity)?;
        let run = self.run(new);
        run.begin();
        run.reset(parent, capacity, self.era);
        run.push(local);
        run.end();
        Some(new)
    }

    fn vacate(&mut self, at: u32) {
        let Self { shared, allocator, .. } = self;
        let Some(run) = Run::at(&shared.arena, at) else { return };
        let class = Class::node(run.state().capacity());
        owners::release(&shared.arena, allocator, &run);
        run.begin();
        run.vacate();
        run.end();
        allocator.give(at, class);
    }

    /// What a slot covers of a run.
    #[inline]
    pub(super) fn mask(&self, run: u32, slot: Slot, tier: Tier) -> u64 {
        owners::mask(&self.shared.arena, &self.run(run), slot, tier)
    }

    /// Gives a slot more blocks of a run. False when there is no memory for it.
    pub(super) fn cover(&mut self, run: u32, slot: Slot, tier: Tier, bits: u64) -> bool {
        self.change(run, slot, tier, |mask| mask | bits)
    }

    /// Takes blocks of a run from a slot; a run, or an end of one, that nobody needs any more is gone then.
    pub(super) fn uncover(&mut self, run: u32, slot: Slot, tier: Tier, bits: u64) {
        self.change(run, slot, tier, |mask| mask & !bits);
        self.trim(run);
    }

    fn change(&mut self, at: u32, slot: Slot, tier: Tier, change: impl FnOnce(u64) -> u64) -> bool {
        let Self { shared, allocator, era, .. } = self;
        let Some(run) = Run::at(&shared.arena, at) else { return false };
        let owned = owners::union(&shared.arena, &run).count_ones();
        let mask = change(owners::mask(&shared.arena, &run, slot, tier));
        let done = owners::set_mask(&shared.arena, allocator, &run, slot, tier, mask);
        run.touch(*era);
        let now = owners::union(&shared.arena, &run).count_ones();
        let distinct = shared.distinct.load(Ordering::Relaxed) + now as usize - owned as usize;
        shared.distinct.store(distinct, Ordering::Relaxed);
        done
    }

    /// Cuts the end of a run that nobody owns and nothing hangs from; frees the run, and goes on above it, when that is all.
    pub(super) fn trim(&mut self, mut at: u32) {
        while at != 0 {
            let run = self.run(at);
            let state = run.state();
            if run.branches() != 0 && run.children() == u32::from(run.next() != 0) {
                run.set_branches(0);
            }
            let mut needed = owners::union(&self.shared.arena, &run) | run.branches();
            if run.next() != 0 {
                needed |= 1 << (state.len() - 1);
            }
            needed |= self.pin.filter(|pin| pin.run() == at).map_or(0, Place::bit);
            let keep = 64 - needed.leading_zeros() as usize;
            if keep >= state.len() {
                return;
            }
            if keep > 0 {
                run.begin();
                run.truncate(keep);
                run.end();
                return;
            }
            let parent = run.parent();
            self.detach(at);
            self.vacate(at);
            at = parent;
        }
    }

    fn detach(&mut self, at: u32) {
        let run = self.run(at);
        let (parent, offset) = (run.parent(), run.state().parent_offset());
        if parent == 0 {
            return self.shared.children.remove(Key::new(None, run.local(0)), at);
        }
        let above = self.run(parent);
        if above.next() == at {
            above.set_next(0);
        } else {
            self.shared.children.remove(Key::new(Some(Place::new(parent, offset)), run.local(0)), at);
        }
        above.set_children(above.children() - 1);
    }

    /// Local hashes from the start of the sequence to a place.
    pub(super) fn path(&self, place: Place) -> Vec<BlockHash> {
        let mut path = Vec::new();
        let (mut at, mut len) = (place.run(), place.offset() + 1);
        while at != 0 {
            let run = self.run(at);
            path.extend((0..len).rev().map(|offset| run.local(offset)));
            (at, len) = (run.parent(), run.state().parent_offset() + 1);
        }
        path.reverse();
        path
    }

    /// Hash of the prefix that ends at a place. Cost: the length of the prefix.
    pub(super) fn sequence(&self, place: Place) -> Option<SequenceHash> {
        self.path(place).into_iter().fold(None, |sequence, local| Some(chain(sequence, local)))
    }

    /// The place before another one; `None` before the first.
    pub(super) fn before(&self, place: Place) -> Option<Place> {
        if place.offset() > 0 {
            return Some(Place::new(place.run(), place.offset() - 1));
        }
        let run = self.run(place.run());
        (run.parent() != 0).then(|| Place::new(run.parent(), run.state().parent_offset()))
    }
}

fn capacity_for(blocks: usize) -> usize {
    blocks.clamp(8, MAX_RUN).next_power_of_two()
}

const _: () = assert!(low(MAX_RUN).count_ones() as usize == MAX_RUN);
