//! The scheduler with tiers below its arena: their bytes are shadows, their disk is as slow and as bad as the test wants.
//!
//! After every step the events told so far must give exactly what is in each tier, in the worker's own index and in a
//! router's; and whatever is moved, lost or late, no answer changes and nobody waits for ever.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use kv_hashing::{BlockHash, SequenceHash, chain};
use kv_index::local::{LocalIndexer, RingLimits};
use kv_index::tree::{self, Limits, Reader, Writer};
use kv_index::{EngineHash, Tier, TierBlocks, WorkerId, WorkerRank};

use super::*;
use crate::engine::builtin::BlockId;
use crate::engine::builtin::tiers::catalog::{Catalog, Sizes};
use crate::engine::builtin::tiers::{Done, Move, Policy, ReadFault, WriteFault};

const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };
const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Disk];

/// What the disk does with its next job.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Disk {
    Works,
    IsFull,
    Fails,
}

/// The scheduler, its bytes, and who listens to its events.
struct Tiered {
    run: Run,
    slab: Shadow,
    disk: Shadow,
    jobs: VecDeque<Move>,
    now: Duration,
    indexer: LocalIndexer,
    router: (Writer, Reader),
    /// Of the blocks ever told.
    locals: HashMap<u64, BlockHash>,
    parents: HashMap<u64, Option<u64>>,
}

impl Tiered {
    fn new(config: SchedulerConfig, sizes: Sizes, policy: Policy) -> Self {
        let mut run = Run::new(config);
        run.scheduler = run.scheduler.with_tiers(Catalog::new(sizes, policy, Vec::new()));
        Self {
            run,
            slab: Shadow::new(sizes.slots(), SIZE),
            disk: Shadow::new(sizes.disk, SIZE),
            jobs: VecDeque::new(),
            now: Duration::ZERO,
            indexer: LocalIndexer::new(0, RingLimits::default()),
            router: tree::new(Limits::default()),
            locals: HashMap::new(),
            parents: HashMap::new(),
        }
    }

    fn enqueue(&mut self, wire: Generate) -> RequestId {
        self.run.enqueue(wire)
    }

    fn make_moves(&mut self) -> bool {
        let moves = self.run.scheduler.take_moves();
        for a_move in &moves {
            match *a_move {
                Move::Offload { from, to } => self.slab.copy_block(BlockId(to.0), &self.run.shadow, from),
                Move::Onboard { from, to } => self.run.shadow.copy_block(to, &self.slab, BlockId(from.0)),
                job => self.jobs.push_back(job),
            }
        }
        !moves.is_empty()
    }

    /// The disk's thread ends its next job, reads first.
    fn work(&mut self, disk: Disk) -> bool {
        let read = self.jobs.iter().position(|job| matches!(job, Move::Read { .. }));
        let Some(job) = self.jobs.remove(read.unwrap_or(0)) else { return false };
        let done = match job {
            Move::Write { from, to, block } => {
                let outcome = match disk {
                    Disk::Works => {
                        self.disk.copy_block(BlockId(to.0), &self.slab, BlockId(from.0));
                        Ok(())
                    }
                    Disk::IsFull => Err(WriteFault::Full),
                    Disk::Fails => Err(WriteFault::Failed),
                };
                Done::Written { hash: block.hash, outcome }
            }
            Move::Read { from, to, hash } => {
                let outcome = match disk {
                    Disk::Works => {
                        self.slab.copy_block(BlockId(to.0), &self.disk, BlockId(from.0));
                        Ok(())
                    }
                    _ => Err(ReadFault::Damaged),
                };
                Done::Read { hash, outcome }
            }
            _ => return true,
        };
        self.run.scheduler.done(done);
        self.make_moves();
        true
    }

    /// Says whether anything was computed or moved.
    fn step(&mut self) -> bool {
        let mut logits = Vec::new();
        self.run.scheduler.tick(self.now);
        self.run.scheduler.plan();
        let moved = self.make_moves();
        let chunks = self.run.scheduler.chunks();
        let computes = !chunks.is_empty();
        if computes {
            self.run.shadow.forward(&chunks, &mut logits);
        }
        for (id, output) in self.run.scheduler.apply(&mut logits) {
            self.run.outputs.entry(id).or_default().push(output);
        }
        self.listen();
        self.check();
        computes || moved
    }

    fn listen(&mut self) {
        for ArenaEvent { tier, data } in self.run.scheduler.take_events() {
            if let kv_index::KvEventData::Stored { parent, blocks } = &data {
                let mut parent = parent.map(|parent| parent.0);
                for block in blocks {
                    self.locals.insert(block.engine.0, block.local);
                    self.parents.insert(block.engine.0, parent);
                    assert_eq!(
                        chain(parent.map(SequenceHash), block.local).0,
                        block.engine.0,
                        "told with another parent"
                    );
                    assert!(!self.indexer.holds(tier, block.engine), "stored twice in {tier:?}");
                    parent = Some(block.engine.0);
                }
            }
            if let kv_index::KvEventData::Removed { blocks } = &data {
                assert!(
                    blocks.iter().all(|block| self.indexer.holds(tier, *block)),
                    "removed what was not in {tier:?}"
                );
            }
            for event in self.indexer.apply(tier, data) {
                let applied = self.router.0.apply(RANK, event.tier, &event.data);
                assert_eq!((applied.orphans, applied.unknown, applied.refused), (0, 0, 0), "{event:?}");
            }
        }
    }

    fn contents(&mut self, tier: Tier) -> HashSet<u64> {
        let pool = &mut self.run.scheduler.pool;
        match tier {
            Tier::Device => pool.cached_hashes().map(|hash| hash.0).collect(),
            tier => pool.tiers_mut().contents(tier).into_iter().map(|(hash, _)| hash.0).collect(),
        }
    }

    fn check(&mut self) {
        self.run.scheduler.pool.tiers_mut().check();
        let contents = TIERS.map(|tier| self.contents(tier));
        for (tier, hashes) in TIERS.into_iter().zip(&contents) {
            assert!(hashes.iter().all(|hash| self.indexer.holds(tier, EngineHash(*hash))), "{tier:?}: not told");
        }
        assert_eq!(self.indexer.blocks(), contents.iter().map(HashSet::len).sum::<usize>(), "told, but not there");
        let counts = self.router.1.blocks(RANK);
        let counts = [counts.device, counts.host, counts.disk].map(|count| count as usize);
        assert_eq!(counts, [0, 1, 2].map(|tier: usize| contents[tier].len()), "the router knows something else");
        let newest = contents.iter().flatten().max().copied();
        if let Some(end) = newest {
            self.check_match(end, &contents);
        }
    }

    /// What a router finds of the prefix that ends with this block.
    fn check_match(&self, end: u64, contents: &[HashSet<u64>; 3]) {
        let mut path: Vec<u64> = std::iter::successors(Some(end), |at| self.parents[at]).collect();
        path.reverse();
        let mut expected = TierBlocks::default();
        for hash in &path {
            let place = contents.iter().position(|tier| tier.contains(hash));
            match place {
                Some(0) => expected.device += 1,
                Some(1) => expected.host += 1,
                Some(_) => expected.disk += 1,
                None => break,
            }
        }
        let locals: Vec<_> = path.iter().map(|hash| self.locals[hash]).collect();
        assert_eq!(self.router.1.find_matches(&locals).get(RANK), expected);
    }

    /// Runs until nobody waits; the disk works on with every step.
    fn finish(&mut self, disk: Disk) {
        for _ in 0..20_000 {
            if self.run.scheduler.is_idle() {
                return;
            }
            let progress = self.step() | self.work(disk);
            if !progress {
                // Only time can help, as when the engine's thread sleeps.
                self.now += Duration::from_millis(500);
            }
        }
        panic!("somebody waits for ever");
    }

    /// Nothing is held or on its way.
    fn check_end(&mut self) {
        while self.work(Disk::Works) {}
        self.step();
        assert_eq!(self.run.scheduler.load().active_blocks, 0, "blocks are still held");
        assert!(self.jobs.is_empty());
    }

    fn run_alone(&mut self, wire: Generate) -> RequestId {
        let id = self.enqueue(wire);
        self.finish(Disk::Works);
        id
    }
}

fn sizes(host: usize, disk: usize) -> Sizes {
    Sizes { host, disk, writes: 16, reads: 4, per_step: 8 }
}

/// Fills an arena of ten blocks with something else.
fn push_out(tiered: &mut Tiered, first: u32) {
    for prompt in [first, first + 1] {
        let prompt: Vec<u32> = (0..36).map(|t| 2 + (prompt + t * 7) % 46).collect();
        tiered.run_alone(generate(&prompt, 1));
    }
    while tiered.work(Disk::Works) {}
    tiered.step();
}

fn prompt() -> Vec<u32> {
    (0..33).map(|t| 2 + t * 3 % 46).collect()
}

fn come_back(sizes: Sizes, disk: Disk) -> (Tiered, usize) {
    let mut tiered = Tiered::new(config(10, 2, 64), sizes, Policy::Lru);
    tiered.run_alone(generate(&prompt(), 3));
    push_out(&mut tiered, 100);
    let id = tiered.enqueue(generate(&prompt(), 3));
    tiered.finish(disk);
    assert_eq!(tiered.run.answer(id), alone(&generate(&prompt(), 3), 40));
    let reused = tiered.run.finished(id).reused_tokens;
    tiered.check_end();
    (tiered, reused)
}

#[test]
fn what_the_arena_evicts_comes_back_from_host_memory() {
    let (tiered, reused) = come_back(sizes(64, 0), Disk::Works);
    assert_eq!(reused, 32, "all full blocks of the prompt");
    assert!(tiered.run.scheduler.tiers().host.onboarded >= 7);
}

#[test]
fn without_tiers_it_is_computed_again() {
    let (_, reused) = come_back(sizes(0, 0), Disk::Works);
    assert!(reused < 32);
}

#[test]
fn what_host_memory_has_no_room_for_comes_back_from_disk() {
    let (tiered, reused) = come_back(sizes(2, 64), Disk::Works);
    assert_eq!(reused, 32);
    assert!(tiered.run.scheduler.tiers().disk.onboarded > 0);
}

#[test]
fn the_disk_is_a_tier_without_host_memory() {
    let (tiered, reused) = come_back(Sizes { reads: 16, ..sizes(0, 64) }, Disk::Works);
    let usage = tiered.run.scheduler.tiers();
    assert_eq!((reused, usage.host_blocks), (32, 0));
    assert!(usage.disk.onboarded >= 7, "{usage:?}");
}

#[test]
fn damaged_blocks_are_computed_and_told_as_gone() {
    let (tiered, reused) = come_back(Sizes { reads: 16, ..sizes(0, 64) }, Disk::Fails);
    let usage = tiered.run.scheduler.tiers();
    assert!(reused < 32 && usage.faults.damaged > 0, "{usage:?}");
}

#[test]
fn a_disk_that_does_not_answer_is_not_waited_for() {
    let mut tiered = Tiered::new(config(10, 2, 64), Sizes { reads: 16, ..sizes(0, 64) }, Policy::Lru);
    tiered.run_alone(generate(&prompt(), 3));
    push_out(&mut tiered, 100);
    let id = tiered.enqueue(generate(&prompt(), 3));
    while !tiered.run.scheduler.is_idle() {
        if !tiered.step() {
            tiered.now += Duration::from_millis(500);
        }
    }
    assert_eq!(tiered.run.answer(id), alone(&generate(&prompt(), 3), 40));
    assert!(tiered.now <= Duration::from_secs(5) && tiered.run.scheduler.tiers().faults.late > 0);
    // Nobody else waits for it either.
    let next = tiered.now;
    push_out_without_disk(&mut tiered);
    tiered.enqueue(generate(&prompt(), 3));
    while !tiered.run.scheduler.is_idle() {
        assert!(tiered.step(), "it waits although the disk is known to be late");
    }
    assert_eq!(tiered.now, next);
    // When it answers in the end it is used again.
    while tiered.work(Disk::Works) {}
    push_out(&mut tiered, 300);
    let id = tiered.run_alone(generate(&prompt(), 3));
    assert_eq!(tiered.run.finished(id).reused_tokens, 32);
    tiered.check_end();
}

/// As [`push_out`], with a disk that does nothing.
fn push_out_without_disk(tiered: &mut Tiered) {
    let prompt: Vec<u32> = (0..36).map(|t| 2 + (200 + t * 7) % 46).collect();
    tiered.enqueue(generate(&prompt, 1));
    while !tiered.run.scheduler.is_idle() {
        tiered.step();
    }
}

#[test]
fn others_run_on_while_a_sequence_waits() {
    let mut tiered = Tiered::new(config(24, 4, 64), Sizes { reads: 32, ..sizes(0, 64) }, Policy::Lru);
    tiered.run_alone(generate(&prompt(), 3));
    for first in [100, 300] {
        push_out(&mut tiered, first);
    }
    let other = tiered.enqueue(ranked(0, &[2, 3, 4], 30));
    tiered.step();
    let waits = tiered.enqueue(generate(&prompt(), 3));
    let tokens = |tiered: &Tiered, id| tiered.run.outputs.get(&id).map_or(0, Vec::len);
    (0..5).for_each(|_| assert!(tiered.step()));
    assert!(tokens(&tiered, other) >= 5 && tokens(&tiered, waits) == 0);
    tiered.run.scheduler.retain(|id| id != waits);
    tiered.finish(Disk::Works);
    assert_eq!(tiered.run.answer(other).0.len(), 30);
    tiered.check_end();
}

#[test]
fn a_hole_is_computed_and_what_is_behind_it_comes_from_below() {
    let mut tiered = Tiered::new(config(10, 2, 64), sizes(64, 0), Policy::Lru);
    tiered.run_alone(generate(&prompt(), 3));
    push_out(&mut tiered, 100);
    let hashes = kv_hashing::sequence_hashes(
        &kv_hashing::HashSpace::default().blocks(&prompt(), BlockSize::new(SIZE as u32).expect("not zero")),
    );
    assert!(tiered.run.scheduler.pool.lose_from_host(hashes[0]), "the first block was there");
    let before = tiered.run.shadow.computed;
    let id = tiered.run_alone(generate(&prompt(), 3));
    assert_eq!(tiered.run.answer(id), alone(&generate(&prompt(), 3), 40));
    assert_eq!(
        tiered.run.shadow.computed - before,
        SIZE + 1 + 2,
        "the first block, the last token, and two of the answer"
    );
}

#[derive(Clone, Debug)]
struct Moment {
    arrivals: usize,
    cancels: bool,
    jobs: Vec<Disk>,
    waits: Duration,
}

fn moment() -> impl Strategy<Value = Moment> {
    let disk = prop_oneof![8 => Just(Disk::Works), 1 => Just(Disk::IsFull), 1 => Just(Disk::Fails)];
    let waits = prop_oneof![8 => Just(0), 2 => Just(300), 1 => Just(3000), 1 => Just(70_000)];
    (0..3usize, 0..8usize, prop::collection::vec(disk, 0..6), waits).prop_map(|(arrivals, cancel, jobs, ms)| Moment {
        arrivals,
        cancels: cancel == 0,
        jobs,
        waits: Duration::from_millis(ms),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any sizes, arrivals, cancellations, and a disk that is late, full or damaged at any time.
    #[test]
    fn events_tell_what_is_where_and_no_answer_changes(
        blocks in 16..30usize, seqs in 1..6usize, extra in 0..20usize, host in 0..40usize, disk in 0..60usize,
        writes in 1..9usize, reads in 1..6usize, per_step in 1..6usize, lfu in any::<bool>(),
        moments in prop::collection::vec(moment(), 10..50),
    ) {
        let policy = if lfu { Policy::Lfu } else { Policy::Lru };
        let sizes = Sizes { host, disk, writes, reads, per_step };
        let mut tiered = Tiered::new(config(blocks, seqs, seqs + extra), sizes, policy);
        // The same prompts come again and again.
        let pool = mixed_requests(24);
        let mut requests = pool.iter().cycle().cloned();
        let mut sent: HashMap<RequestId, Generate> = HashMap::new();
        for Moment { arrivals, cancels, jobs, waits } in moments {
            for mut wire in requests.by_ref().take(arrivals) {
                wire.priority = (wire.token_ids.len() % 3) as i32;
                sent.insert(tiered.enqueue(wire.clone()), wire);
            }
            if cancels {
                let victim = sent.keys().min().copied();
                tiered.run.scheduler.retain(|id| Some(id) != victim);
                victim.map(|id| sent.remove(&id));
            }
            for disk in jobs {
                tiered.work(disk);
            }
            tiered.now += waits;
            tiered.step();
        }
        tiered.finish(Disk::Works);
        tiered.check_end();
        let context_length = tiered.run.scheduler.info().context_length;
        for (id, wire) in &sent {
            prop_assert_eq!(tiered.run.answer(*id), alone(wire, context_length));
        }
    }
}
