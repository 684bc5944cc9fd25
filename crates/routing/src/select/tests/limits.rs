//! Who is left out, and what a request hears when nobody is left.

use super::*;
use Exclusion::*;

fn target(worker: u64) -> Target {
    Target::worker(WorkerId(worker))
}

#[test]
fn filters_say_why() {
    let mut scene = Scene::new(Mode::Kv, 7);
    scene.worker(1).draining = true;
    scene.worker(2).model = "other".into();
    scene.worker(4).unreachable = true;
    scene.worker(5).role = Role::Prefill;
    scene.worker(6).role = Role::Decode;
    scene.excluded = vec![target(3), target(7)];
    assert_eq!(scene.chosen(), 6);
    let expected =
        [Some(Draining), Some(OtherModel), Some(Excluded), Some(Unreachable), Some(OtherRole), None, Some(Excluded)];
    assert_eq!(scene.exclusions(), expected);
    assert!(scene.explain().rows().all(|(row, terms)| terms.is_some() == row.exclusion.is_none()));
}

#[test]
fn roles_are_a_set() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.worker(2).role = Role::Prefill;
    scene.worker(3).role = Role::Decode;
    for (role, id) in [(Role::Aggregated, 1), (Role::Prefill, 2), (Role::Decode, 3)] {
        scene.roles = Roles::only(role);
        assert_eq!(scene.chosen(), id);
        assert_eq!(Role::from_name(role.name()), Some(role));
    }
    assert_eq!(Role::from_name("frontend"), None);
}

#[test]
fn a_half_goes_only_where_kv_fits() {
    let mut scene = Scene::new(Mode::Kv, 3);
    let kv = |revision: &str| KvFormat { revision: Some(revision.into()), ..KvFormat::default() };
    (1..=2).for_each(|id| scene.worker(id).kv = kv("r1"));
    scene.worker(3).kv = kv("r2");
    scene.partners = Some(vec![kv("r2")]);
    assert_eq!((scene.chosen(), scene.exclusions()), (3, vec![Some(KvDiffers), Some(KvDiffers), None]));
    scene.partners = Some(vec![kv("r3"), kv("r1")]);
    assert_eq!(scene.exclusions(), [None, None, Some(KvDiffers)]);
    scene.partners = Some(vec![KvFormat::default()]);
    assert_eq!(scene.exclusions(), [None; 3], "a worker that says nothing fits all");
    scene.partners = Some(vec![kv("r3")]);
    assert_eq!(scene.decide(), Err(Refusal::NoPartner));
    scene.worker(1).kv = kv("r3");
    scene.worker(1).draining = true;
    assert_eq!(scene.decide(), Err(Refusal::AllOut), "the one that fits is away");
}

#[test]
fn adapters_revisions_and_labels_are_required_where_asked_for() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.lora = Some("poet");
    assert_eq!(scene.decide(), Err(Refusal::NoWorker));
    scene.worker(2).adapters = ["clerk".into(), "poet".into()].into();
    assert_eq!((scene.chosen(), scene.exclusions()[0]), (2, Some(AdapterNotServed)));
    scene.lora = None;
    scene.revision = Some("r2");
    assert_eq!(scene.decide(), Err(Refusal::Unmatched));
    scene.worker(3).revision = "r2".into();
    assert_eq!((scene.chosen(), scene.exclusions()[0]), (3, Some(OtherRevision)));
    scene.revision = None;
    scene.labels = vec![("zone".into(), "a".into()), ("gpu".into(), "h200".into())];
    scene.worker(1).labels = BTreeMap::from([("zone".into(), "a".into()), ("gpu".into(), "h200".into())]);
    scene.worker(2).labels = BTreeMap::from([("zone".into(), "b".into()), ("gpu".into(), "h200".into())]);
    assert_eq!((scene.chosen(), scene.exclusions()), (1, vec![None, Some(MissingLabel), Some(MissingLabel)]));
    scene.worker(1).draining = true;
    assert_eq!(scene.decide(), Err(Refusal::AllOut), "the one that matches is away");
}

#[test]
fn a_pin_is_kept_or_refused() {
    let mut scene = Scene::new(Mode::Kv, 3);
    scene.overlaps = overlaps(&[(1, 10)]);
    scene.pinned = Some(target(2));
    assert_eq!(scene.chosen(), 2);
    scene.pinned = Some(target(9));
    assert_eq!(scene.decide(), Err(Refusal::UnknownTarget(target(9))));
    scene.pinned = Some(target(2));
    scene.worker(2).draining = true;
    assert_eq!(scene.decide(), Err(Refusal::AllOut));
    scene.worker(2).model = "other".into();
    assert_eq!(scene.decide(), Err(Refusal::UnknownTarget(target(2))));
}

#[test]
fn a_pin_or_an_exclusion_may_mean_one_rank() {
    let mut scene = Scene::new(Mode::Kv, 1);
    let second = WorkerRank { dp_rank: 1, ..rank(1) };
    scene.workers.push(Worker::new(second, "w1", "m"));
    let one = |dp_rank| Target { worker: WorkerId(1), dp_rank: Some(dp_rank) };
    scene.pinned = Some(one(1));
    assert_eq!(scene.decide().expect("it").rank, second);
    scene.pinned = Some(one(2));
    assert_eq!(scene.decide(), Err(Refusal::UnknownTarget(one(2))));
    scene.pinned = None;
    scene.excluded = vec![one(0)];
    assert!((0..20).all(|_| scene.decide().expect("the other").rank == second));
    scene.excluded = vec![target(1)];
    assert_eq!(scene.decide(), Err(Refusal::AllOut));
}

#[test]
fn nobody_and_nobody_left_are_different_refusals() {
    let mut scene = Scene::new(Mode::Kv, 0);
    assert_eq!(scene.decide(), Err(Refusal::NoWorker));
    let mut scene = Scene::new(Mode::Kv, 2);
    scene.excluded = vec![target(1), target(2)];
    assert_eq!(scene.decide(), Err(Refusal::AllOut));
}

fn busy(busy: BusyThresholds, workers: u64) -> Scene {
    let mut scene = Scene::with(SelectorConfig { busy, ..SelectorConfig::default() }, workers);
    for worker in &mut scene.workers {
        (worker.total_blocks, worker.max_batched_tokens) = (Some(100), Some(1000));
    }
    scene
}

#[test]
fn three_of_four_busy_leave_the_traffic_to_the_fourth() {
    // Case 5.
    let thresholds = BusyThresholds { decode_blocks: Some(0.5), ..BusyThresholds::default() };
    let mut scene = busy(thresholds, 4);
    scene.overlaps = overlaps(&[(1, 10), (2, 10), (3, 10)]);
    (1..=4).for_each(|id| _ = scene.run(id, if id == 4 { 50 * 16 } else { 51 * 16 }, 0));
    assert!((0..50).all(|_| scene.chosen() == 4), "at the threshold is not over it");
    assert_eq!(scene.exclusions(), [Some(BusyDecode), Some(BusyDecode), Some(BusyDecode), None]);
    let row = scene.explain().candidates[0];
    assert_eq!((row.load.active_blocks, row.overlap.device), (51, 10), "what made it busy is shown");
    scene.run(4, 16, 0);
    assert_eq!(scene.decide(), Err(Refusal::Busy));
    scene.worker(1).draining = true;
    assert_eq!(scene.decide(), Err(Refusal::Busy), "some are busy, so waiting may help");
}

#[test]
fn prompt_tokens_make_busy_by_number_or_by_share_of_a_batch() {
    let by_number = BusyThresholds { prefill_tokens: Some(400), ..BusyThresholds::default() };
    let by_share = BusyThresholds { prefill_tokens_frac: Some(0.4), ..BusyThresholds::default() };
    for thresholds in [by_number, by_share] {
        let mut scene = busy(thresholds, 2);
        let prefill = scene.run(1, 401, 401);
        scene.run(2, 400, 400);
        assert_eq!(scene.exclusions(), [Some(BusyPrefill), None]);
        scene.load.prefill_completed(prefill);
        assert_eq!(scene.exclusions(), [None, None]);
    }
}

#[test]
fn a_worker_of_unknown_capacity_is_never_busy_by_a_share_of_it() {
    let thresholds = BusyThresholds { decode_blocks: Some(0.0), prefill_tokens_frac: Some(0.0), prefill_tokens: None };
    let mut scene = busy(thresholds, 2);
    (scene.worker(1).total_blocks, scene.worker(1).max_batched_tokens) = (None, None);
    (1..=2).for_each(|id| _ = scene.run(id, 100, 100));
    assert_eq!(scene.exclusions(), [None, Some(BusyDecode)]);
}

#[test]
fn a_worker_knows_of_load_that_the_router_does_not() {
    let thresholds =
        BusyThresholds { decode_blocks: Some(0.5), prefill_tokens: Some(400), ..BusyThresholds::default() };
    let mut scene = busy(thresholds, 3);
    let report = |active_blocks, prefill_tokens| Reported { active_blocks, prefill_tokens, ..Reported::default() };
    scene.load.report(rank(1), report(Some(80), None), std::time::Duration::ZERO);
    scene.load.report(rank(2), report(None, Some(500)), std::time::Duration::ZERO);
    // Its own word does not hide what has just been sent to it.
    scene.load.report(rank(3), report(Some(0), Some(0)), std::time::Duration::ZERO);
    scene.run(3, 500, 500);
    assert_eq!(scene.exclusions(), [Some(BusyDecode), Some(BusyPrefill), Some(BusyPrefill)]);
    let reports: Vec<u64> = scene.explain().reports.iter().map(|(rank, _)| rank.worker.0).collect();
    assert_eq!(reports, [1, 2, 3], "what each of them said is shown");
    // 40 of others and 20 that the router sent.
    scene.load.report(rank(1), report(Some(40), None), std::time::Duration::ZERO);
    scene.run(1, 20 * 16, 0);
    assert_eq!(scene.exclusions()[0], Some(BusyDecode));
    scene.begun = true;
    assert_eq!(scene.exclusions()[0], None, "an answer that has begun goes on");
}

#[test]
fn a_request_waits_only_when_nobody_has_room() {
    let mut scene = Scene::with(SelectorConfig { queue_threshold: Some(0.5), ..SelectorConfig::default() }, 2);
    scene.workers.iter_mut().for_each(|worker| worker.max_batched_tokens = Some(1000));
    scene.overlaps = overlaps(&[(1, 10)]);
    scene.run(1, 501, 501);
    let last = scene.run(2, 500, 500);
    assert!(scene.decide().is_ok());
    let more = scene.run(2, 1, 1);
    assert_eq!(scene.decide(), Err(Refusal::Saturated));
    assert_eq!(scene.explain().outcome, Err(Refusal::Saturated));
    scene.begun = true;
    assert!(scene.decide().is_ok(), "somebody reads its answer");
    scene.begun = false;
    scene.worker(2).max_batched_tokens = None;
    assert!(scene.decide().is_ok(), "without a known batch there is no measure");
    scene.worker(2).max_batched_tokens = Some(1000);
    scene.load.free(more);
    scene.load.prefill_completed(last);
    assert_eq!(scene.decide().map(|_| ()), Ok(()));
    scene.pinned = Some(target(1));
    assert_eq!(scene.decide(), Err(Refusal::Saturated), "of those that it may go to");
}

#[test]
fn thresholds_outside_their_range_are_named() {
    let with = |busy| SelectorConfig { busy, ..SelectorConfig::default() }.validate().expect_err("invalid").to_string();
    let bad = BusyThresholds { decode_blocks: Some(1.5), ..BusyThresholds::default() };
    assert_eq!(with(bad), "decode_blocks must be from 0 to 1, not 1.5");
    let bad = BusyThresholds { prefill_tokens_frac: Some(-1.0), ..BusyThresholds::default() };
    assert_eq!(with(bad), "prefill_tokens_frac must be a number of at least 0, not -1");
    let bad = SelectorConfig { queue_threshold: Some(f64::NAN), ..SelectorConfig::default() };
    assert_eq!(bad.validate().expect_err("invalid").name, "queue_threshold");
    assert_eq!(SelectorConfig::default().validate(), Ok(()));
}
