//! Filter, score, pick: one decision with every term that led to it.

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

/// What became of a worker in a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request goes there.
    Chosen,
    /// It could have.
    Eligible,
    /// It could not.
    Out(Exclusion),
}

/// One worker in a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// The rank.
    pub rank: WorkerRank,
    /// What became of it.
    pub verdict: Verdict,
    /// Its cost; absent when it was left out.
    pub terms: Option<Terms>,
}

/// A choice, and how every worker came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The rank that was chosen.
    pub rank: WorkerRank,
    /// Its cost.
    pub terms: Terms,
    /// All workers, in order of rank.
    pub workers: Vec<Scored>,
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

/// Picks workers. Holds nothing but its settings and whose turn it is.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    /// How to pick.
    pub mode: Mode,
    /// Weights of the cost.
    pub cost: CostConfig,
    turn: usize,
}

impl Selector {
    /// A selector; the weights must be valid ([`CostConfig::validate`]).
    pub fn new(mode: Mode, cost: CostConfig) -> Self {
        Self { mode, cost, turn: 0 }
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
        let mut scored = Vec::with_capacity(workers.len());
        let mut eligible = Vec::with_capacity(workers.len());
        for worker in workers.iter() {
            let (verdict, terms) = match exclusion(worker, request) {
                Some(reason) => (Verdict::Out(reason), None),
                None => {
                    eligible.push(scored.len());
                    (Verdict::Eligible, Some(self.terms(worker.rank, request.prompt, overlaps, load)))
                }
            };
            scored.push(Scored { rank: worker.rank, verdict, terms });
        }
        if eligible.is_empty() {
            return Err(refusal(&scored, request));
        }
        let cost = |at: usize| scored[at].terms.map_or(f64::INFINITY, |terms| terms.cost);
        let at = match self.mode {
            Mode::Kv if self.cost.temperature > 0.0 => eligible[sample(&eligible, cost, self.cost.temperature, rng)],
            Mode::Kv => lowest(&eligible, cost, rng),
            Mode::RoundRobin => {
                self.turn = self.turn.wrapping_add(1);
                eligible[self.turn % eligible.len()]
            }
            Mode::Random => eligible[rng.random_range(0..eligible.len())],
        };
        scored[at].verdict = Verdict::Chosen;
        let (rank, terms) = (scored[at].rank, scored[at].terms.unwrap_or_default());
        Ok(Decision { rank, terms, workers: scored })
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

fn refusal(scored: &[Scored], request: &Request<'_>) -> Refusal {
    let out =
        |reasons: &[Exclusion]| scored.iter().any(|s| matches!(s.verdict, Verdict::Out(r) if reasons.contains(&r)));
    match request.pinned {
        _ if out(&[Exclusion::Draining, Exclusion::Excluded]) => Refusal::AllOut,
        Some(pin) if out(&[Exclusion::NotPinned]) => Refusal::UnknownPin(pin),
        _ => Refusal::NoWorker,
    }
}

/// One of those with the lowest cost, each as likely.
fn lowest(eligible: &[usize], cost: impl Fn(usize) -> f64, rng: &mut impl Rng) -> usize {
    let least = eligible.iter().map(|&at| cost(at)).fold(f64::INFINITY, f64::min);
    let ties: Vec<usize> = eligible.iter().copied().filter(|&at| cost(at) <= least).collect();
    *ties.choose(rng).unwrap_or(&eligible[0])
}

/// Softmax over costs scaled to 0..1: weight = exp(-(cost - least) / ((most - least) * temperature)). Returns a place in
/// `eligible`.
fn sample(eligible: &[usize], cost: impl Fn(usize) -> f64, temperature: f64, rng: &mut impl Rng) -> usize {
    let costs: Vec<f64> = eligible.iter().map(|&at| cost(at)).collect();
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let spread = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
    // Equal costs are equally likely; a spread of 0 would divide 0 by 0.
    let scale = if spread > 0.0 { spread * temperature } else { 1.0 };
    let weights: Vec<f64> = costs.iter().map(|cost| (-(cost - least) / scale).exp()).collect();
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
