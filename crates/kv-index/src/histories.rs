//! Random histories of events for the tests of every index: few contents, many collisions.

use kv_hashing::{BlockHash, SequenceHash, sequence_hashes};
use proptest::prelude::*;

use crate::event::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use crate::overlap::TierBlocks;

pub(crate) fn rank(worker: u64, dp_rank: u32) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank }
}

pub(crate) fn locals(path: &[u64]) -> Vec<BlockHash> {
    path.iter().map(|n| BlockHash(*n)).collect()
}

pub(crate) fn sequence(path: &[u64]) -> SequenceHash {
    *sequence_hashes(&locals(path)).last().expect("not empty")
}

/// A stored event for `path[from..]`, with sequence hashes as engine hashes.
pub(crate) fn stored(path: &[u64], from: usize) -> KvEventData {
    stored_as(path, from, |prefix| sequence(prefix).0)
}

pub(crate) fn stored_as(path: &[u64], from: usize, engine: impl Fn(&[u64]) -> u64) -> KvEventData {
    let block = |i: usize| StoredBlock { engine: EngineHash(engine(&path[..=i])), local: BlockHash(path[i]) };
    let parent = from.checked_sub(1).map(|last| block(last).engine);
    KvEventData::Stored { parent, blocks: (from..path.len()).map(block).collect() }
}

pub(crate) fn removed(prefixes: &[&[u64]]) -> KvEventData {
    KvEventData::Removed { blocks: prefixes.iter().map(|p| EngineHash(sequence(p).0)).collect() }
}

pub(crate) fn device(blocks: u32) -> TierBlocks {
    TierBlocks { device: blocks, ..TierBlocks::default() }
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Apply(WorkerRank, Tier, KvEventData),
    RemoveWorker(WorkerId),
}

pub(crate) fn paths() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(0..3_u64, 1..7)
}

pub(crate) fn ops() -> impl Strategy<Value = Op> {
    // Five workers of two ranks: more owners than a small set holds in place.
    let ranks = (0..5_u64, 0..2_u32).prop_map(|(worker, dp_rank)| rank(worker, dp_rank));
    let tiers =
        proptest::sample::select(vec![Tier::Device, Tier::Device, Tier::Device, Tier::Host, Tier::Disk, Tier::Shared]);
    let store = (paths(), any::<proptest::sample::Index>(), 0..3_u64).prop_map(|(path, from, salt)| {
        let from = from.index(path.len());
        // Salt 0: deterministic engine hashes; 1: opaque ones; 2: a few numbers that collide, so that hashes move.
        stored_as(&path, from, |prefix| match salt {
            0 => sequence(prefix).0,
            1 => sequence(prefix).0 ^ 1,
            _ => prefix.iter().sum::<u64>() % 5,
        })
    });
    let remove = proptest::collection::vec((paths(), 0..3_u64), 1..4).prop_map(|blocks| {
        let engine = |(path, salt): (Vec<u64>, u64)| match salt {
            0 => sequence(&path).0,
            1 => sequence(&path).0 ^ 1,
            _ => path.iter().sum::<u64>() % 5,
        };
        KvEventData::Removed { blocks: blocks.into_iter().map(|b| EngineHash(engine(b))).collect() }
    });
    let data = prop_oneof![12 => store, 5 => remove, 1 => Just(KvEventData::Cleared)];
    prop_oneof![
        30 => (ranks, tiers, data).prop_map(|(rank, tier, data)| Op::Apply(rank, tier, data)),
        1 => (0..5_u64).prop_map(|worker| Op::RemoveWorker(WorkerId(worker))),
    ]
}
