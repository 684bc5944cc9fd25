//! Matching a prompt, without a lock.
//!
//! A reader walks from run to run. It reads a run's version, then all it needs of the run and of the header of the child it goes
//! to, and then the version again: a change in between makes it start over. Identity of a child (parent, offset, first local
//! hash) under the child's own version, with the parent's version unchanged afterwards, proves the path.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kv_hashing::{BlockHash, SequenceHash, chain};

use super::children::{Branch, Key};
use super::owners::{self, OwnerSet, Slot};
use super::pause;
use super::pooled::Pooled;
use super::roster::Roster;
use super::run::{MAX_RUN, Place, Run, State, low};
use super::{Reader, Shared};
use crate::event::{Tier, WorkerRank};
use crate::overlap::{Overlaps, TierBlocks};

/// Lines of a run that are asked for ahead: the header and 24 hashes.
const LINES: usize = 4;

/// Times that a reader starts over: some seconds of yielding to a writer that lost its core in the middle of a change. After
/// that nothing is known to match, as for any prompt that is new.
const PATIENCE: u64 = 1 << 20;

/// A change met a reader: it starts over.
struct Torn;

/// How much of a prompt each rank holds, in memory that the caller keeps: an answer takes no allocation.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    roster: Arc<Roster>,
    /// A bit for each slot that holds the first block.
    members: Vec<u64>,
    /// A bit for each slot that holds all blocks so far.
    active: Vec<u64>,
    /// By slot; meaningless for slots that are not members.
    blocks: Vec<TierBlocks>,
    /// Whether lower tiers are counted: until they are, nothing is written for active slots.
    tiered: bool,
    /// Owners with a mask of their own that match a whole run, by bit.
    kept: Vec<u64>,
    /// Masks by slot and tier in one run, where there are lower tiers.
    masks: Vec<[u64; 4]>,
    /// Blocks in pools that workers share.
    pooled: Pooled,
}

impl Matches {
    /// Leading blocks of the prompt that `rank` holds.
    pub fn get(&self, rank: WorkerRank) -> TierBlocks {
        self.roster.member(rank).map_or_else(TierBlocks::default, |member| self.of(member.slot))
    }

    /// Every rank with at least one block, in order of rank.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerRank, TierBlocks)> + '_ {
        let all = self.roster.members.iter().map(|member| (member.rank, self.of(member.slot)));
        all.filter(|(_, blocks)| blocks.total() > 0)
    }

    /// How many ranks hold the first block.
    pub fn ranks(&self) -> usize {
        let live = self.members.iter().zip(&self.roster.slots);
        live.map(|(members, slots)| (members & slots).count_ones() as usize).sum()
    }

    /// The same as a value of its own.
    pub fn overlaps(&self) -> Overlaps {
        Overlaps::new(self.iter(), self.pooled.runs(&self.roster))
    }

    /// Of the roster that it was last used with.
    pub(super) fn generation(&self) -> u64 {
        self.roster.generation
    }

    fn of(&self, slot: Slot) -> TierBlocks {
        if has(&self.members, slot) { self.blocks[usize::from(slot)] } else { TierBlocks::default() }
    }

    fn reset(&mut self) {
        let words = self.roster.slots.len();
        for bits in [&mut self.members, &mut self.active] {
            bits.clear();
            bits.resize(words, 0);
        }
        self.blocks.resize(words * 64, TierBlocks::default());
        self.tiered = false;
        self.pooled.clear();
    }

    /// A slot matched `depth` blocks: those not counted in a lower tier were on the device.
    #[inline]
    fn drop_slot(&mut self, slot: usize, depth: usize) {
        let blocks = &mut self.blocks[slot];
        if self.tiered {
            blocks.device = 0;
            blocks.device = depth as u32 - blocks.total();
        } else {
            *blocks = TierBlocks { device: depth as u32, ..TierBlocks::default() };
        }
    }

    /// Drops active slots that are not in `keep`.
    #[inline]
    fn retain(&mut self, keep: impl Fn(usize) -> u64, depth: usize) {
        for word in 0..self.active.len() {
            let dropped = self.active[word] & !keep(word);
            self.active[word] &= !dropped;
            each_bit(word, dropped, |slot| self.drop_slot(slot, depth));
        }
    }

    fn is_over(&self) -> bool {
        self.active.iter().all(|word| *word == 0)
    }

    /// Whether no worker could have the block at `position` and all before it.
    fn is_over_at(&self, position: usize) -> bool {
        self.is_over() && !self.pooled.reaches(position)
    }

    /// A slot with `depth` of a run's `matched` blocks: it is done with, unless that is all of them.
    #[inline]
    fn take(&mut self, slot: Slot, base: usize, depth: usize, matched: usize) -> bool {
        if base == 0 {
            if depth == 0 || usize::from(slot) >= self.members.len() * 64 {
                return false;
            }
            set(&mut self.members, slot);
            set(&mut self.active, slot);
        } else if !has(&self.active, slot) {
            return false;
        }
        if depth == matched {
            return true;
        }
        clear(&mut self.active, slot);
        self.drop_slot(usize::from(slot), base + depth);
        false
    }

    /// Goes through a run of which `matched` blocks are the prompt's, from block `base` on.
    fn visit(&mut self, shared: &Shared, run: &Run<'_>, base: usize, matched: usize) -> Result<(), Torn> {
        if run.below() != 0 || self.tiered {
            self.visit_tiers(shared, Some(run), base, matched, &[]);
            return Ok(());
        }
        let word = run.owners();
        pause::point();
        if word.set() == 0 {
            let mut keep = [None; 2];
            for (at, slot) in word.slots().into_iter().enumerate() {
                let Some(slot) = slot else { continue };
                let depth = depth(run.mask(at), matched);
                keep[at] = self.take(slot, base, depth, matched).then_some(slot);
            }
            let bit = |slot: Option<Slot>, word| slot.map_or(0, |slot| bit_in(slot, word));
            self.retain(|word| bit(keep[0], word) | bit(keep[1], word), base);
            return Ok(());
        }
        let set = OwnerSet::at(&shared.arena, word.set()).ok_or(Torn)?;
        pause::point();
        self.visit_set(&set, base, matched);
        Ok(())
    }

    fn visit_set(&mut self, set: &OwnerSet<'_>, base: usize, matched: usize) {
        let mut kept = std::mem::take(&mut self.kept);
        kept.clear();
        kept.resize(self.active.len(), 0);
        for (slot, mask) in set.exceptions() {
            if self.take(slot, base, depth(mask, matched), matched) {
                set_bit(&mut kept, slot);
            }
        }
        let common = depth(set.common, matched);
        for (word, kept) in kept.iter_mut().enumerate() {
            let exact = set.exact.get(word).map_or(0, |word| word.load(Ordering::Relaxed));
            if base == 0 && common > 0 {
                self.members[word] |= exact;
                self.active[word] |= exact;
            }
            if common == matched {
                *kept |= exact;
            } else {
                let done = self.active[word] & exact & !*kept;
                self.active[word] &= !done;
                each_bit(word, done, |slot| self.drop_slot(slot, base + common));
            }
        }
        self.retain(|word| kept[word], base);
        self.kept = kept;
    }

    /// The same with lower tiers, and with blocks that are not in the tree (`strays`: position in the prompt, slot, tier).
    fn visit_tiers(
        &mut self,
        shared: &Shared,
        run: Option<&Run<'_>>,
        base: usize,
        matched: usize,
        strays: &[(usize, Slot, Tier)],
    ) {
        self.masks.clear();
        self.masks.resize(self.blocks.len(), [0; 4]);
        let pooled = &mut self.pooled;
        let mut add = |slot: Slot, tier: Tier, mask: u64| {
            if tier == Tier::Shared {
                pooled.add(slot, base, mask & low(matched));
            }
            if let Some(masks) = self.masks.get_mut(usize::from(slot)) {
                masks[tier as usize] |= mask;
            }
        };
        if let Some(run) = run {
            owners::on_device(&shared.arena, run).into_iter().for_each(|(slot, mask)| add(slot, Tier::Device, mask));
            owners::below(&shared.arena, run).for_each(|(slot, tier, mask)| add(slot, tier, mask));
        }
        for &(position, slot, tier) in strays {
            add(slot, tier, 1 << (position - base));
        }
        if base == 0 {
            // Whoever has the first block anywhere; the others drop out at once.
            self.active.copy_from_slice(&self.roster.slots);
        }
        if !self.tiered {
            self.tiered = true;
            for word in 0..self.active.len() {
                each_bit(word, self.active[word], |slot| self.blocks[slot] = TierBlocks::default());
            }
        }
        for word in 0..self.active.len() {
            each_bit(word, self.active[word], |slot| {
                let [device, host, disk, pool] = self.masks[slot];
                let depth = depth(device | host | disk | pool, matched);
                let blocks = &mut self.blocks[slot];
                blocks.host += (host & !device & low(depth)).count_ones();
                blocks.disk += (disk & !host & !device & low(depth)).count_ones();
                blocks.shared += (pool & !disk & !host & !device & low(depth)).count_ones();
                if base == 0 && depth > 0 {
                    self.members[word] |= 1 << (slot % 64);
                }
                if depth < matched {
                    self.active[word] &= !(1 << (slot % 64));
                    self.drop_slot(slot, base + depth);
                }
            });
        }
    }
}

/// Leading blocks of a run that a mask covers, of `matched`.
#[inline]
fn depth(mask: u64, matched: usize) -> usize {
    (mask.trailing_ones() as usize).min(matched)
}

#[inline]
fn bit_in(slot: Slot, word: usize) -> u64 {
    if usize::from(slot) / 64 == word { 1 << (slot % 64) } else { 0 }
}

#[inline]
fn has(bits: &[u64], slot: Slot) -> bool {
    bits.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
}

#[inline]
fn set(bits: &mut [u64], slot: Slot) {
    if let Some(word) = bits.get_mut(usize::from(slot) / 64) {
        *word |= 1 << (slot % 64);
    }
}

#[inline]
fn clear(bits: &mut [u64], slot: Slot) {
    if let Some(word) = bits.get_mut(usize::from(slot) / 64) {
        *word &= !(1 << (slot % 64));
    }
}

use set as set_bit;

#[inline]
fn each_bit(word_index: usize, mut word: u64, mut f: impl FnMut(usize)) {
    while word != 0 {
        f(word_index * 64 + word.trailing_zeros() as usize);
        word &= word - 1;
    }
}

/// A run on the way, as it was when it was found.
#[derive(Clone, Copy)]
struct Step<'a> {
    number: u32,
    run: Run<'a>,
    state: State,
}

impl Shared {
    /// The run below `parent` that begins with `local`, as it is now.
    #[inline]
    fn step(&self, number: u32, parent: Option<Place>, local: BlockHash) -> Result<Option<Step<'_>>, Torn> {
        let run = Run::at(&self.arena, number).ok_or(Torn)?;
        let state = run.state();
        pause::point();
        if state.is_changing() && !pause::checks_are_off() {
            return Err(Torn);
        }
        let expected = parent.map_or((0, 0), |parent| (parent.run(), parent.offset()));
        if state.len() == 0 || (run.parent(), state.parent_offset()) != expected {
            return Ok(None);
        }
        Ok((run.local(0) == local).then_some(Step { number, run, state }))
    }

    fn branch(&self, parent: Option<Place>, local: BlockHash) -> Result<Option<Step<'_>>, Torn> {
        let mut found = None;
        let accepted = |branch: Branch| {
            // What is fetched now arrives while the header is read.
            branch.hints.iter().filter(|hint| **hint != 0).for_each(|hint| self.arena.prefetch(*hint, LINES));
            self.arena.prefetch(branch.run, LINES);
            found = self.step(branch.run, parent, local)?;
            Ok(found.is_some())
        };
        self.children.find(Key::new(parent, local), Torn, accepted)?;
        Ok(found)
    }

    /// Where the prompt goes on after `matched` blocks of a run.
    #[inline]
    fn after(&self, at: &Step<'_>, matched: usize, local: BlockHash) -> Result<Option<Step<'_>>, Torn> {
        let place = Place::new(at.number, matched - 1);
        let next = if matched == at.state.len() { at.run.next() } else { 0 };
        if next != 0
            && let Some(step) = self.step(next, Some(place), local)?
        {
            return Ok(Some(step));
        }
        if at.run.branches() & place.bit() == 0 { Ok(None) } else { self.branch(Some(place), local) }
    }
}

impl Reader {
    /// Finds how many leading blocks of a prompt each rank holds. `blocks`: the local hashes of the prompt's full blocks.
    ///
    /// Takes no lock, unless `matches` was last used with another index or before a rank came or went, or there are strays. Cost: a few cache lines for each run of
    /// up to 64 blocks; it ends where nobody who held all earlier blocks holds the next.
    pub fn find(&self, blocks: &[BlockHash], matches: &mut Matches) {
        for tries in 0..PATIENCE {
            if self.try_find(blocks, matches) {
                return;
            }
            wait(tries);
        }
        matches.reset();
    }

    /// False when a change came in between.
    pub(super) fn try_find(&self, blocks: &[BlockHash], matches: &mut Matches) -> bool {
        let shared = &*self.shared;
        if matches.roster.generation != shared.generation.load(Ordering::Acquire) {
            matches.roster = shared.roster().clone();
        }
        matches.reset();
        let walked = self.walk(blocks, matches);
        // A slot may have got another owner meanwhile.
        walked.is_ok() && matches.roster.generation == shared.generation.load(Ordering::Acquire)
    }

    fn walk(&self, prompt: &[BlockHash], matches: &mut Matches) -> Result<(), Torn> {
        let shared = &*self.shared;
        let Some(&first) = prompt.first() else { return Ok(()) };
        // Before the tree: a block that moves there meanwhile is seen here or there.
        let strays =
            if shared.stray_count.load(Ordering::Acquire) > 0 { shared.strays().on_path(prompt) } else { Vec::new() };
        let mut base = 0;
        let mut link = shared.branch(None, first)?;
        let mut last = None;
        while let Some(at) = link {
            shared.arena.prefetch(at.run.skip(), LINES);
            let rest = &prompt[base..];
            let matched = at.run.common_prefix(at.state.len(), rest);
            pause::point();
            if matched == 0 {
                return Err(Torn);
            }
            if strays.is_empty() {
                matches.visit(shared, &at.run, base, matched)?;
            } else {
                let range = |position: &usize| (base..base + matched).contains(position);
                let here: Vec<_> = strays.iter().copied().filter(|(position, _, _)| range(position)).collect();
                matches.visit_tiers(shared, Some(&at.run), base, matched, &here);
            }
            pause::point();
            link = match rest.get(matched) {
                Some(&local) if !matches.is_over_at(base + matched) => shared.after(&at, matched, local)?,
                _ => None,
            };
            pause::point();
            if !at.run.is_still(at.state) {
                return Err(Torn);
            }
            base += matched;
            last = Some(at);
        }
        if let Some(at) = last {
            at.run.touch(shared.era.load(Ordering::Relaxed));
        }
        while !strays.is_empty() && base < prompt.len() && (base == 0 || !matches.is_over_at(base)) {
            let matched = (prompt.len() - base).min(MAX_RUN);
            let range = |position: &usize| (base..base + matched).contains(position);
            let here: Vec<_> = strays.iter().copied().filter(|(position, _, _)| range(position)).collect();
            matches.visit_tiers(shared, None, base, matched, &here);
            base += matched;
        }
        matches.retain(|_| 0, base);
        Ok(())
    }

    /// Whether a rank holds the last block of `prefix`, in any tier, whatever it holds before it.
    pub fn holds(&self, rank: WorkerRank, prefix: &[BlockHash]) -> bool {
        for tries in 0..PATIENCE {
            let roster = self.shared.roster().clone();
            let Some(member) = roster.member(rank) else { return false };
            let held = self.holds_slot(member.slot, prefix);
            if let Ok(held) = held
                && self.shared.generation.load(Ordering::Acquire) == roster.generation
            {
                return held;
            }
            wait(tries);
        }
        false
    }

    fn holds_slot(&self, slot: Slot, prefix: &[BlockHash]) -> Result<bool, Torn> {
        let shared = &*self.shared;
        let Some(&first) = prefix.first() else { return Ok(false) };
        if shared.stray_count.load(Ordering::Acquire) > 0 {
            let sequence: Option<SequenceHash> = prefix.iter().fold(None, |hash, local| Some(chain(hash, *local)));
            if sequence.is_some_and(|sequence| shared.strays().holds(slot, sequence)) {
                return Ok(true);
            }
        }
        let mut rest = prefix;
        let mut link = shared.branch(None, first)?;
        while let Some(at) = link {
            let matched = at.run.common_prefix(at.state.len(), rest);
            let held = [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared]
                .into_iter()
                .fold(0, |bits, tier| bits | owners::mask(&shared.arena, &at.run, slot, tier));
            rest = &rest[matched..];
            link = match rest.first() {
                Some(&local) if matched > 0 => shared.after(&at, matched, local)?,
                _ => None,
            };
            if !at.run.is_still(at.state) || matched == 0 {
                return Err(Torn);
            }
            if rest.is_empty() {
                return Ok(held >> (matched - 1) & 1 == 1);
            }
        }
        Ok(false)
    }
}

/// A writer was at work there. It is done in a moment, unless it lost its core.
fn wait(tries: u64) {
    if tries < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
}
