//! What is running where, from the router's own view: blocks and prompt tokens booked over each request's life.
//!
//! A request is booked when it is routed, grows as it generates, stops counting as prompt load at its first token, and is
//! freed at its end. Sequences that share a prefix on one rank count the shared blocks once. Nothing expires: whoever books
//! holds a guard that frees.

use std::collections::HashMap;
use std::sync::Arc;

use kv_hashing::{BlockSize, SequenceHash};
use kv_index::{HashBuilder, WorkerRank};

/// A prompt as the load sees it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Sequence hashes of its full blocks.
    pub blocks: Arc<[SequenceHash]>,
    /// Its length in tokens; at least `blocks.len()` full blocks.
    pub tokens: usize,
    /// Tokens per block.
    pub block_size: BlockSize,
}

/// One attempt of one request; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BookingId(u64);

/// The load of all ranks.
#[derive(Debug, Default)]
pub struct ActiveLoad {
    ranks: HashMap<WorkerRank, RankLoad>,
    bookings: HashMap<BookingId, Booking, HashBuilder>,
    next_id: u64,
}

#[derive(Debug, Default)]
struct RankLoad {
    /// Sequences that use each shared block. If a block is here, so is every block before it.
    shared: HashMap<SequenceHash, u32, HashBuilder>,
    /// Blocks of one sequence alone: the partial end of its prompt, and its output.
    private: usize,
    prefill_tokens: usize,
    requests: usize,
}

#[derive(Debug)]
struct Booking {
    rank: WorkerRank,
    prompt: Prompt,
    output_tokens: usize,
    /// 0 once prefill has ended.
    prefill_tokens: usize,
}

impl Booking {
    fn private_blocks(&self) -> usize {
        self.prompt.block_size.blocks_for(self.prompt.tokens + self.output_tokens) - self.prompt.blocks.len()
    }
}

impl ActiveLoad {
    /// Nothing runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Books a request on `rank`. `prefill_tokens` are the prompt tokens that the rank has to compute, those expected to be
    /// reused left out.
    pub fn book(&mut self, rank: WorkerRank, prompt: Prompt, prefill_tokens: usize) -> BookingId {
        let booking = Booking { rank, prompt, output_tokens: 0, prefill_tokens };
        let load = self.ranks.entry(rank).or_default();
        for block in booking.prompt.blocks.iter() {
            *load.shared.entry(*block).or_default() += 1;
        }
        load.private += booking.private_blocks();
        load.prefill_tokens += prefill_tokens;
        load.requests += 1;
        let id = BookingId(self.next_id);
        self.next_id += 1;
        self.bookings.insert(id, booking);
        id
    }

    /// The first token came: the request is no prompt load any more. Unknown bookings are ignored, here and below.
    pub fn prefill_completed(&mut self, id: BookingId) {
        let Some(booking) = self.bookings.get_mut(&id) else { return };
        let tokens = std::mem::take(&mut booking.prefill_tokens);
        if let Some(load) = self.ranks.get_mut(&booking.rank) {
            load.prefill_tokens -= tokens;
        }
    }

    /// The request generated `tokens` more tokens.
    pub fn add_output(&mut self, id: BookingId, tokens: usize) {
        let Some(booking) = self.bookings.get_mut(&id) else { return };
        let before = booking.private_blocks();
        booking.output_tokens += tokens;
        if let Some(load) = self.ranks.get_mut(&booking.rank) {
            load.private += booking.private_blocks() - before;
        }
    }

    /// The request ended, however it did.
    pub fn free(&mut self, id: BookingId) {
        let Some(booking) = self.bookings.remove(&id) else { return };
        let Some(load) = self.ranks.get_mut(&booking.rank) else { return };
        for block in booking.prompt.blocks.iter() {
            if let Some(users) = load.shared.get_mut(block) {
                *users -= 1;
                if *users == 0 {
                    load.shared.remove(block);
                }
            }
        }
        load.private -= booking.private_blocks();
        load.prefill_tokens -= booking.prefill_tokens;
        load.requests -= 1;
        if load.requests == 0 {
            self.ranks.remove(&booking.rank);
        }
    }

    /// Blocks in use on a rank.
    pub fn active_blocks(&self, rank: WorkerRank) -> usize {
        self.ranks.get(&rank).map_or(0, |load| load.shared.len() + load.private)
    }

    /// Blocks that would be in use on a rank if `prompt` ran there. Cost: a binary search over the prompt's blocks, since the
    /// blocks of a running sequence are always there from its first one on.
    pub fn potential_blocks(&self, rank: WorkerRank, prompt: &Prompt) -> usize {
        let own = prompt.block_size.blocks_for(prompt.tokens);
        let Some(load) = self.ranks.get(&rank) else { return own };
        let shared = prompt.blocks.partition_point(|block| load.shared.contains_key(block));
        load.shared.len() + load.private + own - shared
    }

    /// Prompt tokens booked on a rank and not yet computed.
    pub fn prefill_tokens(&self, rank: WorkerRank) -> usize {
        self.ranks.get(&rank).map_or(0, |load| load.prefill_tokens)
    }

    /// Requests on a rank.
    pub fn requests(&self, rank: WorkerRank) -> usize {
        self.ranks.get(&rank).map_or(0, |load| load.requests)
    }

    /// Requests on all ranks.
    pub fn total_requests(&self) -> usize {
        self.bookings.len()
    }
}

#[cfg(test)]
mod tests;
