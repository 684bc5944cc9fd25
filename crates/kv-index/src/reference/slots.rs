//! Sets of ranks, small in the common case: a block is held by few ranks, a system prompt by all.

use crate::event::Tier;

/// Dense number of a rank inside one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u32);

impl Slot {
    pub(super) fn new(index: usize) -> Self {
        Self(u32::try_from(index).expect("fewer than 2^32 ranks fit into memory"))
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A bit for each slot.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotMask(Vec<u64>);

impl SlotMask {
    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.0.get(slot.index() / 64).is_some_and(|word| word >> (slot.index() % 64) & 1 == 1)
    }

    fn insert(&mut self, slot: Slot) -> bool {
        let (word, bit) = (slot.index() / 64, 1 << (slot.index() % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        let new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        new
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let (word, bit) = (slot.index() / 64, 1 << (slot.index() % 64));
        let Some(word) = self.0.get_mut(word) else { return false };
        let held = *word & bit != 0;
        *word &= !bit;
        held
    }

    fn union(&mut self, other: &SlotSet) {
        match other {
            SlotSet::Few { .. } => other.for_each(|slot| {
                self.insert(slot);
            }),
            SlotSet::Many(mask) => {
                if self.0.len() < mask.0.len() {
                    self.0.resize(mask.0.len(), 0);
                }
                self.0.iter_mut().zip(&mask.0).for_each(|(word, other)| *word |= other);
            }
        }
    }

    fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(super) fn for_each(&self, mut f: impl FnMut(Slot)) {
        for (i, &word) in self.0.iter().enumerate() {
            each_bit(i, word, &mut f);
        }
    }

    /// Keeps what `keep` (by word) keeps, and reports what falls out.
    fn intersect(&mut self, keep: impl Fn(usize) -> u64, mut dropped: impl FnMut(Slot)) {
        for (i, word) in self.0.iter_mut().enumerate() {
            if *word != 0 {
                let gone = *word & !keep(i);
                *word &= !gone;
                each_bit(i, gone, &mut dropped);
            }
        }
    }
}

fn each_bit(word_index: usize, mut word: u64, f: &mut impl FnMut(Slot)) {
    while word != 0 {
        f(Slot::new(word_index * 64 + word.trailing_zeros() as usize));
        word &= word - 1;
    }
}

/// Slots kept in place before a mask is allocated: with its tag the set then takes 16 bytes.
const FEW: usize = 3;

/// Owners of one block in one tier.
#[derive(Clone, Debug)]
enum SlotSet {
    Few { len: u8, slots: [Slot; FEW] },
    // Boxed so that the set stays at 16 bytes.
    Many(Box<SlotMask>),
}

impl Default for SlotSet {
    fn default() -> Self {
        Self::Few { len: 0, slots: [Slot(0); FEW] }
    }
}

impl SlotSet {
    fn few(&self) -> &[Slot] {
        match self {
            Self::Few { len, slots } => &slots[..usize::from(*len)],
            Self::Many(_) => &[],
        }
    }

    fn contains(&self, slot: Slot) -> bool {
        match self {
            Self::Few { .. } => self.few().contains(&slot),
            Self::Many(mask) => mask.contains(slot),
        }
    }

    fn word(&self, index: usize) -> u64 {
        match self {
            Self::Few { .. } => {
                let here = self.few().iter().filter(|slot| slot.index() / 64 == index);
                here.fold(0, |word, slot| word | 1 << (slot.index() % 64))
            }
            Self::Many(mask) => mask.0.get(index).copied().unwrap_or(0),
        }
    }

    fn insert(&mut self, slot: Slot) -> bool {
        if self.contains(slot) {
            return false;
        }
        match self {
            Self::Few { len, slots } if usize::from(*len) < FEW => {
                slots[usize::from(*len)] = slot;
                *len += 1;
            }
            Self::Few { slots, .. } => {
                let mut mask = SlotMask::default();
                for &held in slots.iter() {
                    mask.insert(held);
                }
                mask.insert(slot);
                *self = Self::Many(Box::new(mask));
            }
            Self::Many(mask) => {
                mask.insert(slot);
            }
        }
        true
    }

    fn remove(&mut self, slot: Slot) -> bool {
        match self {
            Self::Few { len, slots } => {
                let held = &mut slots[..usize::from(*len)];
                let Some(at) = held.iter().position(|s| *s == slot) else { return false };
                held.swap(at, usize::from(*len) - 1);
                *len -= 1;
            }
            Self::Many(mask) => {
                if !mask.remove(slot) {
                    return false;
                }
                // One below the limit, so that a set at the edge does not flip with every event.
                if mask.len() < FEW {
                    let mut few = Self::default();
                    mask.for_each(|held| {
                        few.insert(held);
                    });
                    *self = few;
                }
            }
        }
        true
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Few { len, .. } => *len == 0,
            Self::Many(mask) => mask.is_empty(),
        }
    }

    fn for_each(&self, f: impl FnMut(Slot)) {
        match self {
            Self::Few { .. } => self.few().iter().copied().for_each(f),
            Self::Many(mask) => mask.for_each(f),
        }
    }
}

/// Who holds one block, tier by tier. Most blocks live on devices only.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    device: SlotSet,
    /// Host, disk, shared.
    below: Option<Box<[SlotSet; 3]>>,
}

impl Owners {
    /// False when the slot holds the block in that tier already.
    pub(super) fn insert(&mut self, tier: Tier, slot: Slot) -> bool {
        match tier {
            Tier::Device => self.device.insert(slot),
            lower => self.below.get_or_insert_default()[lower as usize - 1].insert(slot),
        }
    }

    /// False when the slot did not hold the block in that tier.
    pub(super) fn remove(&mut self, tier: Tier, slot: Slot) -> bool {
        if tier == Tier::Device {
            return self.device.remove(slot);
        }
        let Some(below) = &mut self.below else { return false };
        let held = below[tier as usize - 1].remove(slot);
        if below.iter().all(SlotSet::is_empty) {
            self.below = None;
        }
        held
    }

    pub(super) fn is_empty(&self) -> bool {
        self.device.is_empty() && self.below.is_none()
    }

    /// Whether the slot holds the block in any tier.
    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.device.contains(slot) || self.below.iter().flat_map(|below| below.iter()).any(|set| set.contains(slot))
    }

    /// Slots that hold the block anywhere.
    pub(super) fn any_tier(&self) -> SlotMask {
        let mut mask = SlotMask::default();
        mask.union(&self.device);
        for set in self.below.iter().flat_map(|below| below.iter()) {
            mask.union(set);
        }
        mask
    }

    /// Keeps the slots that hold the block anywhere; the others are reported.
    pub(super) fn retain(&self, active: &mut SlotMask, dropped: impl FnMut(Slot)) {
        match &self.below {
            None => active.intersect(|i| self.device.word(i), dropped),
            Some(below) => {
                active.intersect(|i| below.iter().fold(self.device.word(i), |word, set| word | set.word(i)), dropped);
            }
        }
    }

    /// Slots that have the block in their shared pool.
    pub(super) fn pooled(&self) -> SlotMask {
        let mut mask = SlotMask::default();
        if let Some(below) = &self.below {
            mask.union(&below[Tier::Shared as usize - 1]);
        }
        mask
    }

    /// Visits the active slots that hold the block only below the device, with the fastest tier that has it.
    pub(super) fn each_below_device(&self, active: &SlotMask, mut f: impl FnMut(Slot, Tier)) {
        let Some(below) = &self.below else { return };
        for (i, &word) in active.0.iter().enumerate() {
            let mut left = word & !self.device.word(i);
            for (set, tier) in below.iter().zip([Tier::Host, Tier::Disk, Tier::Shared]) {
                let here = left & set.word(i);
                left &= !here;
                each_bit(i, here, &mut |slot| f(slot, tier));
            }
        }
    }
}

const _: () = assert!(size_of::<Owners>() == 24, "an entry of the table: 16 bytes of device owners and a pointer");
