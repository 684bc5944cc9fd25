//! The workers a decision chooses among: plain values, replaced as a whole when anything changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_index::{WorkerId, WorkerRank};

/// Which part of a request a worker runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// All of it.
    #[default]
    Aggregated,
    /// The prompt, for a decode worker to go on with.
    Prefill,
    /// The answer, from KV that a prefill worker computed; a whole request too, where nobody prefills.
    Decode,
}

impl Role {
    /// The role of this name, as model cards spell it.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Aggregated, Self::Prefill, Self::Decode].into_iter().find(|role| role.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A set of roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Roles(u8);

impl Roles {
    /// Who can run a request from prompt to end.
    pub const WHOLE: Self = Self(1 << Role::Aggregated as u8 | 1 << Role::Decode as u8);
    /// How many sets there are.
    pub(crate) const SETS: usize = 8;

    /// One role alone.
    pub fn only(role: Role) -> Self {
        Self(1 << role as u8)
    }

    /// Whether a role is in it.
    pub fn contains(self, role: Role) -> bool {
        self.0 & 1 << role as u8 != 0
    }

    /// Its number, below [`Self::SETS`].
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// One rank of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Worker and rank.
    pub rank: WorkerRank,
    /// Pod or process, for people.
    pub name: Arc<str>,
    /// The model it serves, as clients call it.
    pub model: Arc<str>,
    /// What it runs.
    pub role: Role,
    /// Revision of the deployment it belongs to; empty when unknown.
    pub revision: Arc<str>,
    /// Free labels.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// LoRA adapters it serves.
    pub adapters: Arc<[Arc<str>]>,
    /// KV blocks in its device memory.
    pub total_blocks: Option<u32>,
    /// Most tokens in one step of its engine.
    pub max_batched_tokens: Option<u32>,
    /// Finishes what it has and takes nothing new.
    pub draining: bool,
    /// There is no connection to it now.
    pub unreachable: bool,
}

impl Worker {
    /// An aggregated worker of which nothing else is known.
    pub fn new(rank: WorkerRank, name: impl Into<Arc<str>>, model: impl Into<Arc<str>>) -> Self {
        Self {
            rank,
            name: name.into(),
            model: model.into(),
            role: Role::Aggregated,
            revision: "".into(),
            labels: BTreeMap::new(),
            adapters: [].into(),
            total_blocks: None,
            max_batched_tokens: None,
            draining: false,
            unreachable: false,
        }
    }
}

/// A snapshot of all workers, in order of rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerSet {
    workers: Vec<Worker>,
    /// The models that they serve, in order.
    models: Vec<Arc<str>>,
    /// By worker, its place in `models`: a decision compares numbers, not names.
    model_of: Vec<u32>,
}

impl WorkerSet {
    /// Every worker, in order of rank.
    pub fn iter(&self) -> std::slice::Iter<'_, Worker> {
        self.workers.iter()
    }

    /// Every worker, in order of rank, and whether it serves `model`.
    pub(crate) fn serving<'a>(&'a self, model: &str) -> impl ExactSizeIterator<Item = (&'a Worker, bool)> + use<'a> {
        let wanted = self.models.binary_search_by(|name| (**name).cmp(model)).ok().map(|at| at as u32);
        self.workers.iter().zip(&self.model_of).map(move |(worker, model)| (worker, wanted == Some(*model)))
    }

    /// One of them.
    pub fn get(&self, rank: WorkerRank) -> Option<&Worker> {
        self.workers.binary_search_by_key(&rank, |w| w.rank).ok().map(|i| &self.workers[i])
    }

    /// Whether any rank of a worker serves `model`.
    pub(crate) fn serves(&self, worker: WorkerId, model: &str) -> bool {
        let first = self.workers.partition_point(|other| other.rank.worker < worker);
        let ranks = self.workers[first..].iter().take_while(|other| other.rank.worker == worker);
        ranks.into_iter().any(|other| *other.model == *model)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }
}

impl FromIterator<Worker> for WorkerSet {
    /// Of several entries for one rank the last one counts.
    fn from_iter<I: IntoIterator<Item = Worker>>(workers: I) -> Self {
        let by_rank: BTreeMap<WorkerRank, Worker> = workers.into_iter().map(|w| (w.rank, w)).collect();
        let workers: Vec<Worker> = by_rank.into_values().collect();
        let models: BTreeSet<Arc<str>> = workers.iter().map(|worker| worker.model.clone()).collect();
        let models: Vec<Arc<str>> = models.into_iter().collect();
        let place = |worker: &Worker| models.partition_point(|model| *model < worker.model) as u32;
        let model_of = workers.iter().map(place).collect();
        Self { workers, models, model_of }
    }
}
