//! The obvious index, which the fast one is tested against: one flat table from sequence hash to owners.
//!
//! A sequence hash names a whole prefix, so there are no branches to keep: an entry nobody owns is gone, and a removed middle
//! block simply cuts the prefix until it is stored again. Engine hashes are opaque; each rank keeps what it needs to turn them
//! into sequence hashes.

mod holdings;
mod slots;

use std::collections::{BTreeMap, HashMap};

use kv_hashing::{BlockHash, BlockSize, HashSpace, SequenceHash, chain, sequence_hashes};

use crate::MAX_RANK_BLOCKS;
use crate::event::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use crate::hash::HashBuilder;
use crate::index::KvIndex;
use crate::overlap::{Applied, Overlaps, PooledRun, TierBlocks};
use holdings::{Holdings, TIERS};
use slots::{Owners, Slot, SlotMask};

/// Which rank holds which prefix.
///
/// Cost: an event takes one lookup per block; a match one lookup per matched block and ends at the first block that nobody
/// who held all earlier ones holds; removing a worker one lookup per block it held.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    /// Entries have at least one owner.
    table: HashMap<SequenceHash, Owners, HashBuilder>,
    slot_of: BTreeMap<WorkerRank, Slot>,
    /// By slot; `None` is free.
    ranks: Vec<Option<Holdings>>,
    free: Vec<Slot>,
    /// Most blocks of a rank, where it is not [`MAX_RANK_BLOCKS`]; kept while the rank is empty.
    limits: BTreeMap<WorkerRank, usize>,
}

impl PrefixIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies one event of `rank` to `tier`.
    ///
    /// A stored run whose parent is unknown to the rank (in every tier) is refused whole, unless its hashes themselves name the
    /// prefix. Duplicates have no effect; an engine
    /// hash stored again elsewhere moves there. `Cleared` empties every tier of the rank.
    ///
    /// A rank that holds as many blocks as it may gets no more: further ones are counted as refused, so that less is expected of
    /// the rank than it has, never more. Removals make room again.
    pub fn apply(&mut self, rank: WorkerRank, tier: Tier, data: &KvEventData) -> Applied {
        match data {
            KvEventData::Stored { parent, blocks } => self.store(rank, tier, *parent, blocks),
            KvEventData::Removed { blocks } => self.remove(rank, tier, blocks),
            KvEventData::Cleared => Applied { removed: self.remove_rank(rank), ..Applied::default() },
        }
    }

    /// Bounds the blocks of a rank, over all tiers, until its worker is removed. What it holds already stays.
    pub fn set_limit(&mut self, rank: WorkerRank, blocks: usize) {
        self.limits.insert(rank, blocks);
    }

    /// Forgets every rank of a worker; returns how many blocks it held, over all tiers.
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let ranks: Vec<WorkerRank> = self.ranks_of(worker).map(|(rank, _)| rank).collect();
        self.limits.retain(|rank, _| rank.worker != worker);
        ranks.into_iter().map(|rank| self.remove_rank(rank)).sum()
    }

    /// Forgets one rank; returns how many blocks it held, over all tiers.
    pub fn remove_rank(&mut self, rank: WorkerRank) -> usize {
        let Some(slot) = self.slot_of.remove(&rank) else { return 0 };
        let holdings = self.ranks[slot.index()].take().expect("a slot in use has holdings");
        self.free.push(slot);
        let mut removed = 0;
        for tier in TIERS {
            for sequence in holdings.sequences(tier) {
                removed += usize::from(self.release(sequence, tier, slot));
            }
        }
        removed
    }

    /// How many leading blocks of a prompt each rank holds. Shapes: `blocks` are the local hashes of the prompt's full blocks.
    pub fn find_matches(&self, blocks: &[BlockHash]) -> Overlaps {
        let mut walk = Walk::new(self.ranks.len());
        let mut sequence = None;
        for (depth, &local) in blocks.iter().enumerate() {
            let hash = chain(sequence, local);
            sequence = Some(hash);
            let Some(owners) = self.table.get(&hash) else { break };
            if !walk.step(depth as u32, owners) {
                break;
            }
        }
        let depths = walk.finish();
        Overlaps::new(self.slot_of.iter().map(|(&rank, slot)| (rank, depths[slot.index()])), self.pooled(blocks))
    }

    /// Every block of a prompt that a rank has in its shared pool.
    fn pooled(&self, blocks: &[BlockHash]) -> Vec<PooledRun> {
        let mut found = Vec::new();
        for (start, sequence) in (0..).zip(sequence_hashes(blocks)) {
            let slots = self.table.get(&sequence).map(Owners::pooled).unwrap_or_default();
            let of = |rank: &WorkerRank| found.push(PooledRun { rank: *rank, start, len: 1 });
            self.slot_of.iter().filter(|(_, slot)| slots.contains(**slot)).map(|(rank, _)| rank).for_each(of);
        }
        found
    }

    /// Like [`Self::find_matches`], from the tokens of a prompt.
    pub fn find_matches_for_request(&self, tokens: &[u32], size: BlockSize, space: HashSpace) -> Overlaps {
        self.find_matches(&space.blocks(tokens, size))
    }

    /// Whether a rank holds the block that ends this prefix, in any tier. Cost: two lookups.
    pub fn holds(&self, rank: WorkerRank, prefix: SequenceHash) -> bool {
        let Some(slot) = self.slot_of.get(&rank) else { return false };
        self.table.get(&prefix).is_some_and(|owners| owners.contains(*slot))
    }

    /// Blocks that a rank holds; a block in two tiers counts in both.
    pub fn blocks(&self, rank: WorkerRank) -> TierBlocks {
        let mut counts = TierBlocks::default();
        if let Some(slot) = self.slot_of.get(&rank) {
            let holdings = self.holdings(*slot);
            for tier in TIERS {
                *counts.of(tier) = holdings.distinct(tier) as u32;
            }
        }
        counts
    }

    /// Distinct prefixes in the index.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether no rank holds anything.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    fn ranks_of(&self, worker: WorkerId) -> impl Iterator<Item = (WorkerRank, Slot)> + '_ {
        let at = |dp_rank| WorkerRank { worker, dp_rank };
        self.slot_of.range(at(0)..=at(u32::MAX)).map(|(rank, slot)| (*rank, *slot))
    }

    fn holdings(&self, slot: Slot) -> &Holdings {
        self.ranks[slot.index()].as_ref().expect("a slot in use has holdings")
    }

    fn holdings_mut(&mut self, slot: Slot) -> &mut Holdings {
        self.ranks[slot.index()].as_mut().expect("a slot in use has holdings")
    }

    fn slot(&mut self, rank: WorkerRank) -> Slot {
        if let Some(slot) = self.slot_of.get(&rank) {
            return *slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.ranks.push(None);
            Slot::new(self.ranks.len() - 1)
        });
        self.ranks[slot.index()] = Some(Holdings::default());
        self.slot_of.insert(rank, slot);
        slot
    }

    fn store(&mut self, rank: WorkerRank, tier: Tier, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Applied {
        let mut applied = Applied::default();
        let Some(first) = blocks.first() else { return applied };
        let mut sequence = None;
        if let Some(parent) = parent {
            sequence = self.parent_sequence(rank, tier, parent, first);
            if sequence.is_none() {
                applied.orphans = blocks.len();
                return applied;
            }
        }
        let slot = self.slot(rank);
        let limit = self.limits.get(&rank).copied().unwrap_or(MAX_RANK_BLOCKS);
        for block in blocks {
            let hash = chain(sequence, block.local);
            sequence = Some(hash);
            let holdings = self.holdings(slot);
            if holdings.len() >= limit && !holdings.contains(tier, block.engine) {
                applied.refused += 1;
                continue;
            }
            match self.holdings_mut(slot).insert(tier, block.engine, hash) {
                Some(old) if old == hash => continue,
                Some(old) => applied.removed += usize::from(self.forget(tier, slot, old)),
                None => {}
            }
            if self.table.entry(hash).or_default().insert(tier, slot) {
                applied.added += 1;
            } else {
                self.holdings_mut(slot).alias(tier, hash);
            }
        }
        if self.holdings(slot).is_empty() {
            self.remove_rank(rank);
        }
        applied
    }

    /// The prefix that `first` continues. An engine whose hashes are sequence hashes names it even when the rank does not hold
    /// the parent (evicted, or lost on the way): that the child's own hash follows from it proves so.
    fn parent_sequence(
        &self,
        rank: WorkerRank,
        tier: Tier,
        parent: EngineHash,
        first: &StoredBlock,
    ) -> Option<SequenceHash> {
        let known = self.slot_of.get(&rank).and_then(|slot| self.holdings(*slot).resolve(tier, parent));
        let named = SequenceHash(parent.0);
        known.or_else(|| (chain(Some(named), first.local).0 == first.engine.0).then_some(named))
    }

    fn remove(&mut self, rank: WorkerRank, tier: Tier, blocks: &[EngineHash]) -> Applied {
        let mut applied = Applied::default();
        let Some(&slot) = self.slot_of.get(&rank) else {
            return Applied { unknown: blocks.len(), ..applied };
        };
        for &engine in blocks {
            match self.holdings_mut(slot).remove(tier, engine) {
                Some(sequence) => applied.removed += usize::from(self.forget(tier, slot, sequence)),
                None => applied.unknown += 1,
            }
        }
        if self.holdings(slot).is_empty() {
            self.remove_rank(rank);
        }
        applied
    }

    /// One engine hash for `sequence` went away; the content goes with the last of them.
    fn forget(&mut self, tier: Tier, slot: Slot, sequence: SequenceHash) -> bool {
        !self.holdings_mut(slot).unalias(tier, sequence) && self.release(sequence, tier, slot)
    }

    fn release(&mut self, sequence: SequenceHash, tier: Tier, slot: Slot) -> bool {
        let Some(owners) = self.table.get_mut(&sequence) else { return false };
        let held = owners.remove(tier, slot);
        if owners.is_empty() {
            self.table.remove(&sequence);
        }
        held
    }
}

impl KvIndex for PrefixIndex {
    fn apply(&mut self, rank: WorkerRank, tier: Tier, data: &KvEventData) -> Applied {
        Self::apply(self, rank, tier, data)
    }

    fn set_limit(&mut self, rank: WorkerRank, blocks: usize) {
        Self::set_limit(self, rank, blocks);
    }

    fn remove_worker(&mut self, worker: WorkerId) -> usize {
        Self::remove_worker(self, worker)
    }

    fn remove_rank(&mut self, rank: WorkerRank) -> usize {
        Self::remove_rank(self, rank)
    }

    fn find_matches(&self, blocks: &[BlockHash]) -> Overlaps {
        Self::find_matches(self, blocks)
    }

    fn holds(&self, rank: WorkerRank, prefix: &[BlockHash]) -> bool {
        sequence_hashes(prefix).last().is_some_and(|sequence| Self::holds(self, rank, *sequence))
    }

    fn blocks(&self, rank: WorkerRank) -> TierBlocks {
        Self::blocks(self, rank)
    }

    fn len(&self) -> usize {
        Self::len(self)
    }
}

/// The state of one match: who still holds everything so far, and what the others had when they fell out.
struct Walk {
    active: SlotMask,
    /// Blocks in tiers below the device, by slot.
    blocks: Vec<TierBlocks>,
    depth: u32,
}

impl Walk {
    fn new(slots: usize) -> Self {
        Self { active: SlotMask::default(), blocks: vec![TierBlocks::default(); slots], depth: 0 }
    }

    /// Takes the owners of block `depth`; false when nobody is left.
    fn step(&mut self, depth: u32, owners: &Owners) -> bool {
        let Self { active, blocks, .. } = self;
        if depth == 0 {
            *active = owners.any_tier();
        } else {
            owners.retain(active, |slot| finish_slot(&mut blocks[slot.index()], depth));
        }
        owners.each_below_device(active, |slot, tier| *blocks[slot.index()].of(tier) += 1);
        self.depth = depth + 1;
        !active.is_empty()
    }

    fn finish(mut self) -> Vec<TierBlocks> {
        let depth = self.depth;
        self.active.for_each(|slot| finish_slot(&mut self.blocks[slot.index()], depth));
        self.blocks
    }
}

/// A rank matched `depth` blocks: those not counted in a lower tier were on the device.
fn finish_slot(blocks: &mut TierBlocks, depth: u32) {
    blocks.device = depth - blocks.total();
}

#[cfg(test)]
mod tests;
