//! What is running where: blocks and prompt tokens booked over each request's life, by this router and by the others.
//!
//! A request is booked when it is routed, grows as it generates, stops counting as prompt load at its first token, and is
//! freed at its end. Sequences that share a prefix on one rank count the shared blocks once. Own bookings never expire: whoever
//! books holds a guard that frees. Those of other routers (`replica`) come as events and do expire. `ledger` holds the sums;
//! `reports` what workers say of themselves.

mod ledger;
mod replica;
mod reports;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kv_hashing::{BlockSize, SequenceHash};
use kv_index::{HashBuilder, WorkerId, WorkerRank};

use ledger::{Cursor, Ledger, Share, Sums};
use replica::Replicas;
pub use replica::{Applied, MAX_PEERS, MAX_REPLICATED, MAX_REPLICATED_BLOCKS, ReplicaChange, ReplicaEvent, RouterId};
pub use reports::Reported;
use reports::Reports;

/// What counts as load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadConfig {
    /// Count the blocks of running requests.
    pub track_active_blocks: bool,
    /// Count the blocks that they generate, too.
    pub track_output_blocks: bool,
    /// Count blocks that sequences of a rank have in common once; else every request counts alone.
    pub assume_kv_reuse: bool,
    /// Count prompt tokens that are not computed yet.
    pub track_prefill_tokens: bool,
}

impl Default for LoadConfig {
    fn default() -> Self {
        Self { track_active_blocks: true, track_output_blocks: true, assume_kv_reuse: true, track_prefill_tokens: true }
    }
}

/// A prompt as the load sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Sequence hashes of its full blocks.
    pub blocks: Arc<[SequenceHash]>,
    /// Its length in tokens; at least `blocks.len()` full blocks.
    pub tokens: usize,
    /// Tokens per block.
    pub block_size: BlockSize,
}

/// One attempt of one request of this router; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BookingId(u64);

/// What is to be booked.
#[derive(Clone, Debug)]
pub struct NewBooking {
    /// Names the booking to other routers: used once, so a retry needs another.
    pub request: Arc<str>,
    /// Where it runs.
    pub rank: WorkerRank,
    /// Its prompt.
    pub prompt: Prompt,
    /// Prompt tokens that the rank has to compute, those expected to be reused left out.
    pub prefill_tokens: usize,
    /// How long the answer is expected to be: its blocks count less and less as that length comes near, since they are about
    /// to be freed.
    pub expected_output_tokens: Option<usize>,
}

/// A booking in the middle of its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BookingState {
    /// Where it runs.
    pub rank: WorkerRank,
    /// Its prompt.
    pub prompt: Prompt,
    /// See [`NewBooking::prefill_tokens`].
    pub prefill_tokens: usize,
    /// See [`NewBooking::expected_output_tokens`].
    pub expected_output_tokens: Option<usize>,
    /// Tokens generated so far.
    pub output_tokens: usize,
    /// The first token came.
    pub prefill_completed: bool,
}

impl BookingState {
    fn share(&self, config: &LoadConfig) -> Share<'_> {
        let Prompt { blocks, tokens, block_size } = &self.prompt;
        let prefill_tokens =
            if config.track_prefill_tokens && !self.prefill_completed { self.prefill_tokens } else { 0 };
        if !config.track_active_blocks {
            return Share { shared: &[], private: 0, prefill_tokens };
        }
        let shared = if config.assume_kv_reuse { &blocks[..] } else { &[] };
        let prompt_blocks = block_size.blocks_for(*tokens);
        let mut private = prompt_blocks.saturating_sub(shared.len());
        if config.track_output_blocks {
            let output = block_size.blocks_for(tokens + self.output_tokens) - prompt_blocks;
            private += match self.expected_output_tokens {
                Some(expected) if expected > 0 => {
                    (output * expected.saturating_sub(self.output_tokens)).div_ceil(expected)
                }
                _ => output,
            };
        }
        Share { shared, private, prefill_tokens }
    }
}

/// The load of a rank, all routers' bookings together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankView {
    /// KV blocks in use.
    pub active_blocks: u32,
    /// Prompt tokens booked and not yet computed.
    pub prefill_tokens: u32,
    /// Requests.
    pub requests: u32,
}

impl From<Sums> for RankView {
    fn from(sums: Sums) -> Self {
        Self {
            active_blocks: clamp(sums.blocks()),
            prefill_tokens: clamp(sums.prefill_tokens),
            requests: clamp(sums.requests),
        }
    }
}

fn clamp(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The load of all ranks.
#[derive(Debug)]
pub struct ActiveLoad {
    own: RouterId,
    config: LoadConfig,
    ledger: Ledger,
    bookings: HashMap<BookingId, (Arc<str>, BookingState), HashBuilder>,
    next_id: u64,
    replicas: Replicas,
    reports: Reports,
}

impl ActiveLoad {
    /// Nothing runs. `own` is this router's id among its peers.
    pub fn new(own: RouterId, config: LoadConfig) -> Self {
        let replicas = Replicas::default();
        let (ledger, bookings, reports) = Default::default();
        Self { own, config, ledger, bookings, next_id: 0, replicas, reports }
    }

    /// This router's id among its peers.
    pub fn own_id(&self) -> RouterId {
        self.own
    }

    /// Books a request. Cost: a comparison for each block of its prompt, and a copy of those that nobody else uses.
    pub fn book(&mut self, new: NewBooking) -> BookingId {
        let NewBooking { request, rank, prompt, prefill_tokens, expected_output_tokens } = new;
        let (output_tokens, prefill_completed) = (0, false);
        let state =
            BookingState { rank, prompt, prefill_tokens, expected_output_tokens, output_tokens, prefill_completed };
        self.ledger.add(rank, state.share(&self.config));
        let id = BookingId(self.next_id);
        self.next_id += 1;
        self.bookings.insert(id, (request, state));
        id
    }

    /// The first token came: the request is no prompt load any more. Unknown bookings are ignored, here and below.
    pub fn prefill_completed(&mut self, id: BookingId) {
        self.change(id, |state| state.prefill_completed = true);
    }

    /// The request generated `tokens` more tokens.
    pub fn add_output(&mut self, id: BookingId, tokens: usize) {
        self.change(id, |state| state.output_tokens += tokens);
    }

    /// The request ended, however it did.
    pub fn free(&mut self, id: BookingId) {
        if let Some((_, state)) = self.bookings.remove(&id) {
            self.ledger.remove(state.rank, state.share(&self.config));
        }
    }

    /// Where an own booking stands: what the other routers are told of it.
    pub fn state(&self, id: BookingId) -> Option<&BookingState> {
        self.bookings.get(&id).map(|(_, state)| state)
    }

    /// All own bookings: what a router that joins has to know of this one.
    pub fn own_bookings(&self) -> impl Iterator<Item = ReplicaEvent> + '_ {
        self.bookings.values().map(|(request, state)| ReplicaEvent {
            router: self.own,
            request: request.clone(),
            change: ReplicaChange::Add(state.clone()),
        })
    }

    /// Own bookings that have generated anything: their names, and how many tokens. Cost: linear in the own bookings.
    pub fn own_growth(&self) -> impl Iterator<Item = (Arc<str>, usize)> + '_ {
        let grown = self.bookings.values().filter(|(_, state)| state.output_tokens > 0);
        grown.map(|(request, state)| (request.clone(), state.output_tokens))
    }

    /// Takes over what another router did. Events of one booking may come in any order and more than once: the outcome is
    /// the same. A free that comes before its add is remembered for a while.
    pub fn apply(&mut self, event: &ReplicaEvent, now: Duration) -> Applied {
        if event.router == self.own {
            return Applied::Own;
        }
        self.replicas.apply(event, now, &mut self.ledger, &self.config)
    }

    /// Another router is gone; returns how many bookings went with it.
    pub fn remove_router(&mut self, router: RouterId) -> usize {
        self.replicas.remove_router(router, &mut self.ledger, &self.config)
    }

    /// A worker is gone, and what ran there. Returns how many bookings, own and others'; frees that come later have no effect.
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let gone: Vec<BookingId> =
            self.bookings.iter().filter(|(_, (_, state))| state.rank.worker == worker).map(|(id, _)| *id).collect();
        gone.iter().for_each(|id| self.free(*id));
        self.reports.remove_worker(worker);
        gone.len() + self.replicas.remove_worker(worker, &mut self.ledger, &self.config)
    }

    /// Drops bookings of other routers that have made no progress for `after`; returns how many. Cost: linear in the bookings of
    /// other routers.
    pub fn expire(&mut self, now: Duration, after: Duration) -> usize {
        self.replicas.expire(now, after, &mut self.ledger, &self.config)
    }

    /// A worker tells how busy it is. What it has beyond the bookings counts as load of others until its next report.
    pub fn report(&mut self, rank: WorkerRank, reported: Reported, now: Duration) {
        let booked = self.rank(rank);
        self.reports.take(rank, reported, booked, now);
    }

    /// Drops the reports of workers that have been silent too long.
    pub fn expire_reports(&mut self, now: Duration) {
        self.reports.expire(now);
    }

    /// What a worker last told, until it has been silent too long.
    pub fn reported(&self, rank: WorkerRank) -> Option<Reported> {
        self.reports.get(rank)
    }

    /// The load of one rank.
    pub fn rank(&self, rank: WorkerRank) -> RankView {
        self.ledger.rank(rank).into()
    }

    /// Blocks that would be in use on a rank if `prompt` ran there.
    pub fn potential_blocks(&self, rank: WorkerRank, prompt: &Prompt) -> usize {
        let depth = self.ledger.depth(rank, self.compared(prompt));
        potential(self.ledger.rank(rank), depth, prompt.block_size.blocks_for(prompt.tokens))
    }

    /// Requests of this router.
    pub fn total_requests(&self) -> usize {
        self.bookings.len()
    }

    /// Requests of other routers.
    pub fn replicated_requests(&self) -> usize {
        self.replicas.len()
    }

    /// Reads every rank for one prompt; `depths` is scratch space.
    pub(crate) fn survey<'a>(&'a self, prompt: &Prompt, depths: &'a mut Vec<u32>) -> Survey<'a> {
        self.ledger.depths(self.compared(prompt), depths);
        let own = prompt.block_size.blocks_for(prompt.tokens);
        Survey { own, cursor: self.ledger.cursor(depths), reports: self.reports.cursor() }
    }

    /// The blocks of a prompt that a rank's sequences may have already.
    fn compared<'a>(&self, prompt: &'a Prompt) -> &'a [SequenceHash] {
        if self.config.track_active_blocks && self.config.assume_kv_reuse { &prompt.blocks } else { &[] }
    }

    fn change(&mut self, id: BookingId, with: impl FnOnce(&mut BookingState)) {
        if let Some((_, state)) = self.bookings.get_mut(&id) {
            change(state, &mut self.ledger, &self.config, with);
        }
    }
}

/// Changes a running booking, and the sums with it.
fn change(state: &mut BookingState, ledger: &mut Ledger, config: &LoadConfig, with: impl FnOnce(&mut BookingState)) {
    let Share { private, prefill_tokens, .. } = state.share(config);
    with(state);
    let before = Share { shared: &[], private, prefill_tokens };
    ledger.change(state.rank, before, state.share(config));
}

/// Blocks in use if a prompt of `own` blocks ran where `depth` of them are in use already.
fn potential(sums: Sums, depth: usize, own: usize) -> usize {
    sums.blocks() + own.saturating_sub(depth)
}

/// The load as one prompt finds it, rank by rank in rising order.
pub(crate) struct Survey<'a> {
    /// Blocks of the prompt.
    own: usize,
    cursor: Cursor<'a>,
    reports: reports::Cursor<'a>,
}

impl Survey<'_> {
    /// The load of `rank`, and its blocks if the prompt ran there. Ranks must rise from call to call.
    #[inline]
    pub(crate) fn at(&mut self, rank: WorkerRank) -> (RankView, u32) {
        let (sums, depth) = self.cursor.at(rank);
        (sums.into(), clamp(potential(sums, depth, self.own)))
    }

    /// What `rank` says that it has beyond what is booked there. Ranks must rise from call to call.
    #[inline]
    pub(crate) fn unbooked(&mut self, rank: WorkerRank) -> RankView {
        self.reports.unbooked(rank)
    }
}

#[cfg(test)]
mod tests;
