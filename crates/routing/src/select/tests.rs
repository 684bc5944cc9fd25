//! Decisions over named little clusters.

use std::collections::BTreeMap;

use kv_index::{PooledRun, WorkerId};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::*;
use crate::filter::Target;
use crate::load::{LoadConfig, NewBooking, Prompt, Reported, RouterId};
use crate::worker::{KvFormat, Role};

mod limits;
mod picks;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
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
    pinned: Option<Target>,
    excluded: Vec<Target>,
    roles: Roles,
    partners: Option<Vec<KvFormat>>,
    mode: Option<Mode>,
    lora: Option<&'static str>,
    revision: Option<&'static str>,
    labels: Vec<(String, String)>,
    cost: Option<CostConfig>,
    begun: bool,
    rng: StdRng,
}

impl Scene {
    /// Workers 1 to `workers`.
    fn new(mode: Mode, workers: u64) -> Self {
        Self::with(SelectorConfig { mode, ..SelectorConfig::default() }, workers)
    }

    fn with(config: SelectorConfig, workers: u64) -> Self {
        let name = |id: u64| Worker::new(rank(id), format!("w{id}"), "m");
        Self {
            selector: Selector::new(config),
            workers: (1..=workers).map(name).collect(),
            overlaps: Overlaps::default(),
            load: ActiveLoad::new(RouterId(0), LoadConfig::default()),
            pinned: None,
            excluded: Vec::new(),
            roles: Roles::WHOLE,
            partners: None,
            mode: None,
            lora: None,
            revision: None,
            labels: Vec::new(),
            cost: None,
            begun: false,
            rng: StdRng::seed_from_u64(1),
        }
    }

    fn worker(&mut self, id: u64) -> &mut Worker {
        self.workers.iter_mut().find(|worker| worker.rank == rank(id)).expect("a worker of the scene")
    }

    /// Runs `tokens` tokens of prompt on a worker; `prefill` of them are not computed yet.
    fn run(&mut self, worker: u64, tokens: usize, prefill: usize) -> crate::load::BookingId {
        let booking = NewBooking {
            request: "busy".into(),
            rank: rank(worker),
            prompt: prompt(tokens),
            prefill_tokens: prefill,
            expected_output_tokens: None,
        };
        self.load.book(booking)
    }

    fn ask<T>(
        &mut self,
        with: impl FnOnce(&mut Selector, &WorkerSet, &Request<'_>, &Overlaps, &ActiveLoad, &mut StdRng) -> T,
    ) -> T {
        let set: WorkerSet = self.workers.iter().cloned().collect();
        let prompt = prompt(160);
        let request = Request {
            pinned: self.pinned,
            excluded: &self.excluded,
            roles: self.roles,
            partners: self.partners.as_deref(),
            mode: self.mode,
            lora: self.lora,
            revision: self.revision,
            labels: &self.labels,
            cost: self.cost,
            begun: self.begun,
            ..Request::new("m", &prompt)
        };
        with(&mut self.selector, &set, &request, &self.overlaps, &self.load, &mut self.rng)
    }

    fn decide(&mut self) -> Result<Decision, Refusal> {
        self.ask(|selector, set, request, overlaps, load, rng| selector.decide(set, request, overlaps, load, rng))
    }

    /// Does not use up randomness.
    fn explain(&mut self) -> Explanation {
        self.ask(|selector, set, request, overlaps, load, rng| {
            selector.explain(set, request, overlaps, load, &mut rng.clone())
        })
    }

    fn chosen(&mut self) -> u64 {
        self.decide().expect("somebody").rank.worker.0
    }

    fn exclusions(&mut self) -> Vec<Option<Exclusion>> {
        self.explain().candidates.iter().map(|row| row.exclusion).collect()
    }
}

#[test]
fn the_documents_example_is_decided_for_the_second_worker() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.overlaps = overlaps(&[(1, 2), (2, 5), (3, 8)]);
    // Raw prefill is 10 blocks; what the workers decode already makes the rest: the request itself adds 10 blocks to each.
    for (id, decode) in [(1, 10), (2, 5), (3, 9)] {
        scene.run(id, decode * 16, 0);
    }
    let explained = scene.explain();
    let costs: Vec<f64> = explained.candidates.iter().map(|row| row.cost - 10.0).collect();
    assert_eq!(costs, [18.0, 10.0, 11.0]);
    let decision = scene.decide().expect("somebody");
    let terms: Vec<Terms> = explained.rows().filter_map(|(_, terms)| terms).collect();
    assert_eq!((decision.rank, decision.terms), (rank(2), terms[1]));
    assert_eq!((terms[1].prefill_blocks, terms[1].credits.device, terms[1].decode_blocks), (10.0, 5.0, 15.0));
    assert_eq!((decision.eligible, decision.pick), (3, Pick::Lowest { ties: 1 }));
}

#[test]
fn prompt_load_falls_with_the_first_token() {
    let mut scene = Scene::new(Mode::Kv, 2);
    let busy = scene.run(1, 32, 32);
    let first = |scene: &mut Scene| scene.explain().rows().next().and_then(|(_, terms)| terms).expect("eligible");
    let terms = first(&mut scene);
    assert_eq!((terms.prefill_blocks, terms.decode_blocks), (12.0, 12.0));
    scene.load.prefill_completed(busy);
    let terms = first(&mut scene);
    assert_eq!((terms.prefill_blocks, terms.decode_blocks), (10.0, 12.0));
}

#[test]
fn overlaps_of_workers_that_are_not_in_the_set_are_passed_over() {
    let mut scene = Scene::new(Mode::Kv, 4);
    scene.overlaps = overlaps(&[(0, 9), (2, 3), (3, 1), (9, 9)]);
    scene.workers.remove(1);
    scene.run(2, 160, 0);
    scene.run(4, 16, 0);
    let found: Vec<(u32, u32)> =
        scene.explain().candidates.iter().map(|row| (row.overlap.device, row.load.active_blocks)).collect();
    assert_eq!(found, [(0, 0), (1, 0), (0, 1)]);
}

#[test]
fn what_one_worker_put_into_the_pool_lowers_the_cost_of_the_others() {
    let cost = CostConfig { shared_cache_multiplier: 0.5, ..CostConfig::default() };
    let mut scene = Scene::with(SelectorConfig { cost, ..SelectorConfig::default() }, 3);
    scene.worker(3).model = "other".into();
    let held = |device, shared| TierBlocks { device, shared, ..TierBlocks::default() };
    let run = PooledRun { rank: rank(1), start: 0, len: 8 };
    scene.overlaps = Overlaps::new([(rank(1), held(2, 6)), (rank(2), held(3, 0))], vec![run]);
    let explained = scene.explain();
    let rows: Vec<(u32, f64)> = explained.candidates.iter().map(|row| (row.shared_beyond, row.cost)).collect();
    // 10 blocks of prompt, all of which it would use: what is held is off that, and half of what the pool has beyond.
    assert_eq!(rows, [(6, 20.0 - 2.0 - 3.0), (5, 20.0 - 3.0 - 2.5), (0, f64::INFINITY)]);
    scene.cost = Some(CostConfig::default());
    assert_eq!(
        scene.explain().candidates[1].cost,
        17.0,
        "it costs to be fetched: without a weight it is worth nothing"
    );
}

#[test]
fn a_request_brings_its_own_weights() {
    let mut scene = Scene::new(Mode::Kv, 2);
    scene.overlaps = overlaps(&[(1, 8)]);
    scene.run(1, 64, 0);
    assert_eq!(scene.chosen(), 1, "8 blocks of credit against 4 of load");
    scene.cost = Some(CostConfig { overlap_score_credit: 0.25, ..CostConfig::default() });
    assert_eq!(scene.chosen(), 2);
    assert_eq!(scene.explain().cost.overlap_score_credit, 0.25);
    scene.cost = None;
    assert_eq!(scene.chosen(), 1, "and leaves those of the others alone");
}

proptest! {
    #[test]
    fn an_explanation_is_what_a_decision_would_be(
        mode in prop::sample::select(vec![Mode::Kv, Mode::RoundRobin, Mode::Random, Mode::PowerOfTwo, Mode::LeastLoaded, Mode::Direct]),
        temperature in prop::sample::select(vec![0.0, 0.5]),
        held in prop::collection::vec(0..11_u32, 1..9),
        busy in prop::collection::vec((1..9_u64, 1..400_usize), 0..20),
        draining in prop::collection::vec(any::<bool>(), 9),
        pinned in prop::option::of(1..10_u64),
        seed in any::<u64>(),
    ) {
        let cost = CostConfig { temperature, ..CostConfig::default() };
        let mut scene = Scene::with(SelectorConfig { mode, cost, ..SelectorConfig::default() }, held.len() as u64);
        scene.rng = StdRng::seed_from_u64(seed);
        scene.pinned = pinned.map(|id| Target::worker(WorkerId(id)));
        scene.overlaps = held.iter().enumerate().map(|(i, o)| (rank(i as u64 + 1), TierBlocks { device: *o, ..TierBlocks::default() })).collect();
        for (worker, tokens) in busy {
            scene.run(worker, tokens, tokens);
        }
        scene.workers.iter_mut().zip(draining).for_each(|(worker, draining)| worker.draining = draining);
        for _ in 0..3 {
            let explained = scene.explain();
            prop_assert_eq!(scene.explain(), explained.clone(), "asking changes nothing");
            let decided = scene.decide();
            prop_assert_eq!(&explained.outcome, &decided);
            prop_assert_eq!(scene.selector.candidates(), &explained.candidates[..]);
            for (row, terms) in explained.rows() {
                prop_assert_eq!(row.cost, terms.map_or(f64::INFINITY, |terms| terms.cost));
            }
            if let (Ok(decision), Mode::Kv, 0.0) = (decided, mode, temperature) {
                let least = explained.candidates.iter().map(|row| row.cost).fold(f64::INFINITY, f64::min);
                let ties = explained.candidates.iter().filter(|row| row.cost == least).count() as u32;
                prop_assert_eq!((decision.terms.cost, decision.pick), (least, Pick::Lowest { ties }));
            }
        }
    }
}
