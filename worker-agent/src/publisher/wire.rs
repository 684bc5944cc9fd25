//! KV events from their meaning to their wire form.

use kv_index::{KvEvent, KvEventData, Tier};
use protocol::kv_event::{KvCacheEvent, KvCacheEventData, Removed, RouterEvent, StorageTier, Stored, StoredBlock};

/// The wire form of one event.
pub(crate) fn router_event(worker_id: u64, event: &KvEvent) -> RouterEvent {
    RouterEvent {
        worker_id,
        storage_tier: match event.tier {
            Tier::Device => StorageTier::Device,
            Tier::Host => StorageTier::HostPinned,
            Tier::Disk => StorageTier::Disk,
            Tier::Shared => StorageTier::External,
        },
        residency_domain: Some("worker".to_owned()),
        event: KvCacheEvent { event_id: event.id, dp_rank: event.dp_rank, data: data(&event.data) },
    }
}

fn data(data: &KvEventData) -> KvCacheEventData {
    match data {
        KvEventData::Stored { parent, blocks } => KvCacheEventData::Stored(Stored {
            parent_hash: parent.map(|parent| parent.0),
            start_position: None,
            blocks: blocks.iter().map(|b| StoredBlock { block_hash: b.engine.0, tokens_hash: b.local.0 }).collect(),
        }),
        KvEventData::Removed { blocks } => {
            KvCacheEventData::Removed(Removed { block_hashes: blocks.iter().map(|block| block.0).collect() })
        }
        KvEventData::Cleared => KvCacheEventData::Cleared,
    }
}

/// About how many bytes an event takes as msgpack, never less: 42 a stored block (two named numbers of nine bytes), nine a
/// removed one, and what surrounds them.
pub(crate) fn encoded_bytes(event: &KvEvent) -> usize {
    const AROUND: usize = 200;
    match &event.data {
        KvEventData::Stored { blocks, .. } => AROUND + 42 * blocks.len(),
        KvEventData::Removed { blocks } => AROUND + 9 * blocks.len(),
        KvEventData::Cleared => AROUND,
    }
}

#[cfg(test)]
mod tests {
    use kv_hashing::BlockHash;
    use kv_index::EngineHash;

    use super::*;

    #[test]
    fn the_estimate_is_close_and_never_below() {
        let max = EngineHash(u64::MAX);
        for len in [1, 100, 4096] {
            let blocks = vec![kv_index::StoredBlock { engine: max, local: BlockHash(u64::MAX) }; len];
            for data in
                [KvEventData::Stored { parent: Some(max), blocks }, KvEventData::Removed { blocks: vec![max; len] }]
            {
                let event = KvEvent { id: u64::MAX, dp_rank: u32::MAX, tier: Tier::Host, data };
                let written = protocol::event_plane::encode_events(&[router_event(u64::MAX, &event)]).len();
                let estimate = encoded_bytes(&event);
                assert!(written <= estimate && estimate <= written + 200, "{len}: {written} {estimate}");
            }
        }
    }
}
