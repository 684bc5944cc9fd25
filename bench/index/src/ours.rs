//! Our index, as it is measured.

use std::ops::Range;
use std::time::{Duration, Instant};

use kv_hashing::{BlockHash, sequence_hashes};
use kv_index::tree::{self, Limits, Matches, Reader, Writer};
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};

use crate::measure::{Find, Structure};
use crate::workload::Held;

/// The run tree.
pub struct Tree {
    writer: Writer,
    reader: Reader,
    matches: Matches,
    hint: bool,
}

/// A worker's only rank.
pub fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

/// Sequence hashes as engine hashes, as our engine has them.
pub fn sequence(locals: &[u64]) -> Vec<u64> {
    let locals: Vec<BlockHash> = locals.iter().map(|local| BlockHash(*local)).collect();
    sequence_hashes(&locals).into_iter().map(|hash| hash.0).collect()
}

impl Tree {
    /// An empty one; with `hint` the workers' sizes are announced.
    pub fn new(hint: bool, bytes: usize) -> Self {
        let (writer, reader) = tree::new(Limits { bytes, rank_blocks: usize::MAX });
        Self { writer, reader, matches: Matches::default(), hint }
    }

    /// The writer.
    pub fn writer(&mut self) -> &mut Writer {
        &mut self.writer
    }
}

impl Structure for Tree {
    type Event = (WorkerRank, KvEventData);
    type Hash = BlockHash;

    fn name(&self) -> String {
        if self.hint { "armature run tree" } else { "armature run tree, sizes not announced" }.to_owned()
    }

    fn hash(local: u64) -> BlockHash {
        BlockHash(local)
    }

    fn expect(&mut self, worker: u64, blocks: u64) {
        if self.hint {
            self.writer.expect_blocks(rank(worker), blocks as usize);
        }
    }

    fn stored(held: &Held, blocks: Range<usize>) -> Self::Event {
        let parent = blocks.start.checked_sub(1).map(|at| EngineHash(held.engines[at]));
        let block = |at: usize| StoredBlock { engine: EngineHash(held.engines[at]), local: BlockHash(held.locals[at]) };
        (rank(held.worker), KvEventData::Stored { parent, blocks: blocks.map(block).collect() })
    }

    fn removed(held: &Held, blocks: Range<usize>) -> Self::Event {
        let blocks = blocks.rev().map(|at| EngineHash(held.engines[at])).collect();
        (rank(held.worker), KvEventData::Removed { blocks })
    }

    fn apply(&mut self, events: Vec<Self::Event>) {
        for (rank, data) in &events {
            let applied = self.writer.apply(*rank, Tier::Device, data);
            assert_eq!((applied.orphans, applied.unknown, applied.refused), (0, 0, 0));
        }
    }

    fn find(&mut self, prompt: &[BlockHash]) -> usize {
        self.reader.find(prompt, &mut self.matches);
        self.matches.ranks()
    }

    fn reader(&self) -> Option<Find<BlockHash>> {
        let (reader, mut matches) = (self.reader.clone(), Matches::default());
        Some(Box::new(move |prompt| {
            reader.find(prompt, &mut matches);
            matches.ranks()
        }))
    }

    fn remove_worker(&mut self, worker: u64) {
        self.writer.remove_worker(WorkerId(worker));
    }

    fn dump_and_load(&mut self, workers: u64) -> Option<(usize, Duration, Duration)> {
        let (mut other, _) = tree::new(Limits { bytes: 4 << 30, rank_blocks: usize::MAX });
        let (mut all, mut dumping, mut loading) = (0, Duration::ZERO, Duration::ZERO);
        // One after the other, so that at 2^20 no dump of everything has to fit beside both.
        for rank in (0..workers).map(rank) {
            let start = Instant::now();
            let dump = self.writer.dump(rank);
            dumping += start.elapsed();
            let held = self.reader.blocks(rank);
            let start = Instant::now();
            other.expect_blocks(rank, held.device as usize);
            // To the end of its events, as the peer's.
            for event in dump {
                other.apply(rank, event.tier, &event.data);
            }
            loading += start.elapsed();
            assert_eq!(other.reader().blocks(rank), held);
            all += held.device as usize;
        }
        Some((all, dumping, loading))
    }

    fn counted_bytes(&mut self) -> Option<usize> {
        Some(self.writer.bytes())
    }
}
