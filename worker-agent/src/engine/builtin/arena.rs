//! Where keys and values live: one map of memory, cut into blocks of equal size.
//!
//! Layout, outermost first: block, layer, then the layer's keys and its values, head, and
//! - keys: `[head_dim][block_size]`, transposed, so that scores of neighbouring positions are computed in one vector;
//! - values: `[block_size][head_dim]`;
//!
//! all in half precision, little-endian on every machine we run on. So a block is one range of bytes, and so is a layer of a
//! block: blocks are transferred, offloaded and reused as bytes, between arenas of equal [`KvShape`]. Memory is zero and
//! costs nothing until it is touched.
//!
//! An arena is shared by the forward pass and by whoever moves blocks. It keeps nobody apart: the pool does, by ownership.
//! A block that is cached and held is never written again; one that is allocated belongs to its holder alone.
//!
//! The memory is a file without a name, so that workers of the same host can be given it to read. Nobody else can write to it,
//! map it for writing or change its size, and it is gone with the last process that has it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use memmap2::{MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};

use super::BlockId;
use super::kernels::HeadBlock;

/// What the bytes of a block mean; blocks can be exchanged between arenas of equal shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Key-value heads of a layer.
    pub kv_heads: usize,
    /// Elements of a key, and of a value.
    pub head_dim: usize,
    /// Positions in a block, in tokens: 16, 32 or 64.
    pub block_size: usize,
}

impl KvShape {
    /// Bytes of one layer of a block.
    pub fn layer_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Bytes of the keys, or of the values, of one layer of a block.
    fn half_bytes(&self) -> usize {
        self.kv_heads * self.head_dim * self.block_size * size_of::<u16>()
    }
}

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Another block size.
    #[error("the block size is {0}; it can be 16, 32 or 64 tokens")]
    BlockSize(usize),
    /// More blocks than an address space holds, or none.
    #[error("{0} blocks are not possible")]
    Blocks(usize),
    /// The system refuses.
    #[error("cannot reserve {bytes} bytes of memory for {blocks} KV blocks: {error}")]
    Memory {
        /// What was asked for.
        bytes: usize,
        /// Blocks that were asked for.
        blocks: usize,
        /// What the system says.
        error: std::io::Error,
    },
}

/// The arena.
#[derive(Debug)]
pub struct KvArena {
    map: MmapRaw,
    /// The memory as a file; absent where the system gives none, and it is anonymous.
    memory: Option<File>,
    shape: KvShape,
    blocks: usize,
    /// See [`Self::take_foreign`].
    foreign: Vec<AtomicBool>,
}

impl KvArena {
    /// Reserves an arena of `blocks` blocks.
    pub fn new(shape: KvShape, blocks: usize) -> Result<KvArena, ArenaError> {
        if ![16, 32, 64].contains(&shape.block_size) {
            return Err(ArenaError::BlockSize(shape.block_size));
        }
        let bytes = blocks.checked_mul(shape.block_bytes()).filter(|&b| b > 0 && u32::try_from(blocks).is_ok());
        let bytes = bytes.ok_or(ArenaError::Blocks(blocks))?;
        let (map, memory) = match shareable(bytes) {
            Ok((map, memory)) => (map, Some(memory)),
            Err(error) => {
                tracing::info!(%error, "KV blocks are in memory that cannot be shared");
                let anonymous = MmapOptions::new().len(bytes).no_reserve_swap().map_anon();
                (anonymous.map_err(|error| ArenaError::Memory { bytes, blocks, error })?, None)
            }
        };
        let foreign = (0..blocks).map(|_| AtomicBool::new(false)).collect();
        Ok(KvArena { map: map.into(), memory, shape, blocks, foreign })
    }

    /// The memory as a file, for others to read; `None` where it is none.
    pub fn memory(&self) -> Option<BorrowedFd<'_>> {
        self.memory.as_ref().map(File::as_fd)
    }

    /// Where a block begins in it, in bytes.
    pub fn offset(&self, id: BlockId) -> u64 {
        id.0 as u64 * self.shape.block_bytes() as u64
    }

    /// What the bytes of a block mean.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// A block's bytes.
    ///
    /// # Safety
    /// Nothing writes to the block while the slice lives.
    pub unsafe fn block(&self, id: BlockId) -> &[u8] {
        // SAFETY: `start` checks the id; nobody writes, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start(id), self.shape.block_bytes()) }
    }

    /// A block's bytes, to be written.
    ///
    /// # Safety
    /// Nothing else reads or writes the block while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "owners of different blocks write side by side")]
    pub unsafe fn block_mut(&self, id: BlockId) -> &mut [u8] {
        // SAFETY: `given` checks the id; the caller has the block for itself.
        unsafe { std::slice::from_raw_parts_mut(self.given(id), self.shape.block_bytes()) }
    }

    /// Where a block begins, for somebody else than the forward pass to write. There is no other way to be given one.
    fn given(&self, id: BlockId) -> *mut u8 {
        let start = self.start(id);
        self.foreign[id.0 as usize].store(true, Relaxed);
        start
    }

    /// Whether somebody was given the block's bytes to write since the last call: then they are not what the forward pass has
    /// computed, and a copy that it has elsewhere is stale. Who lists a block has heard from whoever wrote it that it is
    /// complete, so nothing but the order of that message is needed here.
    pub fn take_foreign(&self, id: BlockId) -> bool {
        self.foreign[id.0 as usize].swap(false, Relaxed)
    }

    /// Where the arena begins in the memory of this process, and its length in bytes.
    pub fn range(&self) -> (*const u8, usize) {
        (self.map.as_ptr(), self.map.len())
    }

    /// Where a block begins in the memory of this process, for somebody else than the forward pass to write.
    pub fn place(&self, id: BlockId) -> *mut u8 {
        self.given(id)
    }

    fn start(&self, id: BlockId) -> *mut u8 {
        let index = id.0 as usize;
        assert!(index < self.blocks, "block {index} of an arena of {}", self.blocks);
        // SAFETY: in bounds, by the assertion.
        unsafe { self.map.as_mut_ptr().add(index * self.shape.block_bytes()) }
    }

    /// Keys and values of one head in one layer of a block.
    pub(crate) fn head(&self, id: BlockId, layer: usize, head: usize) -> HeadBlock {
        let KvShape { layers, kv_heads, head_dim, block_size } = self.shape;
        assert!(layer < layers && head < kv_heads);
        // SAFETY: in bounds, by the assertions here and in `start`. A block's size is a multiple of 64 bytes.
        unsafe {
            let keys: *const u16 = self.start(id).add(layer * self.shape.layer_bytes()).cast();
            let keys = keys.add(head * head_dim * block_size);
            let values = keys.add(kv_heads * head_dim * block_size);
            HeadBlock { keys, values, dim: head_dim, slots: block_size }
        }
    }

    /// Stores a position's key and value, `kv_heads * head_dim` elements each.
    ///
    /// # Safety
    /// Nothing else may access this slot meanwhile.
    pub(crate) unsafe fn write(&self, id: BlockId, layer: usize, slot: usize, key: &[u16], value: &[u16]) {
        let KvShape { kv_heads, head_dim, block_size, .. } = self.shape;
        assert!(slot < block_size && key.len() == kv_heads * head_dim && value.len() == key.len());
        for head in 0..kv_heads {
            let at = self.head(id, layer, head);
            let range = head * head_dim..(head + 1) * head_dim;
            // SAFETY: `head` is in bounds, `slot` too; the caller has the slot for itself.
            unsafe {
                for (d, &k) in key[range.clone()].iter().enumerate() {
                    at.keys.cast_mut().add(d * block_size + slot).write(k);
                }
                let to = at.values.cast_mut().add(slot * head_dim);
                std::ptr::copy_nonoverlapping(value[range].as_ptr(), to, head_dim);
            }
        }
    }
}

/// Memory that is a file, sealed: its size is final, and the map made here is the last one that can write.
fn shareable(bytes: usize) -> io::Result<(MmapMut, File)> {
    let memory = File::from(memfd_create("armature-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    ftruncate(&memory, bytes as u64)?;
    // SAFETY: nobody else has the file yet; once it is sealed, nobody else can write to it or cut it short.
    let map = unsafe { MmapOptions::new().len(bytes).no_reserve_swap().map_mut(&memory) }?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
    Ok((map, memory))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const SHAPE: KvShape = KvShape { layers: 3, kv_heads: 2, head_dim: 16, block_size: 16 };

    #[test]
    fn a_slot_is_written_where_the_layout_says() {
        let arena = KvArena::new(SHAPE, 4).unwrap();
        // SAFETY: one thread, and no slice outlives its statement.
        let block = |id| unsafe { arena.block(BlockId(id)) };
        assert_eq!(SHAPE.block_bytes(), 3 * 2 * 2 * 16 * 16 * 2);
        let key: Vec<u16> = (0..32).map(|i| 100 + i).collect();
        let value: Vec<u16> = (0..32).map(|i| 200 + i).collect();
        // SAFETY: one thread.
        unsafe { arena.write(BlockId(2), 1, 5, &key, &value) };
        let word = |i: usize| {
            let bytes = &block(2)[SHAPE.layer_bytes() + 2 * i..][..2];
            u16::from_le_bytes([bytes[0], bytes[1]])
        };
        assert_eq!(word(3 * 16 + 5), 103, "head 0, element 3");
        assert_eq!(word((16 + 3) * 16 + 5), 119, "head 1, element 3");
        assert_eq!(word(512 + 5 * 16 + 3), 203);
        assert_eq!(word(512 + 256 + 5 * 16 + 3), 219);
        let written: usize = (0..4).map(|id| block(id).chunks(2).filter(|w| w != &[0, 0]).count()).sum();
        assert_eq!(written, 64);

        // SAFETY: two blocks, one thread.
        unsafe { arena.block_mut(BlockId(0)) }.copy_from_slice(block(2));
        assert_eq!(block(0), block(2));
        let foreign = || [0, 1, 2, 3].map(|id| arena.take_foreign(BlockId(id)));
        assert_eq!(foreign(), [true, false, false, false], "slots are the forward pass's own");
        assert_eq!(foreign(), [false; 4]);
    }

    #[test]
    fn others_can_read_the_memory_and_nothing_else() {
        let arena = KvArena::new(SHAPE, 4).unwrap();
        // SAFETY: one thread.
        unsafe { arena.block_mut(BlockId(3)) }.fill(7);
        let file = File::from(arena.memory().expect("Linux has memfd").try_clone_to_owned().unwrap());
        let mut read = vec![0; SHAPE.block_bytes()];
        file.read_exact_at(&mut read, arena.offset(BlockId(3))).unwrap();
        assert!(read.iter().all(|&byte| byte == 7));
        assert!(file.write_at(&[1], 0).is_err() && file.set_len(0).is_err());
        // SAFETY: the map is refused.
        assert!(unsafe { MmapOptions::new().map_mut(&file) }.is_err());
        drop(arena);
        file.read_exact_at(&mut read, 0).expect("it outlives the arena while somebody has it");
    }

    #[test]
    fn refuses_what_cannot_be() {
        let odd = KvArena::new(KvShape { block_size: 24, ..SHAPE }, 4).unwrap_err();
        assert_eq!(odd.to_string(), "the block size is 24; it can be 16, 32 or 64 tokens");
        for blocks in [0, usize::MAX, 1 << 33] {
            assert!(matches!(KvArena::new(SHAPE, blocks), Err(ArenaError::Blocks(_))));
        }
    }
}
