//! A few blocks of a rank, to be compared with what its worker says of itself.

use super::Writer;
use super::engines::Engines;
use super::roster::TIERS;
use crate::event::{EngineHash, Tier, WorkerRank};

/// Tries for each block that is wanted: of a map that has shrunk, many segments are empty.
const TRIES: usize = 8;

impl Writer {
    /// Blocks that a rank holds, chosen by `seed`: at most `most`, the same one perhaps twice, none when it holds hardly any for the
    /// room that it once needed. Blocks in no known place are left out. Cost: two cache lines a block.
    pub fn draw(&self, rank: WorkerRank, seed: u64, most: usize) -> Vec<(Tier, EngineHash)> {
        let Some(rank) = self.slot_of.get(&rank).and_then(|slot| self.ranks[usize::from(*slot)].as_ref()) else {
            return Vec::new();
        };
        let held: u64 = rank.tiers.iter().map(|tier| tier.len() as u64).sum();
        let mut randoms = Randoms(seed);
        let mut draw = || {
            let mut at = ((u128::from(randoms.next()) * u128::from(held)) >> 64) as u64;
            let tier = TIERS.into_iter().find(|tier| {
                let len = rank.tiers[*tier as usize].len() as u64;
                let here = at < len;
                at = at.saturating_sub(len);
                here
            })?;
            let engines: &Engines = &rank.tiers[tier as usize];
            engines.draw(randoms.next()).map(|hash| (tier, EngineHash(hash)))
        };
        (0..most * TRIES).filter_map(|_| draw()).take(most).collect()
    }

    /// Whether blocks of a rank were dropped for want of memory, so that it lacks some that its events announced.
    pub fn has_evicted(&self, rank: WorkerRank) -> bool {
        let rank = self.slot_of.get(&rank).and_then(|slot| self.ranks[usize::from(*slot)].as_ref());
        rank.is_some_and(|rank| rank.evicted)
    }
}

/// SplitMix64.
struct Randoms(u64);

impl Randoms {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kv_hashing::BlockHash;

    use super::*;
    use crate::event::{KvEventData, StoredBlock, WorkerId};
    use crate::tree::{Limits, new};

    const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };

    fn stored(range: std::ops::Range<u64>) -> KvEventData {
        let blocks = range.map(|n| StoredBlock { engine: EngineHash(n), local: BlockHash(n) }).collect();
        KvEventData::Stored { parent: None, blocks }
    }

    #[test]
    fn only_blocks_that_are_held_are_drawn_and_each_may_be() {
        let (mut index, _) = new(Limits::default());
        assert_eq!(index.draw(RANK, 1, 10), []);
        index.apply(RANK, Tier::Device, &stored(0..100));
        index.apply(RANK, Tier::Disk, &stored(50..80));
        index.apply(RANK, Tier::Device, &KvEventData::Removed { blocks: (0..40).map(EngineHash).collect() });
        let mut seen = BTreeSet::new();
        for seed in 0..100 {
            let drawn = index.draw(RANK, seed, 16);
            assert_eq!(drawn.len(), 16);
            for (tier, engine) in drawn {
                assert!(index.contains(RANK, tier, engine), "{tier:?} {engine:?}");
                seen.insert((tier as u8, engine.0));
            }
        }
        assert_eq!(seen.len(), 90, "60 on the device and 30 on disk");
        assert_eq!(index.draw(RANK, 7, 16), index.draw(RANK, 7, 16), "the seed decides");
        assert!(!index.has_evicted(RANK));
    }
}
