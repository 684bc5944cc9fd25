//! Which places on disk are free.

use std::collections::HashSet;
use std::time::Duration;

use crate::engine::builtin::tiers::DiskSlot;

/// How long a disk that was full is not asked for more space.
const PAUSE: Duration = Duration::from_secs(60);

/// The places of the disk tier that have no block, and those that the disk has no space for.
#[derive(Debug)]
pub(super) struct DiskRoom {
    free: Vec<DiskSlot>,
    /// Places from here on were never used: the file grows when they are.
    unused: u32,
    total: u32,
    /// The disk had no space for them.
    refused: Vec<DiskSlot>,
    refused_until: Duration,
}

impl DiskRoom {
    pub(super) fn new(total: usize, used: impl Iterator<Item = DiskSlot>) -> Self {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let used: HashSet<_> = used.map(|slot| slot.0).collect();
        let unused = used.iter().max().map_or(0, |last| last + 1);
        assert!(unused <= total, "a block is beyond the end of the tier");
        let free = (0..unused).rev().filter(|slot| !used.contains(slot)).map(DiskSlot).collect();
        Self { free, unused, total, refused: Vec::new(), refused_until: Duration::ZERO }
    }

    pub(super) fn take(&mut self, now: Duration) -> Option<DiskSlot> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if now < self.refused_until {
            return None;
        }
        if let Some(slot) = self.refused.pop() {
            return Some(slot);
        }
        let slot = DiskSlot(self.unused);
        self.unused += u32::from(self.unused < self.total);
        (slot.0 < self.total).then_some(slot)
    }

    pub(super) fn give_back(&mut self, slot: DiskSlot) {
        self.free.push(slot);
    }

    /// The disk had no space for this place. The tier goes on with the places that it has.
    pub(super) fn refused(&mut self, slot: DiskSlot, now: Duration) {
        self.refused.push(slot);
        self.refused_until = now + PAUSE;
    }
}

#[cfg(test)]
impl DiskRoom {
    /// Every place is used, free, or was never used.
    pub(super) fn check(&self, used: Vec<DiskSlot>) {
        let mut all: Vec<_> =
            used.into_iter().chain(self.free.iter().copied()).chain(self.refused.iter().copied()).collect();
        all.sort();
        assert_eq!(all, (0..self.unused).map(DiskSlot).collect::<Vec<_>>(), "a place is lost or given twice");
    }
}
