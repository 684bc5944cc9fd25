//! Bookings of other routers, as their events tell.
//!
//! Of one booking four things are ever said: that it exists, that its prefill has ended, how far it has grown, that it is
//! freed. Each of them only adds to what is known (a later state wins over an earlier one), so that events may come in any
//! order and repeatedly. An end that comes before its booking is remembered for [`EARLY_LIFE`]; a booking of which nothing is
//! heard any more expires, counted from the last news of it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kv_index::WorkerId;

use super::ledger::Ledger;
use super::{BookingState, LoadConfig, change};

/// A router among its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouterId(pub u64);

/// What a router did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaEvent {
    /// Who.
    pub router: RouterId,
    /// Names the booking; used once by its router.
    pub request: Arc<str>,
    /// What happened to it.
    pub change: ReplicaChange,
}

/// What happened to a booking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaChange {
    /// It exists, and stands so.
    Add(BookingState),
    /// Its first token came.
    MarkPrefillCompleted,
    /// It has generated so many tokens by now.
    Grow(usize),
    /// It ended.
    Free,
}

/// What an event did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Applied {
    /// It changed the load.
    Changed,
    /// It was known already; the booking is alive.
    Refreshed,
    /// The booking had ended before.
    AlreadyFreed,
    /// It is this router's own event.
    Own,
    /// Its booking is not known yet; the event is remembered.
    Early,
    /// It tells how far a booking has come that is not known: its addition was lost, refused or has expired.
    Unknown,
    /// A bound is reached: the event is lost.
    Refused,
}

/// Most other routers.
pub const MAX_PEERS: usize = 256;
/// Most bookings of other routers.
pub const MAX_REPLICATED: usize = 1 << 16;
/// Most prompt blocks of their bookings: 4 Mi × 8 bytes of hash, twice, the bookings' own and the ledger's = 67 MB. Another
/// router that makes up bookings of which each leaves the ones before at another block has 200 bytes for each: 800 MB.
pub const MAX_REPLICATED_BLOCKS: usize = 4 << 20;
/// How long what came before its booking is remembered; more than the event plane ever delays a message.
const EARLY_LIFE: Duration = Duration::from_secs(60);
/// Most of that; beyond, the oldest is forgotten.
const MAX_EARLY: usize = 1 << 16;

#[derive(Debug, Default)]
struct Peer {
    live: HashMap<Arc<str>, Live>,
    early: HashMap<Arc<str>, Early>,
}

#[derive(Debug)]
struct Live {
    state: BookingState,
    last_news: Duration,
}

/// What is known of a booking that is not (or no longer) live.
#[derive(Clone, Copy, Debug)]
struct Early {
    /// Else only its prefill has ended.
    freed: bool,
    since: Duration,
}

/// The bookings of all other routers.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    peers: HashMap<RouterId, Peer>,
    /// Every entry of [`Peer::early`], oldest first. An entry whose time differs from the peer's is out of date.
    early: VecDeque<(Duration, RouterId, Arc<str>)>,
    bookings: usize,
    blocks: usize,
}

impl Replicas {
    pub(super) fn len(&self) -> usize {
        self.bookings
    }

    /// Whether nothing is remembered.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.peers.is_empty() && self.early.is_empty() && self.bookings == 0 && self.blocks == 0
    }

    /// Events that came before their bookings.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.early.len()
    }

    pub(super) fn apply(
        &mut self,
        event: &ReplicaEvent,
        now: Duration,
        ledger: &mut Ledger,
        config: &LoadConfig,
    ) -> Applied {
        if !self.peers.contains_key(&event.router) && self.peers.len() >= MAX_PEERS {
            return Applied::Refused;
        }
        let peer = self.peers.entry(event.router).or_default();
        let early = peer.early.get(&event.request).copied();
        if early.is_some_and(|early| early.freed) {
            return Applied::AlreadyFreed;
        }
        if let Some(live) = peer.live.get_mut(&event.request) {
            let news = match &event.change {
                ReplicaChange::Add(news) => (news.output_tokens, news.prefill_completed),
                ReplicaChange::MarkPrefillCompleted => (0, true),
                ReplicaChange::Grow(output_tokens) => (*output_tokens, false),
                ReplicaChange::Free => {
                    self.end(event.router, &event.request, ledger, config);
                    self.remember(event, true, now);
                    return Applied::Changed;
                }
            };
            let applied = progress(live, news, ledger, config);
            // Growth is told again and again, whether or not there is any.
            if applied == Applied::Changed || !matches!(event.change, ReplicaChange::Grow(_)) {
                live.last_news = now;
            }
            return applied;
        }
        match &event.change {
            ReplicaChange::Add(state) => {
                let blocks = state.prompt.blocks.len();
                if self.bookings >= MAX_REPLICATED || self.blocks + blocks > MAX_REPLICATED_BLOCKS {
                    return Applied::Refused;
                }
                peer.early.remove(&event.request);
                let mut state = state.clone();
                state.prefill_completed |= early.is_some();
                ledger.add(state.rank, state.share(config));
                peer.live.insert(event.request.clone(), Live { state, last_news: now });
                self.bookings += 1;
                self.blocks += blocks;
                Applied::Changed
            }
            ReplicaChange::MarkPrefillCompleted if early.is_some() => Applied::Early,
            ReplicaChange::Grow(_) => Applied::Unknown,
            change => {
                self.remember(event, *change == ReplicaChange::Free, now);
                Applied::Early
            }
        }
    }

    pub(super) fn remove_router(&mut self, router: RouterId, ledger: &mut Ledger, config: &LoadConfig) -> usize {
        let Some(peer) = self.peers.remove(&router) else { return 0 };
        for live in peer.live.values() {
            ledger.remove(live.state.rank, live.state.share(config));
            self.blocks -= live.state.prompt.blocks.len();
        }
        self.early.retain(|(_, other, _)| *other != router);
        self.bookings -= peer.live.len();
        peer.live.len()
    }

    pub(super) fn remove_worker(&mut self, worker: WorkerId, ledger: &mut Ledger, config: &LoadConfig) -> usize {
        self.end_where(ledger, config, |live| live.state.rank.worker == worker)
    }

    pub(super) fn expire(&mut self, now: Duration, after: Duration, ledger: &mut Ledger, config: &LoadConfig) -> usize {
        while self.early.front().is_some_and(|(since, ..)| now.saturating_sub(*since) > EARLY_LIFE) {
            self.forget_oldest();
        }
        let ended = self.end_where(ledger, config, |live| now.saturating_sub(live.last_news) > after);
        self.peers.retain(|_, peer| !(peer.live.is_empty() && peer.early.is_empty()));
        ended
    }

    fn end_where(&mut self, ledger: &mut Ledger, config: &LoadConfig, done: impl Fn(&Live) -> bool) -> usize {
        let mut ended = 0;
        for peer in self.peers.values_mut() {
            for (_, live) in peer.live.extract_if(|_, live| done(live)) {
                ledger.remove(live.state.rank, live.state.share(config));
                self.blocks -= live.state.prompt.blocks.len();
                ended += 1;
            }
        }
        self.bookings -= ended;
        ended
    }

    fn end(&mut self, router: RouterId, request: &str, ledger: &mut Ledger, config: &LoadConfig) {
        let Some(live) = self.peers.get_mut(&router).and_then(|peer| peer.live.remove(request)) else { return };
        ledger.remove(live.state.rank, live.state.share(config));
        self.bookings -= 1;
        self.blocks -= live.state.prompt.blocks.len();
    }

    fn remember(&mut self, event: &ReplicaEvent, freed: bool, since: Duration) {
        if self.early.len() >= MAX_EARLY {
            self.forget_oldest();
        }
        let peer = self.peers.entry(event.router).or_default();
        peer.early.insert(event.request.clone(), Early { freed, since });
        self.early.push_back((since, event.router, event.request.clone()));
    }

    fn forget_oldest(&mut self) {
        let Some((since, router, request)) = self.early.pop_front() else { return };
        let Some(peer) = self.peers.get_mut(&router) else { return };
        if peer.early.get(&request).is_some_and(|early| early.since == since) {
            peer.early.remove(&request);
        }
    }
}

/// News of how many tokens are generated, and whether the prefill has ended. Neither ever goes back.
fn progress(live: &mut Live, news: (usize, bool), ledger: &mut Ledger, config: &LoadConfig) -> Applied {
    let before = (live.state.output_tokens, live.state.prefill_completed);
    let after = (before.0.max(news.0), before.1 || news.1);
    if before == after {
        return Applied::Refreshed;
    }
    change(&mut live.state, ledger, config, |state| (state.output_tokens, state.prefill_completed) = after);
    Applied::Changed
}
