//! Sequences of blocks that share beginnings, as a trie whose nodes are runs: blocks in a row with one value for all of them.
//!
//! Prompts share long beginnings, so one of thousands of blocks is a handful of runs. A run is cut where a sequence leaves it;
//! the parts are not joined again, so that there are at most as many runs as blocks.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use kv_hashing::SequenceHash;

use crate::hash::HashBuilder;

/// A run. Used again for another one when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunId(u32);

/// Bytes that the smallest tables take.
const LEAST: usize = 256;

/// What the first run of a sequence follows.
const NOTHING: RunId = RunId(u32::MAX);

#[derive(Debug)]
struct Run<V> {
    /// The run that it follows.
    before: RunId,
    /// Empty when it has ended.
    blocks: Box<[SequenceHash]>,
    value: V,
}

/// Runs with a value each. Every call that is given a sequence costs a lookup for each run that it goes through, and a comparison
/// for each of its blocks.
#[derive(Debug)]
pub struct Runs<V> {
    runs: Vec<Run<V>>,
    free: Vec<RunId>,
    /// A run by the run that it follows and its first block.
    begins: HashMap<(RunId, SequenceHash), RunId, HashBuilder>,
    /// Blocks of all runs.
    blocks: usize,
}

impl<V> Default for Runs<V> {
    fn default() -> Self {
        Self { runs: Vec::new(), free: Vec::new(), begins: HashMap::default(), blocks: 0 }
    }
}

impl<V> Runs<V> {
    /// Distinct blocks of all sequences.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Its memory, without what values own elsewhere: the runs and their blocks, and a table of which an eighth is always free,
    /// with a byte for each place.
    pub fn bytes(&self) -> usize {
        self.blocks * size_of::<SequenceHash>()
            + self.runs.capacity() * size_of::<Run<V>>()
            + self.free.capacity() * size_of::<RunId>()
            + self.begins.capacity() / 7 * 8 * (size_of::<((RunId, SequenceHash), RunId)>() + 1)
    }

    /// The most memory that what is in it takes: tables grow to twice that. Above it is room of runs that have ended
    /// ([`Self::compact`]).
    pub fn weight(&self) -> usize {
        let entry = size_of::<((RunId, SequenceHash), RunId)>() + 1;
        let run = size_of::<Run<V>>() + size_of::<RunId>() + entry.div_ceil(7) * 8;
        self.blocks * size_of::<SequenceHash>() + 2 * run * self.begins.len() + LEAST
    }

    /// Gives back the room of runs that have ended. Returns what each run is called from now on; `None` if it has ended. Cost: linear
    /// in the runs that there were at most.
    pub fn compact(&mut self) -> impl Fn(RunId) -> Option<RunId> + use<V> {
        let mut names = Vec::with_capacity(self.runs.len());
        let mut runs = Vec::with_capacity(self.begins.len());
        for run in std::mem::take(&mut self.runs) {
            let lives = !run.blocks.is_empty();
            names.push(lives.then_some(RunId(runs.len() as u32)));
            runs.extend(lives.then_some(run));
        }
        self.free = Vec::new();
        self.begins = HashMap::with_capacity_and_hasher(runs.len(), HashBuilder);
        for (at, run) in runs.iter_mut().enumerate() {
            if run.before != NOTHING {
                run.before = names[run.before.0 as usize].expect("what a run follows lives as long as it does");
            }
            self.begins.insert((run.before, run.blocks[0]), RunId(at as u32));
        }
        self.runs = runs;
        move |run| names[run.0 as usize]
    }

    /// The value and the blocks of a run; no blocks when it has ended.
    pub fn get(&self, run: RunId) -> (&V, &[SequenceHash]) {
        let run = &self.runs[run.0 as usize];
        (&run.value, &run.blocks)
    }

    /// Shows the runs that a sequence goes through, the last one perhaps in part: the value, and how many blocks are in common up
    /// to there. Ends when `visit` says no.
    pub fn walk(&self, blocks: &[SequenceHash], mut visit: impl FnMut(&V, usize) -> bool) {
        let (mut before, mut end) = (NOTHING, 0);
        while let Some(&id) = blocks.get(end).and_then(|first| self.begins.get(&(before, *first))) {
            let run = &self.runs[id.0 as usize];
            let common = common(&run.blocks, &blocks[end..]);
            end += common;
            if !visit(&run.value, end) || common < run.blocks.len() {
                break;
            }
            before = id;
        }
    }

    /// Shows the runs of a sequence that was inserted: the value, and how many blocks it is for. A run ends when `visit` says so,
    /// which it must then of what follows the run, too.
    pub fn release(&mut self, blocks: &[SequenceHash], mut visit: impl FnMut(&mut V, usize) -> bool)
    where
        V: Default,
    {
        let (mut before, mut rest) = (NOTHING, blocks);
        while let Some(&id) = rest.first().and_then(|first| self.begins.get(&(before, *first))) {
            let run = &mut self.runs[id.0 as usize];
            let Some(further) = rest.strip_prefix(&*run.blocks) else { break };
            if visit(&mut run.value, run.blocks.len()) {
                self.end(id);
            }
            (before, rest) = (id, further);
        }
    }

    /// Shortens a run that nothing follows to its first `length` blocks. Returns the others and, if none is left, so that the run
    /// has ended, the run before it.
    pub fn shorten(&mut self, id: RunId, length: usize) -> (Box<[SequenceHash]>, Option<RunId>)
    where
        V: Default,
    {
        let run = &mut self.runs[id.0 as usize];
        if length == 0 {
            let before = run.before;
            return (self.end(id), (before != NOTHING).then_some(before));
        }
        let rest: Box<[SequenceHash]> = run.blocks[length..].into();
        run.blocks = run.blocks[..length].into();
        self.blocks -= rest.len();
        (rest, None)
    }

    fn end(&mut self, id: RunId) -> Box<[SequenceHash]>
    where
        V: Default,
    {
        let none = Run { before: NOTHING, blocks: Box::default(), value: V::default() };
        let run = std::mem::replace(&mut self.runs[id.0 as usize], none);
        self.begins.remove(&(run.before, run.blocks[0]));
        self.blocks -= run.blocks.len();
        self.free.push(id);
        run.blocks
    }

    fn put(&mut self, run: Run<V>) -> RunId {
        let begin = (run.before, run.blocks[0]);
        self.blocks += run.blocks.len();
        let id = match self.free.pop() {
            Some(id) => {
                self.runs[id.0 as usize] = run;
                id
            }
            None => {
                self.runs.push(run);
                RunId((self.runs.len() - 1) as u32)
            }
        };
        self.begins.insert(begin, id);
        id
    }
}

impl<V: Clone + Default> Runs<V> {
    /// Puts a sequence in, and shows the runs that it then consists of, new ones with the default value: the value, and how many
    /// blocks it is for. Returns the last; none if there are no blocks.
    pub fn insert(&mut self, blocks: &[SequenceHash], mut visit: impl FnMut(&mut V, usize)) -> Option<RunId> {
        let (mut before, mut rest) = (NOTHING, blocks);
        while let Some(first) = rest.first() {
            let id = match self.begins.get(&(before, *first)) {
                Some(&id) => self.cut(id, common(&self.runs[id.0 as usize].blocks, rest)),
                None => self.put(Run { before, blocks: rest.into(), value: V::default() }),
            };
            let run = &mut self.runs[id.0 as usize];
            visit(&mut run.value, run.blocks.len());
            (before, rest) = (id, &rest[run.blocks.len()..]);
        }
        (before != NOTHING).then_some(before)
    }

    /// Makes the first `length` blocks of a run one of their own, and returns it. The rest stays the run that it was, and what
    /// follows still follows it.
    fn cut(&mut self, id: RunId, length: usize) -> RunId {
        let run = &mut self.runs[id.0 as usize];
        if length == run.blocks.len() {
            return id;
        }
        let upper = Run { before: run.before, blocks: run.blocks[..length].into(), value: run.value.clone() };
        run.blocks = run.blocks[length..].into();
        let first = run.blocks[0];
        self.blocks -= length;
        let upper = self.put(upper);
        self.runs[id.0 as usize].before = upper;
        self.begins.insert((upper, first), id);
        upper
    }
}

/// How many blocks two sequences begin with in common.
fn common(a: &[SequenceHash], b: &[SequenceHash]) -> usize {
    let differs = a.iter().zip(b).position(|(a, b)| a != b);
    differs.unwrap_or(a.len().min(b.len()))
}
