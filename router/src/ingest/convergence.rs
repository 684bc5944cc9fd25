//! Cursor, local indexer and tree together, without sockets: whatever happens to messages, the index ends equal to what the
//! worker holds.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use kv_hashing::{BlockHash, sequence_hashes};
use kv_index::local::{Answer, LocalIndexer, RingLimits};
use kv_index::tree::{self, Limits, Writer};
use kv_index::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use proptest::prelude::*;
use proptest::sample::Index;
use tokio::time::Instant;

use super::Batches;
use super::cursor::{Cursor, Verdict, Wish};

const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };

/// A heartbeat comes this often, and two tell whatever one of them can tell.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// So small that some losses are answered with a dump.
const RING: RingLimits = RingLimits { events: 6, blocks: 64 };

/// A message on its way to the router.
#[derive(Clone, Debug)]
enum Message {
    Event(KvEvent),
    Heartbeat(Option<u64>),
}

/// What an engine does, and what happens to messages and answers.
#[derive(Clone, Debug)]
enum Op {
    Store(Vec<u64>, Tier),
    /// One block that no other one continues.
    Evict(Index),
    Clear,
    /// The engine starts anew. `heard`: the router has no question open, and hears heartbeats before the engine has done anything.
    Restart {
        heard: bool,
    },
    Heartbeat,
    Deliver(usize),
    Lose,
    Double,
    /// The next message comes after the one behind it.
    Swap,
    /// The recovery under way is answered, or fails.
    Answer(bool),
    Wait(u64),
}

fn ops(restarts: impl Strategy<Value = bool> + 'static) -> impl Strategy<Value = Op> {
    let path = prop::collection::vec(0..3_u64, 1..6);
    let tier = prop::sample::select(vec![Tier::Device, Tier::Device, Tier::Host, Tier::Shared]);
    prop_oneof![
        12 => (path, tier).prop_map(|(path, tier)| Op::Store(path, tier)),
        6 => any::<Index>().prop_map(Op::Evict),
        1 => Just(Op::Clear),
        1 => restarts.prop_map(|heard| Op::Restart { heard }),
        2 => Just(Op::Heartbeat),
        12 => (1..4_usize).prop_map(Op::Deliver),
        4 => Just(Op::Lose),
        3 => Just(Op::Double),
        3 => Just(Op::Swap),
        6 => prop::bool::weighted(0.8).prop_map(Op::Answer),
        2 => (0..1500_u64).prop_map(Op::Wait),
    ]
}

struct World {
    worker: LocalIndexer,
    /// What the worker holds: tier and path.
    held: BTreeSet<(Tier, Vec<u64>)>,
    network: VecDeque<Message>,
    cursor: Cursor,
    tree: Writer,
    recovering: Option<Wish>,
    now: Instant,
}

fn blocks(path: &[u64]) -> Vec<StoredBlock> {
    let locals: Vec<BlockHash> = path.iter().map(|n| BlockHash(*n)).collect();
    let sequence = sequence_hashes(&locals);
    locals.iter().zip(sequence).map(|(local, hash)| StoredBlock { engine: EngineHash(hash.0), local: *local }).collect()
}

fn engine(path: &[u64]) -> EngineHash {
    blocks(path).last().expect("not empty").engine
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            worker: LocalIndexer::new(0, RING),
            held: BTreeSet::new(),
            network: VecDeque::new(),
            cursor: Cursor::default(),
            tree: tree::new(Limits::default()).0,
            recovering: None,
            now: Instant::now(),
        };
        world.cursor.subscribed();
        world.settle();
        world
    }

    fn engine_does(&mut self, tier: Tier, data: KvEventData) {
        let events = self.worker.apply(tier, data);
        self.network.extend(events.iter().map(|event| Message::Event(KvEvent::clone(event))));
    }

    fn heartbeat(&mut self) {
        self.network.push_back(Message::Heartbeat(self.worker.last_id()));
    }

    fn play(&mut self, op: Op) {
        match op {
            Op::Store(path, tier) => {
                let known =
                    (1..=path.len()).take_while(|end| self.held.contains(&(tier, path[..*end].to_vec()))).count();
                let parent = (known > 0).then(|| engine(&path[..known]));
                self.held.extend((1..=path.len()).map(|end| (tier, path[..end].to_vec())));
                self.engine_does(tier, KvEventData::Stored { parent, blocks: blocks(&path)[known..].to_vec() });
            }
            Op::Evict(at) => {
                let continued = |tier: Tier, path: &[u64]| {
                    self.held
                        .iter()
                        .any(|(other, longer)| *other == tier && longer.len() > path.len() && longer.starts_with(path))
                };
                let ends: Vec<_> = self.held.iter().filter(|(tier, path)| !continued(*tier, path)).cloned().collect();
                if !ends.is_empty() {
                    let (tier, path) = at.get(&ends).clone();
                    self.held.remove(&(tier, path.clone()));
                    self.engine_does(tier, KvEventData::Removed { blocks: vec![engine(&path)] });
                }
            }
            Op::Clear => {
                self.held.clear();
                self.engine_does(Tier::Device, KvEventData::Cleared);
            }
            Op::Restart { heard } => {
                // One connection keeps the order: nothing of the old life comes after the new one began.
                self.network.clear();
                while heard && self.recovering.is_some() {
                    self.answer(true);
                }
                self.worker = LocalIndexer::new(0, RING);
                self.held.clear();
                for _ in 0..if heard { 3 } else { 0 } {
                    self.heartbeat();
                    self.deliver(1);
                    self.wait(HEARTBEAT);
                }
            }
            Op::Heartbeat => self.heartbeat(),
            Op::Deliver(count) => self.deliver(count),
            Op::Lose => _ = self.network.pop_front(),
            Op::Double => {
                if let Some(first) = self.network.front().cloned() {
                    self.network.push_front(first);
                }
            }
            Op::Swap if self.network.len() > 1 => self.network.swap(0, 1),
            Op::Swap => {}
            Op::Answer(well) => self.answer(well),
            Op::Wait(ms) => self.wait(Duration::from_millis(ms)),
        }
    }

    fn deliver(&mut self, count: usize) {
        for _ in 0..count {
            match self.network.pop_front() {
                Some(Message::Event(event)) => self.take(event),
                Some(Message::Heartbeat(last)) => {
                    if self.cursor.reported(last, self.now) {
                        self.tree.remove_rank(RANK);
                    }
                }
                None => return,
            }
            self.settle();
        }
    }

    /// As the ingest does it.
    fn take(&mut self, event: KvEvent) {
        match self.cursor.live(event, self.now) {
            Verdict::Apply(event) => self.apply(vec![event]),
            Verdict::Restarted => _ = self.tree.remove_rank(RANK),
            Verdict::Duplicate | Verdict::Held | Verdict::Gap => {}
        }
    }

    fn apply(&mut self, events: Vec<KvEvent>) {
        for event in Batches::of(events).flatten() {
            if self.tree.apply(RANK, event.tier, &event.data).orphans > 0 {
                self.cursor.wish_dump();
            }
        }
    }

    fn settle(&mut self) {
        self.recovering = self.cursor.take_wish().or(self.recovering.take());
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        if self.cursor.due().is_some_and(|due| self.now >= due) {
            self.cursor.check(self.now);
        }
        self.settle();
    }

    fn answer(&mut self, well: bool) {
        let Some(wish) = self.recovering.take() else { return };
        let answer = match wish {
            _ if !well => return self.fail(),
            Wish::Dump => Answer::Dump(self.worker.dump()),
            Wish::Range { start, end } => self.worker.range(start, end),
        };
        match answer {
            Answer::Dump(snapshot) => {
                self.tree.remove_rank(RANK);
                let last = snapshot.last_id();
                self.apply(snapshot.into_events());
                self.cursor.dumped(last, self.now);
            }
            Answer::Events { events, last_id } => {
                let events = events.iter().map(|event| KvEvent::clone(event)).collect();
                let fresh = self.cursor.ranged(events, last_id, self.now);
                self.apply(fresh);
            }
        }
        for event in self.cursor.release() {
            self.take(event);
        }
        self.settle();
    }

    fn fail(&mut self) {
        self.cursor.failed();
        self.settle();
    }

    /// The network calms down: what is on its way comes, then heartbeats as ever, and every question is answered.
    fn come_to_rest(&mut self) {
        self.deliver(usize::MAX);
        for _ in 0..8 {
            self.heartbeat();
            self.deliver(usize::MAX);
            self.answer(true);
            self.wait(HEARTBEAT);
            self.answer(true);
        }
        assert!(self.cursor.is_live() && self.recovering.is_none(), "at rest nothing is asked for any more");
    }

    fn is_equal(&self) -> bool {
        let count = |tier| self.held.iter().filter(|(of, _)| *of == tier).count();
        let counts = self.tree.reader().blocks(RANK);
        let tiers = [(Tier::Device, counts.device), (Tier::Host, counts.host), (Tier::Shared, counts.shared)];
        tiers.iter().all(|(tier, indexed)| count(*tier) == *indexed as usize)
            && self.held.iter().all(|(tier, path)| self.tree.contains(RANK, *tier, engine(path)))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_to_messages_the_index_ends_equal(history in prop::collection::vec(ops(Just(true)), 1..120)) {
        let mut world = World::new();
        history.into_iter().for_each(|op| world.play(op));
        world.come_to_rest();
        prop_assert!(world.is_equal(), "{:?} and {:?}", world.held, world.tree.stats());
    }

    /// A restart that no heartbeat tells of in time may look like the life before it, if the engine numbers past the old cursor:
    /// then a comparison with the worker finds the difference, and asks for a dump.
    #[test]
    fn a_comparison_repairs_what_numbers_cannot_tell(history in prop::collection::vec(ops(any::<bool>()), 1..120)) {
        let mut world = World::new();
        history.into_iter().for_each(|op| world.play(op));
        world.come_to_rest();
        if !world.is_equal() {
            world.cursor.wish_dump();
            world.settle();
            world.come_to_rest();
        }
        prop_assert!(world.is_equal(), "{:?} and {:?}", world.held, world.tree.stats());
    }
}
