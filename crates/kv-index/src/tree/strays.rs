//! Blocks whose parent their rank does not hold, but names: engines whose hashes are sequence hashes say where a block belongs
//! even when the events before it were lost.
//!
//! There are none in a healthy system, so this is small, flat and bounded, and readers look at it (under a lock) only while
//! there are some. A block stored again under a parent that is known moves into the tree.

use std::collections::HashMap;

use kv_hashing::{BlockHash, SequenceHash, chain};

use super::owners::Slot;
use crate::event::{EngineHash, Tier};
use crate::hash::HashBuilder;

/// Most strays of an index; about 200 bytes each.
const MAX_STRAYS: usize = 1 << 16;

/// A block, and what its prefix is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stray {
    pub(super) parent: SequenceHash,
    pub(super) local: BlockHash,
}

impl Stray {
    pub(super) fn sequence(self) -> SequenceHash {
        chain(Some(self.parent), self.local)
    }
}

/// All strays.
#[derive(Default)]
pub(super) struct Strays {
    held: HashMap<(Slot, Tier), HashMap<EngineHash, Stray>>,
    /// Owners by prefix, and under how many engine hashes each has it.
    owners: HashMap<SequenceHash, Vec<(Slot, Tier, u32)>, HashBuilder>,
    len: usize,
}

impl Strays {
    /// Engine hashes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no room for more.
    pub(super) fn is_full(&self) -> bool {
        self.len >= MAX_STRAYS
    }

    /// Different prefixes.
    pub(super) fn distinct(&self) -> usize {
        self.owners.len()
    }

    pub(super) fn get(&self, slot: Slot, tier: Tier, engine: EngineHash) -> Option<Stray> {
        self.held.get(&(slot, tier))?.get(&engine).copied()
    }

    /// Adds an engine hash that is not there; true when its content is new in the tier.
    pub(super) fn insert(&mut self, slot: Slot, tier: Tier, engine: EngineHash, stray: Stray) -> bool {
        self.held.entry((slot, tier)).or_default().insert(engine, stray);
        self.len += 1;
        let owners = self.owners.entry(stray.sequence()).or_default();
        match owners.iter_mut().find(|(other, its, _)| (*other, *its) == (slot, tier)) {
            Some((_, _, count)) => {
                *count += 1;
                false
            }
            None => {
                owners.push((slot, tier, 1));
                true
            }
        }
    }

    /// Takes an engine hash out; whether its content is gone from the tier, and what it was.
    pub(super) fn remove(&mut self, slot: Slot, tier: Tier, engine: EngineHash) -> Option<(Stray, bool)> {
        let held = self.held.get_mut(&(slot, tier))?;
        let stray = held.remove(&engine)?;
        if held.is_empty() {
            self.held.remove(&(slot, tier));
        }
        self.len -= 1;
        let sequence = stray.sequence();
        let owners = self.owners.get_mut(&sequence)?;
        let at = owners.iter().position(|(other, its, _)| (*other, *its) == (slot, tier))?;
        owners[at].2 -= 1;
        let gone = owners[at].2 == 0;
        if gone {
            owners.swap_remove(at);
        }
        if owners.is_empty() {
            self.owners.remove(&sequence);
        }
        Some((stray, gone))
    }

    /// Engine hashes of one tier of a rank.
    pub(super) fn of(&self, slot: Slot, tier: Tier) -> Vec<(EngineHash, Stray)> {
        self.held.get(&(slot, tier)).into_iter().flatten().map(|(engine, stray)| (*engine, *stray)).collect()
    }

    /// Different blocks of one tier of a rank.
    pub(super) fn blocks(&self, slot: Slot, tier: Tier) -> usize {
        let held = self.held.get(&(slot, tier)).into_iter().flatten();
        held.map(|(_, stray)| stray.sequence()).collect::<std::collections::HashSet<_>>().len()
    }

    /// Whether a rank has the block that ends a prefix, in any tier.
    pub(super) fn holds(&self, slot: Slot, sequence: SequenceHash) -> bool {
        self.owners.get(&sequence).is_some_and(|owners| owners.iter().any(|(other, _, _)| *other == slot))
    }

    /// Where strays lie on a path: position, slot, tier, in order of position.
    pub(super) fn on_path(&self, path: &[BlockHash]) -> Vec<(usize, Slot, Tier)> {
        let mut found = Vec::new();
        let mut sequence = None;
        for (position, &local) in path.iter().enumerate() {
            let hash = chain(sequence, local);
            sequence = Some(hash);
            let owners = self.owners.get(&hash).into_iter().flatten();
            found.extend(owners.map(|(slot, tier, _)| (position, *slot, *tier)));
        }
        found
    }
}
