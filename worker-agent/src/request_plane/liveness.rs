//! Whether the router at the other end is still there. Plain values: the caller brings the time.

use std::time::Duration;

use tokio::time::Instant;

/// Longest time without a byte written while there is something to write.
pub(super) const WRITE_STALL: Duration = Duration::from_secs(30);
/// Longest silence of a router that has sent a Ping before.
const SILENCE: Duration = Duration::from_secs(60);

/// How a router was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Lost {
    #[error("nothing could be written for {} s", WRITE_STALL.as_secs())]
    WriteStall,
    #[error("the router, which used to ping, was silent for {} s", SILENCE.as_secs())]
    Silence,
}

/// What is known of the router's life.
#[derive(Debug)]
pub(super) struct Liveness {
    /// It pings, so its silence means something.
    pinged: bool,
    /// The last byte read or written. Writing counts: nothing is read while much waits to be written, and a router that
    /// takes what is written lives.
    heard: Instant,
    /// Since when the socket has taken nothing.
    stalled: Option<Instant>,
}

impl Liveness {
    pub(super) fn new(now: Instant) -> Self {
        Self { pinged: false, heard: now, stalled: None }
    }

    pub(super) fn pinged(&mut self) {
        self.pinged = true;
    }

    pub(super) fn read(&mut self, now: Instant) {
        self.heard = now;
    }

    pub(super) fn written(&mut self, now: Instant) {
        self.heard = now;
        self.stalled = None;
    }

    /// The socket took nothing.
    pub(super) fn blocked(&mut self, now: Instant) {
        self.stalled.get_or_insert(now);
    }

    pub(super) fn check(&self, now: Instant) -> Result<(), Lost> {
        if self.stalled.is_some_and(|since| now - since > WRITE_STALL) {
            return Err(Lost::WriteStall);
        }
        if self.pinged && now - self.heard > SILENCE {
            return Err(Lost::Silence);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_slow_router_that_takes_what_is_written_lives() {
        let start = Instant::now();
        let mut liveness = Liveness::new(start);
        liveness.pinged();
        // For ten minutes nothing is read, and every 29 seconds a little is written.
        for turn in 0..20 {
            let now = start + 29 * SECOND * turn;
            assert_eq!(liveness.check(now), Ok(()), "turn {turn}");
            liveness.written(now);
            liveness.blocked(now);
        }
    }

    #[test]
    fn a_router_that_takes_nothing_is_lost() {
        let start = Instant::now();
        let mut liveness = Liveness::new(start);
        liveness.blocked(start);
        // Its pings are still read: they do not empty the outbox.
        liveness.read(start + 20 * SECOND);
        liveness.blocked(start + 20 * SECOND);
        assert_eq!(liveness.check(start + WRITE_STALL), Ok(()));
        assert_eq!(liveness.check(start + WRITE_STALL + SECOND), Err(Lost::WriteStall));
    }

    #[test]
    fn only_a_router_that_pings_is_lost_by_silence() {
        let start = Instant::now();
        let mut liveness = Liveness::new(start);
        assert_eq!(liveness.check(start + 10 * SILENCE), Ok(()));
        liveness.pinged();
        liveness.read(start);
        assert_eq!(liveness.check(start + SILENCE), Ok(()));
        assert_eq!(liveness.check(start + SILENCE + SECOND), Err(Lost::Silence));
    }
}
