//! What runs next: continuous batching with chunked prefill over one pool of KV blocks.
//!
//! Pure and deterministic: no clock, thread, channel or random number of its own; the caller alternates
//! [`Scheduler::plan`], the forward pass over [`Scheduler::chunks`], and [`Scheduler::apply`].
//!
//! - A step decodes one token of every sequence that can, then spends what is left of its token budget on prefill, in the
//!   order of rank: higher priority first, then first come, first served.
//! - A sequence is admitted when the blocks of all its tokens are free or cached; its prefill then never lacks blocks.
//! - A sequence whose next blocks are in a tier below the arena waits for them in its place, as long as that takes less time
//!   than it is worth; others run on.
//! - A decoding sequence that lacks a block preempts the running one of lowest rank, possibly itself. A preempted sequence
//!   keeps its tokens and sampler, its full blocks stay cached, and it is recomputed when there is room again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::pool::BlockPool;
use super::stop::Vocabulary;
use super::tiers::catalog::Catalog;
use super::{Chunk, Logits, NextToken};
use crate::engine::{ArenaEvent, EngineInfo, EngineLoad, EngineOutput, SubmitError};

mod exchange;
mod request;
mod sequence;
#[cfg(test)]
mod tests;
mod tiers;

pub use exchange::Handover;
pub use request::{Limits, Request};
pub use sequence::Loaded;
use sequence::{Rank, Sequence};

/// Rows of logits that one step computes for prompt log-probabilities: 64 rows of a 128k vocabulary are 32 MiB.
const PROMPT_LOGIT_ROWS: usize = 64;

/// Names a request inside its scheduler; rises with every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Sizes of a scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Arena and batch.
    pub engine: EngineInfo,
    /// Requests that may wait for their first step.
    pub max_waiting: usize,
}

/// Sizes that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// Something is zero that must not be.
    #[error("{0} must be at least {1}")]
    TooSmall(&'static str, usize),
    /// A step could not decode all running sequences.
    #[error("max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs})")]
    Batch {
        /// Tokens in a step.
        tokens: usize,
        /// Sequences in a step.
        seqs: usize,
    },
}

impl SchedulerConfig {
    /// Checks the sizes, and lowers the context length to what the arena holds: no sequence may outgrow the arena alone.
    pub fn validated(mut self) -> Result<Self, InvalidConfig> {
        let e = &mut self.engine;
        let least = [
            ("total_blocks", e.total_blocks, 1),
            ("max_num_seqs", e.max_num_seqs, 1),
            ("context_length", e.context_length, 2),
            ("max_waiting", self.max_waiting, 1),
        ];
        if let Some(&(name, _, least)) = least.iter().find(|(_, value, least)| value < least) {
            return Err(InvalidConfig::TooSmall(name, least));
        }
        if e.max_num_batched_tokens < e.max_num_seqs {
            return Err(InvalidConfig::Batch { tokens: e.max_num_batched_tokens, seqs: e.max_num_seqs });
        }
        e.context_length = e.context_length.min(e.total_blocks.saturating_mul(e.block_size.get()));
        Ok(self)
    }
}

/// A chunk that the current step computes.
#[derive(Clone, Copy, Debug)]
struct Planned {
    /// Index in `running`.
    index: usize,
    tokens: usize,
    logits: Logits,
}

/// The scheduler.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    vocab: usize,
    /// Chooses tokens; absent where samplers choose by logits.
    next_token: Option<Arc<dyn NextToken>>,
    pool: BlockPool,
    next_id: u64,
    /// Holding blocks; by rank, highest first.
    running: Vec<Sequence>,
    /// Not started yet; bounded by `max_waiting`.
    waiting: BTreeMap<Rank, Sequence>,
    /// Started once and preempted; below twice `max_num_seqs`, because nothing new is started from `max_num_seqs` on.
    preempted: BTreeMap<Rank, Sequence>,
    /// The step between `plan` and `apply`.
    planned: Vec<Planned>,
    /// In the last plan somebody could not go on for want of blocks.
    lacks_blocks: bool,
    /// Of requests that have ended; their blocks are held.
    handovers: Vec<Handover>,
    /// Time since a fixed moment, as the caller has it.
    now: Duration,
    /// Sequences whose blocks have come from below since somebody asked.
    loaded: Vec<Loaded>,
}

impl Scheduler {
    /// A scheduler for a model with `vocab` tokens.
    pub fn new(config: SchedulerConfig, vocab: usize) -> Result<Self, InvalidConfig> {
        let config = config.validated()?;
        Ok(Self {
            vocab,
            next_token: None,
            pool: BlockPool::new(config.engine.total_blocks),
            next_id: 0,
            running: Vec::new(),
            waiting: BTreeMap::new(),
            preempted: BTreeMap::new(),
            planned: Vec::new(),
            lacks_blocks: false,
            handovers: Vec::new(),
            now: Duration::ZERO,
            loaded: Vec::new(),
            config,
        })
    }

    /// A scheduler for a forward pass that has no logits.
    pub fn without_logits(
        config: SchedulerConfig,
        vocab: usize,
        next_token: Arc<dyn NextToken>,
    ) -> Result<Self, InvalidConfig> {
        Ok(Self { next_token: Some(next_token), ..Self::new(config, vocab)? })
    }

    /// The same with tiers below the arena.
    pub fn with_tiers(self, tiers: Catalog) -> Self {
        Self { pool: BlockPool::with_tiers(self.config.engine.total_blocks, tiers), ..self }
    }

    /// What a request must keep to.
    pub fn limits(&self, vocabulary: Arc<Vocabulary>) -> Limits {
        let e = &self.config.engine;
        let next_token = self.next_token.clone();
        Limits { context_length: e.context_length, block_size: e.block_size, vocab: self.vocab, vocabulary, next_token }
    }

    /// Sizes in force.
    pub fn info(&self) -> &EngineInfo {
        &self.config.engine
    }

    /// Takes a request; refused when `max_waiting` others wait for their first step.
    pub fn enqueue(&mut self, request: Request) -> Result<RequestId, SubmitError> {
        if self.waiting.len() >= self.config.max_waiting {
            return Err(SubmitError::Overloaded(self.config.max_waiting));
        }
        let sequence = Sequence::new(RequestId(self.next_id), request);
        self.next_id += 1;
        let id = sequence.id;
        self.waiting.insert(sequence.rank, sequence);
        Ok(id)
    }

    /// Drops every request that `keep` refuses, wherever it is, and frees its blocks. Called between steps.
    pub fn retain(&mut self, mut keep: impl FnMut(RequestId) -> bool) {
        debug_assert!(self.planned.is_empty(), "a step is under way");
        self.waiting.retain(|_, sequence| keep(sequence.id));
        self.preempted.retain(|_, sequence| keep(sequence.id));
        for sequence in self.running.extract_if(.., |sequence| !keep(sequence.id)) {
            self.pool.release(&sequence.table);
        }
    }

    /// Drops every request and all cached blocks: the arena's content is not to be trusted.
    pub fn abort(&mut self) {
        self.planned.clear();
        self.retain(|_| false);
        self.pool.clear();
    }

    /// Whether there is a request to work on.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.preempted.is_empty()
    }

    /// Requests that wait for their first step.
    pub fn waiting_ids(&self) -> impl Iterator<Item = RequestId> {
        self.waiting.values().map(|sequence| sequence.id)
    }

    /// How busy the engine is.
    pub fn load(&self) -> EngineLoad {
        EngineLoad {
            running: self.running.len(),
            waiting: self.waiting.len() + self.preempted.len(),
            active_blocks: self.pool.active(),
            used_blocks: self.pool.used(),
            pending_prefill_tokens: self.running.iter().map(Sequence::pending_prefill).sum(),
        }
    }

    /// What happened in the arena since the last call, in order.
    pub fn take_events(&mut self) -> Vec<ArenaEvent> {
        self.pool.take_events()
    }

    /// Chooses what the next step computes. Blocks that it evicts are told as events before anything overwrites them; the moves
    /// that it leaves are made before the step.
    pub fn plan(&mut self) {
        self.planned.clear();
        self.lacks_blocks = self.secure_decode_blocks();
        if !self.lacks_blocks {
            self.lacks_blocks = !self.admit();
        }
        self.fetch_blocks();
        self.choose_chunks();
    }

    /// The chunks of the step just planned; none when there is nothing to do.
    pub fn chunks(&self) -> Vec<Chunk<'_>> {
        self.planned.iter().map(|p| self.running[p.index].chunk(p.tokens, p.logits)).collect()
    }

    /// Whose they are, and how many tokens of each, in the same order.
    pub fn planned(&self) -> impl Iterator<Item = (RequestId, usize)> {
        self.planned.iter().map(|p| (self.running[p.index].id, p.tokens))
    }

    /// The step just planned is not computed to its end: as if it had not been planned, the next plan begins where this one did.
    pub fn give_up_step(&mut self) {
        self.planned.clear();
    }

    /// Takes the logits of the step just planned, one row for each position wanted, in the order of its chunks; none at all
    /// where there are none.
    ///
    /// # Panics
    /// When `logits` has another length.
    pub fn apply(&mut self, logits: &mut [f32]) -> Vec<(RequestId, EngineOutput)> {
        let wanted: usize = self.planned.iter().map(|p| p.logits.rows(p.tokens)).sum();
        let row = if self.next_token.is_some() { 0 } else { self.vocab };
        assert_eq!(logits.len(), wanted * row, "the forward pass returned another number of logits than wanted");
        let mut rows = logits;
        let mut outputs = Vec::new();
        for planned in std::mem::take(&mut self.planned) {
            let sequence = &mut self.running[planned.index];
            sequence.advance(planned.tokens, &mut self.pool);
            let positions = planned.logits.rows(planned.tokens);
            let own;
            (own, rows) = rows.split_at_mut(positions * row);
            sequence.take_logits(own, positions, &mut outputs);
        }
        for mut sequence in self.running.extract_if(.., |sequence| sequence.ended) {
            self.handovers.extend(sequence.hand_over());
            self.pool.release(&sequence.table);
        }
        outputs
    }

    /// Gives every sequence that decodes the block of its next position, highest rank first; says whether others had to go.
    fn secure_decode_blocks(&mut self) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let missing = sequence.blocks().saturating_sub(sequence.table.len());
            if self.pool.allocate(missing, &mut sequence.table).is_ok() {
                index += 1;
                continue;
            }
            preempted = true;
            let mut victim = self.running.pop().expect("index is inside running");
            self.pool.release(&victim.table);
            victim.restart();
            self.preempted.insert(victim.rank, victim);
        }
        preempted
    }

    /// Starts waiting sequences in order of rank while there are seats, tokens in the budget, and blocks. Each running
    /// sequence is left one block to grow into, so that nobody is admitted only to be preempted at once.
    ///
    /// While `max_num_seqs` are preempted only these are started, whoever else waits: so the best of them always starts when
    /// nothing runs, since no sequence outgrows the arena alone. (It waits for blocks that are leased or reserved: that ends.)
    ///
    /// False when blocks were lacking.
    fn admit(&mut self) -> bool {
        let engine = &self.config.engine;
        let computing = self.running.iter().filter(|sequence| !sequence.is_loading());
        let mut wanted: usize = computing.map(Sequence::remaining).sum();
        while self.running.len() < engine.max_num_seqs && wanted < engine.max_num_batched_tokens {
            let new = self.waiting.first_key_value().filter(|_| self.preempted.len() < engine.max_num_seqs);
            let heads = [new, self.preempted.first_key_value()];
            let Some((&rank, head)) = heads.into_iter().flatten().min_by_key(|(rank, _)| **rank) else { return true };
            let blocks = head.blocks();
            let prefix = self.pool.prefix(head.reusable());
            if self.pool.available() < prefix.idle + (blocks - prefix.blocks) + self.running.len() {
                return false;
            }
            let taken = self.waiting.remove(&rank).or_else(|| self.preempted.remove(&rank));
            let mut sequence = taken.expect("the head of a queue");
            sequence.reuse_cached(&mut self.pool);
            if self.pool.has_tiers() {
                // Making room shall not throw out what is about to come up.
                let wanted: Vec<_> = sequence.reusable().collect();
                self.pool.tiers_mut().touch(wanted.into_iter().rev());
            }
            let fresh = blocks - sequence.table.len();
            self.pool.allocate(fresh, &mut sequence.table).expect("availability was checked above");
            wanted += sequence.remaining();
            let place = self.running.partition_point(|other| other.rank < rank);
            self.running.insert(place, sequence);
        }
        true
    }

    /// Decode first, then prefill chunks by rank, up to the token budget.
    fn choose_chunks(&mut self) {
        let engine = &self.config.engine;
        let mut budget = engine.max_num_batched_tokens;
        for (index, sequence) in self.running.iter().enumerate().filter(|(_, sequence)| sequence.decodes()) {
            self.planned.push(Planned { index, tokens: sequence.remaining(), logits: Logits::Last });
            budget -= 1;
        }
        let mut prompt_rows = PROMPT_LOGIT_ROWS;
        let prefills = |sequence: &Sequence| !sequence.decodes() && !sequence.is_loading();
        for (index, sequence) in self.running.iter_mut().enumerate().filter(|(_, sequence)| prefills(sequence)) {
            if budget == 0 {
                return;
            }
            // Blocks that another sequence has computed since this one was admitted need not be computed again.
            sequence.reuse_cached(&mut self.pool);
            let mut tokens = sequence.tokens_to_compute(sequence.remaining().min(budget), &self.pool);
            let mut logits = if tokens == sequence.remaining() { Logits::Last } else { Logits::None };
            if sequence.collects_prompt_logprobs() {
                tokens = tokens.min(prompt_rows);
                prompt_rows -= tokens;
                logits = Logits::All;
            }
            if tokens > 0 {
                self.planned.push(Planned { index, tokens, logits });
                budget -= tokens;
            }
        }
    }
}
