//! What one rank holds: engine hash to sequence hash, tier by tier.

use std::collections::{HashMap, HashSet};

use kv_hashing::SequenceHash;

use crate::event::{EngineHash, Tier};
use crate::hash::HashBuilder;

/// Every tier, fastest first; a tier's place here is its discriminant.
pub(super) const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared];

/// One tier of one rank.
#[derive(Debug, Default)]
struct TierMap {
    /// Blocks whose engine hash is their sequence hash: engines with deterministic ids pay 8 bytes instead of 16.
    same: HashSet<u64, HashBuilder>,
    other: HashMap<EngineHash, SequenceHash, HashBuilder>,
    /// Content under more than one engine hash: how many beyond the first. Empty in practice.
    aliases: HashMap<SequenceHash, u32, HashBuilder>,
}

/// Everything one rank holds.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    tiers: [TierMap; TIERS.len()],
}

impl Holdings {
    fn tier(&self, tier: Tier) -> &TierMap {
        &self.tiers[tier as usize]
    }

    fn tier_mut(&mut self, tier: Tier) -> &mut TierMap {
        &mut self.tiers[tier as usize]
    }

    /// The prefix behind an engine hash: first in the event's own tier, then in the others, since a block that moved down may
    /// continue one that did not.
    pub(super) fn resolve(&self, tier: Tier, engine: EngineHash) -> Option<SequenceHash> {
        std::iter::once(tier).chain(TIERS).find_map(|tier| self.tier(tier).get(engine))
    }

    /// Maps an engine hash; returns what it meant before.
    pub(super) fn insert(&mut self, tier: Tier, engine: EngineHash, sequence: SequenceHash) -> Option<SequenceHash> {
        let map = self.tier_mut(tier);
        if engine.0 == sequence.0 {
            let was_same = !map.same.insert(engine.0);
            return if was_same { Some(sequence) } else { map.other.remove(&engine) };
        }
        let was_same = map.same.remove(&engine.0).then_some(SequenceHash(engine.0));
        was_same.or(map.other.insert(engine, sequence))
    }

    /// Drops an engine hash; returns what it meant.
    pub(super) fn remove(&mut self, tier: Tier, engine: EngineHash) -> Option<SequenceHash> {
        let map = self.tier_mut(tier);
        if map.same.remove(&engine.0) { Some(SequenceHash(engine.0)) } else { map.other.remove(&engine) }
    }

    /// Another engine hash for content that the tier holds already.
    pub(super) fn alias(&mut self, tier: Tier, sequence: SequenceHash) {
        *self.tier_mut(tier).aliases.entry(sequence).or_default() += 1;
    }

    /// One engine hash for `sequence` is gone; true when another one still names it.
    pub(super) fn unalias(&mut self, tier: Tier, sequence: SequenceHash) -> bool {
        let aliases = &mut self.tier_mut(tier).aliases;
        let Some(count) = aliases.get_mut(&sequence) else { return false };
        *count -= 1;
        if *count == 0 {
            aliases.remove(&sequence);
        }
        true
    }

    /// Sequence hashes of a tier; one that has aliases comes once for each.
    pub(super) fn sequences(&self, tier: Tier) -> impl Iterator<Item = SequenceHash> + '_ {
        let map = self.tier(tier);
        map.same.iter().map(|hash| SequenceHash(*hash)).chain(map.other.values().copied())
    }

    /// Different blocks in a tier.
    pub(super) fn distinct(&self, tier: Tier) -> usize {
        let map = self.tier(tier);
        map.same.len() + map.other.len() - map.aliases.values().map(|n| *n as usize).sum::<usize>()
    }

    /// Entries over all tiers: what it costs in memory.
    pub(super) fn len(&self) -> usize {
        self.tiers.iter().map(|map| map.same.len() + map.other.len()).sum()
    }

    /// Whether the tier holds this very engine hash.
    pub(super) fn contains(&self, tier: Tier, engine: EngineHash) -> bool {
        self.tier(tier).get(engine).is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tiers.iter().all(|map| map.same.is_empty() && map.other.is_empty())
    }
}

impl TierMap {
    fn get(&self, engine: EngineHash) -> Option<SequenceHash> {
        if self.same.contains(&engine.0) { Some(SequenceHash(engine.0)) } else { self.other.get(&engine).copied() }
    }
}
