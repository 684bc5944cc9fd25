//! The cursor, event by event, and random losses, duplicates and reorderings against a worker's own history.

use kv_hashing::BlockHash;
use kv_index::{EngineHash, StoredBlock, Tier};
use proptest::prelude::*;

use super::*;

fn event(id: u64) -> KvEvent {
    let block = StoredBlock { engine: EngineHash(id), local: BlockHash(id) };
    KvEvent { id, dp_rank: 0, tier: Tier::Device, data: KvEventData::Stored { parent: None, blocks: vec![block] } }
}

/// A cursor after a dump that ended with `last`, long enough ago that no echo is expected.
fn live(last: Option<u64>) -> (Cursor, Instant) {
    let now = Instant::now();
    let mut cursor = Cursor::default();
    cursor.subscribed();
    assert_eq!(cursor.take_wish(), Some(Wish::Dump));
    cursor.dumped(last, now);
    assert!(cursor.release().is_empty());
    (cursor, now + ECHO)
}

#[test]
fn the_first_subscription_wants_everything_and_later_ones_nothing() {
    let (mut cursor, now) = live(None);
    cursor.subscribed();
    assert_eq!(cursor.take_wish(), None);
    assert_eq!(cursor.live(event(0), now), Verdict::Apply(event(0)));
}

#[test]
fn after_a_dump_the_cursor_is_the_true_last_id_and_echoes_are_ignored() {
    let (mut cursor, now) = live(Some(41));
    assert_eq!(cursor.live(event(41), now - ECHO), Verdict::Duplicate);
    assert_eq!(cursor.live(event(42), now - ECHO), Verdict::Apply(event(42)));
    assert_eq!(cursor.live(event(40), now - ECHO), Verdict::Duplicate);
}

#[test]
fn a_gap_is_fetched_while_later_events_wait() {
    let (mut cursor, now) = live(Some(1));
    assert_eq!(cursor.live(event(5), now), Verdict::Gap);
    assert_eq!(cursor.live(event(6), now), Verdict::Held);
    assert_eq!(cursor.take_wish(), Some(Wish::Range { start: 2, end: Some(4) }));
    assert_eq!(cursor.take_wish(), None, "one at a time");
    cursor.failed();
    assert_eq!(cursor.take_wish(), Some(Wish::Range { start: 2, end: Some(4) }), "asked again");
    let fresh = cursor.ranged((2..=4).map(event).collect(), Some(4), now);
    assert_eq!(fresh, (2..=4).map(event).collect::<Vec<_>>());
    let held: Vec<Verdict> = cursor.release().into_iter().map(|e| cursor.live(e, now)).collect();
    assert_eq!(held, [Verdict::Apply(event(5)), Verdict::Apply(event(6))]);
}

#[test]
fn a_range_with_a_hole_is_answered_with_a_dump() {
    let (mut cursor, now) = live(Some(1));
    cursor.live(event(5), now);
    cursor.take_wish();
    assert_eq!(cursor.ranged(vec![event(2), event(4)], Some(4), now), [event(2)]);
    assert_eq!(cursor.take_wish(), Some(Wish::Dump));
}

#[test]
fn a_duplicate_is_none_of_a_restart_and_a_restart_is_noticed() {
    let (mut cursor, now) = live(None);
    for id in 0..3 {
        cursor.live(event(id), now);
    }
    assert_eq!(cursor.live(event(1), now), Verdict::Duplicate);
    let mut other = event(0);
    other.data = KvEventData::Cleared;
    assert_eq!(cursor.live(other, now), Verdict::Restarted);
    assert_eq!(cursor.take_wish(), Some(Wish::Dump));
    cursor.dumped(Some(0), now);
    assert!(cursor.release().is_empty(), "the dump contained it");
}

#[test]
fn a_heartbeat_ahead_of_the_events_is_a_loss_after_a_while() {
    let (mut cursor, now) = live(Some(1));
    cursor.reported(Some(2), now);
    let due = cursor.due().expect("something to look at");
    cursor.check(due - Duration::from_millis(1));
    assert_eq!(cursor.take_wish(), None);
    cursor.check(due);
    assert_eq!(cursor.take_wish(), Some(Wish::Range { start: 2, end: None }));
}

#[test]
fn an_event_that_comes_in_time_settles_the_heartbeat() {
    let (mut cursor, now) = live(Some(1));
    cursor.reported(Some(2), now);
    cursor.live(event(2), now);
    cursor.reported(Some(2), now);
    assert_eq!(cursor.due(), None);
}

#[test]
fn heartbeats_below_the_cursor_are_a_restart_when_they_persist() {
    let (mut cursor, now) = live(Some(9));
    assert!(!cursor.reported(None, now));
    assert_eq!(cursor.take_wish(), None, "one may have been on its way");
    assert!(cursor.reported(Some(0), now + AHEAD), "what is known is void");
    assert_eq!(cursor.take_wish(), Some(Wish::Dump));
}

#[test]
fn what_does_not_fit_is_found_missing_later() {
    let mut cursor = Cursor::default();
    let now = Instant::now();
    cursor.subscribed();
    cursor.take_wish();
    for id in 0..HELD as u64 + 10 {
        cursor.live(event(id), now);
    }
    assert_eq!(cursor.held(), HELD);
    cursor.dumped(None, now);
    for held in cursor.release() {
        assert!(matches!(cursor.live(held, now), Verdict::Apply(_)));
    }
    assert_eq!(cursor.live(event(HELD as u64 + 10), now), Verdict::Gap);
}

proptest! {
    /// Whatever happens to messages on their way, every event is applied once and in order.
    #[test]
    fn every_event_is_applied_once_and_in_order(fates in prop::collection::vec((0..4_u8, 0..3_usize), 1..60)) {
        let (mut cursor, now) = live(None);
        let total = fates.len() as u64;
        // Fate 0: lost, 1: twice, else once; each delayed by up to two places.
        let mut messages: Vec<(usize, u64)> = Vec::new();
        for (id, (fate, delay)) in fates.into_iter().enumerate() {
            let copies = match fate { 0 => 0, 1 => 2, _ => 1 };
            messages.extend((0..copies).map(|_| (id + delay, id as u64)));
        }
        messages.sort_by_key(|(at, _)| *at);
        let mut applied: Vec<u64> = Vec::new();
        let mut todo: VecDeque<KvEvent> = messages.into_iter().map(|(_, id)| event(id)).collect();
        let mut done = false;
        while !done {
            match todo.pop_front() {
                Some(next) => {
                    let verdict = cursor.live(next, now);
                    prop_assert!(verdict != Verdict::Restarted);
                    if let Verdict::Apply(event) = verdict {
                        applied.push(event.id);
                    }
                }
                None => {
                    // The heartbeat at the end.
                    cursor.reported(Some(total - 1), now);
                    cursor.check(now + BEHIND);
                    done = cursor.phase == Phase::Live;
                }
            }
            if let Some(wish) = cursor.take_wish() {
                let Wish::Range { start, end } = wish else { panic!("no dump is needed: {wish:?}") };
                let end = end.unwrap_or(total - 1);
                let fresh = cursor.ranged((start..=end).map(event).collect(), Some(end), now);
                applied.extend(fresh.iter().map(|e| e.id));
                for held in cursor.release().into_iter().rev() {
                    todo.push_front(held);
                }
            }
        }
        prop_assert_eq!(applied, (0..total).collect::<Vec<_>>());
    }
}

#[test]
fn a_late_event_of_an_earlier_life_is_dropped_and_not_asked_for_again_and_again() {
    let (mut cursor, now) = live(Some(4));
    assert_eq!(cursor.live(event(9), now), Verdict::Gap);
    assert_eq!(cursor.take_wish(), Some(Wish::Range { start: 5, end: Some(8) }));
    // The worker has nothing after 4: whoever sent 9 is no more.
    assert_eq!(cursor.ranged(Vec::new(), Some(4), now), []);
    assert!(cursor.release().is_empty());
    assert_eq!(cursor.take_wish(), Some(Wish::Dump));
    cursor.dumped(Some(4), now);
    assert!(cursor.release().is_empty() && cursor.is_live());
    assert_eq!(cursor.live(event(5), now), Verdict::Apply(event(5)));
}
