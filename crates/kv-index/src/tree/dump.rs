//! An index as events, parents first: what another one applies to become equal.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use kv_hashing::chain;

use super::Writer;
use super::owners::Slot;
use super::roster::TIERS;
use super::run::Place;
use super::store::{AHEAD, Rank};
use crate::event::{EngineHash, KvEventData, StoredBlock, Tier, WorkerRank};
use crate::hash::HashBuilder;

/// One event of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// Where the blocks live.
    pub tier: Tier,
    /// Stored, or removed.
    pub data: KvEventData,
}

impl Writer {
    /// What a rank holds, as events that make an empty rank hold it, too.
    ///
    /// A block behind one that the rank does not hold has no parent that could be named; it follows a made-up one, which is
    /// removed again at the end. Cost: about 40 bytes a block while it runs, and the events themselves.
    pub fn dump(&self, rank: WorkerRank) -> Vec<Dumped> {
        let Some(&slot) = self.slot_of.get(&rank) else { return Vec::new() };
        let Some(rank) = &self.ranks[usize::from(slot)] else { return Vec::new() };
        Dump::new(self, slot, rank).into_events()
    }
}

/// The blocks of one run that the rank holds in one tier.
struct Piece {
    /// Position of the run's first block: parents come first.
    depth: u32,
    run: u32,
    tier: Tier,
    /// In `named`.
    blocks: Range<usize>,
}

/// A stored event that may still grow.
struct OpenEvent {
    last: Place,
    parent: Option<EngineHash>,
    blocks: Vec<StoredBlock>,
}

struct Dump<'a> {
    writer: &'a Writer,
    slot: Slot,
    rank: &'a Rank,
    /// Engine hashes by place, for each tier, sorted; a place may come more than once.
    named: [Vec<(Place, u64)>; 4],
    made_up: HashMap<(Tier, Place), u64>,
    open: [Option<OpenEvent>; 4],
    events: Vec<Dumped>,
}

impl<'a> Dump<'a> {
    fn new(writer: &'a Writer, slot: Slot, rank: &'a Rank) -> Self {
        let named = TIERS.map(|tier| rank.tiers[tier as usize].by_place());
        let (made_up, open, events) = (HashMap::new(), Default::default(), Vec::new());
        Self { writer, slot, rank, named, made_up, open, events }
    }

    fn into_events(mut self) -> Vec<Dumped> {
        let pieces = self.pieces();
        let mut blocks: Vec<(Place, Tier, u64)> = Vec::new();
        let mut done = 0;
        for run in pieces.chunk_by(|a, b| a.run == b.run) {
            done += run.len();
            if let Some(later) = pieces.get(done + AHEAD / 2) {
                self.writer.runs.shared.arena.prefetch(later.run, 1 + later.blocks.len().div_ceil(8));
            }
            blocks.clear();
            for Piece { tier, blocks: piece, .. } in run {
                let named = &self.named[*tier as usize][piece.clone()];
                blocks.extend(named.iter().map(|&(place, hash)| (place, *tier, hash)));
            }
            if run.len() > 1 {
                blocks.sort_unstable();
            }
            for &(place, tier, hash) in &blocks {
                self.block(place, tier, hash);
            }
            self.close();
        }
        self.strays();
        let mut removed: Vec<_> = std::mem::take(&mut self.made_up).into_iter().collect();
        removed.sort_unstable_by_key(|((tier, place), _)| (*tier, std::cmp::Reverse(*place)));
        for group in removed.chunk_by(|((a, _), _), ((b, _), _)| a == b) {
            let blocks = group.iter().map(|(_, hash)| EngineHash(*hash)).collect();
            self.events.push(Dumped { tier: group[0].0.0, data: KvEventData::Removed { blocks } });
        }
        self.events
    }

    /// Parents first.
    fn pieces(&self) -> Vec<Piece> {
        let mut depths: HashMap<u32, u32, HashBuilder> = HashMap::default();
        let mut pieces = Vec::new();
        for tier in TIERS {
            let mut start = 0;
            for piece in self.named[tier as usize].chunk_by(|(a, _), (b, _)| a.run() == b.run()) {
                let (run, blocks) = (piece[0].0.run(), start..start + piece.len());
                start = blocks.end;
                pieces.push(Piece { depth: self.depth(&mut depths, run), run, tier, blocks });
            }
        }
        pieces.sort_unstable_by_key(|piece| (piece.depth, piece.run, piece.tier));
        pieces
    }

    /// Position of a run's first block.
    fn depth(&self, known: &mut HashMap<u32, u32, HashBuilder>, run: u32) -> u32 {
        let (mut way, mut at, mut depth) = (Vec::new(), run, 0);
        while at != 0 {
            if let Some(of) = known.get(&at) {
                depth = *of;
                break;
            }
            way.push(at);
            at = self.writer.runs.run(at).parent();
        }
        // Downwards again: the run at which the walk ended, or the root, is known.
        for at in way.into_iter().rev() {
            let run = self.writer.runs.run(at);
            if run.parent() != 0 {
                let above = known.get(&run.parent()).copied().unwrap_or(0);
                depth = above + run.state().parent_offset() as u32 + 1;
            } else {
                depth = 0;
            }
            known.insert(at, depth);
        }
        depth
    }

    fn stored(&self, place: Place, hash: u64) -> StoredBlock {
        let local = self.writer.runs.run(place.run()).local(place.offset());
        StoredBlock { engine: EngineHash(hash), local }
    }

    fn block(&mut self, place: Place, tier: Tier, hash: u64) {
        let stored = self.stored(place, hash);
        let before = self.writer.runs.before(place);
        if let Some(open) = &mut self.open[tier as usize]
            && Some(open.last) == before
        {
            open.last = place;
            open.blocks.push(stored);
            return;
        }
        // The parent may be in any event that is still open.
        self.close();
        let parent = before.map(|before| EngineHash(self.name(tier, before)));
        self.open[tier as usize] = Some(OpenEvent { last: place, parent, blocks: vec![stored] });
    }

    fn close(&mut self) {
        for tier in TIERS {
            if let Some(OpenEvent { parent, blocks, .. }) = self.open[tier as usize].take() {
                self.events.push(Dumped { tier, data: KvEventData::Stored { parent, blocks } });
            }
        }
    }

    /// What a child in `tier` calls the block at a place.
    fn name(&mut self, tier: Tier, place: Place) -> u64 {
        if let Some(known) = self.known_name(tier, place) {
            return known;
        }
        let mut missing = vec![place];
        let mut parent = None;
        while let Some(before) = self.writer.runs.before(missing[missing.len() - 1]) {
            if let Some(known) = self.known_name(tier, before) {
                parent = Some(EngineHash(known));
                break;
            }
            missing.push(before);
        }
        missing.reverse();
        let blocks: Vec<StoredBlock> = missing
            .into_iter()
            .map(|place| {
                let hash = self.make_up(place);
                self.made_up.insert((tier, place), hash);
                self.stored(place, hash)
            })
            .collect();
        let name = blocks.last().map_or(0, |block| block.engine.0);
        self.events.push(Dumped { tier, data: KvEventData::Stored { parent, blocks } });
        name
    }

    /// A hash by which a child in `tier` finds the place: of its own tier, or of another one where no tier that is asked
    /// before means something else by it.
    fn known_name(&self, tier: Tier, place: Place) -> Option<u64> {
        let own = self.hash_at(tier, place).or_else(|| self.made_up.get(&(tier, place)).copied());
        own.or_else(|| {
            TIERS.into_iter().filter_map(|other| self.hash_at(other, place)).find(|&hash| {
                let asked = std::iter::once(tier).chain(TIERS);
                let mut found = asked.filter_map(|tier| {
                    let engines = &self.rank.tiers[tier as usize];
                    engines.find(hash).map(|entry| engines.place(entry))
                });
                found.next() == Some(place)
            })
        })
    }

    fn hash_at(&self, tier: Tier, place: Place) -> Option<u64> {
        let named = &self.named[tier as usize];
        let at = named.partition_point(|(other, _)| *other < place);
        named.get(at).filter(|(other, _)| *other == place).map(|(_, hash)| *hash)
    }

    /// A hash that the rank uses in no tier.
    fn make_up(&self, place: Place) -> u64 {
        let sequence = self.writer.runs.sequence(place).map_or(0, |sequence| sequence.0);
        let mut hash = !sequence;
        while TIERS.into_iter().any(|tier| self.rank.tiers[tier as usize].find(hash).is_some()) {
            hash = hash.wrapping_add(1);
        }
        hash
    }

    /// Strays follow the prefix that they name.
    fn strays(&mut self) {
        if self.rank.strays == 0 {
            return;
        }
        let strays = self.writer.runs.shared.strays();
        for tier in TIERS {
            let mut left: Vec<_> = strays.of(self.slot, tier);
            left.sort_unstable_by_key(|(engine, _)| *engine);
            let mut done: HashSet<u64> = HashSet::new();
            // A stray with an opaque hash can only follow another stray: those whose hash names them come first.
            for pass in [true, false] {
                for (engine, stray) in &left {
                    if (chain(Some(stray.parent), stray.local).0 == engine.0) == pass && done.insert(engine.0) {
                        let parent = Some(EngineHash(stray.parent.0));
                        let blocks = vec![StoredBlock { engine: *engine, local: stray.local }];
                        self.events.push(Dumped { tier, data: KvEventData::Stored { parent, blocks } });
                    }
                }
            }
        }
    }
}
