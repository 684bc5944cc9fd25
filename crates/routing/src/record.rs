//! Past decisions, for whoever asks why a request went where it did.
//!
//! A bounded ring. Recording copies the rows a decision computed anyway; the terms are evaluated when somebody looks.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::filter::{Refusal, Request};
use crate::select::{Candidate, Decision, Explanation, Selector};

/// What a request is called: by the router, and by others who may ask for it. Cheap to clone; all clones are told of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestNames(Arc<Names>);

#[derive(Debug, PartialEq)]
struct Names {
    id: Box<str>,
    known_as: Arc<[Box<str>]>,
    answer: OnceLock<Box<str>>,
}

impl RequestNames {
    /// A request of this id, and other names that are known by now.
    pub fn new(id: &str, known_as: Arc<[Box<str>]>) -> Self {
        Self(Arc::new(Names { id: id.into(), known_as, answer: OnceLock::new() }))
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Whoever answers it calls the answer so. The first name stays.
    pub fn answered_as(&self, name: &str) {
        self.0.answer.get_or_init(|| name.into());
    }

    /// Whether this is one of its names.
    pub fn include(&self, name: &str) -> bool {
        let Names { id, known_as, answer } = &*self.0;
        [id].into_iter().chain(known_as.iter()).chain(answer.get()).any(|own| **own == *name)
    }
}

impl From<&str> for RequestNames {
    fn from(id: &str) -> Self {
        Self::new(id, Arc::default())
    }
}

impl fmt::Display for RequestNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// One past decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The request.
    pub request: RequestNames,
    /// When it was decided, in the caller's time.
    pub at: Duration,
    /// The model asked for.
    pub model: Arc<str>,
    /// Workers beyond the number that a log of this size holds, left out of the explanation.
    pub omitted: usize,
    /// How each worker came out.
    pub explanation: Explanation,
}

#[derive(Debug)]
struct Entry {
    /// Without rows.
    record: Record,
    rows: usize,
}

/// The last decisions; the oldest go first. Memory: 64 bytes a row and about 600 a decision.
#[derive(Debug)]
pub struct DecisionLog {
    entries: VecDeque<Entry>,
    /// The rows of all entries, one after the other.
    rows: VecDeque<Candidate>,
    max_decisions: usize,
    max_rows: usize,
}

impl DecisionLog {
    /// An empty log of at most so many decisions, and so many rows (one a worker) over all of them.
    pub fn new(max_decisions: usize, max_rows: usize) -> Self {
        Self { entries: VecDeque::new(), rows: VecDeque::new(), max_decisions, max_rows }
    }

    /// Records the last decision of `selector`, which was about `request`. Cost: a copy of its rows.
    pub fn push(
        &mut self,
        names: RequestNames,
        at: Duration,
        selector: &Selector,
        request: &Request<'_>,
        outcome: Result<Decision, Refusal>,
    ) {
        if self.max_decisions == 0 {
            return;
        }
        let rows = &selector.candidates()[..selector.candidates().len().min(self.max_rows)];
        while self.entries.len() >= self.max_decisions || self.rows.len() + rows.len() > self.max_rows {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.rows.drain(..oldest.rows);
        }
        let record = Record {
            request: names,
            at,
            model: self.name(request.model),
            omitted: selector.candidates().len() - rows.len(),
            explanation: selector.explanation(request, Vec::new(), outcome),
        };
        self.rows.extend(rows);
        self.entries.push_back(Entry { record, rows: rows.len() });
    }

    /// The decisions about the requests of this name, oldest first: one for each attempt. Cost: linear in the decisions.
    pub fn get(&self, name: &str) -> Vec<Record> {
        let mut start = 0;
        let mut found = Vec::new();
        for entry in &self.entries {
            let end = start + entry.rows;
            if entry.record.request.include(name) {
                let mut record = entry.record.clone();
                record.explanation.candidates.extend(self.rows.range(start..end));
                found.push(record);
            }
            start = end;
        }
        found
    }

    /// Decisions held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Rows held, over all decisions.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// A model's name; most requests ask for the same model as the one before.
    fn name(&self, model: &str) -> Arc<str> {
        let last = self.entries.back().map(|entry| &entry.record.model);
        last.filter(|last| ***last == *model).cloned().unwrap_or_else(|| model.into())
    }
}

#[cfg(test)]
mod tests;
