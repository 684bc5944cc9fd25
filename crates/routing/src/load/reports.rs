//! What workers say of themselves, and how much of it is news.
//!
//! A report is up to 100 ms old, so it does not replace the bookings, which are exact for what routers sent. What a worker
//! has beyond the bookings at the moment its report comes was sent by somebody else; that counts until the next report.

use std::collections::BTreeMap;
use std::collections::btree_map::Iter;
use std::iter::Peekable;
use std::time::Duration;

use kv_index::{WorkerId, WorkerRank};

use super::RankView;

/// How long a worker's report of itself counts; it sends one at least every second.
pub(super) const LIFE: Duration = Duration::from_secs(10);

/// Most ranks whose reports are kept.
const MAX: usize = 1 << 16;

/// What a worker says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// KV blocks that running sequences hold.
    pub active_blocks: Option<u32>,
    /// Prompt tokens admitted and not yet computed.
    pub prefill_tokens: Option<u32>,
    /// KV blocks that hold anything, in use or reusable.
    pub kv_used_blocks: Option<u32>,
    /// Requests running.
    pub running_requests: Option<u32>,
    /// Requests waiting for a place.
    pub waiting_requests: Option<u32>,
}

impl Reported {
    /// What it has beyond what is booked there.
    fn beyond(&self, booked: RankView) -> RankView {
        let requests = self.running_requests.unwrap_or(0).saturating_add(self.waiting_requests.unwrap_or(0));
        RankView {
            active_blocks: self.active_blocks.unwrap_or(0).saturating_sub(booked.active_blocks),
            prefill_tokens: self.prefill_tokens.unwrap_or(0).saturating_sub(booked.prefill_tokens),
            requests: requests.saturating_sub(booked.requests),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Report {
    reported: Reported,
    unbooked: RankView,
    at: Duration,
}

/// The last report of each rank.
#[derive(Debug, Default)]
pub(super) struct Reports {
    by_rank: BTreeMap<WorkerRank, Report>,
}

impl Reports {
    /// A rank on which `booked` runs, as far as routers know, tells how busy it is. One that tells nothing has no report.
    pub(super) fn take(&mut self, rank: WorkerRank, reported: Reported, booked: RankView, now: Duration) {
        if reported == Reported::default() {
            self.by_rank.remove(&rank);
        } else if self.by_rank.len() < MAX || self.by_rank.contains_key(&rank) {
            self.by_rank.insert(rank, Report { reported, unbooked: reported.beyond(booked), at: now });
        }
    }

    pub(super) fn get(&self, rank: WorkerRank) -> Option<Reported> {
        self.by_rank.get(&rank).map(|report| report.reported)
    }

    pub(super) fn remove_worker(&mut self, worker: WorkerId) {
        self.by_rank.retain(|rank, _| rank.worker != worker);
    }

    pub(super) fn expire(&mut self, now: Duration) {
        self.by_rank.retain(|_, report| now.saturating_sub(report.at) <= LIFE);
    }

    /// Reads them rank by rank, in rising order.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor { rest: self.by_rank.iter().peekable() }
    }
}

/// Reads [`Reports`] in rising order of rank, without a search for each.
pub(super) struct Cursor<'a> {
    rest: Peekable<Iter<'a, WorkerRank, Report>>,
}

impl Cursor<'_> {
    /// What a rank has beyond what is booked there. Ranks must rise from call to call.
    #[inline]
    pub(super) fn unbooked(&mut self, rank: WorkerRank) -> RankView {
        while self.rest.next_if(|(other, _)| **other < rank).is_some() {}
        self.rest.next_if(|(other, _)| **other == rank).map_or_else(RankView::default, |(_, report)| report.unbooked)
    }
}
