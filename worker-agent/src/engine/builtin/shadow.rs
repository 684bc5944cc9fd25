//! A forward pass for tests: logits are a hash of the context, and the KV contract is checked at every step.
//!
//! Each slot of the shadow arena holds what the real one would depend on: the position and a hash of the whole context up to
//! its token. So a wrong block, a stale slot or a missing write changes or stops the test.

use std::collections::HashSet;

use super::{BlockId, Chunk, Forward, Logits};

/// Tokens in the shadow's vocabulary.
pub(crate) const VOCAB: usize = 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    position: usize,
    /// Hash of the context before the slot's token, and with it.
    before: u64,
    context: u64,
}

/// The shadow arena.
pub(crate) struct Shadow {
    block_size: usize,
    slots: Vec<Option<Slot>>,
    /// Tokens computed in all steps.
    pub(crate) computed: usize,
}

impl Shadow {
    pub(crate) fn new(blocks: usize, block_size: usize) -> Self {
        Self { block_size, slots: vec![None; blocks * block_size], computed: 0 }
    }

    /// Copies a block of another arena.
    pub(crate) fn copy_block(&mut self, to: BlockId, from: &Self, block: BlockId) {
        let range = |id: BlockId| id.0 as usize * self.block_size..(id.0 as usize + 1) * self.block_size;
        let (to, block) = (range(to), range(block));
        self.slots[to].copy_from_slice(&from.slots[block]);
    }

    fn index(&self, blocks: &[BlockId], position: usize) -> usize {
        blocks[position / self.block_size].0 as usize * self.block_size + position % self.block_size
    }

    /// Asserts that the positions before `start` are those of one context, and returns its hash.
    fn check_context(&self, blocks: &[BlockId], start: usize) -> u64 {
        (0..start).fold(0, |context, position| {
            let slot = self.slots[self.index(blocks, position)].expect("an earlier position was never written");
            assert_eq!(slot.position, position, "a block is listed at the wrong position");
            assert_eq!(slot.before, context, "a block belongs to another context");
            slot.context
        })
    }
}

/// Extends a context by a token.
pub(crate) fn extend(context: u64, token: u32) -> u64 {
    let z = (context ^ u64::from(token).wrapping_add(0x51)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z ^ (z >> 29)
}

/// Appends the row of logits that follows a context: in −4..4.
pub(crate) fn push_row(context: u64, logits: &mut Vec<f32>) {
    logits.extend((0..VOCAB as u32).map(|token| {
        let hash = extend(extend(context, token), 7);
        (hash >> 40) as f32 / (1 << 21) as f32 - 4.0
    }));
}

impl Forward for Shadow {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        let mut written = HashSet::new();
        // Every chunk reads the arena as it was before the step.
        let contexts: Vec<u64> = chunks.iter().map(|c| self.check_context(c.blocks, c.start)).collect();
        for (chunk, mut context) in chunks.iter().zip(contexts) {
            assert!(!chunk.tokens.is_empty());
            for (&token, position) in chunk.tokens.iter().zip(chunk.start..) {
                let before = context;
                context = extend(context, token);
                let index = self.index(chunk.blocks, position);
                assert!(written.insert(index), "two chunks write the same slot");
                self.slots[index] = Some(Slot { position, before, context });
                let last = position + 1 == chunk.start + chunk.tokens.len();
                if chunk.logits == Logits::All || (last && chunk.logits == Logits::Last) {
                    push_row(context, logits);
                }
            }
            self.computed += chunk.tokens.len();
        }
        for chunk in chunks {
            self.check_context(chunk.blocks, chunk.start + chunk.tokens.len());
        }
    }
}
