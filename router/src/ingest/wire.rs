//! KV events from their wire form to their meaning.

use kv_hashing::BlockHash;
use kv_index::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier};
use protocol::kv_event::{KvCacheEventData, RouterEvent, StorageTier};

use crate::metrics::{CoreMetrics, ReasonLabels};

/// What a wire event means. One of a tier that this build does not know keeps its number, so that it leaves no gap, and changes
/// nothing, which is counted.
pub(crate) fn event(event: RouterEvent, metrics: &CoreMetrics) -> KvEvent {
    let known = match event.storage_tier {
        StorageTier::Device => Some(Tier::Device),
        StorageTier::HostPinned => Some(Tier::Host),
        StorageTier::Disk => Some(Tier::Disk),
        StorageTier::External => Some(Tier::Shared),
        StorageTier::Unknown => None,
    };
    let tier = known.unwrap_or_default();
    let data = match event.event.data {
        KvCacheEventData::Cleared => KvEventData::Cleared,
        _ if known.is_none() => {
            metrics.events_refused.get_or_create(&ReasonLabels { reason: "unknown medium" }).inc();
            KvEventData::Removed { blocks: Vec::new() }
        }
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
    };
    KvEvent { id: event.event.event_id, dp_rank: event.event.dp_rank, tier, data }
}
