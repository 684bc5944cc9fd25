//! KV blocks where they are computed: the memory of an accelerator, or the host's own, behind one trait.
//!
//! An engine on an accelerator keeps a block in pieces, one in each layer's planes for keys and values. Whoever tiers or sends
//! blocks wants each of them whole, in host memory. [`Arena::gather`] and [`Arena::scatter`] go from one to the other: on CUDA
//! devices a kernel collects the pieces, and one copy brings them over.
//!
//! CUDA is found at run time: the program starts, and says that there is no device, on machines without it.

mod cpu;
pub mod cuda;
#[cfg(test)]
mod tests;

use std::ops::{Deref, DerefMut};

pub use cpu::Cpu;

/// Pieces are multiples of this: what one thread of a device moves at a time.
pub const PIECE_ALIGN: usize = 16;

/// How blocks lie in an arena: `planes` one after the other, each with a piece of every block, in the order of their ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// Layers × 2 for an engine that keeps keys and values apart.
    pub planes: usize,
    /// Blocks of the arena.
    pub blocks: usize,
    /// Bytes of a block in one plane, a multiple of [`PIECE_ALIGN`].
    pub piece_bytes: usize,
}

impl Paging {
    /// Bytes of one block: all its pieces.
    pub fn block_bytes(&self) -> usize {
        self.planes * self.piece_bytes
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.block_bytes() * self.blocks
    }

    /// Where the piece of `block` begins in `plane`.
    fn offset(&self, plane: usize, block: u32) -> usize {
        (plane * self.blocks + block as usize) * self.piece_bytes
    }

    fn check(&self) -> Result<(), DeviceError> {
        let whole = self.planes > 0 && self.blocks > 0 && self.piece_bytes > 0;
        let fits = u32::try_from(self.blocks).is_ok()
            && u32::try_from(self.piece_bytes / PIECE_ALIGN).is_ok()
            && self.planes.checked_mul(self.piece_bytes).and_then(|bytes| bytes.checked_mul(self.blocks)).is_some();
        if whole && fits && self.piece_bytes.is_multiple_of(PIECE_ALIGN) {
            return Ok(());
        }
        Err(DeviceError::Paging(*self))
    }

    /// Checks a copy of `blocks` to or from `host` bytes.
    fn check_copy(&self, blocks: &[u32], host: usize) -> Result<(), DeviceError> {
        if let Some(&block) = blocks.iter().find(|block| **block as usize >= self.blocks) {
            return Err(DeviceError::NoSuchBlock { block, blocks: self.blocks });
        }
        let needed = blocks.len() * self.block_bytes();
        if host < needed {
            return Err(DeviceError::Staging { needed, room: host });
        }
        Ok(())
    }
}

/// Checks that no block is named twice: who writes to it last would be chance.
fn check_once(blocks: &[u32], paging: &Paging) -> Result<(), DeviceError> {
    let mut named = vec![false; paging.blocks];
    match blocks.iter().find(|block| std::mem::replace(&mut named[**block as usize], true)) {
        Some(&block) => Err(DeviceError::Twice(block)),
        None => Ok(()),
    }
}

/// Why something on a device did not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An arena cannot look like this.
    #[error("{0:?}: every number must be above 0, and piece_bytes a multiple of {PIECE_ALIGN}")]
    Paging(Paging),
    /// There is no such block.
    #[error("block {block} of an arena with {blocks}")]
    NoSuchBlock {
        /// The block asked for.
        block: u32,
        /// How many there are.
        blocks: usize,
    },
    /// One block would have two contents.
    #[error("block {0} is named twice")]
    Twice(u32),
    /// The host's buffer is too small.
    #[error("{needed} bytes of blocks, room for {room}")]
    Staging {
        /// Bytes of the blocks.
        needed: usize,
        /// Bytes of the buffer.
        room: usize,
    },
    /// The driver of the device says so.
    #[error("{stage}: {reason}")]
    Driver {
        /// What was being done.
        stage: &'static str,
        /// The driver's words.
        reason: String,
    },
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its number in this process, from 0.
    pub ordinal: usize,
    /// As its maker calls it.
    pub name: String,
    /// The same over reboots and processes; empty where there is none.
    pub uuid: String,
    /// All its memory, in bytes; 0 where it is not the device's own.
    pub memory_bytes: u64,
    /// Major and minor number of what its code may use (CUDA: compute capability).
    pub capability: (u32, u32),
}

/// Something with memory for KV blocks.
pub trait Device: Send + Sync {
    /// What it is.
    fn describe(&self) -> &Description;

    /// Memory for blocks, all of it zero.
    fn arena(&self, paging: Paging) -> Result<Box<dyn Arena>, DeviceError>;

    /// Host memory that the device copies to and from at full speed (page-locked where that helps), all of it zero.
    fn staging(&self, bytes: usize) -> Result<Staging, DeviceError>;
}

/// Memory for KV blocks on one device.
pub trait Arena: Send {
    /// How the blocks lie.
    fn paging(&self) -> Paging;

    /// Copies `blocks`, each whole, one after the other, to the beginning of `into`; waits until they are there.
    ///
    /// Costs one launch and one copy for each [`cuda::CHUNK_BYTES`] on a CUDA device; the engine's own work goes on beside it.
    fn gather(&mut self, blocks: &[u32], into: &mut Staging) -> Result<(), DeviceError>;

    /// The reverse of [`Self::gather`]: `blocks` get their content from the beginning of `from`, which is as `gather` leaves it.
    /// A block that is named twice is refused.
    fn scatter(&mut self, blocks: &[u32], from: &Staging) -> Result<(), DeviceError>;
}

/// Host memory made by a device for copies to and from it; begins at a multiple of [`PIECE_ALIGN`].
pub struct Staging(StagingKind);

enum StagingKind {
    Plain(Aligned),
    Pinned(cuda::Pinned),
}

/// Ordinary memory that begins where numbers may.
struct Aligned {
    units: Vec<Unit>,
    bytes: usize,
}

#[derive(Clone)]
#[repr(C, align(16))]
struct Unit([u8; PIECE_ALIGN]);

impl Aligned {
    fn new(bytes: usize) -> Self {
        Self { units: vec![Unit([0; PIECE_ALIGN]); bytes.div_ceil(PIECE_ALIGN)], bytes }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: units are bytes without a gap, at least so many.
        unsafe { std::slice::from_raw_parts(self.units.as_ptr().cast(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.units.as_mut_ptr().cast(), self.bytes) }
    }
}

impl Deref for Staging {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            StagingKind::Plain(bytes) => bytes.bytes(),
            StagingKind::Pinned(bytes) => bytes.bytes(),
        }
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            StagingKind::Plain(bytes) => bytes.bytes_mut(),
            StagingKind::Pinned(bytes) => bytes.bytes_mut(),
        }
    }
}
