//! The merges of a model, and how they are applied to a piece.
//!
//! Of all neighbours that have a merge, those with the lowest rank are joined, leftmost first. Short pieces rescan an
//! array after each merge; long ones keep a heap, so that even a hostile piece costs `n log n`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Open-addressed map from a pair of tokens to the rank of its merge and the token it yields.
pub(super) struct MergeTable {
    /// A power of two, at most 5/8 of them taken.
    slots: Box<[Slot]>,
    /// Bits of a hash that are not used: 64 - log2(slots).
    shift: u32,
}

#[derive(Clone, Copy)]
struct Slot {
    left: u32,
    right: u32,
    rank: u32,
    token: u32,
}

const FREE: Slot = Slot { left: u32::MAX, right: u32::MAX, rank: u32::MAX, token: u32::MAX };

/// Rank in the upper half, token in the lower: the least is the merge to do first.
type Found = u64;

/// Two tokens that do not merge.
const NONE: Found = u64::MAX;

/// Longest piece that is merged in arrays on the stack, in symbols.
const SHORT: usize = 64;

impl MergeTable {
    /// Room for `merges` merges.
    pub(super) fn with_capacity(merges: usize) -> MergeTable {
        let size = (merges * 8 / 5 + 1).next_power_of_two().max(2);
        MergeTable { slots: vec![FREE; size].into_boxed_slice(), shift: 64 - size.trailing_zeros() }
    }

    /// Adds a merge; the last of equal pairs counts. Only as many as there is room for.
    pub(super) fn insert(&mut self, left: u32, right: u32, rank: u32, token: u32) {
        let at = self.slot(left, right);
        self.slots[at] = Slot { left, right, rank, token };
    }

    fn get(&self, left: u32, right: u32) -> Found {
        let slot = &self.slots[self.slot(left, right)];
        u64::from(slot.rank) << 32 | u64::from(slot.token)
    }

    /// Where the pair is, or would be.
    fn slot(&self, left: u32, right: u32) -> usize {
        // 2⁶⁴ divided by the golden ratio: spreads neighbouring keys evenly over the upper bits.
        let hash = (u64::from(left) << 32 | u64::from(right)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut at = (hash >> self.shift) as usize;
        loop {
            let slot = &self.slots[at];
            if (slot.left == left && slot.right == right) || slot.left == u32::MAX {
                return at;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// Merges `symbols[from..]` in place.
    pub(super) fn apply(&self, symbols: &mut Vec<u32>, from: usize) {
        let piece = &mut symbols[from..];
        let left = match piece.len() {
            0 | 1 => return,
            2..=SHORT => self.apply_short(piece),
            _ => self.apply_long(piece),
        };
        symbols.truncate(from + left);
    }

    /// Returns how many symbols are left, at the begin of `symbols`.
    fn apply_short(&self, symbols: &mut [u32]) -> usize {
        let mut left = symbols.len();
        // Merge of each symbol with its right neighbour; the last one has none.
        let mut found = [NONE; SHORT];
        for at in 0..left - 1 {
            found[at] = self.get(symbols[at], symbols[at + 1]);
        }
        loop {
            let (mut at, mut best) = (0, NONE);
            for (candidate, &merge) in found[..left - 1].iter().enumerate() {
                if merge < best {
                    (at, best) = (candidate, merge);
                }
            }
            if best == NONE {
                return left;
            }
            symbols[at] = best as u32;
            symbols.copy_within(at + 2..left, at + 1);
            found.copy_within(at + 1..left, at);
            left -= 1;
            found[at] = if at + 1 < left { self.get(symbols[at], symbols[at + 1]) } else { NONE };
            if at > 0 {
                found[at - 1] = self.get(symbols[at - 1], symbols[at]);
            }
        }
    }

    /// As [`Self::apply_short`], for any length.
    fn apply_long(&self, symbols: &mut [u32]) -> usize {
        let len = symbols.len();
        let mut found: Vec<Found> = symbols.windows(2).map(|pair| self.get(pair[0], pair[1])).collect();
        found.push(NONE);
        // Neighbours of each symbol that is left; `len` is none.
        let mut next: Vec<u32> = (1..=len as u32).collect();
        let mut previous: Vec<u32> = std::iter::once(len as u32).chain(0..len as u32 - 1).collect();
        let entry = |merge: Found, at: usize| Reverse((merge >> 32) << 32 | at as u64);
        let mut heap: BinaryHeap<Reverse<u64>> = found
            .iter()
            .enumerate()
            .filter(|(_, merge)| **merge != NONE)
            .map(|(at, merge)| entry(*merge, at))
            .collect();
        while let Some(Reverse(top)) = heap.pop() {
            let at = top as u32 as usize;
            // The pair may have changed since: its entry is then another one.
            if found[at] == NONE || found[at] >> 32 != top >> 32 {
                continue;
            }
            let (gone, after) = (next[at] as usize, next[next[at] as usize] as usize);
            symbols[at] = found[at] as u32;
            found[gone] = NONE;
            next[at] = after as u32;
            found[at] = NONE;
            if after < len {
                previous[after] = at as u32;
                found[at] = self.get(symbols[at], symbols[after]);
            }
            let before = previous[at] as usize;
            if before < len {
                found[before] = self.get(symbols[before], symbols[at]);
            }
            for changed in [before, at] {
                if changed < len && found[changed] != NONE {
                    heap.push(entry(found[changed], changed));
                }
            }
        }
        let (mut at, mut left) = (0, 0);
        while at < len {
            symbols[left] = symbols[at];
            left += 1;
            at = next[at] as usize;
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few tokens and many merges, so that ranks tie and pairs change under queued entries.
        #[test]
        fn both_ways_to_merge_agree(
            merges in proptest::collection::vec((0u32..12, 0u32..12, 0u32..12), 0..60),
            piece in proptest::collection::vec(0u32..6, 2..=SHORT)
        ) {
            let mut table = MergeTable::with_capacity(merges.len());
            for (rank, (left, right, token)) in merges.into_iter().enumerate() {
                table.insert(left, right, rank as u32, token);
            }
            let (mut short, mut long) = (piece.clone(), piece);
            let left = table.apply_short(&mut short);
            prop_assert_eq!(left, table.apply_long(&mut long));
            prop_assert_eq!(&short[..left], &long[..left]);
        }
    }
}
