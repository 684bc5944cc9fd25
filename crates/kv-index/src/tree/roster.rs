//! Which rank has which slot, as readers see it: replaced as a whole when a rank comes or goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::owners::Slot;
use crate::event::{Tier, WorkerRank};
use crate::overlap::TierBlocks;

/// Every tier, fastest first; a tier's place here is its discriminant.
pub(super) const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared];

/// Different blocks of a rank, by tier.
#[derive(Debug, Default)]
pub(super) struct Counts([AtomicU32; 4]);

impl Counts {
    pub(super) fn set(&self, tier: Tier, blocks: usize) {
        self.0[tier as usize].store(u32::try_from(blocks).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> TierBlocks {
        let mut blocks = TierBlocks::default();
        for tier in TIERS {
            *blocks.of(tier) = self.0[tier as usize].load(Ordering::Relaxed);
        }
        blocks
    }
}

/// One rank.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) rank: WorkerRank,
    pub(super) slot: Slot,
    pub(super) counts: Arc<Counts>,
}

/// All ranks.
#[derive(Clone, Debug, Default)]
pub(super) struct Roster {
    /// Another one after each change, and in each index of the process; 0 where no rank ever came.
    pub(super) generation: u64,
    /// Sorted by rank.
    pub(super) members: Vec<Member>,
    /// A bit for each slot in use.
    pub(super) slots: Vec<u64>,
}

impl Roster {
    /// The roster of a new generation.
    pub(super) fn new(mut members: Vec<Member>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        members.sort_unstable_by_key(|member| member.rank);
        let words = members.iter().map(|member| usize::from(member.slot) / 64 + 1).max().unwrap_or(0);
        let mut slots = vec![0; words];
        for member in &members {
            slots[usize::from(member.slot) / 64] |= 1 << (member.slot % 64);
        }
        Self { generation: LAST.fetch_add(1, Ordering::Relaxed) + 1, members, slots }
    }

    /// A rank's entry.
    pub(super) fn member(&self, rank: WorkerRank) -> Option<&Member> {
        let at = self.members.binary_search_by_key(&rank, |member| member.rank).ok()?;
        self.members.get(at)
    }
}
