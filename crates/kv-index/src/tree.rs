//! The index that the product runs: a tree of runs, one writer, any number of readers that take no lock.
//!
//! A run holds up to 64 consecutive blocks of one path; beside its local hashes it has one mask for each rank that owns some
//! of them. What readers follow lies in `arena`, `run`, `owners` and `children`. The writer alone has, for each rank and tier, an exact
//! map from engine hash to place (`engines`). Reasons and numbers: docs/decisions/0008-prefix-index.md.
//!
//! Events of all ranks go through one [`Writer`]: owned by one thread, or shared under a mutex that is taken for each batch.

#[allow(
    unsafe_code,
    reason = "zeroed memory seen as atomics, chunks that point into their slab, hints to processor and kernel"
)]
mod arena;
mod children;
mod dump;
mod engines;
mod evict;
mod find;
mod owners;
mod pause;
mod pool;
mod pooled;
mod roster;
mod run;
mod runs;
mod sample;
mod store;
mod strays;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use kv_hashing::{BlockHash, BlockSize, HashSpace};

use crate::event::{EngineHash, KvEventData, Tier, WorkerId, WorkerRank};
use crate::index::KvIndex;
use crate::overlap::{Applied, Overlaps, TierBlocks};
use arena::{Allocator, Arena};
use children::Children;
pub use dump::Dumped;
pub use find::Matches;
use owners::Slot;
use pool::Pool;
use roster::{Member, Roster, TIERS};
use runs::Runs;
use store::{Hand, Rank};
use strays::Strays;

/// Share of the budget that is stored in an era: what is used in one counts as newer than all that was last used before.
const ERAS: usize = 64;

/// About what a block takes: 16 bytes in its rank's map, 9 in the tree.
const BLOCK_BYTES: usize = 25;

/// What an index may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes, over everything. Past it the runs that were least recently stored or matched are dropped.
    pub bytes: usize,
    /// Most blocks of one rank, over all tiers, where [`Writer::set_limit`] says nothing else.
    pub rank_blocks: usize,
}

impl Default for Limits {
    /// 4 GiB, about 160 million blocks; [`crate::MAX_RANK_BLOCKS`] a rank. Memory is taken as it is needed.
    fn default() -> Self {
        Self { bytes: 4 << 30, rank_blocks: crate::MAX_RANK_BLOCKS }
    }
}

/// What an index has and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes taken, free lists included: what it costs the process.
    pub bytes: usize,
    /// Bytes in use.
    pub live_bytes: usize,
    /// Blocks that ranks hold; one in two tiers or of two ranks counts twice.
    pub owned_blocks: usize,
    /// Different prefixes.
    pub distinct_blocks: usize,
    /// Blocks stored under a parent that their rank does not hold.
    pub stray_blocks: usize,
    /// Blocks dropped for want of memory, ever.
    pub evicted_blocks: u64,
}

/// What writer and readers share.
struct Shared {
    arena: Arena,
    children: Children,
    /// Generation of `roster`.
    generation: AtomicU64,
    roster: Mutex<Arc<Roster>>,
    /// Of `strays`, so that readers need not lock to see that there are none.
    stray_count: AtomicUsize,
    strays: RwLock<Strays>,
    era: AtomicU32,
    /// Different prefixes in the tree.
    distinct: AtomicUsize,
}

impl Shared {
    fn roster(&self) -> MutexGuard<'_, Arc<Roster>> {
        // What a panicking writer left is whole: the roster is replaced by one assignment.
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn strays(&self) -> RwLockReadGuard<'_, Strays> {
        self.strays.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_strays<R>(&self, change: impl FnOnce(&mut Strays) -> R) -> R {
        let mut strays = self.strays.write().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut strays);
        self.stray_count.store(strays.len(), Ordering::Release);
        result
    }
}

/// The one that changes the index.
///
/// Cost: an event takes one cache line of the rank's map for each block; removing a rank a walk over its runs.
pub struct Writer {
    runs: Runs,
    pool: Pool,
    /// By slot; `None` is free.
    ranks: Vec<Option<Rank>>,
    slot_of: BTreeMap<WorkerRank, Slot>,
    free_slots: Vec<Slot>,
    limits: Limits,
    events: u64,
    /// Bytes stored in this era.
    stored: usize,
    /// Bytes outside of arena and pool, lately.
    lists: usize,
    evicted_blocks: u64,
    /// Blocks were refused for want of memory since the last look at the budget.
    starved: bool,
}

thread_local! {
    /// What a thread's last matches were made in, of two indexes: the next one of either allocates nothing but its answer.
    static LAST: Cell<[Option<Matches>; 2]> = const { Cell::new([None, None]) };
}

/// One that matches; cheap to clone, and used from any thread.
#[derive(Clone)]
pub struct Reader {
    shared: Arc<Shared>,
}

/// An empty index.
pub fn new(limits: Limits) -> (Writer, Reader) {
    let shared = Arc::new(Shared {
        arena: Arena::new(limits.bytes.min(4 << 30)),
        children: Children::new(),
        generation: AtomicU64::new(0),
        roster: Mutex::default(),
        stray_count: AtomicUsize::new(0),
        strays: RwLock::default(),
        era: AtomicU32::new(0),
        distinct: AtomicUsize::new(0),
    });
    let runs = Runs { shared: shared.clone(), allocator: Allocator::new(limits.bytes), era: 0, pin: None };
    let writer = Writer {
        runs,
        pool: Pool::new(limits.bytes),
        ranks: Vec::new(),
        slot_of: BTreeMap::new(),
        free_slots: Vec::new(),
        limits,
        events: 0,
        stored: 0,
        lists: 0,
        evicted_blocks: 0,
        starved: false,
    };
    (writer, Reader { shared })
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("distinct_blocks", &self.len()).finish_non_exhaustive()
    }
}

impl Writer {
    /// One more reader.
    pub fn reader(&self) -> Reader {
        Reader { shared: self.runs.shared.clone() }
    }

    /// Applies one event of `rank` to `tier`.
    ///
    /// A stored run whose parent is unknown to the rank (in every tier) is refused whole, unless its hashes themselves name the
    /// prefix. Duplicates have no effect; an engine hash stored again elsewhere moves there. `Cleared` empties every tier of
    /// the rank.
    ///
    /// A rank that holds as many blocks as it may gets no more: further ones are counted as refused, so that less is expected of
    /// the rank than it has, never more. Removals make room again.
    pub fn apply(&mut self, rank: WorkerRank, tier: Tier, data: &KvEventData) -> Applied {
        self.events += 1;
        let applied = match data {
            KvEventData::Stored { blocks, .. } if blocks.is_empty() => Applied::default(),
            KvEventData::Stored { parent, blocks } => match self.hand(rank, tier) {
                Some(hand) => hand.store(*parent, blocks),
                None => Applied { refused: blocks.len(), ..Applied::default() },
            },
            KvEventData::Removed { blocks } if !self.slot_of.contains_key(&rank) => {
                Applied { unknown: blocks.len(), ..Applied::default() }
            }
            KvEventData::Removed { blocks } => match self.hand(rank, tier) {
                Some(hand) => hand.remove(blocks),
                None => Applied::default(),
            },
            KvEventData::Cleared => Applied { removed: self.remove_rank(rank), ..Applied::default() },
        };
        self.advance(applied.added);
        self.starved |= applied.refused > 0 && !self.is_full(rank);
        self.keep_budget();
        applied
    }

    /// Announces how many blocks a rank will hold on its device, so that its map gets that size at once. A hint: at most half of what is
    /// left of the budget is taken for it.
    pub fn expect_blocks(&mut self, rank: WorkerRank, blocks: usize) {
        let Some(slot) = self.slot(rank) else { return };
        let room = self.limits.bytes.saturating_sub(self.live_bytes()) / 2 / BLOCK_BYTES;
        let Self { ranks, pool, .. } = self;
        if let Some(rank) = &mut ranks[usize::from(slot)] {
            rank.tiers[Tier::Device as usize].expect(pool, blocks.min(rank.limit).min(room));
        }
    }

    /// Bounds the blocks of a rank, over all tiers, until its worker is removed. What it holds already stays.
    pub fn set_limit(&mut self, rank: WorkerRank, blocks: usize) {
        if let Some(slot) = self.slot(rank)
            && let Some(rank) = &mut self.ranks[usize::from(slot)]
        {
            rank.limit = blocks;
        }
    }

    /// Forgets every rank of a worker; returns how many blocks it held, over all tiers. Readers miss it from the first moment.
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let at = |dp_rank| WorkerRank { worker, dp_rank };
        let ranks: Vec<(WorkerRank, Slot)> =
            self.slot_of.range(at(0)..=at(u32::MAX)).map(|(rank, slot)| (*rank, *slot)).collect();
        if ranks.is_empty() {
            return 0;
        }
        for (rank, _) in &ranks {
            self.slot_of.remove(rank);
        }
        self.publish_roster();
        let mut removed = 0;
        for (_, slot) in ranks {
            removed += self.clear_slot(slot);
            self.ranks[usize::from(slot)] = None;
            self.free_slots.push(slot);
        }
        removed
    }

    /// Forgets what one rank holds; returns how many blocks that was, over all tiers. Its limit stays.
    pub fn remove_rank(&mut self, rank: WorkerRank) -> usize {
        self.slot_of.get(&rank).copied().map_or(0, |slot| self.clear_slot(slot))
    }

    /// Whether a rank holds this very engine hash in a tier.
    pub fn contains(&self, rank: WorkerRank, tier: Tier, engine: EngineHash) -> bool {
        let Some(slot) = self.slot_of.get(&rank) else { return false };
        let Some(rank) = &self.ranks[usize::from(*slot)] else { return false };
        rank.tiers[tier as usize].find(engine.0).is_some()
            || rank.strays > 0 && self.runs.shared.strays().get(*slot, tier, engine).is_some()
    }

    /// Every rank that is known.
    pub fn ranks(&self) -> impl Iterator<Item = WorkerRank> + '_ {
        self.slot_of.keys().copied()
    }

    /// Bytes taken.
    pub fn bytes(&self) -> usize {
        self.runs.allocator.resident() + self.pool.resident() + self.list_bytes()
    }

    /// What there is, and what was done. Cost: a look at every rank.
    pub fn stats(&self) -> Stats {
        let owned = self.ranks.iter().flatten().map(|rank| rank.counts.get().total() as usize).sum();
        let strays = self.runs.shared.strays();
        Stats {
            bytes: self.bytes(),
            live_bytes: self.live_bytes(),
            owned_blocks: owned,
            distinct_blocks: self.runs.shared.distinct.load(Ordering::Relaxed) + strays.distinct(),
            stray_blocks: strays.len(),
            evicted_blocks: self.evicted_blocks,
        }
    }

    fn live_bytes(&self) -> usize {
        self.runs.allocator.live() + self.pool.live() + self.list_bytes()
    }

    /// Bytes outside of arena and pool.
    fn list_bytes(&self) -> usize {
        let maps: usize =
            self.ranks.iter().flatten().flat_map(|rank| &rank.tiers).map(engines::Engines::list_bytes).sum();
        maps + self.runs.shared.children.bytes() + self.ranks.capacity() * size_of::<Option<Rank>>()
    }

    fn advance(&mut self, stored: usize) {
        self.stored += stored * BLOCK_BYTES;
        if self.stored >= self.limits.bytes / ERAS {
            self.stored = 0;
            self.runs.era = self.runs.era.wrapping_add(1);
            self.runs.shared.era.store(self.runs.era, Ordering::Relaxed);
        }
    }

    /// Whether a rank holds as many blocks as it may.
    fn is_full(&self, rank: WorkerRank) -> bool {
        let rank = self.slot_of.get(&rank).and_then(|slot| self.ranks[usize::from(*slot)].as_ref());
        rank.is_none_or(|rank| rank.len() >= rank.limit)
    }

    fn hand(&mut self, rank: WorkerRank, tier: Tier) -> Option<Hand<'_>> {
        let slot = self.slot(rank)?;
        let Self { runs, pool, ranks, .. } = self;
        Some(Hand::new(runs, pool, ranks[usize::from(slot)].as_mut()?, slot, tier))
    }

    /// The slot of a rank, which it gets at its first mention. `None` when all 65,535 are taken.
    fn slot(&mut self, rank: WorkerRank) -> Option<Slot> {
        if let Some(slot) = self.slot_of.get(&rank) {
            return Some(*slot);
        }
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None => {
                let slot = Slot::try_from(self.ranks.len()).ok().filter(|slot| *slot < Slot::MAX)?;
                self.ranks.push(None);
                slot
            }
        };
        self.ranks[usize::from(slot)] = Some(Rank::new(self.limits.rank_blocks));
        self.slot_of.insert(rank, slot);
        self.publish_roster();
        Some(slot)
    }

    fn publish_roster(&mut self) {
        let members = self.slot_of.iter().filter_map(|(&rank, &slot)| {
            let counts = self.ranks[usize::from(slot)].as_ref()?.counts.clone();
            Some(Member { rank, slot, counts })
        });
        let mut roster = self.runs.shared.roster();
        *roster = Arc::new(Roster::new(members.collect()));
        self.runs.shared.generation.store(roster.generation, Ordering::Release);
    }

    fn clear_slot(&mut self, slot: Slot) -> usize {
        let Self { runs, pool, ranks, .. } = self;
        let Some(rank) = &mut ranks[usize::from(slot)] else { return 0 };
        rank.evicted = false;
        TIERS.into_iter().map(|tier| Hand::new(runs, pool, rank, slot, tier).clear()).sum()
    }
}

impl Reader {
    /// How many leading blocks of a prompt each rank holds, by their local hashes. Allocates nothing but the answer; [`Self::find`]
    /// not even that.
    pub fn find_matches(&self, blocks: &[BlockHash]) -> Overlaps {
        let generation = self.shared.generation.load(Ordering::Relaxed);
        let [newer, older] = LAST.take();
        let fits = newer.as_ref().is_some_and(|matches| matches.generation() == generation);
        let (kept, other) = if fits { (newer, older) } else { (older, newer) };
        let mut matches = kept.unwrap_or_default();
        self.find(blocks, &mut matches);
        let overlaps = matches.overlaps();
        LAST.set([Some(matches), other]);
        overlaps
    }

    /// The same from the tokens of a prompt.
    pub fn find_matches_for_request(&self, tokens: &[u32], size: BlockSize, space: HashSpace) -> Overlaps {
        self.find_matches(&space.blocks(tokens, size))
    }

    /// Blocks that a rank holds; a block in two tiers counts in both.
    pub fn blocks(&self, rank: WorkerRank) -> TierBlocks {
        let roster = self.shared.roster().clone();
        roster.member(rank).map_or_else(TierBlocks::default, |member| member.counts.get())
    }

    /// Different prefixes in the index.
    pub fn len(&self) -> usize {
        let strays = self.shared.stray_count.load(Ordering::Acquire);
        let flat = if strays > 0 { self.shared.strays().distinct() } else { 0 };
        self.shared.distinct.load(Ordering::Relaxed) + flat
    }

    /// Whether no rank holds anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl KvIndex for Writer {
    fn apply(&mut self, rank: WorkerRank, tier: Tier, data: &KvEventData) -> Applied {
        Self::apply(self, rank, tier, data)
    }

    fn set_limit(&mut self, rank: WorkerRank, blocks: usize) {
        Self::set_limit(self, rank, blocks);
    }

    fn remove_worker(&mut self, worker: WorkerId) -> usize {
        Self::remove_worker(self, worker)
    }

    fn remove_rank(&mut self, rank: WorkerRank) -> usize {
        Self::remove_rank(self, rank)
    }

    fn find_matches(&self, blocks: &[BlockHash]) -> Overlaps {
        self.reader().find_matches(blocks)
    }

    fn holds(&self, rank: WorkerRank, prefix: &[BlockHash]) -> bool {
        self.reader().holds(rank, prefix)
    }

    fn blocks(&self, rank: WorkerRank) -> TierBlocks {
        self.reader().blocks(rank)
    }

    fn len(&self) -> usize {
        self.reader().len()
    }
}
