//! KV cache events as they travel: Dynamo's router event, msgpack with field names (the same shape in JSON).
//!
//! These are wire types: what an event *means* lives in `kv-index`. Unknown fields are ignored on reading.

use serde::{Deserialize, Serialize};

/// One event of one worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterEvent {
    /// Instance id of the worker (below 2^53).
    pub worker_id: u64,
    /// Where the blocks live; absent means device.
    #[serde(default)]
    pub storage_tier: StorageTier,
    /// `"worker"` for blocks that belong to one worker. Absent: written by an old publisher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency_domain: Option<String>,
    /// The event itself.
    pub event: KvCacheEvent,
}

/// Where a block is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageTier {
    /// Device memory (the arena of a CPU engine counts as it).
    #[default]
    Device,
    /// Pinned host memory.
    HostPinned,
    /// Local disk.
    Disk,
    /// A pool shared by several workers.
    External,
    /// One that this build does not know: its events are numbered like all others, and mean nothing else here.
    #[serde(other)]
    Unknown,
}

/// An event with its number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvCacheEvent {
    /// Rises by one with each event of a (worker, rank), from 0.
    pub event_id: u64,
    /// What happened.
    pub data: KvCacheEventData,
    /// Data-parallel rank.
    #[serde(default)]
    pub dp_rank: u32,
}

/// What happened to blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvCacheEventData {
    /// Blocks were computed and can be reused.
    Stored(Stored),
    /// Blocks are gone.
    Removed(Removed),
    /// Every block of this (worker, rank) is gone.
    Cleared,
}

/// A run of blocks, each the child of the one before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// Engine hash of the block before the first; absent at the start of a sequence.
    pub parent_hash: Option<u64>,
    /// Position of the first block in its sequence, in blocks, where the publisher knows it.
    #[serde(default)]
    pub start_position: Option<u32>,
    /// The run.
    pub blocks: Vec<StoredBlock>,
}

/// One stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The engine's own id of the block: opaque, keys removals and parents.
    pub block_hash: u64,
    /// Hash of the block's tokens (`kv_hashing::BlockHash`): what requests are matched by.
    pub tokens_hash: u64,
}

/// Blocks that are gone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Removed {
    /// Engine hashes.
    pub block_hashes: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_the_peers_json() {
        let text = r#"{"worker_id":42,"storage_tier":"device","residency_domain":"worker","event":{"event_id":3,"dp_rank":1,
            "data":{"stored":{"parent_hash":11,"start_position":null,"blocks":[{"block_hash":12,"tokens_hash":13,"mm_extra_info":null}]}}}}"#;
        let event: RouterEvent = serde_json::from_str(text).expect("the peer's own form");
        let blocks = vec![StoredBlock { block_hash: 12, tokens_hash: 13 }];
        let stored = Stored { parent_hash: Some(11), start_position: None, blocks };
        assert_eq!(event.event.data, KvCacheEventData::Stored(stored));
        let packed = rmp_serde::to_vec_named(&event).expect("serializable");
        assert_eq!(rmp_serde::from_slice::<RouterEvent>(&packed).expect("own output"), event);
    }

    #[test]
    fn a_tier_of_a_later_version_is_read_as_unknown() {
        for tier in ["device", "host_pinned", "tape"] {
            let text =
                format!(r#"{{"worker_id":1,"storage_tier":"{tier}","event":{{"event_id":0,"data":"cleared"}}}}"#);
            let event: RouterEvent = serde_json::from_str(&text).expect("readable");
            assert_eq!(event.storage_tier == StorageTier::Unknown, tier == "tape");
            let packed = rmp_serde::to_vec_named(&serde_json::from_str::<serde_json::Value>(&text).expect("JSON"));
            let again: RouterEvent = rmp_serde::from_slice(&packed.expect("serializable")).expect("readable");
            assert_eq!(again, event);
        }
    }

    #[test]
    fn cleared_is_a_bare_string() {
        let json = serde_json::to_string(&KvCacheEventData::Cleared).expect("serializable");
        assert_eq!(json, r#""cleared""#);
    }
}
