//! The workers a decision chooses among: plain values, replaced as a whole when anything changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_index::{WorkerId, WorkerRank};

use crate::filter::{Request, exclusion};

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

/// What kind of KV a worker makes. One fits another unless both say something of theirs that differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KvFormat {
    /// Which revision of the weights computes it; absent when unknown.
    pub revision: Option<Arc<str>>,
    /// How a block of it is laid out; absent when unknown.
    pub layout: Option<Arc<str>>,
}

impl KvFormat {
    /// Whether a worker of this kind can use what one of the other kind computed, and the other way round.
    pub fn fits(&self, other: &Self) -> bool {
        let same = |one: &Option<Arc<str>>, other: &Option<Arc<str>>| one.is_none() || other.is_none() || one == other;
        same(&self.revision, &other.revision) && same(&self.layout, &other.layout)
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
    /// The KV that it makes.
    pub kv: KvFormat,
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
            kv: KvFormat::default(),
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
    /// The KV of some of them does not fit that of others.
    mixed: bool,
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

    /// Whether the KV of some of them does not fit that of others.
    pub fn mixes_kv(&self) -> bool {
        self.mixed
    }

    /// The kinds of KV that those make to whom a request could go, its load aside; each once. `None`: every worker of the set can
    /// exchange KV with every other. Cost: nothing then, else linear in the workers.
    pub fn kv_formats(&self, request: &Request<'_>) -> Option<Vec<KvFormat>> {
        if !self.mixed {
            return None;
        }
        let fit = self.serving(request.model).filter(|(worker, serves)| exclusion(worker, *serves, request).is_none());
        Some(distinct(fit.map(|(worker, _)| &worker.kv)))
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
        let formats = distinct(workers.iter().map(|worker| &worker.kv));
        let mixed = formats.iter().any(|one| formats.iter().any(|other| !one.fits(other)));
        Self { workers, models, model_of, mixed }
    }
}

/// Each once. There are as many as revisions and layouts in use: a few.
fn distinct<'a>(formats: impl Iterator<Item = &'a KvFormat>) -> Vec<KvFormat> {
    let mut found: Vec<KvFormat> = Vec::new();
    for format in formats {
        if !found.contains(format) {
            found.push(format.clone());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use kv_hashing::BlockSize;

    use super::*;
    use crate::filter::Target;
    use crate::load::Prompt;

    /// `?`: it does not say.
    fn kv(revision: &str, layout: &str) -> KvFormat {
        let said = |text: &str| (text != "?").then(|| text.into());
        KvFormat { revision: said(revision), layout: said(layout) }
    }

    fn worker(id: u64, role: Role, kv: KvFormat) -> Worker {
        Worker { role, kv, ..Worker::new(WorkerRank { worker: WorkerId(id), dp_rank: 0 }, "w", "m") }
    }

    #[test]
    fn kv_fits_where_nothing_that_both_say_differs() {
        for (one, other, fits) in [
            (kv("r1", "l1"), kv("r1", "l1"), true),
            (kv("r1", "l1"), kv("r2", "l1"), false),
            (kv("r1", "l1"), kv("r1", "l2"), false),
            (kv("", "l1"), kv("r2", "l1"), false),
            (kv("?", "l1"), kv("r2", "l1"), true),
            (kv("?", "l1"), kv("?", "l2"), false),
            (kv("?", "?"), kv("r1", "l1"), true),
        ] {
            assert_eq!((one.fits(&other), other.fits(&one)), (fits, fits), "{one:?} {other:?}");
        }
    }

    #[test]
    fn kinds_of_kv_are_those_of_the_workers_that_could_take_the_request() {
        let prompt = Prompt { blocks: [].into(), tokens: 1, block_size: BlockSize::new(4).expect("not zero") };
        let excluded = [Target::worker(WorkerId(4))];
        let request = Request { excluded: &excluded, ..Request::new("m", &prompt) };
        let alike: WorkerSet =
            [worker(1, Role::Decode, kv("r1", "?")), worker(2, Role::Prefill, kv("?", "l1"))].into_iter().collect();
        assert_eq!(alike.kv_formats(&request), None, "all fit all");
        let mixed = [
            worker(1, Role::Decode, kv("r1", "?")),
            worker(2, Role::Prefill, kv("r2", "?")),
            worker(3, Role::Aggregated, kv("r1", "?")),
            worker(4, Role::Decode, kv("r3", "?")),
            Worker { draining: true, ..worker(5, Role::Decode, kv("r4", "?")) },
        ];
        assert_eq!(mixed.into_iter().collect::<WorkerSet>().kv_formats(&request), Some(vec![kv("r1", "?")]));
    }
}
