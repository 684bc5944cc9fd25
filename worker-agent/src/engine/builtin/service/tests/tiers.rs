//! The engine with tiers below its arena: a tiny real model, its thread, real memory and real files.

use std::path::Path;

use kv_index::local::{LocalIndexer, RingLimits};
use kv_index::{EngineHash, Tier};
use protocol::request_plane::Sampling;

use super::*;
use crate::engine::builtin::llama::tests::{tiny, tokens};
use crate::engine::builtin::tiers::catalog::TierUsage;
use crate::engine::builtin::tiers::disk::DiskError;
use crate::engine::builtin::tiers::metrics::{DiskFault, TierName};
use crate::engine::builtin::tiers::{DiskOptions, TierOptions};

/// Blocks of the arena: one long prompt and its answer.
const ARENA: usize = 8;
const ANSWER: u32 = 6;

/// An engine, and what a router would know of it.
struct Node {
    engine: BuiltIn,
    events: UnboundedReceiver<ArenaEvent>,
    index: LocalIndexer,
}

fn host(blocks: u64) -> TierOptions {
    TierOptions { host_bytes: blocks * block_bytes(), ..TierOptions::default() }
}

fn disk(dir: &Path, blocks: u64) -> TierOptions {
    let disk = DiskOptions { dir: dir.to_path_buf(), bytes: blocks * (block_bytes() + 64), revision: "r1".into() };
    TierOptions { disk: Some(disk), ..TierOptions::default() }
}

fn block_bytes() -> u64 {
    tiny(1, false).arena().shape().block_bytes() as u64
}

fn start_node(tiers: &TierOptions, other_model: bool) -> Result<Node, StartError> {
    let engine = EngineInfo {
        block_size: BlockSize::new(16).expect("not zero"),
        total_blocks: ARENA,
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        context_length: 128,
    };
    let config = SchedulerConfig { engine, max_waiting: 64 };
    let engine = BuiltIn::start_with_tiers(tiny(ARENA, other_model), config, Vocabulary::default(), tiers)?;
    let events = engine.take_events().expect("the first taker");
    Ok(Node { engine, events, index: LocalIndexer::new(0, RingLimits::default()) })
}

fn prompt(number: u64) -> Vec<u32> {
    tokens(70 + 3 * number as usize, number)
}

fn request(number: u64) -> Generate {
    let stop = Stop { max_tokens: ANSWER, ignore_eos: true, ..Default::default() };
    Generate { token_ids: prompt(number), stop: Some(stop), ..Default::default() }
}

impl Node {
    fn start(tiers: &TierOptions) -> Self {
        start_node(tiers, false).expect("starts")
    }

    async fn answer(&mut self, number: u64) -> (Vec<u32>, usize) {
        let mut outputs = self.engine.submit(request(number)).expect("room");
        let mut tokens = Vec::new();
        loop {
            match next(&mut outputs).await.expect("outputs end with Finished") {
                EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => tokens.push(token),
                EngineOutput::Finished(finish) => return (tokens, finish.reused_tokens),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Answers to ten prompts, of which the arena holds one.
    async fn round(&mut self) -> (Vec<Vec<u32>>, usize) {
        let (mut answers, mut reused) = (Vec::new(), 0);
        for number in 0..10 {
            let (tokens, from_cache) = self.answer(number).await;
            answers.push(tokens);
            reused += from_cache;
        }
        (answers, reused)
    }

    /// Takes in what has been told; every event must be about something.
    fn listen(&mut self) {
        while let Ok(ArenaEvent { tier, data }) = self.events.try_recv() {
            if let KvEventData::Removed { blocks } = &data {
                assert!(blocks.iter().all(|block| self.index.holds(tier, *block)), "removed what was not in {tier:?}");
            }
            self.index.apply(tier, data);
        }
    }

    /// Blocks that a tier is said to have.
    fn told(&mut self, tier: Tier) -> usize {
        self.listen();
        let all = self.index.dump().into_events();
        all.iter()
            .filter(|event| event.tier == tier)
            .map(|event| match &event.data {
                KvEventData::Stored { blocks, .. } => blocks.len(),
                _ => 0,
            })
            .sum()
    }

    fn onboarded(&self, tier: TierName) -> u64 {
        self.metrics().onboarded_blocks(tier)
    }

    fn metrics(&self) -> &TierMetrics {
        self.engine.tier_metrics().expect("there are tiers")
    }

    /// Waits until the disk has so many blocks.
    async fn on_disk(&mut self, blocks: usize) {
        let wait = async {
            while self.told(Tier::Disk) < blocks {
                let ArenaEvent { tier, data } = self.events.recv().await.expect("the engine runs");
                self.index.apply(tier, data);
            }
        };
        tokio::time::timeout(DEADLINE, wait).await.expect("blocks are written in time");
    }
}

async fn without_tiers() -> Vec<Vec<u32>> {
    let (answers, reused) = Node::start(&TierOptions::default()).round().await;
    assert_eq!(reused, 0);
    answers
}

#[tokio::test]
async fn what_comes_back_from_host_memory_answers_as_what_was_computed() {
    let expected = without_tiers().await;
    let mut node = Node::start(&host(100));
    assert!(node.engine.tier_metrics().is_some());
    assert_eq!(node.round().await, (expected.clone(), 0));
    let (answers, reused) = node.round().await;
    assert_eq!(answers, expected);
    let all: usize = (0..10).map(|number| (prompt(number).len() - 1) / 16 * 16).sum();
    assert_eq!(reused, all, "all that can be reused of every prompt");
    assert!(node.onboarded(TierName::host) >= 30);
    assert_eq!(node.engine.load().active_blocks, 0);
    assert!(node.told(Tier::Host) > 40 && node.told(Tier::Disk) == 0);
}

#[tokio::test]
async fn what_comes_back_from_disk_answers_as_what_was_computed_also_after_a_restart() {
    let expected = without_tiers().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut node = Node::start(&disk(dir.path(), 100));
    assert_eq!(node.round().await.0, expected);
    node.on_disk(40).await;
    let (answers, reused) = node.round().await;
    assert_eq!(answers, expected);
    assert!(reused > 400, "{reused} tokens");
    assert!(node.onboarded(TierName::disk) >= 30);
    // The last prompt is in the arena alone; the others are on disk.
    let on_disk = node.told(Tier::Disk);
    node.engine.shutdown();
    drop(node);

    let mut node = Node::start(&disk(dir.path(), 100));
    assert_eq!(node.told(Tier::Disk), on_disk, "what was there is told before any request");
    let (answers, reused) = node.round().await;
    assert_eq!(answers, expected);
    assert!(reused > 400, "{reused} tokens");
    drop(node);

    let other = TierOptions {
        disk: disk(dir.path(), 100).disk.map(|disk| DiskOptions { revision: "r2".into(), ..disk }),
        ..TierOptions::default()
    };
    let mut node = Node::start(&other);
    assert_eq!(node.told(Tier::Disk), 0, "blocks of another revision are not used");
    assert_eq!(node.round().await.0, expected);
}

#[tokio::test]
async fn blocks_of_another_model_are_not_used() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut node = Node::start(&disk(dir.path(), 100));
    node.round().await;
    node.on_disk(40).await;
    drop(node);
    let mut other = start_node(&disk(dir.path(), 100), true).expect("starts");
    assert_eq!(other.told(Tier::Disk), 0);
}

#[tokio::test]
async fn all_tiers_together_give_the_same_answers() {
    let expected = without_tiers().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    for policy in [crate::engine::builtin::tiers::Policy::Lru, crate::engine::builtin::tiers::Policy::Lfu] {
        let tiers = TierOptions { host_bytes: host(12).host_bytes, policy, ..disk(dir.path(), 100) };
        let mut node = Node::start(&tiers);
        for _ in 0..3 {
            assert_eq!(node.round().await.0, expected);
        }
        assert!(node.onboarded(TierName::disk) > 0, "{policy:?}");
    }
}

#[tokio::test]
async fn damage_on_disk_costs_time_and_no_answer() {
    let expected = without_tiers().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut node = Node::start(&disk(dir.path(), 100));
    node.round().await;
    node.on_disk(40).await;
    // A bit in every block.
    let path = dir.path().join("blocks");
    let mut bytes = std::fs::read(&path).expect("there");
    bytes.iter_mut().step_by(block_bytes() as usize).for_each(|byte| *byte ^= 1);
    std::fs::write(&path, bytes).expect("writes");
    let (answers, _) = node.round().await;
    assert_eq!(answers, expected);
    assert!(node.metrics().faults(DiskFault::damaged) > 0);
    assert_eq!(node.engine.load().active_blocks, 0);
}

#[tokio::test]
async fn files_that_vanish_cost_time_and_no_answer() {
    let expected = without_tiers().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut node = Node::start(&disk(dir.path(), 100));
    node.round().await;
    node.on_disk(40).await;
    std::fs::OpenOptions::new().write(true).open(dir.path().join("blocks")).expect("there").set_len(0).expect("cuts");
    assert_eq!(node.round().await.0, expected);
    assert!(node.metrics().faults(DiskFault::damaged) > 0);
}

#[tokio::test]
async fn two_engines_do_not_share_a_directory() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let first = Node::start(&disk(dir.path(), 100));
    let refused = start_node(&disk(dir.path(), 100), false).err().expect("refused");
    assert!(matches!(refused, StartError::Tiers(TierError::Disk(DiskError::Locked(_)))), "{refused}");
    drop(first);
    Node::start(&disk(dir.path(), 100));
}

#[tokio::test]
async fn impossible_tiers_are_one_line() {
    let message = |tiers: &TierOptions| start_node(tiers, false).err().expect("refused").to_string();
    let small = TierOptions { host_bytes: 10, ..TierOptions::default() };
    assert!(message(&small).starts_with("--host-cache-bytes 10 is less than one KV block"), "{}", message(&small));
    let dir = tempfile::tempdir().expect("a temporary directory");
    let small = disk(dir.path(), 0);
    assert!(message(&small).starts_with("--disk-cache-bytes 0 is less than"), "{}", message(&small));
    let immovable = BuiltIn::start_with_tiers(Shadow::new(64, 4), config(64, 32, 8), Vocabulary::default(), &host(4));
    assert!(immovable.err().expect("refused").to_string().contains("cannot be moved"));
}

#[tokio::test]
async fn requests_given_up_while_blocks_come_leave_nothing_behind() {
    let expected = without_tiers().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let tiers = TierOptions { host_bytes: host(6).host_bytes, ..disk(dir.path(), 60) };
    let mut node = Node::start(&tiers);
    node.round().await;
    for number in 0..200u64 {
        let sampling = Sampling { temperature: 1.0, ..Default::default() };
        let mut outputs =
            node.engine.submit(Generate { sampling: Some(sampling), ..request(number % 10) }).expect("room");
        match number % 3 {
            0 => drop(outputs),
            1 => drop(next(&mut outputs).await),
            _ => assert!(matches!(last(&mut outputs).await, EngineOutput::Finished(_))),
        }
    }
    assert_eq!(node.round().await.0, expected);
    let load = node.engine.load();
    assert_eq!((load.running, load.waiting, load.active_blocks), (0, 0, 0));
}

#[tokio::test]
async fn a_reservation_takes_from_host_memory_what_need_not_be_fetched() {
    let mut node = Node::start(&host(100));
    node.round().await;
    let exchange = node.engine.exchange().expect("a model has blocks");
    let (place, _outputs) = exchange.place(request(0)).expect("room");
    let wanted = place.expect("not ended").reusable().to_vec();
    assert_eq!(wanted.len(), 4);
    let reservation = exchange.reserve(wanted.clone(), Duration::from_secs(5)).await.expect("room");
    assert_eq!((reservation.here(), reservation.missing().len()), (4, 0));
    drop(reservation);
    let (_, reused) = node.answer(0).await;
    assert_eq!(reused, 64);
    node.listen();
    assert!(wanted.iter().all(|(_, hash)| node.index.holds(Tier::Device, EngineHash(hash.0))));
}

#[tokio::test]
async fn what_is_on_this_machine_s_disk_is_read_and_not_fetched() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut node = Node::start(&disk(&dir.path().join("w"), 100));
    let (expected, _) = node.answer(0).await;
    for number in 1..6 {
        node.answer(number).await;
    }
    node.on_disk(16).await;
    let exchange = node.engine.exchange().expect("a model has blocks");
    let wanted = async |number| {
        let (place, _outputs) = exchange.place(request(number)).expect("room");
        place.expect("not ended").reusable().to_vec()
    };
    let all = wanted(0).await;
    let room = Duration::from_secs(5);
    let reservation = exchange.reserve(all.clone(), room).await.expect("room");
    assert_eq!((reservation.here(), reservation.missing().len()), (0, 0), "it takes no room, and nothing comes");
    drop(reservation);
    assert_eq!(node.answer(0).await, (expected, 64), "the sequence reads them");
    assert!(node.onboarded(TierName::disk) >= 4);
    // One that is nowhere here has to come, and those before it with it.
    let other = [&all[..2], &wanted(9).await[..1]].concat();
    node.answer(3).await;
    let reservation = exchange.reserve(other, room).await.expect("room");
    assert_eq!(reservation.here() + reservation.missing().len(), 3);
    assert!(reservation.missing().len() >= 1);
}

#[test]
fn metrics_take_over_differences() {
    let metrics = TierMetrics::default();
    let mut usage = TierUsage::default();
    metrics.update(&usage, &usage, 10);
    let before = usage;
    usage.host.onboarded = 3;
    usage.faults.damaged = 2;
    metrics.update(&before, &usage, 10);
    metrics.update(&usage, &usage, 10);
    assert_eq!((metrics.onboarded_blocks(TierName::host), metrics.faults(DiskFault::damaged)), (3, 2));
}
