//! Filter, score, pick; and, for whoever asks, how each worker came out.
//!
//! A decision computes only what it needs: the turns and the dice look at no costs.

use std::collections::HashMap;

use rand::Rng;
use rand::seq::IndexedRandom;

use kv_index::{Overlaps, WorkerId, WorkerRank};

use crate::cost::{CostConfig, Terms};
use crate::load::{ActiveLoad, Prompt};
use crate::worker::{Worker, WorkerSet};

/// How a worker is picked among those that could serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// By cost: overlap and load.
    #[default]
    Kv,
    /// Each in turn.
    RoundRobin,
    /// Any.
    Random,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The model asked for.
    pub model: &'a str,
    /// Its prompt.
    pub prompt: &'a Prompt,
    /// Only this worker will do.
    pub pinned: Option<WorkerId>,
    /// Workers that failed this request already, or cannot be reached.
    pub excluded: &'a [WorkerId],
}

/// Why a worker was left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// It serves another model.
    OtherModel,
    /// The request is pinned to another worker.
    NotPinned,
    /// It takes nothing new.
    Draining,
    /// It failed this request already, or cannot be reached.
    Excluded,
}

/// What a request finds in a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It could go there.
    Eligible,
    /// It could not.
    Out(Exclusion),
}

/// One worker in an explanation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// The rank.
    pub rank: WorkerRank,
    /// Whether the request could go there.
    pub verdict: Verdict,
    /// Its cost; absent when it was left out.
    pub terms: Option<Terms>,
}

/// A choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The rank that was chosen.
    pub rank: WorkerRank,
    /// Its cost.
    pub terms: Terms,
}

/// Why nobody was chosen.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refusal {
    /// No worker serves the model.
    #[error("no worker serves the model")]
    NoWorker,
    /// The pinned worker does not serve the model.
    #[error("worker {} does not serve the model", .0.0)]
    UnknownPin(WorkerId),
    /// Workers serve it, but each is draining or excluded.
    #[error("every worker that serves the model is draining or excluded")]
    AllOut,
}

/// Models with a turn of their own. Beyond that many all begin again: turns are cheap to lose.
const TURNS: usize = 1024;

/// Picks workers. Holds nothing but its settings and whose turn it is.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    /// How to pick.
    pub mode: Mode,
    /// Weights of the cost.
    pub cost: CostConfig,
    /// Whose turn it is, by model: the order of one must not depend on the requests of another.
    turns: HashMap<String, usize>,
}

impl Selector {
    /// A selector; the weights must be valid ([`CostConfig::validate`]).
    pub fn new(mode: Mode, cost: CostConfig) -> Self {
        Self { mode, cost, turns: HashMap::new() }
    }

    /// Decides where `request` runs. Cost: linear in the workers, a few lookups each.
    pub fn decide(
        &mut self,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        load: &ActiveLoad,
        rng: &mut impl Rng,
    ) -> Result<Decision, Refusal> {
        let mut eligible = Vec::with_capacity(workers.len());
        let mut out = LeftOut::default();
        for worker in workers.iter() {
            match exclusion(worker, request) {
                Some(reason) => out.note(reason),
                None => eligible.push(worker.rank),
            }
        }
        if eligible.is_empty() {
            return Err(out.refusal(request));
        }
        let (rank, terms) = match self.mode {
            Mode::Kv => {
                let terms = |&rank| self.terms(rank, request.prompt, overlaps, load);
                let costs: Vec<Terms> = eligible.iter().map(terms).collect();
                let at = match self.cost.temperature {
                    t if t > 0.0 => sample(&costs, t, rng),
                    _ => lowest(&costs, rng),
                };
                (eligible[at], costs[at])
            }
            Mode::RoundRobin => {
                let rank = eligible[self.turn(request.model) % eligible.len()];
                (rank, self.terms(rank, request.prompt, overlaps, load))
            }
            Mode::Random => {
                let rank = eligible[rng.random_range(0..eligible.len())];
                (rank, self.terms(rank, request.prompt, overlaps, load))
            }
        };
        Ok(Decision { rank, terms })
    }

    /// How every worker comes out for `request`, in order of rank: what a decision at this moment would go by.
    pub fn explain(
        &self,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        load: &ActiveLoad,
    ) -> Vec<Scored> {
        let score = |worker: &Worker| {
            let (verdict, terms) = match exclusion(worker, request) {
                Some(reason) => (Verdict::Out(reason), None),
                None => (Verdict::Eligible, Some(self.terms(worker.rank, request.prompt, overlaps, load))),
            };
            Scored { rank: worker.rank, verdict, terms }
        };
        workers.iter().map(score).collect()
    }

    fn turn(&mut self, model: &str) -> usize {
        if let Some(turn) = self.turns.get_mut(model) {
            *turn = turn.wrapping_add(1);
            return *turn;
        }
        if self.turns.len() >= TURNS {
            self.turns.clear();
        }
        self.turns.insert(model.to_owned(), 0);
        0
    }

    fn terms(&self, rank: WorkerRank, prompt: &Prompt, overlaps: &Overlaps, load: &ActiveLoad) -> Terms {
        let prefill = (load.prefill_tokens(rank) + prompt.tokens) as f64 / prompt.block_size.get() as f64;
        Terms::new(&self.cost, prefill, overlaps.get(rank), load.potential_blocks(rank, prompt) as f64)
    }
}

fn exclusion(worker: &Worker, request: &Request<'_>) -> Option<Exclusion> {
    if *worker.model != *request.model {
        return Some(Exclusion::OtherModel);
    }
    if request.pinned.is_some_and(|pin| pin != worker.rank.worker) {
        return Some(Exclusion::NotPinned);
    }
    if worker.draining {
        return Some(Exclusion::Draining);
    }
    request.excluded.contains(&worker.rank.worker).then_some(Exclusion::Excluded)
}

/// Why workers were left out, as far as a refusal depends on it.
#[derive(Default)]
struct LeftOut {
    /// Draining or excluded: it would have done.
    unavailable: bool,
    not_pinned: bool,
}

impl LeftOut {
    fn note(&mut self, reason: Exclusion) {
        match reason {
            Exclusion::Draining | Exclusion::Excluded => self.unavailable = true,
            Exclusion::NotPinned => self.not_pinned = true,
            Exclusion::OtherModel => {}
        }
    }

    fn refusal(&self, request: &Request<'_>) -> Refusal {
        match request.pinned {
            _ if self.unavailable => Refusal::AllOut,
            Some(pin) if self.not_pinned => Refusal::UnknownPin(pin),
            _ => Refusal::NoWorker,
        }
    }
}

/// The place of one of those with the lowest cost, each as likely.
fn lowest(costs: &[Terms], rng: &mut impl Rng) -> usize {
    let least = costs.iter().map(|terms| terms.cost).fold(f64::INFINITY, f64::min);
    let ties: Vec<usize> = (0..costs.len()).filter(|&at| costs[at].cost <= least).collect();
    ties.choose(rng).copied().unwrap_or(0)
}

/// Softmax over costs scaled to 0..1: weight = exp(-(cost - least) / ((most - least) * temperature)). Returns a place.
fn sample(costs: &[Terms], temperature: f64, rng: &mut impl Rng) -> usize {
    let least = costs.iter().map(|terms| terms.cost).fold(f64::INFINITY, f64::min);
    let spread = costs.iter().map(|terms| terms.cost).fold(f64::NEG_INFINITY, f64::max) - least;
    // Equal costs are equally likely; a spread of 0 would divide 0 by 0.
    let scale = if spread > 0.0 { spread * temperature } else { 1.0 };
    let weights: Vec<f64> = costs.iter().map(|terms| (-(terms.cost - least) / scale).exp()).collect();
    let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (at, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return at;
        }
    }
    weights.len() - 1
}

#[cfg(test)]
mod tests;
