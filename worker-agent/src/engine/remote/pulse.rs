//! Whether the server gets anywhere: one whose engine hangs goes on to answer that it is well.
//!
//! Signs of life are tokens on any stream, and figures on its page of load that only move when it computes. Requests that wait for
//! another server, as for its KV, are no sign of anything: they count only once the server says that it runs them, or has begun
//! to answer.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Most of the time between two looks that counts as silence: when more has passed, it was nobody's turn to look.
const GAP: Duration = Duration::from_secs(2);

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

#[derive(Debug, Default)]
struct Seen {
    /// Time without a sign of life, between pages that came one after the other while there was something to do.
    silence: Duration,
    /// When the last page came; `None` after one that did not.
    looked: Option<Instant>,
    figures: Figures,
    /// Requests of ours that the server has been asked.
    asked: usize,
    /// Those of them that it has begun to answer.
    generating: usize,
}

impl Pulse {
    pub(super) fn new() -> Self {
        Self { seen: Mutex::default() }
    }

    /// The server is asked something that it has to compute.
    pub(super) fn asks(&self) -> Asking<'_> {
        let mut seen = self.seen.lock();
        seen.asked += 1;
        if seen.asked == 1 {
            seen.silence = Duration::ZERO;
        }
        Asking { pulse: self, generates: false }
    }

    /// Takes what its page says.
    pub(super) fn page(&self, figures: Figures, now: Instant) {
        let mut seen = self.seen.lock();
        let gap = seen.looked.replace(now).map_or(Duration::ZERO, |last| now.saturating_duration_since(last).min(GAP));
        let alive = std::mem::replace(&mut seen.figures, figures) != figures || seen.asked == 0;
        seen.silence = if alive { Duration::ZERO } else { seen.silence + gap };
    }

    /// Its page did not come, which says nothing: not that there are signs of life, and not that there are none.
    pub(super) fn no_page(&self) {
        self.seen.lock().looked = None;
    }

    /// How many requests wait for a server that has had something to compute and has given no sign of life for longer than
    /// `limit`. Never of one whose page has no figures that move.
    pub(super) fn hangs(&self, limit: Duration) -> Option<usize> {
        let seen = self.seen.lock();
        let computes = seen.asked > 0 && (seen.figures.running > 0 || seen.generating > 0);
        (seen.silence > limit && computes && seen.figures.moves.is_some()).then_some(seen.asked)
    }
}

/// A request that the server has been asked, until it is dropped.
pub(super) struct Asking<'a> {
    pulse: &'a Pulse,
    generates: bool,
}

impl Asking<'_> {
    /// Tokens have come.
    pub(super) fn tokens(&mut self) {
        let mut seen = self.pulse.seen.lock();
        seen.silence = Duration::ZERO;
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

    fn figures(running: usize, moves: u64) -> Figures {
        Figures { running, moves: Some(moves) }
    }

    /// Looks once a second.
    struct Looks(Instant);

    impl Looks {
        fn find(&mut self, figures: Figures, seconds: u64, pulse: &Pulse) -> Option<usize> {
            for _ in 0..seconds {
                self.0 += Duration::from_secs(1);
                pulse.page(figures, self.0);
            }
            pulse.hangs(LIMIT)
        }
    }

    #[test]
    fn one_that_has_nothing_to_do_does_not_hang() {
        let (pulse, mut looks) = (Pulse::new(), Looks(Instant::now()));
        // An old figure of an engine that is idle.
        assert_eq!(looks.find(figures(1, 7), 600, &pulse), None);
        let _asking = pulse.asks();
        assert_eq!(looks.find(figures(1, 7), 60, &pulse), None, "it has had no more time than that");
        assert_eq!(looks.find(figures(1, 7), 1, &pulse), Some(1));
    }

    #[test]
    fn a_long_prompt_that_moves_figures_is_no_hang() {
        let (pulse, mut looks) = (Pulse::new(), Looks(Instant::now()));
        let _asking = pulse.asks();
        for step in 0..5 {
            assert_eq!(looks.find(figures(1, step), 50, &pulse), None);
        }
        assert_eq!(looks.find(figures(1, 4), 20, &pulse), Some(1));
    }

    #[test]
    fn a_request_that_waits_for_another_server_is_no_hang() {
        let (pulse, mut looks) = (Pulse::new(), Looks(Instant::now()));
        let mut asking = pulse.asks();
        assert_eq!(looks.find(figures(0, 1), 100, &pulse), None, "nothing runs");
        // One that has begun waits for nobody.
        asking.tokens();
        assert_eq!(looks.find(figures(0, 1), 60, &pulse), None);
        assert_eq!(looks.find(figures(0, 1), 1, &pulse), Some(1));
        let _other = pulse.asks();
        assert_eq!(pulse.hangs(LIMIT), Some(2), "one more says nothing");
        drop(asking);
        assert_eq!(looks.find(figures(0, 1), 100, &pulse), None);
    }

    #[test]
    fn what_is_not_known_is_no_hang() {
        let (pulse, mut looks) = (Pulse::new(), Looks(Instant::now()));
        let mut asking = pulse.asks();
        asking.tokens();
        assert_eq!(looks.find(Figures { running: 1, moves: None }, 600, &pulse), None, "its page has no figures");
        assert_eq!(looks.find(figures(1, 1), 50, &pulse), None);
        // Pages that do not come, and then a machine that stood still.
        for _ in 0..100 {
            pulse.no_page();
            looks.0 += Duration::from_secs(1);
        }
        assert_eq!(looks.find(figures(1, 1), 1, &pulse), None);
        looks.0 += Duration::from_secs(1000);
        assert_eq!(looks.find(figures(1, 1), 5, &pulse), None);
        assert_eq!(looks.find(figures(1, 1), 10, &pulse), Some(1), "it adds up to more than the limit");
    }
}
