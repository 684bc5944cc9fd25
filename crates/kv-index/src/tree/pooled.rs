//! Blocks of a prompt that ranks have in pools which others read too, as a match meets them on its way.

use super::owners::Slot;
use super::roster::Roster;
use crate::overlap::PooledRun;

/// What was met so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Pooled {
    /// Slot, first block, number of blocks.
    found: Vec<(Slot, u32, u32)>,
    /// End of the last block met.
    end: u32,
}

impl Pooled {
    pub(super) fn clear(&mut self) {
        self.found.clear();
        self.end = 0;
    }

    /// A slot has these blocks, counted from block `base` of the prompt, in its pool.
    pub(super) fn add(&mut self, slot: Slot, base: usize, mut mask: u64) {
        while mask != 0 {
            let start = mask.trailing_zeros();
            let len = (mask >> start).trailing_ones();
            let first = base as u32 + start;
            self.found.push((slot, first, len));
            self.end = self.end.max(first + len);
            mask = if start + len == 64 { 0 } else { mask >> (start + len) << (start + len) };
        }
    }

    /// Whether the block before `at` is in a pool: then a worker may go on there, though no rank holds all blocks so far.
    pub(super) fn reaches(&self, at: usize) -> bool {
        at > 0 && self.end as usize == at
    }

    /// The same by rank; what belongs to no rank any more is left out.
    pub(super) fn runs(&self, roster: &Roster) -> Vec<PooledRun> {
        if self.found.is_empty() {
            return Vec::new();
        }
        let mut ranks = vec![None; roster.slots.len() * 64];
        for member in &roster.members {
            ranks[usize::from(member.slot)] = Some(member.rank);
        }
        let run = |&(slot, start, len): &(Slot, u32, u32)| {
            let rank = *ranks.get(usize::from(slot))?.as_ref()?;
            Some(PooledRun { rank, start, len })
        };
        self.found.iter().filter_map(run).collect()
    }
}
