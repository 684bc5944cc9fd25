//! What this router tells, as messages: numbers them, cuts them, and knows what it has told of each running booking.
//!
//! No socket and no clock. Whoever reads all messages in order knows exactly what runs here; whoever sees a gap in the
//! numbers asks for a snapshot.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kv_index::{WorkerId, WorkerRank};
use protocol::replica_sync::{
    ACTIVE_SEQUENCES, ActiveSequenceBatch, ActiveSequenceData, ActiveSequenceEvent, GROWTH, GrowthBatch,
    MAX_BATCH_BLOCKS, MAX_BATCH_EVENTS, ROUTER_STATUS, RouterStatus, Snapshot, SnapshotRequest, encode, snapshot_topic,
};
use routing::{BookingState, ReplicaChange, ReplicaEvent, RouterId};

use super::wire;

/// Where an event runs of whose booking nothing was told: before anybody listened. Readers go by the request's name.
const NOWHERE: WorkerRank = WorkerRank { worker: WorkerId(0), dp_rank: 0 };

/// So many times growth is told of those that grew, and then once of all: what was lost is made good, and a reader that has
/// forgotten one hears that it runs.
pub(super) const GROWTH_ROUNDS: u32 = 20;

/// A message without its envelope.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outgoing {
    pub(super) topic: String,
    /// Rises by one with each message of this kind.
    pub(super) sequence: u64,
    pub(super) payload: Vec<u8>,
}

/// Everything told so far, as far as it matters.
#[derive(Default)]
pub(super) struct Feed {
    /// Where each running booking is.
    ranks: HashMap<Arc<str>, WorkerRank>,
    /// Tokens of each booking that had generated any when growth was told last.
    grown: HashMap<Arc<str>, usize>,
    growth_rounds: u32,
    /// Sequence of the next message of events, of growth, of status, and of snapshots.
    next_events: u64,
    next_growth: u64,
    next_status: u64,
    next_snapshot: u64,
}

impl Feed {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Messages that tell these events, in order.
    pub(super) fn events(&mut self, events: impl IntoIterator<Item = ReplicaEvent>) -> Vec<Outgoing> {
        let events = events.into_iter().filter_map(|event| wire::event(&event, self.note(&event))).collect();
        let payloads = cut(events).into_iter().map(|events| encode(&ActiveSequenceBatch { events }));
        payloads.map(|payload| numbered(ACTIVE_SEQUENCES, &mut self.next_events, payload)).collect()
    }

    /// Messages that tell how far bookings have grown, of those that grew since the last call, and of all from time to time.
    pub(super) fn growth(&mut self, running: Vec<(Arc<str>, usize)>) -> Vec<Outgoing> {
        self.growth_rounds = (self.growth_rounds + 1) % GROWTH_ROUNDS;
        if self.growth_rounds == 0 {
            self.grown.clear();
        }
        let before = std::mem::replace(&mut self.grown, running.iter().cloned().collect());
        let grew = running.iter().filter(|(request, tokens)| before.get(request) != Some(tokens));
        let requests: Vec<_> = grew.map(|(request, tokens)| wire::growth(request, *tokens)).collect();
        let payloads = requests.chunks(MAX_BATCH_EVENTS).map(|part| encode(&GrowthBatch { requests: part.to_vec() }));
        payloads.map(|payload| numbered(GROWTH, &mut self.next_growth, payload)).collect()
    }

    /// Events were lost before they could be told: every reader shall see a gap.
    pub(super) fn lost(&mut self) {
        self.next_events += 1;
    }

    /// The message that says how far this router is, and which snapshots it waits for.
    pub(super) fn status(&mut self, wants: Vec<SnapshotRequest>) -> Outgoing {
        let payload = encode(&RouterStatus { next_sequence: self.next_events, wants });
        numbered(ROUTER_STATUS, &mut self.next_status, payload)
    }

    /// Messages that tell one other router all that runs here.
    pub(super) fn snapshot(&mut self, asker: RouterId, nonce: u64, running: &[ReplicaEvent]) -> Vec<Outgoing> {
        let next_sequence = self.next_events;
        // Ends that were lost, or that nobody was there to hear, are forgotten here at the latest.
        let names: HashSet<&str> = running.iter().map(|event| &*event.request).collect();
        self.ranks.retain(|request, _| names.contains(&**request));
        let added = running.iter().filter_map(|event| wire::event(event, state(event)?.rank));
        let mut parts = cut(added.collect());
        if parts.is_empty() {
            parts.push(Vec::new());
        }
        let (topic, last) = (snapshot_topic(asker.0), parts.len() - 1);
        let messages = parts.into_iter().enumerate().map(|(part, events)| {
            let snapshot = Snapshot { nonce, part: part as u32, last: part == last, next_sequence, events };
            numbered(&topic, &mut self.next_snapshot, encode(&snapshot))
        });
        messages.collect()
    }

    /// Takes note of what is told, and says where the booking runs.
    fn note(&mut self, event: &ReplicaEvent) -> WorkerRank {
        match &event.change {
            ReplicaChange::Add(state) => {
                self.ranks.insert(event.request.clone(), state.rank);
                state.rank
            }
            ReplicaChange::Free => self.ranks.remove(&event.request).unwrap_or(NOWHERE),
            _ => self.ranks.get(&event.request).copied().unwrap_or(NOWHERE),
        }
    }
}

fn numbered(topic: &str, next: &mut u64, payload: Vec<u8>) -> Outgoing {
    let sequence = *next;
    *next += 1;
    Outgoing { topic: topic.to_owned(), sequence, payload }
}

fn state(event: &ReplicaEvent) -> Option<&BookingState> {
    match &event.change {
        ReplicaChange::Add(state) => Some(state),
        _ => None,
    }
}

/// Cuts events into as few messages as the limits allow, in order.
fn cut(events: Vec<ActiveSequenceEvent>) -> Vec<Vec<ActiveSequenceEvent>> {
    let mut messages: Vec<Vec<ActiveSequenceEvent>> = Vec::new();
    let mut room = 0;
    for event in events {
        let blocks = blocks(&event);
        match messages.last_mut() {
            Some(message) if message.len() < MAX_BATCH_EVENTS && blocks <= room => {
                room -= blocks;
                message.push(event);
            }
            _ => {
                room = MAX_BATCH_BLOCKS.saturating_sub(blocks);
                messages.push(vec![event]);
            }
        }
    }
    messages
}

fn blocks(event: &ActiveSequenceEvent) -> usize {
    match &event.data {
        ActiveSequenceData::AddRequest(add) => add.token_sequence.as_ref().map_or(0, Vec::len),
        ActiveSequenceData::MarkPrefillCompleted | ActiveSequenceData::Free => 0,
    }
}

#[cfg(test)]
mod tests {
    use kv_hashing::{BlockSize, SequenceHash};
    use protocol::replica_sync::decode;
    use routing::Prompt;

    use super::*;

    const RANK: WorkerRank = WorkerRank { worker: WorkerId(42), dp_rank: 0 };

    fn booked(blocks: u64, output_tokens: usize) -> BookingState {
        let hashes: Vec<SequenceHash> = (0..blocks).map(SequenceHash).collect();
        let block_size = BlockSize::new(16).expect("not zero");
        BookingState {
            rank: RANK,
            prompt: Prompt { tokens: hashes.len() * 16, blocks: hashes.into(), block_size },
            prefill_tokens: 16,
            expected_output_tokens: None,
            output_tokens,
            prefill_completed: output_tokens > 0,
        }
    }

    fn event(request: &str, change: ReplicaChange) -> ReplicaEvent {
        ReplicaEvent { router: RouterId(7), request: request.into(), change }
    }

    fn sizes(messages: &[Outgoing]) -> Vec<usize> {
        let events = |message: &Outgoing| decode::<ActiveSequenceBatch>(&message.payload).expect("own output").events;
        messages.iter().map(|message| events(message).len()).collect()
    }

    #[test]
    fn both_limits_cut_and_each_message_has_the_next_number() {
        let mut feed = Feed::new();
        let frees = |count: usize| (0..count).map(|n| event(&n.to_string(), ReplicaChange::Free));
        assert_eq!(sizes(&feed.events(frees(257))), [256, 1]);
        let long = [9000, 4096, 4096, 1].map(|blocks| event("r", ReplicaChange::Add(booked(blocks, 0))));
        let messages = feed.events(long);
        assert_eq!(sizes(&messages), [1, 2, 1]);
        assert_eq!(messages.iter().map(|message| message.sequence).collect::<Vec<_>>(), [2, 3, 4]);
        feed.lost();
        let status = decode::<RouterStatus>(&feed.status(Vec::new()).payload).expect("own output");
        assert_eq!(status.next_sequence, 6, "one number is never sent");
        assert!(feed.events([]).is_empty());
    }

    #[test]
    fn a_mark_or_an_end_says_where_its_booking_runs() {
        let mut feed = Feed::new();
        let add = event("r", ReplicaChange::Add(booked(1, 0)));
        let [mark, end] = [ReplicaChange::MarkPrefillCompleted, ReplicaChange::Free].map(|change| event("r", change));
        let messages = feed.events([add, mark, end.clone(), end]);
        let told = decode::<ActiveSequenceBatch>(&messages[0].payload).expect("own output").events;
        assert_eq!(told.iter().map(|event| event.worker.worker_id).collect::<Vec<_>>(), [42, 42, 42, 0]);
    }

    #[test]
    fn growth_is_told_of_those_that_grew_and_again_from_time_to_time() {
        let mut feed = Feed::new();
        let running = |tokens: &[usize]| -> Vec<(Arc<str>, usize)> {
            tokens.iter().enumerate().map(|(n, tokens)| (n.to_string().into(), *tokens)).collect()
        };
        let grown = |messages: Vec<Outgoing>| -> Vec<(u64, String, u64)> {
            let told = messages.into_iter().flat_map(|Outgoing { topic, sequence, payload }| {
                assert_eq!(topic, GROWTH);
                let requests = decode::<GrowthBatch>(&payload).expect("own output").requests;
                requests.into_iter().map(move |growth| (sequence, growth.request_id, growth.output_tokens))
            });
            told.collect()
        };
        feed.events([event("0", ReplicaChange::Add(booked(1, 0)))]);
        let told = |sequence, request: &str, tokens| (sequence, request.to_owned(), tokens);
        assert_eq!(grown(feed.growth(running(&[16, 16]))), [told(0, "0", 16), told(0, "1", 16)]);
        assert_eq!(grown(feed.growth(running(&[16, 32]))), [told(1, "1", 32)]);
        assert!((3..GROWTH_ROUNDS).all(|_| feed.growth(running(&[16, 32])).is_empty()));
        assert_eq!(grown(feed.growth(running(&[16, 32]))), [told(2, "0", 16), told(2, "1", 32)]);
        feed.events([event("0", ReplicaChange::Free)]);
        let many = grown(feed.growth(running(&[48; 257])));
        assert_eq!((many.len(), many[255].0, many[256].0), (257, 3, 4));
        assert!(feed.growth(Vec::new()).is_empty() && feed.grown.is_empty(), "what has ended is forgotten");
    }

    #[test]
    fn a_snapshot_has_at_least_one_part_and_one_last() {
        let mut feed = Feed::new();
        for (running, expected) in [(0, vec![(0, true, 0)]), (300, vec![(0, false, 256), (1, true, 44)])] {
            let added = |n: usize| event(&n.to_string(), ReplicaChange::Add(booked(1, 0)));
            let messages = feed.snapshot(RouterId(9), 5, &(0..running).map(added).collect::<Vec<_>>());
            assert!(messages.iter().all(|message| message.topic == snapshot_topic(9)));
            let parts = messages.iter().map(|message| decode::<Snapshot>(&message.payload).expect("own output"));
            assert_eq!(parts.map(|p| (p.part, p.last, p.events.len())).collect::<Vec<_>>(), expected);
        }
    }
}
