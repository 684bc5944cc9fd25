//! The workers a decision chooses among: plain values, replaced as a whole when anything changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_index::WorkerRank;

/// One rank of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Worker and rank.
    pub rank: WorkerRank,
    /// Pod or process, for people.
    pub name: Arc<str>,
    /// The model it serves, as clients call it.
    pub model: Arc<str>,
    /// Finishes what it has and takes nothing new.
    pub draining: bool,
}

/// A snapshot of all workers, in order of rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerSet {
    workers: Vec<Worker>,
}

impl WorkerSet {
    /// Every worker, in order of rank.
    pub fn iter(&self) -> std::slice::Iter<'_, Worker> {
        self.workers.iter()
    }

    /// One of them.
    pub fn get(&self, rank: WorkerRank) -> Option<&Worker> {
        self.workers.binary_search_by_key(&rank, |w| w.rank).ok().map(|i| &self.workers[i])
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
        Self { workers: by_rank.into_values().collect() }
    }
}
