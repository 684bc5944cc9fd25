//! The device's copy of the arena: two planes for each layer, one of keys and one of values, with a row for every slot of every
//! block, so that a step writes and reads rows.
//!
//! *Invariant:* before a layer reads a position, its row is what the arena has. The forward pass writes to both. Everybody
//! else, who writes whole blocks to the arena, leaves a mark there ([`KvArena::take_foreign`]); such a block is copied when a
//! step reads it, and only then, and only once. A block that was fetched and never read, and then given to a sequence that
//! computes it, is not copied: its mark goes when its first slot is computed.

use candle_core::{DType, Device, Tensor};

use super::super::forward::Place;
use super::CandleError;
use super::carrier::Carrier;
use crate::engine::builtin::arena::{KvArena, KvShape};
use crate::engine::builtin::{BlockId, Chunk};

/// Most bytes of blocks that are brought at once.
const BRING_BYTES: usize = 32 << 20;

/// One layer's keys and values, `[slots, kv_heads × head_dim]` halves each. Row `block × block_size + slot` is that slot's.
pub(super) struct Planes {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

/// All blocks on the device.
pub(super) struct Mirror {
    shape: KvShape,
    layers: Vec<Planes>,
    device: Device,
    brought: u64,
}

impl Mirror {
    pub(super) fn new(shape: KvShape, blocks: usize, device: &Device) -> Result<Self, CandleError> {
        let (slots, width) = (blocks * shape.block_size, shape.kv_heads * shape.head_dim);
        // Candle's kernels number the elements of a tensor with 32 bits.
        let most = u32::MAX as usize / (width * shape.block_size);
        if blocks > most {
            return Err(CandleError::Blocks { blocks, most });
        }
        let plane = || Tensor::zeros((slots, width), DType::F16, device);
        let layers = (0..shape.layers).map(|_| Ok(Planes { keys: plane()?, values: plane()? }));
        Ok(Self { shape, layers: layers.collect::<Result<_, CandleError>>()?, device: device.clone(), brought: 0 })
    }

    /// Blocks that were copied from the arena, since the start.
    pub(super) fn brought(&self) -> u64 {
        self.brought
    }

    pub(super) fn layer(&self, index: usize) -> &Planes {
        &self.layers[index]
    }

    /// Copies the blocks that others have written and this step reads.
    pub(super) fn refresh(
        &mut self,
        arena: &KvArena,
        chunks: &[Chunk<'_>],
        carrier: &mut Carrier,
    ) -> candle_core::Result<()> {
        let size = self.shape.block_size;
        let mut stale = Vec::new();
        for chunk in chunks {
            let (read, end) = (chunk.start.div_ceil(size), (chunk.start + chunk.tokens.len()).div_ceil(size));
            for (index, &block) in chunk.blocks[..end].iter().enumerate() {
                // Of two chunks with the same block the first finds the mark.
                if arena.take_foreign(block) && index < read {
                    stale.push(block);
                }
            }
        }
        for blocks in stale.chunks((BRING_BYTES / self.shape.block_bytes()).max(1)) {
            self.bring(arena, blocks, carrier)?;
        }
        Ok(())
    }

    fn bring(&mut self, arena: &KvArena, blocks: &[BlockId], carrier: &mut Carrier) -> candle_core::Result<()> {
        let KvShape { layers, kv_heads, head_dim, block_size } = self.shape;
        let (count, width) = (blocks.len(), kv_heads * head_dim);
        let whole = carrier.up(&[count, layers, 2, width * block_size], |bytes| {
            for (&block, to) in blocks.iter().zip(bytes.chunks_exact_mut(self.shape.block_bytes())) {
                // SAFETY: sequences of this step list the block at positions before those that they compute: nobody writes to it.
                to.copy_from_slice(unsafe { arena.block(block) });
            }
        })?;
        let slots: Vec<Place> =
            blocks.iter().flat_map(|&block| (0..block_size).map(move |slot| Place { block, slot })).collect();
        let slots = self.slots(&slots)?;
        for (index, planes) in self.layers.iter().enumerate() {
            let layer = whole.narrow(1, index, 1)?.squeeze(1)?;
            // As the arena has them: keys transposed.
            let keys = layer.narrow(1, 0, 1)?.reshape((count, kv_heads, head_dim, block_size))?;
            let keys = keys.permute((0, 3, 1, 2))?.contiguous()?.reshape((count * block_size, width))?;
            let values = layer.narrow(1, 1, 1)?.reshape((count, kv_heads, block_size, head_dim))?;
            let values = values.permute((0, 2, 1, 3))?.contiguous()?.reshape((count * block_size, width))?;
            planes.keys.scatter_set(&slots, &keys, 0)?;
            planes.values.scatter_set(&slots, &values, 0)?;
        }
        self.brought += count as u64;
        Ok(())
    }

    /// Rows of these places, as [`Self::write`] wants them: one number for each element.
    pub(super) fn slots(&self, places: &[Place]) -> candle_core::Result<Tensor> {
        let (size, width) = (self.shape.block_size, self.shape.kv_heads * self.shape.head_dim);
        let rows: Vec<u32> = places.iter().map(|place| row(place.block, place.slot, size)).collect();
        Tensor::from_vec(rows, (places.len(), 1), &self.device)?.broadcast_as((places.len(), width))?.contiguous()
    }

    /// Writes a layer's keys and values, `[slots, kv_heads × head_dim]` halves.
    pub(super) fn write(
        &self,
        layer: usize,
        slots: &Tensor,
        keys: &Tensor,
        values: &Tensor,
    ) -> candle_core::Result<()> {
        self.layers[layer].keys.scatter_set(slots, keys, 0)?;
        self.layers[layer].values.scatter_set(slots, values, 0)
    }
}

/// Where a slot is in a plane. Below 2^32, as [`Mirror::new`] has seen to.
pub(super) fn row(block: BlockId, slot: usize, block_size: usize) -> u32 {
    (block.0 as usize * block_size + slot) as u32
}
