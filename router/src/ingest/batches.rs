//! Runs of events in pieces small enough to be applied under one lock of the index.

use std::collections::VecDeque;

use kv_index::{KvEvent, KvEventData};

/// Most blocks applied under one lock: matches wait for no more than that, some 100 µs at 100 ns a block.
const BLOCKS: usize = 1024;

/// The events in order, in batches of at most [`BLOCKS`] blocks; an event of more is cut, with the same meaning and number.
pub(crate) struct Batches {
    events: std::vec::IntoIter<KvEvent>,
    /// What comes before `events`.
    cut: VecDeque<KvEvent>,
}

impl Batches {
    pub(crate) fn of(events: Vec<KvEvent>) -> Self {
        Self { events: events.into_iter(), cut: VecDeque::new() }
    }
}

impl Iterator for Batches {
    type Item = Vec<KvEvent>;

    fn next(&mut self) -> Option<Vec<KvEvent>> {
        let (mut batch, mut room) = (Vec::new(), BLOCKS);
        loop {
            if self.cut.is_empty() {
                let Some(event) = self.events.next() else { break };
                self.cut.extend(pieces(event));
            }
            let weight = self.cut.front().map_or(0, weight);
            if weight > room {
                break;
            }
            room -= weight;
            batch.extend(self.cut.pop_front());
        }
        (!batch.is_empty()).then_some(batch)
    }
}

/// In blocks; an event costs at least one.
fn weight(event: &KvEvent) -> usize {
    match &event.data {
        KvEventData::Stored { blocks, .. } => blocks.len().max(1),
        KvEventData::Removed { blocks } => blocks.len().max(1),
        KvEventData::Cleared => 1,
    }
}

fn pieces(event: KvEvent) -> Vec<KvEvent> {
    if weight(&event) <= BLOCKS {
        return vec![event];
    }
    let KvEvent { id, dp_rank, tier, data } = event;
    let parts: Vec<KvEventData> = match data {
        KvEventData::Stored { parent, blocks } => {
            let before = |at: usize| if at == 0 { parent } else { Some(blocks[at * BLOCKS - 1].engine) };
            let runs = blocks.chunks(BLOCKS).enumerate();
            runs.map(|(at, run)| KvEventData::Stored { parent: before(at), blocks: run.to_vec() }).collect()
        }
        KvEventData::Removed { blocks } => {
            blocks.chunks(BLOCKS).map(|part| KvEventData::Removed { blocks: part.to_vec() }).collect()
        }
        KvEventData::Cleared => vec![KvEventData::Cleared],
    };
    parts.into_iter().map(|data| KvEvent { id, dp_rank, tier, data }).collect()
}

#[cfg(test)]
mod tests {
    use kv_hashing::BlockHash;
    use kv_index::tree::{self, Limits};
    use kv_index::{EngineHash, KvIndex, StoredBlock, Tier, WorkerId, WorkerRank};

    use super::*;

    const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };

    /// Blocks whose engine hashes say nothing of the prefix.
    fn blocks(range: std::ops::Range<u64>) -> Vec<StoredBlock> {
        range.map(|n| StoredBlock { engine: EngineHash(n), local: BlockHash(n) }).collect()
    }

    fn event(data: KvEventData) -> KvEvent {
        KvEvent { id: 7, dp_rank: 0, tier: Tier::Device, data }
    }

    #[test]
    fn batches_are_small_and_mean_the_same() {
        let mut events = vec![event(KvEventData::Stored { parent: None, blocks: blocks(1..4001) })];
        events.extend(
            (4000..6000)
                .map(|n| event(KvEventData::Stored { parent: Some(EngineHash(n)), blocks: blocks(n + 1..n + 2) })),
        );
        let gone = (3500..5000).map(EngineHash).collect();
        events.push(event(KvEventData::Removed { blocks: gone }));
        let ((mut whole, _), (mut cut, _)) = (tree::new(Limits::default()), tree::new(Limits::default()));
        for event in &events {
            assert_eq!(whole.apply(RANK, event.tier, &event.data).orphans, 0);
        }
        for batch in Batches::of(events) {
            assert!(batch.iter().map(weight).sum::<usize>() <= BLOCKS);
            for event in &batch {
                assert_eq!((event.id, cut.apply(RANK, event.tier, &event.data).orphans), (7, 0));
            }
        }
        let locals: Vec<BlockHash> = (1..6001).map(BlockHash).collect();
        assert_eq!((cut.len(), cut.find_matches(&locals)), (whole.len(), whole.find_matches(&locals)));
        assert_eq!(cut.find_matches(&locals).get(RANK).device, 3499);
    }

    #[test]
    fn nothing_makes_no_batch() {
        assert_eq!(Batches::of(Vec::new()).next(), None);
    }
}
