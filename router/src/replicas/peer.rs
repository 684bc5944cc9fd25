//! What is known of one other router: how far its messages were read, what runs there, and whether a snapshot is missing.
//!
//! Its messages come in order, some may be lost. Each event is passed on as it comes; a gap in the numbers, or a status that
//! is ahead of them, asks for a snapshot, which adds what is missing and frees what is no more. No clock but the caller's.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use protocol::replica_sync::{Snapshot, SnapshotRequest};
use routing::{ReplicaChange, ReplicaEvent, RouterId};
use tokio::time::Instant;

/// A snapshot that is not complete by then is asked for again.
const RETRY: Duration = Duration::from_secs(1);

/// Least time between two snapshots for one router: it may ask, but not keep us busy.
const ANSWER: Duration = Duration::from_millis(250);

/// Least time between two snapshots that are asked for because of requests that this router has forgotten: those that did not fit
/// into a bound would be asked for again for ever.
const FORGOT: Duration = Duration::from_secs(60);

/// Most running requests remembered of one router. What is beyond ends by its own event or by expiry.
const MAX_RUNNING: usize = 1 << 16;

/// One other router.
pub(super) struct Peer {
    router: RouterId,
    /// When anything came from it last.
    heard: Instant,
    /// Sequence that its next message of events should have.
    next: Option<u64>,
    running: HashSet<Arc<str>>,
    want: Option<Want>,
    joined: bool,
    /// When it was last told of a request here that had been forgotten, and a snapshot was asked for.
    forgot: Option<Instant>,
    /// Its last request that was answered, and when.
    answered: Option<(u64, Instant)>,
}

/// A snapshot on its way.
struct Want {
    nonce: u64,
    since: Instant,
    /// The parts so far, without a gap.
    parts: u32,
    events: Vec<ReplicaEvent>,
}

impl Want {
    fn new(nonce: u64, since: Instant) -> Self {
        Self { nonce, since, parts: 0, events: Vec::new() }
    }
}

/// What a message of events is good for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the next one.
    Next,
    /// Messages before it are missing.
    Gap,
    /// It was read before.
    Old,
}

impl Peer {
    /// A router heard of for the first time: a snapshot of it is wanted.
    pub(super) fn new(router: RouterId, now: Instant, nonce: u64) -> Self {
        let want = Some(Want::new(nonce, now));
        let (next, running, joined, forgot, answered) = Default::default();
        Self { router, heard: now, next, running, want, joined, forgot, answered }
    }

    pub(super) fn touch(&mut self, now: Instant) {
        self.heard = now;
    }

    pub(super) fn silent_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }

    /// Whether all that ran there when it was found is counted.
    pub(super) fn joined(&self) -> bool {
        self.joined
    }

    /// A message of events came. After a gap, see [`Self::missed`].
    pub(super) fn events(&mut self, sequence: u64, events: &[ReplicaEvent]) -> Verdict {
        let verdict = match self.next {
            Some(next) if sequence < next => return Verdict::Old,
            Some(next) if sequence > next => Verdict::Gap,
            _ => Verdict::Next,
        };
        self.next = Some(sequence.saturating_add(1));
        for event in events {
            match &event.change {
                ReplicaChange::Add(_) if self.running.len() < MAX_RUNNING => {
                    self.running.insert(event.request.clone());
                }
                ReplicaChange::Free => {
                    self.running.remove(&event.request);
                }
                _ => {}
            }
        }
        verdict
    }

    /// Its status says which sequence comes next. True when messages before that are missing.
    pub(super) fn status(&mut self, next_sequence: u64) -> bool {
        let missed = self.next.is_some_and(|next| next < next_sequence);
        self.next = self.next.max(Some(next_sequence));
        missed
    }

    /// A part of a snapshot came. With the last one: everything to apply.
    pub(super) fn snapshot(&mut self, snapshot: Snapshot, events: Vec<ReplicaEvent>) -> Option<Vec<ReplicaEvent>> {
        let want = self.want.as_mut().filter(|want| want.nonce == snapshot.nonce)?;
        if want.parts != snapshot.part {
            // A part is lost: the rest is of no use, and the request is repeated in time.
            return None;
        }
        want.parts += 1;
        want.events.extend(events);
        if !snapshot.last {
            return None;
        }
        let mut events = self.want.take()?.events;
        self.joined = true;
        let told: HashSet<Arc<str>> = events.iter().map(|event| event.request.clone()).collect();
        // A snapshot older than what was read already, which only a second connection could bring, proves no end.
        if self.next.is_none_or(|next| next <= snapshot.next_sequence) {
            let ended = self.running.difference(&told).cloned();
            events.extend(ended.map(|request| ReplicaEvent {
                router: self.router,
                request,
                change: ReplicaChange::Free,
            }));
            self.running = told;
        } else {
            self.running.extend(told);
        }
        self.next = self.next.max(Some(snapshot.next_sequence));
        Some(events)
    }

    /// Messages were missed: a snapshot is needed. One that is asked for already will do, unless a part of it came before: the
    /// rest is sent after what revealed the gap, and so taken after it.
    pub(super) fn missed(&mut self, now: Instant, nonce: u64) {
        if self.want.as_ref().is_none_or(|want| want.parts > 0) {
            self.ask(now, nonce);
        }
    }

    /// A request runs there that is not known here, since it had expired. True when it is time to ask for it.
    pub(super) fn forgot(&mut self, now: Instant) -> bool {
        let due = self.forgot.is_none_or(|last| now.saturating_duration_since(last) >= FORGOT);
        if due {
            self.forgot = Some(now);
        }
        due
    }

    /// Asks for a snapshot, whatever is on its way.
    pub(super) fn ask(&mut self, now: Instant, nonce: u64) {
        self.want = Some(Want::new(nonce, now));
    }

    /// The snapshot it waits for.
    pub(super) fn wanted(&self) -> Option<SnapshotRequest> {
        self.want.as_ref().map(|want| SnapshotRequest { router_id: self.router.0, nonce: want.nonce })
    }

    /// Whether a snapshot has been waited for too long.
    pub(super) fn overdue(&self, now: Instant) -> bool {
        self.want.as_ref().is_some_and(|want| now.saturating_duration_since(want.since) >= RETRY)
    }

    /// Whether it asks for something new, and may have it. An answer must follow.
    pub(super) fn answer(&mut self, nonce: u64, now: Instant) -> bool {
        let due = self.answered.is_none_or(|(last, at)| last != nonce && now.saturating_duration_since(at) >= ANSWER);
        if due {
            self.answered = Some((nonce, now));
        }
        due
    }
}
