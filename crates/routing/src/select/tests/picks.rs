//! How one is taken of those that are left.

use super::*;

fn counts(scene: &mut Scene, decisions: usize) -> BTreeMap<u64, usize> {
    let mut seen = BTreeMap::new();
    for _ in 0..decisions {
        *seen.entry(scene.chosen()).or_insert(0) += 1;
    }
    seen
}

#[test]
fn ties_are_spread() {
    let mut scene = Scene::new(Mode::Kv, 4);
    scene.overlaps = overlaps(&[(1, 3), (2, 3)]);
    let seen = counts(&mut scene, 200);
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [1, 2]);
    assert!(seen.values().all(|n| *n > 60), "{seen:?}");
    assert_eq!(scene.decide().expect("somebody").pick, Pick::Lowest { ties: 2 });
}

#[test]
fn the_second_turn_of_a_conversation_goes_where_the_first_went() {
    // Case 7: whoever holds the conversation wins among idle workers, and among equally busy ones.
    for busy in [0, 2] {
        let mut scene = Scene::new(Mode::Kv, 8);
        (1..=8).for_each(|id| (0..busy).for_each(|_| _ = scene.run(id, 64, 0)));
        scene.overlaps = overlaps(&[(5, 6)]);
        assert_eq!(counts(&mut scene, 50), BTreeMap::from([(5, 50)]));
    }
}

#[test]
fn round_robin_takes_turns_whatever_the_overlap() {
    let mut scene = Scene::new(Mode::RoundRobin, 3);
    scene.overlaps = overlaps(&[(1, 10)]);
    let turns: Vec<u64> = (0..6).map(|_| scene.chosen()).collect();
    assert_eq!(turns, [1, 2, 3, 1, 2, 3]);
}

#[test]
fn a_turn_is_kept_when_workers_come_and_go() {
    let mut scene = Scene::new(Mode::RoundRobin, 4);
    assert_eq!((scene.chosen(), scene.chosen()), (1, 2));
    scene.worker(3).draining = true;
    assert_eq!((scene.chosen(), scene.chosen()), (4, 1));
    scene.worker(3).draining = false;
    scene.workers.remove(0);
    assert_eq!((scene.chosen(), scene.chosen(), scene.chosen()), (2, 3, 4));
}

#[test]
fn a_turn_of_one_model_or_role_is_none_of_another() {
    let mut scene = Scene::new(Mode::RoundRobin, 6);
    (3..=4).for_each(|id| scene.worker(id).model = "other".into());
    (5..=6).for_each(|id| scene.worker(id).role = Role::Prefill);
    let set: WorkerSet = scene.workers.iter().cloned().collect();
    let prompt = prompt(16);
    let mut seen = Vec::new();
    let (whole, prefill) = (Roles::WHOLE, Roles::only(Role::Prefill));
    for (model, roles) in
        [("m", whole), ("other", whole), ("m", prefill), ("m", whole), ("other", whole), ("m", prefill)]
    {
        let request = Request { roles, ..Request::new(model, &prompt) };
        let decision = scene.selector.decide(&set, &request, &scene.overlaps, &scene.load, &mut scene.rng);
        seen.push(decision.expect("somebody").rank.worker.0);
    }
    assert_eq!(seen, [1, 3, 5, 2, 4, 6]);
    (0..TURNS * 2).for_each(|n| {
        scene.selector.take_turn(&Request::new(&n.to_string(), &prompt), rank(1));
    });
    assert!(scene.selector.turns.len() <= TURNS);
}

#[test]
fn a_request_may_be_picked_for_in_another_way() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.run(1, 160, 160);
    scene.mode = Some(Mode::RoundRobin);
    assert_eq!((scene.chosen(), scene.chosen(), scene.chosen(), scene.chosen()), (1, 2, 3, 1));
    assert_eq!(scene.explain().mode, Mode::RoundRobin);
    scene.mode = None;
    assert_ne!(scene.chosen(), 1, "by cost");
}

#[test]
fn a_peek_takes_nobodys_turn() {
    let mut scene = Scene::new(Mode::RoundRobin, 3);
    let peek = |scene: &mut Scene| {
        scene.ask(|selector, set, request, overlaps, load, rng| selector.peek(set, request, overlaps, load, rng))
    };
    for turn in [1, 2, 3, 1] {
        let seen = [peek(&mut scene), peek(&mut scene)].map(|outcome| outcome.expect("somebody").rank.worker.0);
        assert_eq!((seen, scene.chosen()), ([turn, turn], turn));
    }
}

#[test]
fn random_reaches_everybody() {
    let mut scene = Scene::new(Mode::Random, 3);
    let seen = counts(&mut scene, 300);
    assert!(seen.len() == 3 && seen.values().all(|n| *n > 60), "{seen:?}");
}

#[test]
fn the_least_loaded_has_the_fewest_requests() {
    let mut scene = Scene::new(Mode::LeastLoaded, 4);
    scene.run(1, 16, 0);
    (0..3).for_each(|_| _ = scene.run(2, 16, 0));
    // One long request is one request.
    scene.run(3, 16_000, 16_000);
    (0..2).for_each(|_| _ = scene.run(4, 16, 0));
    let seen = counts(&mut scene, 100);
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [1, 3]);
    assert!(seen.values().all(|n| *n > 25), "{seen:?}");
}

#[test]
fn of_two_the_one_with_fewer_requests() {
    let mut scene = Scene::new(Mode::PowerOfTwo, 4);
    for id in 1..=4 {
        (0..id).for_each(|_| _ = scene.run(id, 16, 0));
    }
    // Pairs of four, each as likely: the first is in 3 of 6, the second is the lesser in 2, the third in 1, the fourth in none.
    let seen = counts(&mut scene, 1200);
    let near = |id: u64, expected: usize| seen.get(&id).is_some_and(|n| n.abs_diff(expected) < 90);
    assert!(near(1, 600) && near(2, 400) && near(3, 200) && !seen.contains_key(&4), "{seen:?}");
    scene.workers.truncate(1);
    assert_eq!(scene.decide().expect("somebody").pick, Pick::TwoChoices { other: rank(1) });
    let mut equal = Scene::new(Mode::PowerOfTwo, 3);
    assert!(counts(&mut equal, 300).values().all(|n| *n > 60));
}

#[test]
fn in_direct_mode_the_request_names_its_worker() {
    let mut scene = Scene::new(Mode::Direct, 3);
    assert_eq!(scene.decide(), Err(Refusal::NeedsTarget));
    scene.pinned = Some(Target::worker(WorkerId(2)));
    let decision = scene.decide().expect("the named one");
    assert_eq!((decision.rank, decision.pick), (rank(2), Pick::Named));
    scene.workers.clear();
    scene.pinned = None;
    assert_eq!(scene.decide(), Err(Refusal::NoWorker), "nobody could be named");
}

#[test]
fn temperature_prefers_the_cheaper_but_not_always() {
    let cost = CostConfig { temperature: 1.0, ..CostConfig::default() };
    let mut scene = Scene::with(SelectorConfig { cost, ..SelectorConfig::default() }, 2);
    scene.overlaps = overlaps(&[(1, 8)]);
    // Scaled costs are 0 and 1: the odds are e to 1, so 73 % of 1000.
    let cheaper = (0..1000).filter(|_| scene.chosen() == 1).count();
    assert!((680..780).contains(&cheaper), "{cheaper}");
    scene.cost = Some(CostConfig { temperature: 0.01, ..cost });
    assert!((0..100).all(|_| scene.chosen() == 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Frequencies against the formula, each within five standard deviations.
    #[test]
    fn softmax_has_the_distribution_of_its_formula(
        held in prop::collection::vec(0..11_u32, 2..6),
        temperature in 0.1..3.0_f64,
        seed in any::<u64>(),
    ) {
        const DRAWS: usize = 2000;
        let cost = CostConfig { temperature, ..CostConfig::default() };
        let mut scene = Scene::with(SelectorConfig { cost, ..SelectorConfig::default() }, held.len() as u64);
        scene.rng = StdRng::seed_from_u64(seed);
        scene.overlaps = held.iter().enumerate().map(|(i, o)| (rank(i as u64 + 1), TierBlocks { device: *o, ..TierBlocks::default() })).collect();
        let (most, least) = (*held.iter().max().expect("some"), *held.iter().min().expect("some"));
        // The cost falls by one with each block held, so the cheapest holds the most.
        let weight = |held: &u32| if most == least { 1.0 } else { (-f64::from(most - held) / f64::from(most - least) / temperature).exp() };
        let total: f64 = held.iter().map(weight).sum();
        let mut seen = vec![0_usize; held.len()];
        for _ in 0..DRAWS {
            let decision = scene.decide().expect("somebody");
            let at = decision.rank.worker.0 as usize - 1;
            seen[at] += 1;
            let Pick::Softmax { probability, draw, .. } = decision.pick else { panic!("{:?}", decision.pick) };
            prop_assert!((probability - weight(&held[at]) / total).abs() < 1e-9 && (0.0..1.0).contains(&draw));
        }
        for (n, held) in seen.iter().zip(&held) {
            let p = weight(held) / total;
            let deviation = (DRAWS as f64 * p * (1.0 - p)).sqrt();
            prop_assert!((*n as f64 - DRAWS as f64 * p).abs() <= 5.0 * deviation + 1.0, "{n} of {DRAWS} at {p}");
        }
    }
}

#[test]
fn requests_of_others_count_where_requests_are_counted() {
    let busy = Reported { running_requests: Some(3), waiting_requests: Some(2), ..Reported::default() };
    for mode in [Mode::LeastLoaded, Mode::PowerOfTwo] {
        let mut scene = Scene::new(mode, 2);
        scene.load.report(rank(1), busy, std::time::Duration::ZERO);
        (0..4).for_each(|_| _ = scene.run(2, 16, 0));
        let explained = scene.explain();
        let requests: Vec<u32> = explained.candidates.iter().map(Candidate::requests).collect();
        assert_eq!((requests, explained.reports), (vec![5, 4], vec![(rank(1), busy)]));
        if mode == Mode::LeastLoaded {
            assert!((0..10).all(|_| scene.chosen() == 2), "the other has five");
        }
        scene.run(1, 16, 0);
        scene.run(2, 16, 0);
        let ties: Vec<u32> = scene.explain().candidates.iter().map(Candidate::requests).collect();
        assert_eq!(ties, [6, 5], "bookings count on top of it");
    }
    assert_eq!(size_of::<Candidate>(), 64);
}
