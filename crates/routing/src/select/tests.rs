//! Decisions over named little clusters.

use std::collections::BTreeMap;

use kv_hashing::BlockSize;
use kv_index::TierBlocks;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::*;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

fn worker(id: u64) -> Worker {
    Worker { rank: rank(id), name: format!("w{id}").into(), model: "m".into(), draining: false }
}

fn prompt(tokens: usize) -> Prompt {
    Prompt { blocks: [].into(), tokens, block_size: BlockSize::new(16).expect("not zero") }
}

fn overlaps(device: &[(u64, u32)]) -> Overlaps {
    device.iter().map(|&(w, device)| (rank(w), TierBlocks { device, ..TierBlocks::default() })).collect()
}

/// One helper for all scenarios: `decide` for a 160-token prompt.
struct Scene {
    selector: Selector,
    workers: Vec<Worker>,
    overlaps: Overlaps,
    load: ActiveLoad,
    pinned: Option<WorkerId>,
    excluded: Vec<WorkerId>,
    rng: StdRng,
}

impl Scene {
    fn new(mode: Mode, workers: u64) -> Self {
        Self {
            selector: Selector::new(mode, CostConfig::default()),
            workers: (1..=workers).map(worker).collect(),
            overlaps: Overlaps::default(),
            load: ActiveLoad::new(),
            pinned: None,
            excluded: Vec::new(),
            rng: StdRng::seed_from_u64(1),
        }
    }

    fn decide(&mut self) -> Result<Decision, Refusal> {
        let set: WorkerSet = self.workers.iter().cloned().collect();
        let prompt = prompt(160);
        let request = Request { model: "m", prompt: &prompt, pinned: self.pinned, excluded: &self.excluded };
        self.selector.decide(&set, &request, &self.overlaps, &self.load, &mut self.rng)
    }

    fn explain(&self) -> Vec<Scored> {
        let set: WorkerSet = self.workers.iter().cloned().collect();
        let prompt = prompt(160);
        let request = Request { model: "m", prompt: &prompt, pinned: self.pinned, excluded: &self.excluded };
        self.selector.explain(&set, &request, &self.overlaps, &self.load)
    }

    fn chosen(&mut self) -> u64 {
        self.decide().expect("somebody").rank.worker.0
    }
}

#[test]
fn the_documents_example_is_decided_for_the_second_worker() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.overlaps = overlaps(&[(1, 2), (2, 5), (3, 8)]);
    // Raw prefill is 10 blocks; what the workers decode already makes the rest: the request itself adds 10 blocks to each.
    for (id, decode) in [(1, 10), (2, 5), (3, 9)] {
        let busy = scene.load.book(rank(id), prompt(decode * 16), 0);
        scene.load.prefill_completed(busy);
    }
    let explained = scene.explain();
    let costs: Vec<f64> = explained.iter().map(|w| w.terms.expect("eligible").cost - 10.0).collect();
    assert_eq!(costs, [18.0, 10.0, 11.0]);
    let decision = scene.decide().expect("somebody");
    assert_eq!((decision.rank, Some(decision.terms)), (rank(2), explained[1].terms));
}

#[test]
fn prompt_load_falls_with_the_first_token() {
    let mut scene = Scene::new(Mode::Kv, 2);
    let busy = scene.load.book(rank(1), prompt(32), 32);
    let terms = scene.explain()[0].terms.expect("eligible");
    assert_eq!((terms.prefill_blocks, terms.decode_blocks), (12.0, 12.0));
    scene.load.prefill_completed(busy);
    let terms = scene.explain()[0].terms.expect("eligible");
    assert_eq!((terms.prefill_blocks, terms.decode_blocks), (10.0, 12.0));
}

#[test]
fn ties_are_spread() {
    let mut scene = Scene::new(Mode::Kv, 4);
    scene.overlaps = overlaps(&[(1, 3), (2, 3)]);
    let mut seen = BTreeMap::new();
    for _ in 0..200 {
        *seen.entry(scene.chosen()).or_insert(0) += 1;
    }
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [1, 2]);
    assert!(seen.values().all(|n| *n > 60), "{seen:?}");
}

#[test]
fn round_robin_takes_turns_whatever_the_overlap() {
    let mut scene = Scene::new(Mode::RoundRobin, 3);
    scene.overlaps = overlaps(&[(1, 10)]);
    let turns: Vec<u64> = (0..6).map(|_| scene.chosen()).collect();
    assert_eq!(turns, [1, 2, 3, 1, 2, 3]);
}

#[test]
fn a_turn_of_one_model_is_none_of_another() {
    let mut scene = Scene::new(Mode::RoundRobin, 2);
    scene.workers.extend((3..=4).map(|id| Worker { model: "other".into(), ..worker(id) }));
    let set: WorkerSet = scene.workers.iter().cloned().collect();
    let prompt = prompt(16);
    let mut seen = Vec::new();
    for model in ["m", "other", "m", "other"] {
        let request = Request { model, prompt: &prompt, pinned: None, excluded: &[] };
        let decision = scene.selector.decide(&set, &request, &scene.overlaps, &scene.load, &mut scene.rng);
        seen.push(decision.expect("somebody").rank.worker.0);
    }
    assert_eq!(seen, [1, 3, 2, 4]);
    (0..TURNS * 2).for_each(|n| {
        scene.selector.turn(&n.to_string());
    });
    assert!(scene.selector.turns.len() <= TURNS);
}

#[test]
fn random_reaches_everybody() {
    let mut scene = Scene::new(Mode::Random, 3);
    let seen: std::collections::BTreeSet<u64> = (0..60).map(|_| scene.chosen()).collect();
    assert_eq!(seen.len(), 3);
}

#[test]
fn temperature_prefers_the_cheaper_but_not_always() {
    let mut scene = Scene::new(Mode::Kv, 2);
    scene.overlaps = overlaps(&[(1, 8)]);
    scene.selector.cost.temperature = 1.0;
    // Scaled costs are 0 and 1: the odds are e to 1, so 73 % of 1000.
    let cheaper = (0..1000).filter(|_| scene.chosen() == 1).count();
    assert!((680..780).contains(&cheaper), "{cheaper}");
    scene.selector.cost.temperature = 0.01;
    assert!((0..100).all(|_| scene.chosen() == 1));
}

#[test]
fn filters_say_why() {
    let mut scene = Scene::new(Mode::Kv, 4);
    scene.workers[0].draining = true;
    scene.workers[1].model = "other".into();
    scene.excluded = vec![WorkerId(3)];
    assert_eq!(scene.chosen(), 4);
    let verdicts: Vec<Verdict> = scene.explain().iter().map(|w| w.verdict).collect();
    use Exclusion::{Draining, Excluded, OtherModel};
    use Verdict::{Eligible, Out};
    assert_eq!(verdicts, [Out(Draining), Out(OtherModel), Out(Excluded), Eligible]);
}

#[test]
fn a_pin_is_kept_or_refused() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.overlaps = overlaps(&[(1, 10)]);
    scene.pinned = Some(WorkerId(2));
    assert_eq!(scene.chosen(), 2);
    scene.pinned = Some(WorkerId(9));
    assert_eq!(scene.decide(), Err(Refusal::UnknownPin(WorkerId(9))));
    scene.pinned = Some(WorkerId(2));
    scene.workers[1].draining = true;
    assert_eq!(scene.decide(), Err(Refusal::AllOut));
}

#[test]
fn nobody_and_nobody_left_are_different_refusals() {
    let mut scene = Scene::new(Mode::Kv, 0);
    assert_eq!(scene.decide(), Err(Refusal::NoWorker));
    let mut scene = Scene::new(Mode::Kv, 2);
    scene.excluded = vec![WorkerId(1), WorkerId(2)];
    assert_eq!(scene.decide(), Err(Refusal::AllOut));
}

proptest! {
    #[test]
    fn no_eligible_worker_is_cheaper_than_the_chosen_one(
        held in prop::collection::vec(0..11_u32, 1..9),
        busy in prop::collection::vec((0..9_u64, 1..400_usize), 0..20),
        seed in any::<u64>(),
    ) {
        let mut scene = Scene::new(Mode::Kv, held.len() as u64);
        scene.rng = StdRng::seed_from_u64(seed);
        scene.overlaps = held.iter().enumerate().map(|(i, o)| (rank(i as u64 + 1), TierBlocks { device: *o, ..TierBlocks::default() })).collect();
        for (worker, tokens) in busy {
            scene.load.book(rank(worker), prompt(tokens), tokens);
        }
        let explained = scene.explain();
        let decision = scene.decide().expect("somebody");
        let least = explained.iter().filter_map(|w| w.terms).map(|t| t.cost).fold(f64::INFINITY, f64::min);
        prop_assert_eq!(decision.terms.cost, least);
    }
}
