//! Whether the server gets anywhere: one whose engine hangs goes on to answer that it is well.
//!
//! Signs of life are tokens on any stream, and figures on its page of load that only move when it computes. Requests that wait for
//! another server, as for its KV, are no sign of anything: they count only once the server says that it runs them, or has begun
//! to answer.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What the page of load says of the engine's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Figures {
    /// Requests that it computes.
    pub(super) running: usize,
    /// Stands for everything on the page that moves when a step is made; `None` where nothing does.
    pub(super) moves: Option<u64>,
}

/// The signs.
#[derive(Debug)]
pub(super) struct Pulse {
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// The last sign of life, or when there was nothing to do.
    last: Instant,
    figures: Figures,
    /// Requests of ours that the server has been asked.
    asked: usize,
    /// Those of them that it has begun to answer.
    generating: usize,
}

impl Pulse {
    pub(super) fn new(now: Instant) -> Self {
        Self { seen: Mutex::new(Seen { last: now, figures: Figures::default(), asked: 0, generating: 0 }) }
    }

    /// The server is asked something that it has to compute.
    pub(super) fn asks(&self, now: Instant) -> Asking<'_> {
        let mut seen = self.seen.lock();
        seen.asked += 1;
        if seen.asked == 1 {
            seen.last = now;
        }
        Asking { pulse: self, generates: false }
    }

    /// Takes what its page says.
    pub(super) fn page(&self, figures: Figures, now: Instant) {
        let mut seen = self.seen.lock();
        if seen.figures != figures {
            (seen.figures, seen.last) = (figures, now);
        }
    }

    /// How many requests wait for a server that has had something to compute and has given no sign of life for longer than `limit`.
    pub(super) fn hangs(&self, limit: Duration, now: Instant) -> Option<usize> {
        let seen = self.seen.lock();
        let runs = seen.asked > 0 && seen.figures.running > 0 && seen.figures.moves.is_some();
        (now.saturating_duration_since(seen.last) > limit && (runs || seen.generating > 0)).then_some(seen.asked)
    }
}

/// A request that the server has been asked, until it is dropped.
pub(super) struct Asking<'a> {
    pulse: &'a Pulse,
    generates: bool,
}

impl Asking<'_> {
    /// Tokens have come.
    pub(super) fn tokens(&mut self, now: Instant) {
        let mut seen = self.pulse.seen.lock();
        seen.last = now;
        if !std::mem::replace(&mut self.generates, true) {
            seen.generating += 1;
        }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut seen = self.pulse.seen.lock();
        seen.asked -= 1;
        seen.generating -= usize::from(self.generates);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Seconds after the beginning.
    struct Clock(Instant);

    impl Clock {
        fn at(&self, seconds: u64) -> Instant {
            self.0 + Duration::from_secs(seconds)
        }
    }

    fn start() -> (Clock, Pulse) {
        let clock = Clock(Instant::now());
        let pulse = Pulse::new(clock.at(0));
        (clock, pulse)
    }

    fn figures(running: usize, moves: u64) -> Figures {
        Figures { running, moves: Some(moves) }
    }

    #[test]
    fn one_that_has_nothing_to_do_does_not_hang() {
        let (clock, pulse) = start();
        // An old figure of an engine that is idle.
        pulse.page(figures(1, 7), clock.at(0));
        assert_eq!(pulse.hangs(LIMIT, clock.at(600)), None);
        let _asking = pulse.asks(clock.at(600));
        assert_eq!(pulse.hangs(LIMIT, clock.at(640)), None, "it has had less time than that");
        assert_eq!(pulse.hangs(LIMIT, clock.at(661)), Some(1));
    }

    #[test]
    fn a_long_prompt_that_moves_figures_is_no_hang() {
        let (clock, pulse) = start();
        let _asking = pulse.asks(clock.at(0));
        for step in 0..5 {
            pulse.page(figures(1, step), clock.at(step * 40));
            assert_eq!(pulse.hangs(LIMIT, clock.at(step * 40 + 39)), None);
        }
        pulse.page(figures(1, 4), clock.at(200));
        assert_eq!(pulse.hangs(LIMIT, clock.at(221)), Some(1));
    }

    #[test]
    fn a_request_that_waits_for_another_server_is_no_hang() {
        let (clock, pulse) = start();
        let mut asking = pulse.asks(clock.at(0));
        // Nothing runs, or the page says nothing of the engine's steps.
        pulse.page(figures(0, 1), clock.at(0));
        assert_eq!(pulse.hangs(LIMIT, clock.at(100)), None);
        pulse.page(Figures { running: 1, moves: None }, clock.at(100));
        assert_eq!(pulse.hangs(LIMIT, clock.at(200)), None);
        // One that has begun waits for nobody.
        asking.tokens(clock.at(300));
        assert_eq!(pulse.hangs(LIMIT, clock.at(340)), None);
        assert_eq!(pulse.hangs(LIMIT, clock.at(361)), Some(1));
        let _other = pulse.asks(clock.at(362));
        assert_eq!(pulse.hangs(LIMIT, clock.at(363)), Some(2), "one more says nothing");
        drop(asking);
        assert_eq!(pulse.hangs(LIMIT, clock.at(500)), None);
    }
}
