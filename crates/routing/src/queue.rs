//! The order of requests that wait for a worker.
//!
//! Strict priority first; then, by policy, a score of priority, arrival and size. A plain structure: the caller brings `now`, wakes
//! whoever is popped, and tells those whose deadline has passed.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use kv_index::HashBuilder;

/// Who comes first among requests of equal strict priority. The highest score does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueuePolicy {
    /// Who came first: priority − arrival (s). A priority of 1 is worth a second of waiting.
    #[default]
    Fcfs,
    /// Most weight for the least work: (1 + priority) / uncached tokens.
    Wspt,
    /// Who came last: priority + arrival (s).
    Lcfs,
}

impl QueuePolicy {
    /// Its name, as flags have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Wspt => "wspt",
            Self::Lcfs => "lcfs",
        }
    }

    fn score(self, waiting: &Waiting) -> f64 {
        let arrival = waiting.arrival.as_secs_f64();
        let priority = if waiting.priority.is_finite() { waiting.priority } else { 0.0 };
        match self {
            Self::Fcfs => priority - arrival,
            Self::Lcfs => priority + arrival,
            Self::Wspt => {
                // The same slope below zero as above, and never negative: with less than no weight long prompts would go first.
                let weight = if priority >= 0.0 { 1.0 + priority } else { 1.0 / (1.0 - priority) };
                weight / waiting.uncached_tokens.max(1) as f64
            }
        }
    }
}

/// What a request waits with. Times are counted from any fixed origin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waiting {
    /// Whoever has a higher one goes first, whatever the policy.
    pub strict_priority: i32,
    /// Weighs in the policy's score.
    pub priority: f64,
    /// When it came.
    pub arrival: Duration,
    /// Prompt tokens that some worker will have to compute.
    pub uncached_tokens: usize,
    /// When it has waited long enough.
    pub deadline: Duration,
}

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The queue is full; here is what was to go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct Full<T>(pub T);

/// Sorts who goes first to the front.
#[derive(Clone, Copy, Debug)]
struct Order {
    strict_priority: Reverse<i32>,
    score: f64,
    /// Who came first of equals; last, for last come first served.
    tie: i64,
}

impl Ord for Order {
    fn cmp(&self, other: &Self) -> Ordering {
        let score = || other.score.total_cmp(&self.score);
        self.strict_priority.cmp(&other.strict_priority).then_with(score).then(self.tie.cmp(&other.tie))
    }
}

impl PartialOrd for Order {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Order {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Order {}

#[derive(Debug)]
struct Entry<T> {
    ticket: Ticket,
    deadline: Duration,
    value: T,
}

/// Requests that wait, in the order in which they will be served.
#[derive(Debug)]
pub struct WaitQueue<T> {
    policy: QueuePolicy,
    capacity: usize,
    entries: BTreeMap<Order, Entry<T>>,
    orders: HashMap<Ticket, Order, HashBuilder>,
    deadlines: BTreeSet<(Duration, Ticket)>,
    next: u64,
}

impl<T> WaitQueue<T> {
    /// An empty queue for at most `capacity` requests.
    pub fn new(policy: QueuePolicy, capacity: usize) -> Self {
        let (entries, orders, deadlines) = Default::default();
        Self { policy, capacity, entries, orders, deadlines, next: 0 }
    }

    /// Puts a request in its place. Cost of this and the rest: logarithmic.
    pub fn push(&mut self, waiting: Waiting, value: T) -> Result<Ticket, Full<T>> {
        if self.entries.len() >= self.capacity {
            return Err(Full(value));
        }
        let ticket = Ticket(self.next);
        let tie = if self.policy == QueuePolicy::Lcfs { -(self.next as i64) } else { self.next as i64 };
        self.next += 1;
        let strict_priority = Reverse(waiting.strict_priority);
        let order = Order { strict_priority, score: self.policy.score(&waiting), tie };
        self.orders.insert(ticket, order);
        self.deadlines.insert((waiting.deadline, ticket));
        self.entries.insert(order, Entry { ticket, deadline: waiting.deadline, value });
        Ok(ticket)
    }

    /// Takes the request whose turn it is.
    pub fn pop(&mut self) -> Option<(Ticket, T)> {
        let (_, entry) = self.entries.pop_first()?;
        self.orders.remove(&entry.ticket);
        self.deadlines.remove(&(entry.deadline, entry.ticket));
        Some((entry.ticket, entry.value))
    }

    /// Takes one request out of the order; `None` when it is not here any more.
    pub fn remove(&mut self, ticket: Ticket) -> Option<T> {
        let order = self.orders.remove(&ticket)?;
        let entry = self.entries.remove(&order)?;
        self.deadlines.remove(&(entry.deadline, ticket));
        Some(entry.value)
    }

    /// Those who wait, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Ticket, &T)> {
        self.entries.values().map(|entry| (entry.ticket, &entry.value))
    }

    /// Takes out those whose deadline has come, the earliest first.
    pub fn expire(&mut self, now: Duration) -> Vec<(Ticket, T)> {
        let mut expired = Vec::new();
        while let Some((_, ticket)) = self.deadlines.first().copied().filter(|(deadline, _)| *deadline <= now) {
            expired.extend(self.remove(ticket).map(|value| (ticket, value)));
        }
        expired
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many may wait.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

#[cfg(test)]
mod tests;
