//! Past decisions, for whoever asks why a request went where it did.
//!
//! A bounded ring. Recording copies the rows a decision computed anyway; the terms are evaluated when somebody looks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::filter::{Refusal, Request};
use crate::select::{Candidate, Decision, Explanation, Selector};

/// One past decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The request's id.
    pub request: Arc<str>,
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

/// The last decisions; the oldest go first. Memory: 64 bytes a row and about 400 a decision.
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
        id: Arc<str>,
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
            request: id,
            at,
            model: self.name(request.model),
            omitted: selector.candidates().len() - rows.len(),
            explanation: selector.explanation(request, Vec::new(), outcome),
        };
        self.rows.extend(rows);
        self.entries.push_back(Entry { record, rows: rows.len() });
    }

    /// The decisions about a request, oldest first: one for each attempt. Cost: linear in the decisions.
    pub fn get(&self, request: &str) -> Vec<Record> {
        let mut start = 0;
        let mut found = Vec::new();
        for entry in &self.entries {
            let end = start + entry.rows;
            if *entry.record.request == *request {
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
