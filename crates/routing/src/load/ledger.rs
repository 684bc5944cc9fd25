//! The sums behind the load, per rank.
//!
//! The shared blocks of all ranks are in one trie, so that a prompt is compared with every rank by a few lookups in all, not a
//! few for each rank. What is added must be removed with the same values; the caller keeps them.

use kv_hashing::SequenceHash;
use kv_index::{Runs, WorkerRank};
use smallvec::SmallVec;

/// Place of a rank in [`Ledger::sums`]; reused when the rank is idle.
type Slot = u32;

/// Who uses the blocks of a run, in order of slot: (slot, its sequences that do).
type Users = SmallVec<[(Slot, u32); 1]>;

fn place_of(slot: Slot, users: &Users) -> Result<usize, usize> {
    users.binary_search_by_key(&slot, |(slot, _)| *slot)
}

/// What one sequence adds to its rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share<'a> {
    /// Blocks that count once however many sequences of the rank use them; each is the end of a prefix.
    pub(super) shared: &'a [SequenceHash],
    /// Blocks of this sequence alone.
    pub(super) private: usize,
    /// Prompt tokens yet to be computed.
    pub(super) prefill_tokens: usize,
}

/// The load of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    /// Distinct shared blocks.
    shared: usize,
    private: usize,
    pub(super) prefill_tokens: usize,
    pub(super) requests: usize,
}

impl Sums {
    pub(super) fn blocks(&self) -> usize {
        self.shared + self.private
    }
}

/// The load of all ranks. An idle rank leaves nothing behind.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// In order of rank.
    order: Vec<(WorkerRank, Slot)>,
    sums: Vec<Sums>,
    free: Vec<Slot>,
    prefixes: Runs<Users>,
}

impl Ledger {
    /// A sequence starts on `rank`.
    pub(super) fn add(&mut self, rank: WorkerRank, share: Share<'_>) {
        let slot = self.slot_or_new(rank);
        let sums = &mut self.sums[slot as usize];
        self.prefixes.insert(share.shared, |users, blocks| match place_of(slot, users) {
            Ok(at) => users[at].1 += 1,
            Err(at) => {
                users.insert(at, (slot, 1));
                sums.shared += blocks;
            }
        });
        sums.private += share.private;
        sums.prefill_tokens += share.prefill_tokens;
        sums.requests += 1;
    }

    /// A sequence ends; `share` is what it counts for now.
    pub(super) fn remove(&mut self, rank: WorkerRank, share: Share<'_>) {
        let Some(at) = self.place(rank) else { return };
        let slot = self.order[at].1;
        let sums = &mut self.sums[slot as usize];
        self.prefixes.release(share.shared, |users, blocks| {
            let Ok(at) = place_of(slot, users) else { return false };
            users[at].1 -= 1;
            if users[at].1 == 0 {
                users.remove(at);
                sums.shared -= blocks;
            }
            // Whoever uses what follows uses these blocks, too.
            users.is_empty()
        });
        sums.private -= share.private;
        sums.prefill_tokens -= share.prefill_tokens;
        sums.requests -= 1;
        if sums.requests == 0 {
            self.order.remove(at);
            self.free.push(slot);
        }
    }

    /// A running sequence counts otherwise than before; its shared blocks stay.
    pub(super) fn change(&mut self, rank: WorkerRank, before: Share<'_>, after: Share<'_>) {
        let Some(at) = self.place(rank) else { return };
        let sums = &mut self.sums[self.order[at].1 as usize];
        sums.private = sums.private - before.private + after.private;
        sums.prefill_tokens = sums.prefill_tokens - before.prefill_tokens + after.prefill_tokens;
    }

    /// The load of one rank.
    pub(super) fn rank(&self, rank: WorkerRank) -> Sums {
        self.place(rank).map_or_else(Sums::default, |at| self.sums[self.order[at].1 as usize])
    }

    /// Leading blocks of `blocks` that sequences of `rank` use.
    pub(super) fn depth(&self, rank: WorkerRank, blocks: &[SequenceHash]) -> usize {
        let Some(at) = self.place(rank) else { return 0 };
        let slot = self.order[at].1;
        let mut depth = 0;
        self.prefixes.walk(blocks, |users, end| {
            let used = place_of(slot, users).is_ok();
            if used {
                depth = end;
            }
            used
        });
        depth
    }

    /// [`Self::depth`] of every rank, into `depths`, for [`Cursor`].
    pub(super) fn depths(&self, blocks: &[SequenceHash], depths: &mut Vec<u32>) {
        depths.clear();
        depths.resize(self.sums.len(), 0);
        self.prefixes.walk(blocks, |users, end| {
            for (slot, _) in users {
                depths[*slot as usize] = end as u32;
            }
            true
        });
    }

    /// Reads the ranks in rising order, with the `depths` of a prompt.
    pub(super) fn cursor<'a>(&'a self, depths: &'a [u32]) -> Cursor<'a> {
        Cursor { ledger: self, rest: &self.order, depths }
    }

    /// Ranks that run anything.
    #[cfg(test)]
    pub(super) fn ranks(&self) -> usize {
        self.order.len()
    }

    /// Distinct shared blocks.
    #[cfg(test)]
    pub(super) fn shared_blocks(&self) -> usize {
        self.prefixes.blocks()
    }

    fn place(&self, rank: WorkerRank) -> Option<usize> {
        self.order.binary_search_by_key(&rank, |(rank, _)| *rank).ok()
    }

    fn slot_or_new(&mut self, rank: WorkerRank) -> Slot {
        match self.order.binary_search_by_key(&rank, |(rank, _)| *rank) {
            Ok(at) => self.order[at].1,
            Err(at) => {
                let slot = self.free.pop().unwrap_or_else(|| {
                    self.sums.push(Sums::default());
                    (self.sums.len() - 1) as Slot
                });
                self.order.insert(at, (rank, slot));
                slot
            }
        }
    }
}

/// Reads a [`Ledger`] rank by rank, in rising order: two steps along sorted lists instead of a search each.
pub(super) struct Cursor<'a> {
    ledger: &'a Ledger,
    rest: &'a [(WorkerRank, Slot)],
    depths: &'a [u32],
}

impl Cursor<'_> {
    /// The load of `rank` and how much of the prompt its sequences use. Ranks must rise from call to call.
    #[inline]
    pub(super) fn at(&mut self, rank: WorkerRank) -> (Sums, usize) {
        while let [(first, slot), rest @ ..] = self.rest {
            if *first > rank {
                break;
            }
            self.rest = rest;
            if *first == rank {
                return (self.ledger.sums[*slot as usize], self.depths[*slot as usize] as usize);
            }
        }
        (Sums::default(), 0)
    }
}
