//! The last step of a decision: one of those that are left.

use rand::Rng;

use kv_index::WorkerRank;

use super::Candidate;

/// How the chosen worker was picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pick {
    /// The lowest cost.
    Lowest {
        /// How many had it; each was as likely.
        ties: u32,
    },
    /// Sampled by cost.
    Softmax {
        /// The temperature.
        temperature: f64,
        /// The random number, from 0 to 1.
        draw: f64,
        /// How likely this choice was.
        probability: f64,
    },
    /// It was its turn.
    Turn,
    /// At random.
    Dice,
    /// Fewer requests than the other of two taken at random (the same, where there was but one).
    TwoChoices {
        /// The other.
        other: WorkerRank,
    },
    /// The fewest requests.
    FewestRequests {
        /// How many had as few; each was as likely.
        ties: u32,
    },
    /// The request named it.
    Named,
}

/// Those that are left; at least one. Each way to pick returns a place in `candidates`.
pub(super) struct Among<'a> {
    pub(super) candidates: &'a [Candidate],
    /// Places in `candidates`, rising.
    pub(super) eligible: &'a [u32],
    /// Scratch space: what each of `eligible` is compared by, side by side, since several passes are made over it.
    pub(super) values: &'a mut Vec<f64>,
}

impl Among<'_> {
    /// One with the lowest cost.
    pub(super) fn lowest(&mut self, rng: &mut impl Rng) -> (usize, Pick) {
        let (at, ties) = self.least(|candidate| candidate.cost, rng);
        (at, Pick::Lowest { ties })
    }

    /// One with the fewest requests.
    pub(super) fn least_loaded(&mut self, rng: &mut impl Rng) -> (usize, Pick) {
        let (at, ties) = self.least(|candidate| f64::from(candidate.requests()), rng);
        (at, Pick::FewestRequests { ties })
    }

    /// Softmax over costs scaled to 0..1: weight = exp(-(cost - least) / ((most - least) * temperature)).
    pub(super) fn softmax(&mut self, temperature: f64, rng: &mut impl Rng) -> (usize, Pick) {
        self.fill(|candidate| candidate.cost);
        let least = least(self.values);
        let spread = self.values.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
        // Equal costs are equally likely; a spread of 0 would divide 0 by 0.
        let scale = if spread > 0.0 { spread * temperature } else { 1.0 };
        self.values.iter_mut().for_each(|value| *value = (-(*value - least) / scale).exp());
        let total: f64 = self.values.iter().sum();
        let draw = rng.random::<f64>();
        let mut left = draw * total;
        let mut place = self.values.len() - 1;
        for (at, weight) in self.values.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                place = at;
                break;
            }
        }
        let probability = self.values[place] / total;
        (self.eligible[place] as usize, Pick::Softmax { temperature, draw, probability })
    }

    /// The one that comes after `last` in order of rank; after the last of all, the first.
    pub(super) fn next_after(&self, last: Option<WorkerRank>) -> (usize, Pick) {
        let had_turn = |at: &u32| last.is_some_and(|last| self.candidates[*at as usize].rank <= last);
        let place = self.eligible.partition_point(had_turn) % self.eligible.len();
        (self.eligible[place] as usize, Pick::Turn)
    }

    /// Any.
    pub(super) fn any(&self, rng: &mut impl Rng) -> (usize, Pick) {
        (self.random(rng), Pick::Dice)
    }

    /// A rank of the worker that the request named.
    pub(super) fn named(&mut self, rng: &mut impl Rng) -> (usize, Pick) {
        (self.least(|candidate| candidate.cost, rng).0, Pick::Named)
    }

    /// The one with fewer requests of two different ones.
    pub(super) fn less_loaded_of_two(&self, rng: &mut impl Rng) -> (usize, Pick) {
        let first = rng.random_range(0..self.eligible.len());
        if self.eligible.len() == 1 {
            let at = self.eligible[first] as usize;
            return (at, Pick::TwoChoices { other: self.candidates[at].rank });
        }
        let second = (first + rng.random_range(1..self.eligible.len())) % self.eligible.len();
        let (first, second) = (self.eligible[first] as usize, self.eligible[second] as usize);
        let requests = |at: usize| self.candidates[at].requests();
        // Which of the two is first is random already, so a tie is too.
        let (at, other) = if requests(second) < requests(first) { (second, first) } else { (first, second) };
        (at, Pick::TwoChoices { other: self.candidates[other].rank })
    }

    fn random(&self, rng: &mut impl Rng) -> usize {
        self.eligible[rng.random_range(0..self.eligible.len())] as usize
    }

    /// One of those with the least of something, each as likely; and how many they are.
    fn least(&mut self, of: impl Fn(&Candidate) -> f64, rng: &mut impl Rng) -> (usize, u32) {
        self.fill(of);
        let least = least(self.values);
        let ties = self.values.iter().filter(|value| **value <= least).count();
        let tied = self.values.iter().zip(self.eligible).filter(|(value, _)| **value <= least);
        let at = tied.map(|(_, at)| *at).nth(if ties > 1 { rng.random_range(0..ties) } else { 0 });
        (at.unwrap_or(self.eligible[0]) as usize, ties as u32)
    }

    fn fill(&mut self, of: impl Fn(&Candidate) -> f64) {
        self.values.clear();
        self.values.extend(self.eligible.iter().map(|at| of(&self.candidates[*at as usize])));
    }
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}
