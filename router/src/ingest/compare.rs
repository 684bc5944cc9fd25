//! Is the index right? A few blocks of each rank are compared with what its worker says of itself, in both directions.
//!
//! Both sides change all the time, so they are compared at the same point of the events: the worker says which event its answer
//! includes last, and the comparison waits until that one is applied. Blocks that any event has touched since the index was
//! looked at are left out. What remains must be equal; if it is not, the whole state of the rank is fetched anew.

use std::collections::HashSet;
use std::pin::Pin;
use std::time::Duration;

use kv_index::{EngineHash, KvEvent, KvEventData, WorkerRank};
use tokio::time::Instant;

use super::{Ingest, query};
use crate::index::{Block, Look};
use crate::metrics::ReasonLabels;
use query::{QueryError, Sampled};

/// Blocks compared in each direction.
const BLOCKS: usize = 64;

/// Most blocks touched while a comparison is under way; a worker with more of them is compared another time.
const TOUCHED: usize = 1 << 16;

/// Shortest and longest time between two repairs of a rank, in comparisons: those that do not help become rare.
const REPAIRS: (u32, u32) = (6, 360);

/// A comparison under way.
pub(super) struct Check {
    dp_rank: u32,
    /// Number of the first event that the index had not seen when `asked` was drawn from it.
    next: u64,
    asked: Vec<Block>,
    touched: HashSet<EngineHash>,
    void: bool,
    answer: Option<Sampled>,
}

/// The answer of a worker.
pub(super) type Sample = Pin<Box<dyn Future<Output = Result<Sampled, QueryError>> + Send>>;

/// How far a comparison is.
#[derive(Debug, PartialEq, Eq)]
enum Stand {
    /// The answer is not there, or includes events that are still on their way.
    Waiting,
    /// It says nothing.
    Void,
    /// Blocks that the worker has can be looked up.
    Ready,
}

/// What a comparison showed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Findings {
    /// Blocks of the index that were compared, and those that the worker does not hold.
    index: (usize, usize),
    /// The same for blocks of the worker.
    worker: (usize, usize),
}

impl Check {
    fn new(dp_rank: u32, next: u64, asked: Vec<Block>) -> Self {
        Self { dp_rank, next, asked, touched: HashSet::new(), void: false, answer: None }
    }

    /// Events of a rank are about to be applied.
    pub(super) fn touch(&mut self, dp_rank: u32, events: &[KvEvent]) {
        if dp_rank != self.dp_rank {
            return;
        }
        for event in events {
            match &event.data {
                KvEventData::Stored { blocks, .. } => self.touched.extend(blocks.iter().map(|block| block.engine)),
                KvEventData::Removed { blocks } => self.touched.extend(blocks),
                // A restart, or a dump: everything may be different.
                KvEventData::Cleared => self.void = true,
            }
        }
        self.void |= self.touched.len() > TOUCHED;
    }

    /// How far it is when `next` is the first event that has not been applied.
    fn stand(&self, next: u64) -> Stand {
        let Some(answer) = &self.answer else { return if self.void { Stand::Void } else { Stand::Waiting } };
        let after = answer.last_event_id.map_or(0, |last| last + 1);
        // An answer from before the look can only come from another life of the engine.
        if self.void || after < self.next || answer.held.len() != self.asked.len() {
            Stand::Void
        } else if next < after {
            Stand::Waiting
        } else {
            Stand::Ready
        }
    }

    /// What is right and wrong; `look` says which of the worker's blocks the index holds.
    fn findings(&self, look: &Look) -> Findings {
        let Some(answer) = &self.answer else { return Findings::default() };
        let count = |blocks: &[Block], held: &[bool]| {
            let settled = blocks.iter().zip(held).filter(|((_, engine), _)| !self.touched.contains(engine));
            settled.fold((0, 0), |(all, wrong), (_, held)| (all + 1, wrong + usize::from(!held)))
        };
        Findings { index: count(&self.asked, &answer.held), worker: count(&answer.drawn, &look.held) }
    }
}

/// When a rank was repaired.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    last: Option<Instant>,
    /// Those that were followed by another mistake.
    in_vain: u32,
}

impl Repairs {
    /// Whether it is time for another one, which is noted.
    fn take(&mut self, now: Instant, every: Duration) -> bool {
        let pause = every * (REPAIRS.0 << self.in_vain.min(16)).min(REPAIRS.1);
        let due = self.last.is_none_or(|last| now - last >= pause);
        if due {
            self.in_vain += u32::from(self.last.is_some());
            self.last = Some(now);
        }
        due
    }

    /// Everything was right.
    fn helped(&mut self) {
        self.in_vain = 0;
    }
}

impl Ingest {
    /// Begins a comparison of the rank whose turn it is; one that has not ended by now is given up.
    pub(super) async fn begin_check(&mut self) {
        self.samples.clear();
        if self.check.take().is_some() {
            self.count_check("abandoned");
        }
        let dp_rank = self.turn % self.feed.ranks;
        self.turn = self.turn.wrapping_add(1);
        let cursor = &self.ranks[dp_rank as usize].cursor;
        if !cursor.is_live() {
            return;
        }
        let next = cursor.next();
        let rank = WorkerRank { worker: self.feed.worker, dp_rank };
        let Some(look) = self.feed.index.look(rank, Vec::new(), BLOCKS, &self.feed.stop).await else { return };
        let asked = look.drawn.clone();
        self.check = Some(Check::new(dp_rank, next, look.drawn));
        let client = self.feed.client.clone();
        self.samples.push(Box::pin(async move { query::sample(&client, dp_rank, &asked, BLOCKS).await }));
    }

    /// The worker answered.
    pub(super) fn sampled(&mut self, result: Result<Sampled, QueryError>) {
        match (result, &mut self.check) {
            (Ok(answer), Some(check)) => check.answer = Some(answer),
            (Err(error), _) => {
                tracing::debug!(worker = %self.feed.name, %error, "no comparison with the worker");
                self.check = None;
                self.count_check("failed");
            }
            (Ok(_), None) => {}
        }
    }

    /// Ends the comparison if it can be ended now.
    pub(super) async fn compare(&mut self) {
        let Some(check) = &self.check else { return };
        let (dp_rank, cursor) = (check.dp_rank, &self.ranks[check.dp_rank as usize].cursor);
        match check.stand(cursor.next()) {
            // What is being recovered is known to be wrong.
            Stand::Ready if cursor.is_live() => {}
            Stand::Ready | Stand::Waiting => return,
            Stand::Void => {
                self.check = None;
                return self.count_check("abandoned");
            }
        }
        let Some(check) = self.check.take() else { return };
        let rank = WorkerRank { worker: self.feed.worker, dp_rank };
        let theirs = check.answer.as_ref().map_or_else(Vec::new, |answer| answer.drawn.clone());
        let Some(look) = self.feed.index.look(rank, theirs, 0, &self.feed.stop).await else { return };
        self.judge(dp_rank, &check.findings(&look), look.evicted);
    }

    fn judge(&mut self, dp_rank: u32, found: &Findings, evicted: bool) {
        let metrics = &self.feed.metrics;
        for (reason, (all, wrong)) in [("index", found.index), ("worker", found.worker)] {
            let labels = ReasonLabels { reason };
            metrics.index_checked.get_or_create(&labels).inc_by(all as u64);
            metrics.index_wrong.get_or_create(&labels).inc_by(wrong as u64);
        }
        let rank = &mut self.ranks[dp_rank as usize];
        // What the index could not take is no mistake, and asking for it again would not help.
        let missing = if evicted || rank.refused { 0 } else { found.worker.1 };
        if found.index.1 + missing == 0 {
            rank.repairs.helped();
            return self.count_check("agreed");
        }
        self.count_check("disagreed");
        self.repair(dp_rank, found.index.1, missing);
    }

    /// Fetches the whole state of a rank, unless that was done just now.
    fn repair(&mut self, dp_rank: u32, vanished: usize, missing: usize) {
        let rank = &mut self.ranks[dp_rank as usize];
        if !rank.cursor.is_live() || !rank.repairs.take(Instant::now(), self.feed.index.check_every()) {
            return;
        }
        rank.cursor.wish_dump();
        let worker = &self.feed.name;
        if rank.repairs.in_vain == 0 {
            tracing::info!(
                worker,
                dp_rank,
                vanished,
                missing,
                "the index differs from the worker's own blocks: fetching all"
            );
        } else {
            tracing::warn!(
                worker,
                dp_rank,
                vanished,
                missing,
                "the index differs from the worker's own blocks once more"
            );
        }
        self.feed.metrics.index_repairs.inc();
        self.settle(dp_rank);
    }

    fn count_check(&self, reason: &'static str) {
        self.feed.metrics.index_checks.get_or_create(&ReasonLabels { reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use kv_index::Tier;

    use super::*;

    fn block(hash: u64) -> Block {
        (Tier::Device, EngineHash(hash))
    }

    fn removed(id: u64, hash: u64) -> KvEvent {
        let data = KvEventData::Removed { blocks: vec![EngineHash(hash)] };
        KvEvent { id, dp_rank: 0, tier: Tier::Device, data }
    }

    fn answered(last_event_id: Option<u64>, held: Vec<bool>, drawn: Vec<Block>) -> Check {
        let mut check = Check::new(0, 10, vec![block(1), block(2), block(3)]);
        assert_eq!(check.stand(100), Stand::Waiting, "no answer yet");
        check.answer = Some(Sampled { held, drawn, last_event_id });
        check
    }

    #[test]
    fn blocks_whose_events_are_on_their_way_do_not_count() {
        let mut check = answered(Some(11), vec![true, false, false], vec![block(4), block(5)]);
        check.touch(1, &[removed(10, 3)]);
        check.touch(0, &[removed(10, 2)]);
        assert_eq!(check.stand(11), Stand::Waiting, "the worker has seen one more event");
        check.touch(0, &[removed(11, 5)]);
        assert_eq!(check.stand(12), Stand::Ready);
        let look = Look { held: vec![false, false], ..Look::default() };
        assert_eq!(check.findings(&look), Findings { index: (2, 1), worker: (1, 1) });
    }

    #[test]
    fn a_restart_makes_a_comparison_void() {
        let held = vec![true; 3];
        assert_eq!(answered(Some(8), held.clone(), Vec::new()).stand(10), Stand::Void, "an older state than ours");
        assert_eq!(answered(Some(9), held.clone(), Vec::new()).stand(10), Stand::Ready);
        assert_eq!(answered(Some(9), vec![true], Vec::new()).stand(10), Stand::Void, "an answer to something else");
        let mut cleared = answered(Some(9), held, Vec::new());
        cleared.touch(0, &[KvEvent { id: 0, dp_rank: 0, tier: Tier::Device, data: KvEventData::Cleared }]);
        assert_eq!(cleared.stand(10), Stand::Void);
    }

    #[test]
    fn repairs_that_do_not_help_become_rare() {
        let (mut repairs, start) = (Repairs::default(), Instant::now());
        let (every, minute) = (Duration::from_secs(10), Duration::from_secs(60));
        let taken = |repairs: &mut Repairs, from: u32| -> Vec<u32> {
            (from..from + 200).filter(|at| repairs.take(start + minute * *at, every)).collect()
        };
        assert_eq!(taken(&mut repairs, 0), [0, 1, 3, 7, 15, 31, 63, 123, 183]);
        repairs.helped();
        assert_eq!(taken(&mut repairs, 200)[..3], [200, 202, 206]);
    }
}
