//! Host memory for blocks: one map of anonymous memory, cut into slots of one block each.
//!
//! As with the arena, it keeps nobody apart: the catalog does. A slot is written by the one move that it is given to, and
//! read by others only after that has ended. Memory costs nothing until it is touched.

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use super::Slot;

/// The slab.
#[derive(Debug)]
pub struct Slab {
    map: MmapRaw,
    slot_bytes: usize,
    slots: usize,
}

impl Slab {
    /// Reserves `slots` slots of `slot_bytes` bytes, neither of them 0.
    pub fn new(slot_bytes: usize, slots: usize) -> std::io::Result<Self> {
        let bytes = slot_bytes.checked_mul(slots).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let map: MmapMut = MmapOptions::new().len(bytes).no_reserve_swap().map_anon()?;
        Ok(Self { map: map.into(), slot_bytes, slots })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// A slot's bytes.
    ///
    /// # Safety
    /// Nothing writes to the slot while the slice lives.
    pub unsafe fn slot(&self, slot: Slot) -> &[u8] {
        // SAFETY: `start` checks the slot; nobody writes, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start(slot), self.slot_bytes) }
    }

    /// A slot's bytes, to be written.
    ///
    /// # Safety
    /// Nothing else reads or writes the slot while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "owners of different slots write side by side")]
    pub unsafe fn slot_mut(&self, slot: Slot) -> &mut [u8] {
        // SAFETY: `start` checks the slot; the caller has it for itself.
        unsafe { std::slice::from_raw_parts_mut(self.start(slot), self.slot_bytes) }
    }

    fn start(&self, slot: Slot) -> *mut u8 {
        let index = slot.0 as usize;
        assert!(index < self.slots, "slot {index} of a slab of {}", self.slots);
        // SAFETY: in bounds, by the assertion.
        unsafe { self.map.as_mut_ptr().add(index * self.slot_bytes) }
    }
}
