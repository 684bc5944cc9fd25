//! Which events share a message.

use std::sync::Arc;

use kv_index::{KvEvent, KvEventData};
use protocol::event_plane::{MAX_BATCH_BLOCKS, MAX_BATCH_EVENTS};

/// Cuts `events` into messages, in order: as few as the limits allow. An event that is over the limit of blocks by itself
/// is alone in its message.
pub(super) fn batches(events: &[Arc<KvEvent>]) -> impl Iterator<Item = &[Arc<KvEvent>]> {
    let mut rest = events;
    std::iter::from_fn(move || {
        let mut blocks = 0;
        let fits = |event: &&Arc<KvEvent>| {
            blocks += block_count(event);
            blocks <= MAX_BATCH_BLOCKS
        };
        let len = rest.iter().take(MAX_BATCH_EVENTS).take_while(fits).count().max(1);
        let (batch, later) = rest.split_at_checked(len)?;
        rest = later;
        Some(batch)
    })
}

fn block_count(event: &KvEvent) -> usize {
    match &event.data {
        KvEventData::Stored { blocks, .. } => blocks.len(),
        KvEventData::Removed { blocks } => blocks.len(),
        KvEventData::Cleared => 0,
    }
}

#[cfg(test)]
mod tests {
    use kv_index::{EngineHash, Tier};

    use super::*;

    fn sizes(blocks: &[usize]) -> Vec<usize> {
        let event = |(id, &len): (usize, &usize)| {
            let data = KvEventData::Removed { blocks: vec![EngineHash(0); len] };
            Arc::new(KvEvent { id: id as u64, dp_rank: 0, tier: Tier::Device, data })
        };
        let events: Vec<_> = blocks.iter().enumerate().map(event).collect();
        let cut: Vec<&[Arc<KvEvent>]> = batches(&events).collect();
        let ids: Vec<u64> = cut.concat().iter().map(|event| event.id).collect();
        assert_eq!(ids, (0..blocks.len() as u64).collect::<Vec<_>>(), "every event once, in order");
        cut.iter().map(|batch| batch.len()).collect()
    }

    #[test]
    fn both_limits_cut() {
        assert!(sizes(&[]).is_empty());
        assert_eq!(sizes(&[1; 128]), [128]);
        assert_eq!(sizes(&[1; 129]), [128, 1]);
        assert_eq!(sizes(&[4096, 4096, 1]), [2, 1]);
        assert_eq!(sizes(&[9000, 1, 9000]), [1, 1, 1]);
    }
}
