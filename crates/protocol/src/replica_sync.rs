//! What routers tell each other, so that each counts the requests of all: Dynamo's `active_sequences_events`, msgpack with
//! field names, and beside it three topics of ours: by one a router tells how answers grow, by the others it joins and repairs
//! what it missed.
//!
//! All of them travel in the frames of [`crate::event_plane`], with the router's id as publisher. An addition carries a few
//! fields that the peer's own does not have: they are ignored there, and have defaults here when they are absent. Unknown
//! fields are ignored on reading.

use serde::{Deserialize, Serialize};

use crate::event_plane::EventFrameError;

/// Topic of [`ActiveSequenceBatch`].
pub const ACTIVE_SEQUENCES: &str = "active_sequences_events";
/// Topic of [`GrowthBatch`].
pub const GROWTH: &str = "armature_router_growth";
/// Topic of [`RouterStatus`].
pub const ROUTER_STATUS: &str = "armature_router_status";

/// Most events, or requests that grew, in one message.
pub const MAX_BATCH_EVENTS: usize = 256;
/// Most prompt blocks in one message, over all its events: 8192 × 9 bytes = 74 KB. An event of more is alone in its message.
pub const MAX_BATCH_BLOCKS: usize = 8192;

/// Topic of the [`Snapshot`]s meant for one router. Ids are written in full, so that no topic is the beginning of another.
pub fn snapshot_topic(router_id: u64) -> String {
    format!("armature_router_snapshot/{router_id:016x}")
}

/// Payload of [`ACTIVE_SEQUENCES`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ActiveSequenceBatch {
    /// In the order in which they happened.
    pub events: Vec<ActiveSequenceEvent>,
}

/// Something happened to a request of a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActiveSequenceEvent {
    /// Names one attempt of a request; used once by its router.
    pub request_id: String,
    /// Where it runs.
    pub worker: WorkerWithDpRank,
    /// What happened.
    pub data: ActiveSequenceData,
    /// Whose request it is. A router ignores its own.
    pub router_id: u64,
    /// LoRA adapter; its name is part of the block hashes already.
    #[serde(default)]
    pub lora_name: Option<String>,
}

/// A rank of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerWithDpRank {
    /// Instance id.
    pub worker_id: u64,
    /// Data-parallel rank.
    #[serde(default)]
    pub dp_rank: u32,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ActiveSequenceData {
    /// It was routed.
    AddRequest(AddRequest),
    /// Its first token came.
    MarkPrefillCompleted,
    /// It ended.
    Free,
}

/// A routed request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddRequest {
    /// Sequence hashes of the prompt's full blocks.
    #[serde(default)]
    pub token_sequence: Option<Vec<u64>>,
    /// Prompt tokens, where the sender says.
    #[serde(default)]
    pub isl: Option<u64>,
    /// Prompt blocks that the worker was expected to reuse.
    #[serde(default)]
    pub overlap: u32,
    /// Whether the prompt counts as prompt load.
    #[serde(default = "yes")]
    pub track_prefill_tokens: bool,
    /// Tokens that the answer is expected to have.
    #[serde(default)]
    pub expected_output_tokens: Option<u32>,
    /// How much of the prompt has to be computed.
    #[serde(default)]
    pub prefill_load_hint: Option<PrefillLoadHint>,
    /// Tokens per block; ours.
    #[serde(default)]
    pub block_size: Option<u32>,
    /// Tokens generated so far; ours.
    #[serde(default)]
    pub output_tokens: u64,
    /// The first token has come; ours.
    #[serde(default)]
    pub prefill_completed: bool,
}

fn yes() -> bool {
    true
}

/// How much of a prompt has to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillLoadHint {
    /// Prompt tokens that the worker has to compute.
    pub initial_effective_prefill_tokens: u64,
    /// How long that is expected to take.
    #[serde(default)]
    pub expected_prefill_duration: Option<PrefillDuration>,
}

/// A duration as Dynamo writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillDuration {
    /// Whole seconds.
    pub secs: u64,
    /// The rest, below 10⁹.
    pub nanos: u32,
}

/// Payload of [`GROWTH`], sent a few times a second. Its loss is not looked for: what runs is told again every few seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthBatch {
    /// Running requests that have generated more than was told of them.
    pub requests: Vec<Growth>,
}

/// How far a request has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// See [`ActiveSequenceEvent::request_id`].
    pub request_id: String,
    /// Tokens generated so far.
    pub output_tokens: u64,
}

/// Payload of [`ROUTER_STATUS`], sent a few times a second: the router lives, and how far its events have come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterStatus {
    /// Sequence that its next [`ACTIVE_SEQUENCES`] message will have: whoever expects a lower one has missed some.
    pub next_sequence: u64,
    /// Snapshots that it waits for.
    #[serde(default)]
    pub wants: Vec<SnapshotRequest>,
}

/// A router asks another one for its running requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRequest {
    /// Who is asked.
    pub router_id: u64,
    /// Repeated in the answer; a request with the same number is the same request.
    pub nonce: u64,
}

/// A part of the answer, on the [`snapshot_topic`] of the router that asked. The parts of one answer follow each other in
/// order, with no other message of their router between.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Of the request.
    pub nonce: u64,
    /// From 0.
    pub part: u32,
    /// No part follows.
    pub last: bool,
    /// See [`RouterStatus::next_sequence`]: what is told by messages before it is in the snapshot.
    pub next_sequence: u64,
    /// An addition for each running request.
    pub events: Vec<ActiveSequenceEvent>,
}

/// Encodes any payload of this module.
pub fn encode(payload: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec_named(payload).expect("these types are always serializable")
}

/// Decodes the payload of one topic.
pub fn decode<'a, P: Deserialize<'a>>(payload: &'a [u8]) -> Result<P, EventFrameError> {
    Ok(rmp_serde::from_slice(payload)?)
}

#[cfg(test)]
mod tests;
