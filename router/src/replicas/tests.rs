//! Routers without sockets: real loads, real messages, and a way between them that loses what a test wants lost.

mod choices;
mod sockets;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kv_hashing::{BlockSize, SequenceHash};
use kv_index::{WorkerId, WorkerRank};
use parking_lot::Mutex;
use proptest::prelude::*;
use protocol::replica_sync::{SnapshotRequest, snapshot_topic};
use routing::{ActiveLoad, Applied, BookingId, LoadConfig, NewBooking, Prompt};
use routing::{RankView, ReplicaChange, ReplicaEvent, RouterId};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::feed::{self, Feed, Outgoing};
use super::hub::{Ask, GRACE, Hub};
use super::metrics::ReplicaMetrics;
use super::{Load, Tally, link, publisher};

const EXPIRY: Duration = Duration::from_secs(300);

/// A load with a clock that the test moves.
struct Clocked {
    load: Mutex<ActiveLoad>,
    now: Mutex<Duration>,
}

impl Clocked {
    fn tally(&self, load: &ActiveLoad, dropped: usize) -> Tally {
        Tally { dropped: dropped as u64, replicated: load.replicated_requests(), ..Tally::default() }
    }
}

impl Load for Clocked {
    fn apply(&self, events: &[ReplicaEvent]) -> Tally {
        let (mut load, now) = (self.load.lock(), *self.now.lock());
        let applied: Vec<_> = events.iter().map(|event| load.apply(event, now)).collect();
        let count = |what| applied.iter().filter(|applied| **applied == what).count() as u64;
        Tally { refused: count(Applied::Refused), unknown: count(Applied::Unknown), ..self.tally(&load, 0) }
    }

    fn remove_router(&self, router: RouterId) -> Tally {
        let mut load = self.load.lock();
        let dropped = load.remove_router(router);
        self.tally(&load, dropped)
    }

    fn expire(&self, after: Duration) -> Tally {
        let (mut load, now) = (self.load.lock(), *self.now.lock());
        let dropped = load.expire(now, after);
        self.tally(&load, dropped)
    }

    fn own_bookings(&self) -> Vec<ReplicaEvent> {
        self.load.lock().own_bookings().collect()
    }

    fn own_growth(&self) -> Vec<(Arc<str>, usize)> {
        self.load.lock().own_growth().collect()
    }
}

/// One router.
struct Node {
    own: RouterId,
    load: Arc<Clocked>,
    feed: Feed,
    hub: Hub,
    wants: watch::Receiver<Vec<SnapshotRequest>>,
    asks: mpsc::Receiver<Ask>,
    metrics: Arc<ReplicaMetrics>,
    start: Instant,
    running: Vec<(Arc<str>, BookingId)>,
    booked: usize,
    /// Own events that are not in a message yet.
    untold: Vec<ReplicaEvent>,
}

impl Node {
    fn new(id: u64) -> Self {
        let own = RouterId(id);
        let load = Arc::new(Clocked {
            load: Mutex::new(ActiveLoad::new(own, LoadConfig::default())),
            now: Mutex::new(Duration::ZERO),
        });
        let metrics = Arc::<ReplicaMetrics>::default();
        let (hub, wants, asks) = Hub::new(own, load.clone(), metrics.clone(), EXPIRY);
        let (start, feed) = (Instant::now(), Feed::new());
        Self { own, load, feed, hub, wants, asks, metrics, start, running: Vec::new(), booked: 0, untold: Vec::new() }
    }

    fn now(&self) -> Instant {
        self.start + *self.load.now.lock()
    }

    /// Time passes, here only.
    fn pass(&mut self, time: Duration) {
        *self.load.now.lock() += time;
        self.hub.tick(self.now());
    }

    /// Books a prompt of this many full blocks, the same ones each time, and three tokens to be computed.
    fn book(&mut self, worker: u64, blocks: u64) {
        self.place(rank(worker), prompt(0, blocks), 3);
    }

    fn place(&mut self, rank: WorkerRank, prompt: Prompt, prefill_tokens: usize) {
        let request: Arc<str> = format!("{}-{}", self.own.0, self.booked).into();
        self.booked += 1;
        let new = NewBooking { request: request.clone(), rank, prompt, prefill_tokens, expected_output_tokens: None };
        let id = self.load.load.lock().book(new);
        let state = self.load.load.lock().state(id).expect("just booked").clone();
        self.untold.push(self.event(&request, ReplicaChange::Add(state)));
        self.running.push((request, id));
    }

    fn event(&self, request: &Arc<str>, change: ReplicaChange) -> ReplicaEvent {
        ReplicaEvent { router: self.own, request: request.clone(), change }
    }

    /// The first token of a running request, of which `at` picks one.
    fn first_token(&mut self, at: usize) {
        let Some((request, id)) = self.running.get(at % self.running.len().max(1)).cloned() else { return };
        self.load.load.lock().prefill_completed(id);
        self.untold.push(self.event(&request, ReplicaChange::MarkPrefillCompleted));
    }

    fn output(&mut self, at: usize, tokens: usize) {
        let Some((_, id)) = self.running.get(at % self.running.len().max(1)) else { return };
        self.load.load.lock().add_output(*id, tokens);
    }

    fn end(&mut self, at: usize) {
        if self.running.is_empty() {
            return;
        }
        let (request, id) = self.running.swap_remove(at % self.running.len());
        self.load.load.lock().free(id);
        self.untold.push(self.event(&request, ReplicaChange::Free));
    }

    /// Own events so far, as messages.
    fn tell(&mut self) -> Vec<Outgoing> {
        let events = std::mem::take(&mut self.untold);
        self.feed.events(events)
    }

    fn status(&mut self) -> Outgoing {
        let wants = self.wants.borrow_and_update().clone();
        self.feed.status(wants)
    }

    /// The snapshots that others asked for.
    fn answers(&mut self) -> Vec<Outgoing> {
        let mut messages = Vec::new();
        while let Ok(ask) = self.asks.try_recv() {
            messages.extend(self.feed.snapshot(ask.asker, ask.nonce, &self.load.own_bookings()));
        }
        messages
    }

    /// How far own requests have grown, as messages.
    fn growth(&mut self) -> Vec<Outgoing> {
        self.feed.growth(self.load.own_growth())
    }

    /// How far all own requests have grown, as messages.
    fn all_growth(&mut self) -> Vec<Outgoing> {
        (0..feed::GROWTH_ROUNDS).flat_map(|_| self.growth()).collect()
    }

    /// Reads messages of another router, those of them that it is subscribed to.
    fn hear(&mut self, from: RouterId, messages: impl IntoIterator<Item = Outgoing>) {
        for message in messages {
            if message.topic.contains('/') && message.topic != snapshot_topic(self.own.0) {
                continue;
            }
            let frames = publisher::frames(from, 0, message);
            let message = link::message_of(&frames, &self.metrics).expect("own output");
            self.hub.take(message, self.now());
        }
    }

    fn replicated(&self) -> usize {
        self.load.load.lock().replicated_requests()
    }

    fn view(&self, worker: u64) -> RankView {
        self.load.load.lock().rank(rank(worker))
    }
}

/// Of this many full blocks, and three tokens more; others have other blocks.
fn prompt(number: u64, blocks: u64) -> Prompt {
    let blocks: Vec<SequenceHash> = (0..blocks).map(|block| SequenceHash(number * 1000 + block)).collect();
    let block_size = BlockSize::new(16).expect("not zero");
    Prompt { tokens: blocks.len() * 16 + 3, blocks: blocks.into(), block_size }
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

/// Status messages and the snapshots they ask for, both ways, until nobody waits for any.
fn converge(a: &mut Node, b: &mut Node) {
    for _ in 0..4 {
        for node in [&mut *a, &mut *b] {
            // Long enough that requests are repeated, and answered again.
            node.pass(Duration::from_millis(1100));
        }
        let (from_a, from_b) = (a.status(), b.status());
        a.hear(b.own, [from_b]);
        b.hear(a.own, [from_a]);
        let (from_a, from_b) = (a.answers(), b.answers());
        a.hear(b.own, from_b);
        b.hear(a.own, from_a);
    }
    assert!(a.wants.borrow().is_empty() && b.wants.borrow().is_empty(), "a snapshot is still missing");
}

#[test]
fn each_event_counts_at_the_other_router_at_once() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    b.hear(a.own, a.tell());
    assert_eq!(b.view(10), RankView { active_blocks: 5, prefill_tokens: 3, requests: 1 });
    a.first_token(0);
    b.hear(a.own, a.tell());
    assert_eq!(b.view(10), RankView { active_blocks: 5, prefill_tokens: 0, requests: 1 });
    a.end(0);
    b.hear(a.own, a.tell());
    assert_eq!((b.view(10), b.replicated()), (RankView::default(), 0));
}

#[test]
fn what_a_request_generates_counts_at_the_other_router_too() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    a.first_token(0);
    b.hear(a.own, a.tell());
    a.output(0, 100);
    b.hear(a.own, a.growth());
    assert_eq!((b.view(10).active_blocks, b.view(10)), (11, a.view(10)), "67 tokens of the prompt, and 100 more");
    assert!(a.growth().is_empty(), "nothing new");
    // The growth that tells of more is lost, and told again.
    a.output(0, 32);
    drop(a.growth());
    b.hear(a.own, a.all_growth());
    assert_eq!((b.view(10), b.metrics.gaps.get()), (a.view(10), 0));
    a.end(0);
    b.hear(a.own, a.tell());
    assert_eq!((b.view(10), b.replicated()), (RankView::default(), 0));
}

#[test]
fn a_request_that_expired_elsewhere_counts_again_when_it_grows() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    b.hear(a.own, a.tell());
    // It waits in its worker's queue for longer than bookings live without news.
    for _ in 0..=EXPIRY.as_secs() {
        b.pass(Duration::from_secs(1));
        b.hear(a.own, [a.status()]);
    }
    assert_eq!(b.view(10), RankView::default());
    a.first_token(0);
    a.output(0, 100);
    b.hear(a.own, a.tell());
    b.hear(a.own, a.all_growth());
    converge(&mut a, &mut b);
    assert_eq!((b.view(10).requests, b.view(10)), (1, a.view(10)));
}

#[test]
fn a_late_joiner_starts_from_a_snapshot() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    for _ in 0..600 {
        a.book(10, 4);
    }
    a.first_token(0);
    a.end(1);
    // Nobody listened: none of it is told.
    a.untold.clear();
    converge(&mut a, &mut b);
    assert!(b.hub.joined(a.own));
    assert_eq!((b.replicated(), b.view(10)), (599, a.view(10)));
}

#[test]
fn events_during_a_join_are_neither_lost_nor_doubled() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    a.book(10, 4);
    a.book(10, 4);
    a.untold.clear();
    b.hear(a.own, [a.status()]);
    a.hear(b.own, [b.status()]);
    // One ends and one begins before the snapshot is taken, and once more after it.
    a.end(0);
    a.book(11, 2);
    b.hear(a.own, a.tell());
    // This is lost, but in the snapshot: no gap to repair.
    a.book(13, 2);
    drop(a.tell());
    let snapshot = a.answers();
    a.end(0);
    a.book(12, 2);
    let later = a.tell();
    b.hear(a.own, snapshot.into_iter().chain(later));
    assert_eq!((b.replicated(), b.metrics.gaps.get()), (3, 0));
    for worker in 10..14 {
        assert_eq!(b.view(worker), a.view(worker), "worker {worker}");
    }
}

#[test]
fn a_lost_end_is_repaired_by_the_next_status() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    b.hear(a.own, a.tell());
    a.end(0);
    drop(a.tell());
    assert_eq!(b.replicated(), 1);
    converge(&mut a, &mut b);
    assert_eq!((b.replicated(), b.metrics.gaps.get()), (0, 1));
}

#[test]
fn events_lost_before_they_were_told_are_repaired_too() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    a.untold.clear();
    a.feed.lost();
    converge(&mut a, &mut b);
    assert_eq!(b.view(10), a.view(10));
}

#[test]
fn a_router_that_dies_takes_its_requests_along_but_not_at_the_first_silence() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    b.hear(a.own, a.tell());
    b.pass(GRACE - Duration::from_secs(1));
    assert_eq!((b.replicated(), b.metrics.peers.get()), (1, 1));
    b.hear(a.own, [a.status()]);
    b.pass(GRACE - Duration::from_secs(1));
    assert_eq!(b.replicated(), 1, "it was heard again in time");
    b.pass(Duration::from_secs(1));
    assert_eq!((b.replicated(), b.metrics.peers.get()), (0, 0));
    // It was only cut off: its requests come back with it.
    converge(&mut a, &mut b);
    assert_eq!(b.view(10), a.view(10));
}

#[test]
fn a_long_stream_counts_until_its_end_and_one_without_progress_does_not() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    a.book(11, 4);
    a.first_token(0);
    b.hear(a.own, a.tell());
    // Ten minutes, of which both routers hear each other every second.
    for second in 1..=600_u64 {
        if second.is_multiple_of(EXPIRY.as_secs()) {
            a.output(0, 1);
        }
        b.pass(Duration::from_secs(1));
        b.hear(a.own, [a.status()]);
        b.hear(a.own, a.growth());
    }
    assert_eq!(b.view(10).requests, 1, "it goes on");
    assert_eq!(b.view(11).requests, 0, "nothing was heard of it");
    a.end(0);
    b.hear(a.own, a.tell());
    assert_eq!(b.replicated(), 0);
}

#[test]
fn a_message_that_comes_twice_counts_once() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    converge(&mut a, &mut b);
    a.book(10, 4);
    let added = a.tell();
    a.end(0);
    let ended = a.tell();
    for message in [added.clone(), ended.clone(), added, ended] {
        b.hear(a.own, message);
    }
    assert_eq!((b.replicated(), b.view(10)), (0, RankView::default()));
}

#[test]
fn a_router_may_ask_but_not_too_often() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    let mut asked = |nonce, pass: Duration| {
        a.pass(pass);
        a.hear(RouterId(2), [b.feed.status(vec![SnapshotRequest { router_id: 1, nonce }])]);
        a.asks.try_recv().is_ok()
    };
    let long = Duration::from_secs(1);
    assert!(asked(1, long));
    assert!(!asked(1, long), "the same request, repeated");
    assert!(asked(2, long));
    assert!(!asked(3, Duration::from_millis(1)));
    assert!(asked(3, long), "later");
}

/// One step of a history; the number picks the request where there are several.
#[derive(Clone, Debug)]
enum Step {
    Book {
        worker: u64,
        blocks: u64,
    },
    FirstToken(usize),
    Output(usize, usize),
    End(usize),
    /// Own events become messages; of these, growth and a status, the ones numbered here are lost.
    Tell {
        lost: HashSet<usize>,
        status: bool,
    },
    /// The router's publisher loses own events.
    Overflow,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (10_u64..14, 0_u64..6).prop_map(|(worker, blocks)| Step::Book { worker, blocks }),
        2 => any::<usize>().prop_map(Step::FirstToken),
        2 => (any::<usize>(), 1_usize..40).prop_map(|(at, tokens)| Step::Output(at, tokens)),
        3 => any::<usize>().prop_map(Step::End),
        4 => (prop::collection::hash_set(0_usize..3, 0..3), any::<bool>())
            .prop_map(|(lost, status)| Step::Tell { lost, status }),
        1 => Just(Step::Overflow),
    ]
}

impl Node {
    /// Takes a step, and gives the messages that arrive elsewhere.
    fn step(&mut self, step: Step) -> Vec<Outgoing> {
        match step {
            Step::Book { worker, blocks } => self.book(worker, blocks),
            Step::FirstToken(at) => self.first_token(at),
            Step::Output(at, tokens) => self.output(at, tokens),
            Step::End(at) => self.end(at),
            Step::Overflow => {
                self.untold.clear();
                self.feed.lost();
            }
            Step::Tell { lost, status } => {
                let mut messages = self.tell();
                messages.extend(self.answers());
                if status {
                    messages.extend(self.growth());
                    messages.push(self.status());
                }
                let arrived = messages.into_iter().enumerate().filter(|(at, _)| !lost.contains(at));
                return arrived.map(|(_, message)| message).collect();
            }
        }
        Vec::new()
    }
}

proptest! {
    #[test]
    fn whatever_is_lost_both_routers_end_with_the_same_load(
        steps in prop::collection::vec((any::<bool>(), step(), 0_u64..400), 1..80)
    ) {
        let (mut a, mut b) = (Node::new(1), Node::new(2));
        for (first, step, ms) in steps {
            a.pass(Duration::from_millis(ms));
            b.pass(Duration::from_millis(ms));
            let (from, to) = if first { (&mut a, &mut b) } else { (&mut b, &mut a) };
            let messages = from.step(step);
            to.hear(from.own, messages);
        }
        let (told_a, told_b) = (a.tell(), b.tell());
        a.hear(b.own, told_b);
        b.hear(a.own, told_a);
        converge(&mut a, &mut b);
        let (grown_a, grown_b) = (a.all_growth(), b.all_growth());
        a.hear(b.own, grown_b);
        b.hear(a.own, grown_a);
        prop_assert_eq!((a.replicated(), b.replicated()), (b.running.len(), a.running.len()));
        for worker in 10..14 {
            prop_assert_eq!(a.view(worker), b.view(worker), "worker {}", worker);
        }
    }
}
