//! Who could serve a request at all, and what keeps each of the others out.
//!
//! Each reason has a name that people see. The order of the checks is from what a worker is to how it is doing, so that the
//! reason given is the one that would have to change first.

use std::fmt;

use kv_index::{WorkerId, WorkerRank};

use crate::cost::CostConfig;
use crate::load::{Prompt, RankView};
use crate::select::Mode;
use crate::setting::{self, SettingError};
use crate::worker::{KvFormat, Roles, Worker};

/// A worker, or one rank of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The worker.
    pub worker: WorkerId,
    /// Its rank; absent: any.
    pub dp_rank: Option<u32>,
}

impl Target {
    /// Any rank of a worker.
    pub fn worker(worker: WorkerId) -> Self {
        Self { worker, dp_rank: None }
    }

    /// Whether `rank` is meant.
    pub fn includes(self, rank: WorkerRank) -> bool {
        self.worker == rank.worker && self.dp_rank.is_none_or(|dp_rank| dp_rank == rank.dp_rank)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dp_rank {
            Some(dp_rank) => write!(f, "{} rank {dp_rank}", self.worker.0),
            None => write!(f, "{}", self.worker.0),
        }
    }
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The model asked for.
    pub model: &'a str,
    /// Its prompt.
    pub prompt: &'a Prompt,
    /// Only workers that serve this LoRA adapter.
    pub lora: Option<&'a str>,
    /// Only workers of these roles.
    pub roles: Roles,
    /// Only workers whose KV fits one of these kinds: of its two parts the other runs elsewhere.
    pub partners: Option<&'a [KvFormat]>,
    /// Only workers of this revision.
    pub revision: Option<&'a str>,
    /// Only workers with these labels, as (name, value).
    pub labels: &'a [(String, String)],
    /// Only this worker will do.
    pub pinned: Option<Target>,
    /// Workers that failed this request already, or are not wanted.
    pub excluded: &'a [Target],
    /// Somebody reads its answer already: it goes on at once, over thresholds and before those that wait.
    pub begun: bool,
    /// Weights of its own ([`crate::CostOverrides::apply`]).
    pub cost: Option<CostConfig>,
    /// Picked in another way than the selector is set to.
    pub mode: Option<Mode>,
}

impl<'a> Request<'a> {
    /// A whole request that asks for nothing but a model.
    pub fn new(model: &'a str, prompt: &'a Prompt) -> Self {
        Self {
            model,
            prompt,
            lora: None,
            roles: Roles::WHOLE,
            partners: None,
            revision: None,
            labels: &[],
            pinned: None,
            excluded: &[],
            begun: false,
            cost: None,
            mode: None,
        }
    }

    /// Whether it could not go to just any worker of its model: then others may find room where it does not.
    pub fn is_constrained(&self) -> bool {
        self.lora.is_some()
            || self.revision.is_some()
            || self.pinned.is_some()
            || self.partners.is_some()
            || !(self.labels.is_empty() && self.excluded.is_empty())
    }
}

/// Why a worker was left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exclusion {
    /// It serves another model.
    OtherModel,
    /// It does not serve the LoRA adapter.
    AdapterNotServed,
    /// It runs another part of requests.
    OtherRole,
    /// Its KV fits that of nobody who runs the other part.
    KvDiffers,
    /// The request is pinned to another worker or rank.
    NotPinned,
    /// It is of another revision.
    OtherRevision,
    /// It lacks a label that is required.
    MissingLabel,
    /// It takes nothing new.
    Draining,
    /// There is no connection to it.
    Unreachable,
    /// It failed this request already, or is not wanted.
    Excluded,
    /// The share of its KV blocks in use is over `--active-decode-blocks-threshold`.
    BusyDecode,
    /// Its active prompt tokens are over `--active-prefill-tokens-threshold`, or the share of a batch over `…-frac`.
    BusyPrefill,
}

impl Exclusion {
    /// In words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OtherModel => "other model",
            Self::AdapterNotServed => "adapter not served",
            Self::OtherRole => "other role",
            Self::KvDiffers => "KV of another kind",
            Self::NotPinned => "not pinned",
            Self::OtherRevision => "other revision",
            Self::MissingLabel => "missing label",
            Self::Draining => "draining",
            Self::Unreachable => "unreachable",
            Self::Excluded => "excluded",
            Self::BusyDecode => "busy: KV blocks",
            Self::BusyPrefill => "busy: prompt tokens",
        }
    }
}

impl fmt::Display for Exclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// From what load a worker takes nothing more; each worker by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyThresholds {
    /// Share of its KV blocks in use by running requests, 0 to 1.
    pub decode_blocks: Option<f64>,
    /// Prompt tokens not yet computed.
    pub prefill_tokens: Option<u32>,
    /// The same as a share of the most tokens in one step of its engine, ≥ 0; above 1 for several steps.
    pub prefill_tokens_frac: Option<f64>,
}

impl BusyThresholds {
    /// Refuses thresholds outside their ranges.
    pub fn validate(&self) -> Result<(), SettingError> {
        self.decode_blocks.map_or(Ok(()), |share| setting::share("decode_blocks", share))?;
        self.prefill_tokens_frac.map_or(Ok(()), |frac| setting::not_negative("prefill_tokens_frac", frac))
    }

    /// Whether there is any.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }

    /// What makes a worker busy: what is booked there and what it has beyond that, since others may send to it, too. A worker
    /// whose capacity is unknown is not busy by a share of it.
    #[inline]
    pub(crate) fn exceeded(&self, worker: &Worker, load: RankView, unbooked: RankView) -> Option<Exclusion> {
        let blocks = load.active_blocks.saturating_add(unbooked.active_blocks);
        if let Some((share, total)) = self.decode_blocks.zip(worker.total_blocks)
            && f64::from(blocks) > share * f64::from(total)
        {
            return Some(Exclusion::BusyDecode);
        }
        let tokens = load.prefill_tokens.saturating_add(unbooked.prefill_tokens);
        let over_share = |(share, batch): (f64, u32)| f64::from(tokens) > share * f64::from(batch);
        let over = self.prefill_tokens.is_some_and(|most| tokens > most)
            || self.prefill_tokens_frac.zip(worker.max_batched_tokens).is_some_and(over_share);
        over.then_some(Exclusion::BusyPrefill)
    }
}

/// What keeps a request from a worker, its load aside. `serves`: whether the worker serves the model.
#[inline]
pub(crate) fn exclusion(worker: &Worker, serves: bool, request: &Request<'_>) -> Option<Exclusion> {
    if !serves {
        return Some(Exclusion::OtherModel);
    }
    if request.lora.is_some_and(|lora| !worker.adapters.iter().any(|adapter| **adapter == *lora)) {
        return Some(Exclusion::AdapterNotServed);
    }
    if !request.roles.contains(worker.role) {
        return Some(Exclusion::OtherRole);
    }
    if request.partners.is_some_and(|partners| !partners.iter().any(|kv| kv.fits(&worker.kv))) {
        return Some(Exclusion::KvDiffers);
    }
    if request.pinned.is_some_and(|pin| !pin.includes(worker.rank)) {
        return Some(Exclusion::NotPinned);
    }
    if request.revision.is_some_and(|revision| *worker.revision != *revision) {
        return Some(Exclusion::OtherRevision);
    }
    let has = |(name, value): &(String, String)| worker.labels.get(name.as_str()).is_some_and(|own| **own == **value);
    if !request.labels.iter().all(has) {
        return Some(Exclusion::MissingLabel);
    }
    if worker.draining {
        return Some(Exclusion::Draining);
    }
    if worker.unreachable {
        return Some(Exclusion::Unreachable);
    }
    request.excluded.iter().any(|target| target.includes(worker.rank)).then_some(Exclusion::Excluded)
}

/// Why workers were left out, as far as a refusal depends on it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LeftOut {
    busy: bool,
    /// Draining, unreachable or excluded: it would have done.
    unavailable: bool,
    /// Of another revision, or without a label.
    unmatched: bool,
    kv_differs: bool,
    not_pinned: bool,
}

impl LeftOut {
    pub(crate) fn note(&mut self, reason: Exclusion) {
        match reason {
            Exclusion::BusyDecode | Exclusion::BusyPrefill => self.busy = true,
            Exclusion::Draining | Exclusion::Unreachable | Exclusion::Excluded => self.unavailable = true,
            Exclusion::OtherRevision | Exclusion::MissingLabel => self.unmatched = true,
            Exclusion::KvDiffers => self.kv_differs = true,
            Exclusion::NotPinned => self.not_pinned = true,
            Exclusion::OtherModel | Exclusion::AdapterNotServed | Exclusion::OtherRole => {}
        }
    }

    /// What nobody being left means: the worker that came nearest decides.
    pub(crate) fn refusal(self, request: &Request<'_>) -> Refusal {
        match request.pinned {
            _ if self.busy => Refusal::Busy,
            _ if self.unavailable => Refusal::AllOut,
            _ if self.unmatched => Refusal::Unmatched,
            _ if self.kv_differs => Refusal::NoPartner,
            Some(pin) if self.not_pinned => Refusal::UnknownTarget(pin),
            _ => Refusal::NoWorker,
        }
    }
}

/// Why nobody was chosen.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refusal {
    /// No worker serves the model.
    #[error("no worker serves the model")]
    NoWorker,
    /// Workers serve the model, but none is of the revision or has the labels asked for.
    #[error("no worker that serves the model has the revision and labels asked for")]
    Unmatched,
    /// Workers serve the model, but the KV of none fits that of the worker which runs the other part of the request.
    #[error("no worker that serves the model can exchange KV with the one of the other half")]
    NoPartner,
    /// The pinned worker does not serve the model.
    #[error("worker {0} does not serve the model")]
    UnknownTarget(Target),
    /// In direct mode every request names its worker.
    #[error("the router mode is direct: the request must name its worker")]
    NeedsTarget,
    /// Workers serve it, but each is draining, unreachable or excluded.
    #[error("every worker that serves the model is draining, unreachable or excluded")]
    AllOut,
    /// Workers would do, but each of them is over a threshold.
    #[error("every worker that serves the model is busy")]
    Busy,
    /// Workers would do, but the prompts that each has to compute fill its batches: the request should wait.
    #[error("every worker that serves the model has as many prompt tokens as it may")]
    Saturated,
}
