//! A sequence whose next blocks are in a tier below the arena: it has its place in the arena and waits for them there, while
//! others run on. What does not come in time it computes.

use std::time::Duration;

use super::Sequence;
use crate::engine::builtin::pool::BlockPool;
use crate::engine::builtin::tiers::catalog::Found;

/// Longest wait of one sequence for blocks from below. From disk 1 GB comes in that time if it is slow; what would take longer
/// than this to read is seldom faster to read than to compute.
const WAIT: Duration = Duration::from_secs(4);

/// How far a sequence has come with it.
#[derive(Debug, Default)]
pub(super) struct Loading {
    /// It waits since then.
    since: Option<Duration>,
    /// Blocks that have come since then.
    blocks: usize,
    /// It has waited long enough.
    waited_out: bool,
}

/// Blocks have come from below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// When the first of them was asked for.
    pub since: Duration,
    /// How many.
    pub blocks: usize,
}

impl Sequence {
    /// Whether it waits for blocks, and so computes nothing.
    pub(in crate::engine::builtin::scheduler) fn is_loading(&self) -> bool {
        self.loading.since.is_some()
    }

    /// Brings the blocks that come next from below, as far as they are there. Tells when there is nothing more to wait for.
    pub(in crate::engine::builtin::scheduler) fn load(
        &mut self,
        pool: &mut BlockPool,
        now: Duration,
    ) -> Option<Loaded> {
        loop {
            self.reuse_cached(pool);
            let next = self.next_reusable().filter(|_| !self.loading.waited_out);
            let Some((local, hash)) = next else { break };
            match pool.fetch(hash, self.table[self.committed]) {
                Found::Here(_) => {
                    let parent = self.committed.checked_sub(1).map(|last| self.hashes[last].1);
                    let block = &mut self.table[self.committed];
                    *block = pool.commit(*block, parent, hash, local);
                    self.loading.since.get_or_insert(now);
                    self.loading.blocks += 1;
                    self.cover_next();
                }
                Found::Later => {
                    let since = *self.loading.since.get_or_insert(now);
                    if now.saturating_sub(since) < WAIT {
                        self.read_ahead(pool);
                        return None;
                    }
                    self.loading.waited_out = true;
                }
                Found::Nowhere => break,
            }
        }
        let since = self.loading.since.take()?;
        let blocks = std::mem::take(&mut self.loading.blocks);
        pool.tiers_mut().touch(self.hashes[..self.committed].iter().rev().map(|hash| hash.1));
        (blocks > 0).then_some(Loaded { since, blocks })
    }

    /// Of the next `tokens` tokens, those before the first block that is below the arena: it need not be computed.
    pub(in crate::engine::builtin::scheduler) fn tokens_to_compute(&self, tokens: usize, pool: &BlockPool) -> usize {
        if self.loading.waited_out || !pool.has_tiers() {
            return tokens;
        }
        let size = self.block_size.get();
        let blocks = (self.computed + tokens).div_ceil(size);
        let first = self.committed + 1;
        let beyond = self.reusable().enumerate().take(blocks).skip(first);
        let below = beyond.map(|(index, hash)| (index * size, hash)).find(|(_, hash)| pool.has_below(*hash));
        below.map_or(tokens, |(start, _)| start - self.computed)
    }

    fn read_ahead(&self, pool: &mut BlockPool) {
        for hash in self.reusable().skip(self.committed + 1) {
            if !pool.tiers_mut().read_ahead(hash) {
                break;
            }
        }
    }
}
