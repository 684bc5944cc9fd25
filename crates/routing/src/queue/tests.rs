//! Orders that people expect, bounds, deadlines, and random use against a sorted list.

use proptest::prelude::*;

use super::*;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn waiting(arrival: u64) -> Waiting {
    Waiting { strict_priority: 0, priority: 0.0, arrival: secs(arrival), uncached_tokens: 100, deadline: secs(1000) }
}

fn drain<T>(mut queue: WaitQueue<T>) -> Vec<T> {
    std::iter::from_fn(|| queue.pop()).map(|(_, value)| value).collect()
}

fn order(policy: QueuePolicy, requests: &[(&'static str, Waiting)]) -> Vec<&'static str> {
    let mut queue = WaitQueue::new(policy, 100);
    for (name, waiting) in requests {
        queue.push(*waiting, *name).expect("room");
    }
    let seen: Vec<&str> = queue.iter().map(|(_, name)| *name).collect();
    let drained = drain(queue);
    assert_eq!(seen, drained, "iteration is in the order of service");
    drained
}

#[test]
fn first_come_first_served_and_a_priority_is_worth_seconds() {
    let hasty = Waiting { priority: 1.5, ..waiting(3) };
    assert_eq!(
        order(QueuePolicy::Fcfs, &[("late", waiting(2)), ("early", waiting(1)), ("hasty", hasty)]),
        ["early", "hasty", "late"]
    );
    assert_eq!(order(QueuePolicy::Fcfs, &[("a", waiting(1)), ("b", waiting(1)), ("c", waiting(1))]), ["a", "b", "c"]);
}

#[test]
fn last_come_first_served() {
    let hasty = Waiting { priority: 1.5, ..waiting(1) };
    assert_eq!(
        order(QueuePolicy::Lcfs, &[("early", waiting(1)), ("late", waiting(2)), ("hasty", hasty)]),
        ["hasty", "late", "early"]
    );
    assert_eq!(order(QueuePolicy::Lcfs, &[("a", waiting(1)), ("b", waiting(1))]), ["b", "a"]);
}

#[test]
fn weighted_shortest_first() {
    let of = |uncached_tokens, priority| Waiting { uncached_tokens, priority, ..waiting(1) };
    let requests =
        [("long", of(1000, 0.0)), ("short", of(10, 0.0)), ("heavy", of(1000, 149.0)), ("cached", of(0, 0.0))];
    assert_eq!(order(QueuePolicy::Wspt, &requests), ["cached", "heavy", "short", "long"]);
    let unimportant = [("long", of(1000, -5.0)), ("short", of(10, -5.0)), ("usual", of(1000, 0.0))];
    assert_eq!(order(QueuePolicy::Wspt, &unimportant), ["short", "usual", "long"]);
}

#[test]
fn strict_priority_goes_before_every_score() {
    let strict = |strict_priority, arrival| Waiting { strict_priority, ..waiting(arrival) };
    for policy in [QueuePolicy::Fcfs, QueuePolicy::Wspt, QueuePolicy::Lcfs] {
        let requests =
            [("usual", strict(0, 1)), ("first", strict(2, 2)), ("last", strict(-1, 0)), ("second", strict(1, 3))];
        assert_eq!(order(policy, &requests), ["first", "second", "usual", "last"]);
    }
}

#[test]
fn it_is_bounded_and_gives_back_what_does_not_fit() {
    let mut queue = WaitQueue::new(QueuePolicy::Fcfs, 2);
    let first = queue.push(waiting(1), "a").expect("room");
    queue.push(waiting(2), "b").expect("room");
    assert_eq!(queue.push(waiting(0), "c"), Err(Full("c")));
    assert_eq!((queue.remove(first), queue.remove(first)), (Some("a"), None));
    queue.push(waiting(0), "c").expect("room again");
    assert_eq!((queue.len(), queue.capacity()), (2, 2));
    assert_eq!(drain(queue), ["c", "b"]);
}

#[test]
fn deadlines_are_met_in_their_own_order() {
    let mut queue = WaitQueue::new(QueuePolicy::Fcfs, 10);
    for (name, arrival, deadline) in [("a", 1, 30), ("b", 2, 10), ("c", 3, 20), ("d", 4, 40)] {
        queue.push(Waiting { deadline: secs(deadline), ..waiting(arrival) }, name).expect("room");
    }
    assert_eq!(queue.next_deadline(), Some(secs(10)));
    assert_eq!(queue.expire(secs(9)), []);
    let expired: Vec<&str> = queue.expire(secs(20)).into_iter().map(|(_, name)| name).collect();
    assert_eq!((expired, queue.next_deadline()), (vec!["b", "c"], Some(secs(30))));
    assert_eq!(queue.pop().map(|(_, name)| name), Some("a"));
    assert_eq!(queue.next_deadline(), Some(secs(40)));
    assert_eq!(drain(queue), ["d"]);
}

proptest! {
    #[test]
    fn service_follows_the_policy_whatever_comes_and_goes(
        policy in prop::sample::select(vec![QueuePolicy::Fcfs, QueuePolicy::Wspt, QueuePolicy::Lcfs]),
        requests in prop::collection::vec((-1..2_i32, -2..3_i32, 0..5_u64, 0..4_usize), 0..40),
        leave in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
    ) {
        let mut queue = WaitQueue::new(policy, 100);
        let mut model = Vec::new();
        for (n, (strict_priority, priority, arrival, tokens)) in requests.into_iter().enumerate() {
            let uncached_tokens = tokens * 50;
            let waiting = Waiting { strict_priority, priority: f64::from(priority), uncached_tokens, ..waiting(arrival) };
            let ticket = queue.push(waiting, n).expect("room");
            model.push((ticket, waiting, n));
        }
        for index in leave {
            if !model.is_empty() {
                let (ticket, _, n) = model.remove(index.index(model.len()));
                prop_assert_eq!(queue.remove(ticket), Some(n));
            }
        }
        // The obvious queue: sort by what the policy says, keeping the order of arrival between equals.
        if policy == QueuePolicy::Lcfs {
            model.reverse();
        }
        model.sort_by(|(_, a, _), (_, b, _)| {
            b.strict_priority.cmp(&a.strict_priority).then(policy.score(b).total_cmp(&policy.score(a)))
        });
        prop_assert_eq!(queue.next_deadline().is_some(), !model.is_empty());
        let expected: Vec<usize> = model.into_iter().map(|(_, _, n)| n).collect();
        prop_assert_eq!(drain(queue), expected);
    }
}
