//! Elections on a clock of their own.

use super::*;

const LEASE: Duration = Duration::from_secs(15);

fn lease(version: u64, holder: &str) -> Observed {
    Observed { resource_version: version.to_string(), holder: Some(holder.into()), duration: LEASE }
}

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn a_missing_or_released_lease_is_taken_at_once() {
    let mut a = Election::new("a", LEASE);
    let now = Instant::now();
    assert_eq!(a.step(now, None), Step::Create);
    assert_eq!(a.step(now, Some(&lease(1, ""))), Step::Take);
    assert_eq!(a.step(now, Some(&Observed { holder: None, ..lease(2, "") })), Step::Take);
}

#[test]
fn a_lease_that_is_renewed_is_never_taken() {
    let mut a = Election::new("a", LEASE);
    let start = Instant::now();
    for tick in 0..100 {
        assert_eq!(a.step(start + s(5) * tick, Some(&lease(tick.into(), "b"))), Step::Wait, "tick {tick}");
    }
}

#[test]
fn an_abandoned_lease_is_taken_after_its_own_duration() {
    let mut a = Election::new("a", s(3));
    let start = Instant::now();
    assert_eq!(a.step(start, Some(&lease(7, "b"))), Step::Wait);
    assert_eq!(a.step(start + s(14), Some(&lease(7, "b"))), Step::Wait);
    assert_eq!(a.step(start + s(15), Some(&lease(7, "b"))), Step::Take);
}

#[test]
fn leadership_ends_at_two_thirds_without_renewal() {
    let mut a = Election::new("a", LEASE);
    let start = Instant::now();
    assert!(!a.leads(start));
    a.renewed(start);
    assert!(a.leads(start + s(10) - Duration::from_millis(1)));
    assert!(!a.leads(start + s(10)));
    a.renewed(start + s(5));
    assert!(a.leads(start + s(14)));
}

#[test]
fn the_old_leader_has_stopped_before_another_may_start() {
    let (mut a, mut b) = (Election::new("a", LEASE), Election::new("b", LEASE));
    let start = Instant::now();
    // a writes at `start`; b sees that write a moment later, then nothing more comes from a.
    a.renewed(start);
    assert_eq!(b.step(start + Duration::from_millis(1), Some(&lease(1, "a"))), Step::Wait);
    let taken =
        (0..30).map(|t| start + s(t)).find(|t| b.step(*t, Some(&lease(1, "a"))) == Step::Take).expect("expires");
    assert!(!a.leads(taken));
    assert!(taken - a.leads_until().expect("it led") >= LEASE / 3);
}

#[test]
fn a_leader_that_finds_another_holder_stops() {
    let mut a = Election::new("a", LEASE);
    let now = Instant::now();
    a.renewed(now);
    assert_eq!(a.step(now + s(1), Some(&lease(9, "b"))), Step::Wait);
    assert!(!a.leads(now + s(1)));
}
