//! Which operator is active: a Lease, renewed by its holder and taken by another once it has expired.
//!
//! [`Election`] decides from plain values; `api` reads and writes the Lease. Expiry is measured by the own monotonic clock
//! from the moment a Lease was last seen to change, so that clocks of different nodes need not agree.

pub mod api;

use std::time::{Duration, Instant};

/// What matters of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Changes with every write.
    pub resource_version: String,
    /// Who holds it; empty or missing where it was released.
    pub holder: Option<String>,
    /// How long it lasts without renewal, as its holder says.
    pub duration: Duration,
}

/// What to do with the Lease now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is none: make it.
    Create,
    /// It is free or expired: become its holder.
    Take,
    /// It is ours: renew it.
    Renew,
    /// Somebody else holds it.
    Wait,
}

/// One candidate's view.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    duration: Duration,
    /// Version of a foreign Lease, and when it was first seen.
    seen: Option<(String, Instant)>,
    /// Start of the last write that succeeded.
    renewed: Option<Instant>,
}

impl Election {
    /// A candidate that holds nothing yet.
    pub fn new(identity: impl Into<String>, duration: Duration) -> Self {
        Self { identity: identity.into(), duration, seen: None, renewed: None }
    }

    /// Own name in the Lease.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// How long a Lease lasts without renewal.
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// Time between two renewals: a third of the Lease, so that one may fail.
    pub fn period(&self) -> Duration {
        self.duration / 3
    }

    /// What to do with the Lease as it was read at `now`.
    pub fn step(&mut self, now: Instant, lease: Option<&Observed>) -> Step {
        let Some(lease) = lease else { return Step::Create };
        match lease.holder.as_deref() {
            None | Some("") => return Step::Take,
            Some(holder) if holder == self.identity => return Step::Renew,
            Some(_) => self.renewed = None,
        }
        match &self.seen {
            Some((version, since)) if *version == lease.resource_version => {
                if now.duration_since(*since) >= lease.duration { Step::Take } else { Step::Wait }
            }
            _ => {
                self.seen = Some((lease.resource_version.clone(), now));
                Step::Wait
            }
        }
    }

    /// A write that was begun at `started` succeeded.
    pub fn renewed(&mut self, started: Instant) {
        self.renewed = Some(started);
    }

    /// Until when this candidate may act: two thirds of the Lease after its last renewal, a third before another may take it.
    pub fn leads_until(&self) -> Option<Instant> {
        self.renewed.map(|at| at + self.duration * 2 / 3)
    }

    /// Whether this candidate may act at `now`.
    pub fn leads(&self, now: Instant) -> bool {
        self.leads_until().is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests;
