//! Filter, score, pick; and, for whoever asks, how each worker came out.
//!
//! One pass looks at every worker once, in order of rank, with what it holds and what runs there. `decide` and `explain` are the
//! same pass, so that an explanation is what a decision at that moment would be. `pick` chooses among those that are left.

mod pick;
mod pool;

use std::collections::HashMap;

use rand::Rng;

use kv_hashing::BlockSize;
use kv_index::{Overlaps, TierBlocks, WorkerId, WorkerRank};

use crate::cost::{CostConfig, Terms};
use crate::filter::{BusyThresholds, Exclusion, LeftOut, Refusal, Request, exclusion};
use crate::load::{ActiveLoad, RankView, Reported};
use crate::setting::{self, SettingError};
use crate::worker::{Roles, Worker, WorkerSet};
pub use pick::Pick;
use pool::Pool;

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
    /// Of two taken at random, the one with fewer requests.
    PowerOfTwo,
    /// The one with the fewest requests.
    LeastLoaded,
    /// The one that the request names.
    Direct,
}

impl Mode {
    /// Its name, as flags and labels have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
            Self::LeastLoaded => "least-loaded",
            Self::Direct => "direct",
        }
    }
}

/// Settings of a [`Selector`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SelectorConfig {
    /// How to pick.
    pub mode: Mode,
    /// Weights of the cost.
    pub cost: CostConfig,
    /// From what load a worker is left out.
    pub busy: BusyThresholds,
    /// A request has to wait when the active prompt tokens of all workers that could take it exceed this share of the most
    /// tokens in one step of their engines, ≥ 0. Absent: it never waits.
    pub queue_threshold: Option<f64>,
}

impl SelectorConfig {
    /// Refuses settings outside their ranges.
    pub fn validate(&self) -> Result<(), SettingError> {
        self.cost.validate()?;
        self.busy.validate()?;
        self.queue_threshold.map_or(Ok(()), |share| setting::not_negative("queue_threshold", share))
    }
}

/// One worker as a request finds it: all that its cost is computed from. 64 bytes, so that every decision can be recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The rank.
    pub rank: WorkerRank,
    /// Why it was left out.
    pub exclusion: Option<Exclusion>,
    /// Requests there beyond those in `load`, as it says itself; at most 65,535, and 0 in modes that do not count requests.
    pub unbooked_requests: u16,
    /// What it holds of the prompt. Unknown (0) here and below for whom was left out for another reason than being busy.
    pub overlap: TierBlocks,
    /// See [`Terms::shared_beyond`].
    pub shared_beyond: u32,
    /// What is booked there.
    pub load: RankView,
    /// Blocks in use if the request ran there.
    pub potential_blocks: u32,
    /// What is compared; infinite for whom was left out.
    pub cost: f64,
}

impl Candidate {
    /// Nothing is known yet.
    const UNKNOWN: Self = Self {
        rank: WorkerRank { worker: WorkerId(0), dp_rank: 0 },
        exclusion: None,
        unbooked_requests: 0,
        overlap: TierBlocks { device: 0, host: 0, disk: 0, shared: 0 },
        shared_beyond: 0,
        load: RankView { active_blocks: 0, prefill_tokens: 0, requests: 0 },
        potential_blocks: 0,
        cost: f64::INFINITY,
    };

    /// Requests there, as far as anybody knows; in modes that count them.
    pub fn requests(&self) -> u32 {
        self.load.requests.saturating_add(u32::from(self.unbooked_requests))
    }

    /// Every term of its cost; none for whom was left out. `prompt_tokens`: length of the request's prompt.
    pub fn terms(&self, config: &CostConfig, prompt_tokens: usize, block_size: BlockSize) -> Option<Terms> {
        self.exclusion.is_none().then(|| self.evaluate(&Formula::new(config, prompt_tokens, block_size)))
    }

    fn evaluate(&self, formula: &Formula) -> Terms {
        formula.terms(self.load.prefill_tokens, self.overlap, self.shared_beyond, self.potential_blocks)
    }
}

/// The cost formula of one request: what is the same for every worker, once.
struct Formula {
    config: CostConfig,
    prompt_tokens: f64,
    block_size: f64,
}

impl Formula {
    fn new(config: &CostConfig, prompt_tokens: usize, block_size: BlockSize) -> Self {
        Self { config: *config, prompt_tokens: prompt_tokens as f64, block_size: block_size.get() as f64 }
    }

    #[inline]
    fn terms(&self, active_prefill_tokens: u32, overlap: TierBlocks, shared_beyond: u32, blocks: u32) -> Terms {
        let prefill = (f64::from(active_prefill_tokens) + self.prompt_tokens) / self.block_size;
        Terms::new(&self.config, prefill, overlap, shared_beyond, f64::from(blocks))
    }
}

/// A choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The rank that was chosen.
    pub rank: WorkerRank,
    /// Its cost.
    pub terms: Terms,
    /// What ran there.
    pub load: RankView,
    /// How many workers it was chosen among.
    pub eligible: u32,
    /// How it was picked.
    pub pick: Pick,
}

/// How every worker came out for a request, and what followed.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// How it was picked.
    pub mode: Mode,
    /// The weights.
    pub cost: CostConfig,
    /// Length of the prompt.
    pub prompt_tokens: usize,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Every worker, in order of rank.
    pub candidates: Vec<Candidate>,
    /// What those of them that tell of their load last said, in order of rank. Empty for past decisions.
    pub reports: Vec<(WorkerRank, Reported)>,
    /// The choice, or why there is none.
    pub outcome: Result<Decision, Refusal>,
}

impl Explanation {
    /// Every worker, with the terms of its cost unless it was left out.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = (&Candidate, Option<Terms>)> {
        self.candidates.iter().map(|row| (row, row.terms(&self.cost, self.prompt_tokens, self.block_size)))
    }
}

/// Models with a turn of their own. Beyond that many all begin again: turns are cheap to lose.
const TURNS: usize = 1024;

/// Picks workers. Holds nothing but its settings, whose turn it is, and the workspace of its last decision.
#[derive(Debug, Default)]
pub struct Selector {
    config: SelectorConfig,
    /// Who had the last turn, by model and set of roles: the order of one must not depend on the requests of another.
    turns: HashMap<String, [Option<WorkerRank>; Roles::SETS]>,
    work: Workspace,
}

/// What a decision computes on its way; kept, so that the next one need not allocate.
#[derive(Debug, Default)]
struct Workspace {
    candidates: Vec<Candidate>,
    /// Places of those left, in `candidates`.
    eligible: Vec<u32>,
    depths: Vec<u32>,
    pool: Pool,
    /// Of those left, what they are compared by.
    values: Vec<f64>,
}

impl Selector {
    /// A selector; the settings must be valid ([`SelectorConfig::validate`]).
    pub fn new(config: SelectorConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Its settings.
    pub fn config(&self) -> &SelectorConfig {
        &self.config
    }

    /// Decides where `request` runs. Cost: linear in the workers, some 10 ns each; nothing is allocated.
    pub fn decide(
        &mut self,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        load: &ActiveLoad,
        rng: &mut impl Rng,
    ) -> Result<Decision, Refusal> {
        let outcome = self.peek(workers, request, overlaps, load, rng);
        if let Ok(Decision { rank, pick: Pick::Turn, .. }) = outcome {
            self.take_turn(request, rank);
        }
        outcome
    }

    /// Where `request` would go: what [`Self::decide`] would do now with the same randomness. Changes nothing that a decision
    /// depends on. Cost: that of a decision.
    pub fn peek(
        &mut self,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        load: &ActiveLoad,
        rng: &mut impl Rng,
    ) -> Result<Decision, Refusal> {
        let mut work = std::mem::take(&mut self.work);
        let outcome = self.evaluate(&mut work, workers, request, overlaps, load, rng);
        self.work = work;
        outcome
    }

    /// How each worker came out in the last decision or peek, in order of rank.
    pub fn candidates(&self) -> &[Candidate] {
        &self.work.candidates
    }

    /// How every worker comes out for `request`, and what [`Self::decide`] would do now with the same randomness. Changes nothing.
    pub fn explain(
        &self,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        load: &ActiveLoad,
        rng: &mut impl Rng,
    ) -> Explanation {
        let mut work = Workspace::default();
        let outcome = self.evaluate(&mut work, workers, request, overlaps, load, rng);
        let ranks = work.candidates.iter().map(|row| row.rank);
        let reports = ranks.filter_map(|rank| Some((rank, load.reported(rank)?))).collect();
        Explanation { reports, ..self.explanation(request, work.candidates, outcome) }
    }

    /// Puts together what is known of a decision about `request`.
    pub(crate) fn explanation(
        &self,
        request: &Request<'_>,
        candidates: Vec<Candidate>,
        outcome: Result<Decision, Refusal>,
    ) -> Explanation {
        Explanation {
            mode: self.mode(request),
            cost: request.cost.unwrap_or(self.config.cost),
            prompt_tokens: request.prompt.tokens,
            block_size: request.prompt.block_size,
            candidates,
            reports: Vec::new(),
            outcome,
        }
    }

    fn evaluate(
        &self,
        work: &mut Workspace,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        load: &ActiveLoad,
        rng: &mut impl Rng,
    ) -> Result<Decision, Refusal> {
        let (mode, cost) = (self.mode(request), request.cost.unwrap_or(self.config.cost));
        let formula = Formula::new(&cost, request.prompt.tokens, request.prompt.block_size);
        let saturated = self.survey(work, &formula, workers, request, overlaps, load)?;
        if mode == Mode::Direct && request.pinned.is_none() {
            return Err(Refusal::NeedsTarget);
        }
        if saturated && !request.begun {
            return Err(Refusal::Saturated);
        }
        let Workspace { candidates, eligible, values, .. } = work;
        let mut among = pick::Among { candidates, eligible, values };
        let (at, pick) = match mode {
            Mode::Kv if cost.temperature > 0.0 => among.softmax(cost.temperature, rng),
            Mode::Kv => among.lowest(rng),
            Mode::RoundRobin => among.next_after(self.last_turn(request)),
            Mode::Random => among.any(rng),
            Mode::PowerOfTwo => among.less_loaded_of_two(rng),
            Mode::LeastLoaded => among.least_loaded(rng),
            // A worker may have several ranks.
            Mode::Direct => among.named(rng),
        };
        let Candidate { rank, load, .. } = candidates[at];
        let terms = candidates[at].evaluate(&formula);
        Ok(Decision { rank, terms, load, eligible: eligible.len() as u32, pick })
    }

    /// Looks at every worker. Returns whether all that are left have too many prompt tokens to take another now.
    fn survey(
        &self,
        work: &mut Workspace,
        formula: &Formula,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        active: &ActiveLoad,
    ) -> Result<bool, Refusal> {
        let Workspace { candidates, eligible, depths, pool, .. } = work;
        pool.fill(overlaps, workers, request.model);
        candidates.clear();
        candidates.reserve(workers.len());
        eligible.clear();
        let watches = self.config.busy.any();
        let counts = matches!(self.mode(request), Mode::PowerOfTwo | Mode::LeastLoaded);
        let listens = watches || counts;
        let mut loads = active.survey(request.prompt, depths);
        let mut held = overlaps.iter().peekable();
        let mut left_out = LeftOut::default();
        let mut saturated = true;
        for (worker, serves) in workers.serving(request.model) {
            let rank = worker.rank;
            if let Some(reason) = exclusion(worker, serves, request) {
                left_out.note(reason);
                candidates.push(Candidate { rank, exclusion: Some(reason), ..Candidate::UNKNOWN });
                continue;
            }
            while held.next_if(|(other, _)| *other < rank).is_some() {}
            let overlap = held.next_if(|(other, _)| *other == rank).map_or(TierBlocks::default(), |(_, blocks)| blocks);
            let (load, potential_blocks) = loads.at(rank);
            let shared_beyond = pool.beyond(overlap);
            let unbooked = if listens { loads.unbooked(rank) } else { RankView::default() };
            let exclusion =
                if watches && !request.begun { self.config.busy.exceeded(worker, load, unbooked) } else { None };
            let mut cost = f64::INFINITY;
            match exclusion {
                Some(reason) => left_out.note(reason),
                None => {
                    cost = formula.terms(load.prefill_tokens, overlap, shared_beyond, potential_blocks).cost;
                    saturated &= self.is_saturated(worker, load);
                    eligible.push(candidates.len() as u32);
                }
            }
            let unbooked_requests = if counts { u16::try_from(unbooked.requests).unwrap_or(u16::MAX) } else { 0 };
            candidates.push(Candidate {
                rank,
                exclusion,
                unbooked_requests,
                overlap,
                shared_beyond,
                load,
                potential_blocks,
                cost,
            });
        }
        if eligible.is_empty() { Err(left_out.refusal(request)) } else { Ok(saturated) }
    }

    fn is_saturated(&self, worker: &Worker, load: RankView) -> bool {
        let limits = self.config.queue_threshold.zip(worker.max_batched_tokens);
        limits.is_some_and(|(share, batch)| f64::from(load.prefill_tokens) > share * f64::from(batch))
    }

    /// How a request's worker is picked.
    pub fn mode(&self, request: &Request<'_>) -> Mode {
        request.mode.unwrap_or(self.config.mode)
    }

    fn last_turn(&self, request: &Request<'_>) -> Option<WorkerRank> {
        self.turns.get(request.model)?[request.roles.index()]
    }

    fn take_turn(&mut self, request: &Request<'_>, rank: WorkerRank) {
        let at = request.roles.index();
        if let Some(turns) = self.turns.get_mut(request.model) {
            turns[at] = Some(rank);
            return;
        }
        if self.turns.len() >= TURNS {
            self.turns.clear();
        }
        self.turns.entry(request.model.to_owned()).or_default()[at] = Some(rank);
    }
}

#[cfg(test)]
mod tests;
