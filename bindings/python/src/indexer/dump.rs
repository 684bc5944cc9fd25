//! The content of a `KvIndexer` as bytes: msgpack of a version, the block size, and Stored events in the router's event form.

use kv_hashing::{BlockHash, BlockSize};
use kv_index::tree::{Dumped, Writer};
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use protocol::kv_event as wire;
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Dump {
    version: u32,
    block_size: u64,
    /// Parents before children; the ids mean nothing.
    events: Vec<wire::RouterEvent>,
}

/// Why bytes are no dump for this index.
#[derive(Debug, thiserror::Error)]
pub(super) enum DumpError {
    /// Not what `dump` writes.
    #[error("malformed dump: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// Written by another version.
    #[error("the dump has version {0}, this build reads version {VERSION}")]
    Version(u32),
    /// Written by an index with blocks of another size.
    #[error("the dump has blocks of {dump} tokens, this index has blocks of {index}")]
    BlockSize { dump: u64, index: u64 },
    /// Blocks are somewhere that this build does not know.
    #[error("the dump has blocks in a tier that this build does not know")]
    Tier,
}

/// The content of an index.
pub(super) fn write(index: &Writer, size: BlockSize) -> Vec<u8> {
    let events = index.ranks().flat_map(|rank| index.dump(rank).into_iter().map(move |dumped| to_wire(rank, dumped)));
    let dump = Dump { version: VERSION, block_size: size.get() as u64, events: events.collect() };
    rmp_serde::to_vec_named(&dump).expect("events are always serializable")
}

/// The events of a dump, to be applied in order to an empty index.
pub(super) fn read(bytes: &[u8], size: BlockSize) -> Result<Vec<(WorkerRank, Tier, KvEventData)>, DumpError> {
    let dump: Dump = rmp_serde::from_slice(bytes)?;
    if dump.version != VERSION {
        return Err(DumpError::Version(dump.version));
    }
    if dump.block_size != size.get() as u64 {
        return Err(DumpError::BlockSize { dump: dump.block_size, index: size.get() as u64 });
    }
    let event = |event: wire::RouterEvent| {
        let rank = WorkerRank { worker: WorkerId(event.worker_id), dp_rank: event.event.dp_rank };
        Ok((rank, tier(event.storage_tier).ok_or(DumpError::Tier)?, from_wire(event.event.data)))
    };
    dump.events.into_iter().map(event).collect()
}

fn to_wire(rank: WorkerRank, dumped: Dumped) -> wire::RouterEvent {
    let storage_tier = match dumped.tier {
        Tier::Device => wire::StorageTier::Device,
        Tier::Host => wire::StorageTier::HostPinned,
        Tier::Disk => wire::StorageTier::Disk,
        Tier::Shared => wire::StorageTier::External,
    };
    let data = match dumped.data {
        KvEventData::Stored { parent, blocks } => {
            let blocks = blocks.iter().map(|b| wire::StoredBlock { block_hash: b.engine.0, tokens_hash: b.local.0 });
            let parent_hash = parent.map(|parent| parent.0);
            wire::KvCacheEventData::Stored(wire::Stored { parent_hash, start_position: None, blocks: blocks.collect() })
        }
        KvEventData::Removed { blocks } => wire::KvCacheEventData::Removed(wire::Removed {
            block_hashes: blocks.into_iter().map(|block| block.0).collect(),
        }),
        KvEventData::Cleared => wire::KvCacheEventData::Cleared,
    };
    wire::RouterEvent {
        worker_id: rank.worker.0,
        storage_tier,
        residency_domain: Some("worker".to_owned()),
        event: wire::KvCacheEvent { event_id: 0, data, dp_rank: rank.dp_rank },
    }
}

fn tier(tier: wire::StorageTier) -> Option<Tier> {
    match tier {
        wire::StorageTier::Device => Some(Tier::Device),
        wire::StorageTier::HostPinned => Some(Tier::Host),
        wire::StorageTier::Disk => Some(Tier::Disk),
        wire::StorageTier::External => Some(Tier::Shared),
        wire::StorageTier::Unknown => None,
    }
}

fn from_wire(data: wire::KvCacheEventData) -> KvEventData {
    match data {
        wire::KvCacheEventData::Stored(stored) => {
            let blocks = stored.blocks.iter();
            let blocks = blocks
                .map(|b| StoredBlock { engine: EngineHash(b.block_hash), local: BlockHash(b.tokens_hash) })
                .collect();
            KvEventData::Stored { parent: stored.parent_hash.map(EngineHash), blocks }
        }
        wire::KvCacheEventData::Removed(removed) => {
            KvEventData::Removed { blocks: removed.block_hashes.into_iter().map(EngineHash).collect() }
        }
        wire::KvCacheEventData::Cleared => KvEventData::Cleared,
    }
}
