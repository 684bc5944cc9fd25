//! Blocks that the scheduler hands to others, and takes from them: a prompt computed for another engine, room for blocks that
//! are on their way, and their arrival.

use kv_hashing::{BlockHash, SequenceHash};

use super::{Request, RequestId, Scheduler};
use crate::engine::builtin::BlockId;
use crate::engine::builtin::exchange::Import;

#[cfg(test)]
mod tests;

/// The full blocks of a prompt that was computed for another engine; still held.
#[derive(Debug)]
pub struct Handover {
    /// The request, which has ended.
    pub id: RequestId,
    /// Names of the blocks, in order.
    pub hashes: Vec<SequenceHash>,
    /// The blocks.
    pub table: Vec<BlockId>,
}

impl Request {
    /// Leading blocks that may come from a cache: never the last token, whose logits are needed, and none at all when those of
    /// all tokens are.
    pub fn reusable(&self) -> &[(BlockHash, SequenceHash)] {
        let blocks = if self.prompt_logprobs { 0 } else { self.block_size.full_blocks(self.tokens.len() - 1) };
        &self.hashes[..blocks]
    }
}

impl Scheduler {
    /// What ended in the last step with its blocks kept for another engine. The caller releases them.
    pub fn take_handovers(&mut self) -> Vec<Handover> {
        std::mem::take(&mut self.handovers)
    }

    /// Gives back blocks that were handed over or reserved.
    pub fn release(&mut self, table: &[BlockId]) {
        self.pool.release(table);
    }

    /// How many of a sequence's leading blocks are not cached.
    pub fn missing(&self, blocks: &[(BlockHash, SequenceHash)]) -> usize {
        blocks.len() - self.pool.prefix(blocks.iter().map(|block| block.1)).blocks
    }

    /// How many of these blocks a fetch shall bring or hold: none of those that are on this machine's disk, if that has all that are
    /// missing here. The sequence reads them itself; a disk that has only some of them spares the network no time.
    pub fn worth_fetching(&self, blocks: &[(BlockHash, SequenceHash)]) -> usize {
        let here = self.pool.prefix(blocks.iter().map(|block| block.1)).blocks;
        let missing = blocks[here..].iter().map(|block| block.1);
        if self.pool.on_disk_here(missing) { here } else { blocks.len() }
    }

    /// Holds the leading blocks that are cached or in host memory, and allocates the others, `limit` at most, for the caller to
    /// fill; returns the table, how many were cached, and how many need not be filled. The moves that this leaves come before
    /// anything else is written.
    /// As with admission, running sequences keep a block each to grow into; and while others wait for blocks there are none to
    /// reserve.
    pub fn reserve(
        &mut self,
        blocks: &[(BlockHash, SequenceHash)],
        limit: usize,
    ) -> Option<(Vec<BlockId>, usize, usize)> {
        let prefix = self.pool.prefix(blocks.iter().map(|block| block.1));
        let missing = blocks.len() - prefix.blocks;
        // Of the last plan; whoever lacked blocks then may be gone.
        let wanted = self.lacks_blocks && !self.is_idle();
        let short = self.pool.available() < prefix.idle + missing + self.running.len();
        if missing > limit || missing > 0 && (wanted || short) {
            return None;
        }
        let here = blocks[..prefix.blocks].iter();
        let mut table: Vec<_> = here.filter_map(|block| self.pool.acquire(block.1)).collect();
        // Making room shall not throw out what is about to come up.
        self.pool.tiers_mut().touch(blocks.iter().rev().map(|block| block.1));
        self.pool.allocate(missing, &mut table).ok()?;
        let here = self.fill_from_host(blocks, &mut table, prefix.blocks);
        Some((table, prefix.blocks, here))
    }

    /// Caches the blocks that have come, and gives all of a reservation back to the pool: they are what is evicted last.
    pub fn import(&mut self, import: Import) {
        let Import { blocks, mut table, new, share: _share } = import;
        for index in new {
            let (local, hash) = blocks[index];
            let parent = index.checked_sub(1).map(|parent| blocks[parent].1);
            table[index] = self.pool.commit(table[index], parent, hash, local);
        }
        self.pool.release(&table);
    }
}
