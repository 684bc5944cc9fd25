//! Waiting for as long as a step takes.
//!
//! A step that follows another begins when that one should have ended, not when its thread woke up: the time that the
//! scheduler and a late timer take is part of the step, as long as the step is the longer one. So a run of steps keeps the
//! model's time, at high speed-ups too. After idle time a step begins when it is asked for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::timing::{StepWork, TimingModel};
use crate::engine::builtin::{Chunk, Forward, Kv, NextToken};

/// Time, and waiting for it.
pub trait Clock: Send {
    /// Since a fixed moment.
    fn now(&self) -> Duration;

    /// Returns at `time` or soon after; at once when it has passed.
    fn sleep_until(&self, time: Duration);
}

/// The machine's clock; the calling thread sleeps, and wakes some 50 µs late on Linux.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&self, time: Duration) {
        if let Some(left) = time.checked_sub(self.now()) {
            std::thread::sleep(left);
        }
    }
}

/// Lets steps take their time, faster by a factor.
#[derive(Debug)]
pub struct Pacer<C> {
    clock: C,
    /// 0: no waiting.
    speedup_ratio: f64,
    /// When the step before ends.
    end: Duration,
}

impl<C: Clock> Pacer<C> {
    /// `speedup_ratio` is 0 (no waiting) or above; 1 is real time.
    pub fn new(clock: C, speedup_ratio: f64) -> Self {
        Self { end: clock.now(), clock, speedup_ratio }
    }

    /// The next step follows no other.
    pub fn resume(&mut self) {
        self.end = self.clock.now();
    }

    /// Waits until a step of this length ends.
    pub fn step(&mut self, length: Duration) {
        if self.speedup_ratio <= 0.0 {
            return;
        }
        // A step that ended late is not made up for by more than the next one: an overloaded machine shows in the times.
        self.end = (self.end + length.div_f64(self.speedup_ratio)).max(self.clock.now());
        self.clock.sleep_until(self.end);
    }
}

/// A forward pass that computes nothing and takes its time for it.
pub struct Paced<C> {
    timing: TimingModel,
    pacer: Pacer<C>,
    vocab: usize,
    next_token: Arc<dyn NextToken>,
    kv: Option<Kv>,
}

impl<C: Clock> Paced<C> {
    /// `vocab` is the size of the vocabulary, in tokens.
    pub fn new(timing: TimingModel, pacer: Pacer<C>, vocab: usize, next_token: Arc<dyn NextToken>) -> Self {
        Self { timing, pacer, vocab, next_token, kv: None }
    }

    /// With blocks that can be moved.
    pub fn with_kv(self, kv: Option<Kv>) -> Self {
        Self { kv, ..self }
    }
}

impl<C: Clock> Forward for Paced<C> {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn next_token(&self) -> Option<Arc<dyn NextToken>> {
        Some(self.next_token.clone())
    }

    fn kv(&self) -> Option<Kv> {
        self.kv.clone()
    }

    fn resume(&mut self) {
        self.pacer.resume();
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], _logits: &mut Vec<f32>) {
        self.pacer.step(self.timing.step(StepWork::of(chunks)));
    }
}
