//! Where the router stands in one rank's numbered events, and what each new one means: values in, verdicts out.
//!
//! Ids rise by one from 0. A higher one is a gap, to be fetched. A lower one is a duplicate if it is one of the last events
//! seen, and otherwise means that the engine restarted: its blocks are void. Heartbeats carry the newest id, so that a loss
//! at the end of a stream shows as well.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use kv_index::{KvEvent, KvEventData};
use tokio::time::Instant;

/// Live events held back during a recovery; what does not fit is fetched afterwards.
const HELD: usize = 8192;

/// Events remembered to tell a duplicate from a restart.
const RECENT: usize = 256;

/// A heartbeat ahead of the events is a loss after this long; the events may just be on their way.
const BEHIND: Duration = Duration::from_millis(300);

/// Heartbeats below what was seen mean a restart after this long: at least the second one.
const AHEAD: Duration = Duration::from_millis(1200);

/// After a recovery, events that it contained already may still arrive for so long.
const ECHO: Duration = Duration::from_secs(5);

/// What is to be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// The whole state.
    Dump,
    /// The events from `start` to `end`, inclusive, or up to now.
    Range { start: u64, end: Option<u64> },
}

/// What a live event means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the next one.
    Apply(KvEvent),
    /// It came before.
    Duplicate,
    /// A recovery is under way; it waits.
    Held,
    /// Events before it are missing; it waits, and they are asked for.
    Gap,
    /// The numbering began again: everything known of this rank is void, and a dump is asked for.
    Restarted,
}

/// The state of one rank. Before the first subscription everything is held.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    next: u64,
    recent: VecDeque<(u64, u64)>,
    held: VecDeque<KvEvent>,
    /// What is held was sent by an earlier life of the engine.
    stale: bool,
    phase: Phase,
    echo_until: Option<Instant>,
    /// Since when heartbeats have been ahead of the events: the time at which that is a loss.
    behind: Option<Instant>,
    /// The same for heartbeats below what was seen.
    ahead: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Unsubscribed,
    Live,
    /// A recovery is wanted and not yet under way.
    Wishing(Wish),
    Recovering(Wish),
}

impl Cursor {
    /// The subscription stands. The first time, the whole state is wanted.
    pub(super) fn subscribed(&mut self) {
        if self.phase == Phase::Unsubscribed {
            self.phase = Phase::Wishing(Wish::Dump);
        }
    }

    /// Takes one live event.
    pub(super) fn live(&mut self, event: KvEvent, now: Instant) -> Verdict {
        if self.phase != Phase::Live {
            return self.hold(event);
        }
        if event.id == self.next {
            self.advance(&event);
            return Verdict::Apply(event);
        }
        if event.id > self.next {
            self.phase = Phase::Wishing(Wish::Range { start: self.next, end: Some(event.id - 1) });
            self.hold(event);
            return Verdict::Gap;
        }
        let echo =
            self.echo_until.is_some_and(|until| now < until) && self.recent.front().is_none_or(|r| event.id < r.0);
        if echo || self.recent.contains(&(event.id, fingerprint(&event))) {
            return Verdict::Duplicate;
        }
        self.restart();
        self.hold(event);
        Verdict::Restarted
    }

    /// Takes the newest id of a heartbeat. True when it proves that the engine restarted: everything known of this rank is void,
    /// and a dump is asked for.
    pub(super) fn reported(&mut self, last: Option<u64>, now: Instant) -> bool {
        let next = last.map_or(0, |id| id + 1);
        let lag = |since: Option<Instant>, wait| Some(since.unwrap_or(now + wait));
        self.behind = if next > self.next { lag(self.behind, BEHIND) } else { None };
        self.ahead = if next < self.next { lag(self.ahead, AHEAD) } else { None };
        if self.phase != Phase::Live {
            (self.behind, self.ahead) = (None, None);
        }
        // Only a heartbeat that still disagrees proves a restart: without one, nothing is known.
        let restarted = self.ahead.is_some_and(|due| now >= due);
        if restarted {
            self.restart();
        }
        restarted
    }

    /// When [`Self::check`] has something to look at.
    pub(super) fn due(&self) -> Option<Instant> {
        self.behind.filter(|_| self.phase == Phase::Live)
    }

    /// Asks for what a heartbeat announced and no event brought.
    pub(super) fn check(&mut self, now: Instant) {
        if self.phase == Phase::Live && self.behind.is_some_and(|due| now >= due) {
            self.behind = None;
            self.phase = Phase::Wishing(Wish::Range { start: self.next, end: None });
        }
    }

    /// Asks for the whole state, unless a recovery is wanted anyway.
    pub(super) fn wish_dump(&mut self) {
        if self.phase == Phase::Live {
            self.phase = Phase::Wishing(Wish::Dump);
        }
    }

    /// The recovery to start now.
    pub(super) fn take_wish(&mut self) -> Option<Wish> {
        let Phase::Wishing(wish) = self.phase else { return None };
        self.phase = Phase::Recovering(wish);
        Some(wish)
    }

    /// The recovery failed; it is wanted again.
    pub(super) fn failed(&mut self) {
        if let Phase::Recovering(wish) = self.phase {
            self.phase = Phase::Wishing(wish);
        }
    }

    /// A dump was applied: its true last id is the cursor.
    pub(super) fn dumped(&mut self, last: Option<u64>, now: Instant) {
        self.next = last.map_or(0, |id| id + 1);
        self.recent.clear();
        self.live_again(now);
    }

    /// A range came: returns the events to apply. One that does not continue where the cursor stands, or that ends before it,
    /// comes from another life of the engine: then the whole state is wanted. So it is when the worker does not have all that was
    /// asked for: the event behind it, which made us ask, is not the worker's any more.
    pub(super) fn ranged(&mut self, events: Vec<KvEvent>, last: Option<u64>, now: Instant) -> Vec<KvEvent> {
        let start = self.next;
        let mut fresh = Vec::with_capacity(events.len());
        for event in events.into_iter().filter(|event| event.id >= start) {
            if event.id != self.next {
                break;
            }
            self.advance(&event);
            fresh.push(event);
        }
        self.stale = matches!(self.phase, Phase::Recovering(Wish::Range { end: Some(end), .. }) if self.next <= end);
        self.live_again(now);
        if self.stale || last.map_or(0, |id| id + 1) != self.next {
            self.phase = Phase::Wishing(Wish::Dump);
        }
        fresh
    }

    /// The events held back during a recovery, to be taken again, those left out that it contained.
    pub(super) fn release(&mut self) -> VecDeque<KvEvent> {
        let mut held = std::mem::take(&mut self.held);
        let stale = std::mem::take(&mut self.stale);
        held.retain(|event| event.id >= self.next && !stale);
        held
    }

    /// Whether nothing is known to be missing.
    pub(super) fn is_live(&self) -> bool {
        self.phase == Phase::Live
    }

    /// Number of the first event that has not been taken.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Events held back.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    fn hold(&mut self, event: KvEvent) -> Verdict {
        // What does not fit is newer than all that is held: the next event or heartbeat shows it as a gap.
        if self.held.len() < HELD {
            self.held.push_back(event);
        }
        Verdict::Held
    }

    fn advance(&mut self, event: &KvEvent) {
        self.next = event.id + 1;
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((event.id, fingerprint(event)));
    }

    fn restart(&mut self) {
        self.next = 0;
        self.recent.clear();
        self.echo_until = None;
        (self.behind, self.ahead) = (None, None);
        self.phase = Phase::Wishing(Wish::Dump);
    }

    fn live_again(&mut self, now: Instant) {
        self.phase = Phase::Live;
        self.echo_until = Some(now + ECHO);
        (self.behind, self.ahead) = (None, None);
    }
}

/// Enough of an event to tell it from another one of the same number.
fn fingerprint(event: &KvEvent) -> u64 {
    let mut hasher = DefaultHasher::new();
    event.tier.hash(&mut hasher);
    match &event.data {
        KvEventData::Stored { parent, blocks } => {
            (parent, blocks.len(), blocks.first(), blocks.last()).hash(&mut hasher)
        }
        KvEventData::Removed { blocks } => (1, blocks.len(), blocks.first(), blocks.last()).hash(&mut hasher),
        KvEventData::Cleared => 2.hash(&mut hasher),
    }
    hasher.finish()
}

#[cfg(test)]
mod tests;
