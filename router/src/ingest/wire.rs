//! KV events from their wire form to their meaning.

use kv_hashing::BlockHash;
use kv_index::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier};
use protocol::kv_event::{KvCacheEventData, RouterEvent, StorageTier};

/// What a wire event means.
pub(super) fn event(event: RouterEvent) -> KvEvent {
    let tier = match event.storage_tier {
        StorageTier::Device => Tier::Device,
        StorageTier::HostPinned => Tier::Host,
        StorageTier::Disk => Tier::Disk,
        StorageTier::External => Tier::Shared,
    };
    let data = match event.event.data {
        KvCacheEventData::Stored(stored) => KvEventData::Stored {
            parent: stored.parent_hash.map(EngineHash),
            blocks: stored
                .blocks
                .iter()
                .map(|b| StoredBlock { engine: EngineHash(b.block_hash), local: BlockHash(b.tokens_hash) })
                .collect(),
        },
        KvCacheEventData::Removed(removed) => {
            KvEventData::Removed { blocks: removed.block_hashes.into_iter().map(EngineHash).collect() }
        }
        KvCacheEventData::Cleared => KvEventData::Cleared,
    };
    KvEvent { id: event.event.event_id, dp_rank: event.event.dp_rank, tier, data }
}
