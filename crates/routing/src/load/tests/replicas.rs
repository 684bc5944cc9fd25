//! Bookings of other routers: order, repetition, loss of routers and workers, and time.

use super::*;
use crate::load::replica::{MAX_PEERS, MAX_REPLICATED, MAX_REPLICATED_BLOCKS};

const PEER: RouterId = RouterId(7);
const T0: Duration = Duration::from_secs(100);

fn after(seconds: u64) -> Duration {
    T0 + Duration::from_secs(seconds)
}

fn event(request: &str, change: ReplicaChange) -> ReplicaEvent {
    ReplicaEvent { router: PEER, request: request.into(), change }
}

fn standing(rank: WorkerRank, prompt: Prompt) -> BookingState {
    let prefill_tokens = prompt.tokens;
    let (output_tokens, prefill_completed, expected_output_tokens) = (0, false, None);
    BookingState { rank, prompt, prefill_tokens, expected_output_tokens, output_tokens, prefill_completed }
}

fn add(request: &str) -> ReplicaEvent {
    event(request, ReplicaChange::Add(standing(rank(1), prompt(&[1, 2], 1))))
}

fn load_with(events: &[ReplicaEvent]) -> ActiveLoad {
    let mut load = empty(LoadConfig::default());
    events.iter().for_each(|event| {
        load.apply(event, T0);
    });
    load
}

#[test]
fn another_routers_request_counts_as_an_own_one_would() {
    let mut load = load_with(&[add("a")]);
    let own = load.book(new(rank(1), prompt(&[1, 2, 3], 0)));
    assert_eq!(seen(&load, rank(1)), (4, 21, 2), "two blocks in common");
    assert_eq!((load.total_requests(), load.replicated_requests()), (1, 1));
    load.apply(&event("a", ReplicaChange::MarkPrefillCompleted), T0);
    assert_eq!(seen(&load, rank(1)), (4, 12, 2));
    load.free(own);
    assert_eq!(seen(&load, rank(1)), (3, 0, 1));
    assert_eq!(load.apply(&event("a", ReplicaChange::Free), T0), Applied::Changed);
    assert_eq!((seen(&load, rank(1)), load.replicated_requests()), ((0, 0, 0), 0));
}

#[test]
fn own_events_are_ignored() {
    let mut load = empty(LoadConfig::default());
    assert_eq!(load.apply(&ReplicaEvent { router: RouterId(0), ..add("a") }, T0), Applied::Own);
    assert_eq!(load.replicated_requests(), 0);
}

#[test]
fn a_free_before_its_add_leaks_nothing() {
    let mut load = empty(LoadConfig::default());
    assert_eq!(load.apply(&event("a", ReplicaChange::Free), T0), Applied::Early);
    assert_eq!(load.apply(&add("a"), T0), Applied::AlreadyFreed);
    assert_eq!(load.apply(&add("a"), after(59)), Applied::AlreadyFreed);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0));
    assert_eq!(load.expire(after(61), Duration::from_secs(300)), 0);
    assert!(load.replicas.is_empty(), "what was remembered is forgotten");
}

#[test]
fn a_request_is_not_raised_from_the_dead() {
    let mut load = load_with(&[add("a"), event("a", ReplicaChange::Free)]);
    assert_eq!(load.apply(&add("a"), after(1)), Applied::AlreadyFreed);
    assert_eq!(load.apply(&event("a", ReplicaChange::Free), after(1)), Applied::AlreadyFreed);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0));
}

#[test]
fn the_end_of_prefill_may_come_first() {
    let mut load = load_with(&[event("a", ReplicaChange::MarkPrefillCompleted)]);
    assert_eq!(load.apply(&add("a"), T0), Applied::Changed);
    assert_eq!(seen(&load, rank(1)), (3, 0, 1));
}

/// Case 11: a stream of ten minutes is counted until its end.
#[test]
fn expiry_counts_from_the_last_progress() {
    let limit = Duration::from_secs(300);
    let mut load = load_with(&[add("long"), add("lost")]);
    load.apply(&event("long", ReplicaChange::MarkPrefillCompleted), T0);
    // A stream of ten minutes, which grows as it goes.
    for minute in 1..=10 {
        let grown = event("long", ReplicaChange::Grow(minute * 4));
        assert_eq!(load.apply(&grown, after(minute as u64 * 60)), Applied::Changed);
        load.expire(after(minute as u64 * 60), limit);
    }
    assert_eq!(load.replicated_requests(), 1, "the lost one is gone");
    assert_eq!(seen(&load, rank(1)), (13, 0, 1), "2 blocks and 41 tokens");
    assert_eq!(load.expire(after(600 + 300), limit), 0);
    assert_eq!(load.expire(after(600 + 301), limit), 1);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0));
}

#[test]
fn growth_never_goes_back_and_revives_nothing() {
    let mut load = load_with(&[event("a", ReplicaChange::Grow(40))]);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0), "of nobody knows what");
    let mut state = standing(rank(1), prompt(&[1, 2], 1));
    state.output_tokens = 8;
    load.apply(&event("a", ReplicaChange::Add(state)), T0);
    let before = seen(&load, rank(1));
    assert_eq!(load.apply(&event("a", ReplicaChange::Grow(4)), T0), Applied::Refreshed);
    assert_eq!((seen(&load, rank(1)), before.1), (before, 9), "it is no sign that the prefill has ended");
    assert_eq!(load.apply(&event("a", ReplicaChange::Grow(12)), T0), Applied::Changed);
    assert_eq!(seen(&load, rank(1)), (before.0 + 1, 9, 1));
    assert_eq!(load.apply(&event("a", ReplicaChange::Grow(12)), after(200)), Applied::Refreshed);
    assert_eq!(load.expire(after(301), Duration::from_secs(300)), 1, "news without progress is none");
    assert_eq!(load.apply(&event("a", ReplicaChange::Grow(12)), T0), Applied::Unknown);
    load.apply(&event("a", ReplicaChange::Free), T0);
    assert_eq!(load.apply(&event("a", ReplicaChange::Grow(50)), T0), Applied::AlreadyFreed);
    assert_eq!(seen(&load, rank(1)), (0, 0, 0));
}

#[test]
fn a_router_that_leaves_takes_its_bookings_along() {
    let mut load = load_with(&[add("a"), add("b"), event("c", ReplicaChange::Free)]);
    load.apply(&ReplicaEvent { router: RouterId(8), ..add("a") }, T0);
    assert_eq!(load.remove_router(PEER), 2);
    assert_eq!((load.remove_router(PEER), load.replicated_requests()), (0, 1));
    assert_eq!(seen(&load, rank(1)), (3, 9, 1));
    assert_eq!(load.apply(&add("c"), T0), Applied::Changed, "it may come back and begin anew");
}

#[test]
fn a_worker_that_leaves_takes_the_bookings_of_all_routers_along() {
    let elsewhere = event("b", ReplicaChange::Add(standing(rank(2), prompt(&[1], 0))));
    let mut load = load_with(&[add("a"), elsewhere]);
    assert_eq!(load.remove_worker(WorkerId(1)), 1);
    load.apply(&event("a", ReplicaChange::Free), T0);
    assert_eq!((seen(&load, rank(1)), seen(&load, rank(2))), ((0, 0, 0), (1, 4, 1)));
}

#[test]
fn a_router_that_joins_learns_what_runs() {
    let mut old = empty(LoadConfig::default());
    let first = old.book(NewBooking { request: "a".into(), ..new(rank(1), prompt(&[1, 2], 3)) });
    old.book(NewBooking { request: "b".into(), ..new(rank(2), prompt(&[1], 0)) });
    old.prefill_completed(first);
    old.add_output(first, 9);
    let mut joining = ActiveLoad::new(RouterId(9), LoadConfig::default());
    // An end that overtakes the snapshot.
    let ended = ReplicaEvent { router: RouterId(0), request: "b".into(), change: ReplicaChange::Free };
    joining.apply(&ended, T0);
    old.own_bookings().for_each(|event| {
        joining.apply(&event, T0);
    });
    assert_eq!(seen(&joining, rank(1)), seen(&old, rank(1)));
    assert_eq!(seen(&joining, rank(2)), (0, 0, 0));
}

#[test]
fn everything_is_bounded() {
    let mut load = empty(LoadConfig::default());
    for router in 1..=MAX_PEERS as u64 {
        load.apply(&ReplicaEvent { router: RouterId(router), ..add("a") }, T0);
    }
    let one_more = ReplicaEvent { router: RouterId(1 << 40), ..add("a") };
    assert_eq!(load.apply(&one_more, T0), Applied::Refused);
    for n in MAX_PEERS..MAX_REPLICATED {
        load.apply(&event(&n.to_string(), ReplicaChange::Add(standing(rank(1), prompt(&[], 1)))), T0);
    }
    assert_eq!((load.replicated_requests(), load.apply(&add("new"), T0)), (MAX_REPLICATED, Applied::Refused));
    (0..MAX_REPLICATED + 10).for_each(|n| {
        load.apply(&event(&format!("never {n}"), ReplicaChange::Free), T0);
    });
    assert!(load.replicas.remembered() <= MAX_REPLICATED);
    let mut load = empty(LoadConfig::default());
    let long: Vec<u64> = (0..MAX_REPLICATED_BLOCKS as u64 / 4).collect();
    let state = standing(rank(1), prompt(&long, 0));
    let answers: Vec<Applied> =
        (0..5).map(|n| load.apply(&event(&n.to_string(), ReplicaChange::Add(state.clone())), T0)).collect();
    assert_eq!(answers[3..], [Applied::Changed, Applied::Refused]);
}

/// What is said of one booking over its life, and what it comes to.
#[derive(Clone, Debug)]
struct Story {
    worker: u64,
    path: Vec<u64>,
    outputs: Vec<usize>,
    marked: bool,
    freed: bool,
}

impl Story {
    fn state(&self, output_tokens: usize) -> BookingState {
        BookingState { output_tokens, ..standing(rank(self.worker), prompt(&self.path, 1)) }
    }

    fn events(&self, request: &str) -> Vec<ReplicaEvent> {
        let adds = self.outputs.iter().map(|output| ReplicaChange::Add(self.state(*output)));
        let mark = self.marked.then_some(ReplicaChange::MarkPrefillCompleted);
        let free = self.freed.then_some(ReplicaChange::Free);
        adds.chain(mark).chain(free).map(|change| event(request, change)).collect()
    }
}

fn stories() -> impl Strategy<Value = Vec<Story>> {
    let path = prop::collection::vec(0..2_u64, 0..4);
    let story = (0..3_u64, path, prop::collection::vec(0..20_usize, 1..4), any::<bool>(), any::<bool>());
    let story = story.prop_map(|(worker, path, outputs, marked, freed)| Story { worker, path, outputs, marked, freed });
    prop::collection::vec(story, 1..6)
}

proptest! {
    #[test]
    fn events_in_any_order_and_repeated_come_to_the_same(
        (stories, order) in stories().prop_flat_map(|stories| {
            let named = stories.iter().enumerate();
            let events: Vec<ReplicaEvent> = named.flat_map(|(n, story)| story.events(&n.to_string())).collect();
            let twice = [events.clone(), events].concat();
            (Just(stories), Just(twice).prop_shuffle())
        }),
        twice_from in any::<prop::sample::Index>(),
    ) {
        // Everything once at least, some of it twice.
        let mut seen_once = Vec::new();
        let keep = twice_from.index(order.len());
        let order: Vec<ReplicaEvent> = order.into_iter().enumerate().filter(|(at, event)| {
            let first = !seen_once.contains(event);
            seen_once.push(event.clone());
            first || *at >= keep
        }).map(|(_, event)| event).collect();
        let load = load_with(&order);
        let mut expected = empty(LoadConfig::default());
        for story in stories.iter().filter(|story| !story.freed) {
            let id = expected.book(new(rank(story.worker), prompt(&story.path, 1)));
            expected.add_output(id, *story.outputs.iter().max().expect("at least one"));
            if story.marked {
                expected.prefill_completed(id);
            }
        }
        for worker in 0..3 {
            prop_assert_eq!(seen(&load, rank(worker)), seen(&expected, rank(worker)));
        }
        let mut load = load;
        load.expire(after(1000), Duration::from_secs(300));
        prop_assert!(load.replicas.is_empty() && load.ledger.ranks() == 0 && load.ledger.shared_blocks() == 0);
    }
}
