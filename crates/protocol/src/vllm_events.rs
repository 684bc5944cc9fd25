//! KV events as engines publish them themselves: vLLM's, which SGLang's resemble, over ZeroMQ.
//!
//! A message has three parts: topic, sequence (u64 big endian, one for each batch) and the msgpack of a batch. Batches and
//! events come as arrays or as maps, by version; elements and fields that this build does not know are ignored. What an
//! event means to an index is told by [`Translator`]: the engine's own hashes only name blocks, so blocks are hashed anew.

mod decode;
mod source;
mod translate;

use serde::Deserialize;

pub use source::{EventSource, MalformedSource};
pub use translate::{Refused, Translated, Translator};

/// What follows the events that an engine replays: its sequence in the last message.
pub const END_OF_REPLAY: u64 = u64::MAX;

/// The events of one engine step.
#[derive(Clone, Debug, PartialEq)]
pub struct EventBatch {
    /// In order.
    pub events: Vec<EngineEvent>,
    /// Data-parallel rank, where the engine says.
    pub dp_rank: Option<u32>,
}

/// What an engine says of its blocks. Hashes are the engine's own; of longer ones the last 64 bits.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// Blocks can be reused from now on.
    Stored(BlockStored),
    /// Blocks are gone.
    Removed(BlockRemoved),
    /// All blocks of the rank are gone.
    Cleared,
    /// An event of a later version.
    Unknown,
}

/// A run of blocks, each the child of the one before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockStored {
    /// The run.
    pub block_hashes: Vec<u64>,
    /// The block before it.
    pub parent_block_hash: Option<u64>,
    /// Its tokens.
    pub token_ids: TokenIds,
    /// Tokens of a block.
    pub block_size: u32,
    /// Name of the LoRA adapter, where the engine tells names.
    pub lora_name: Option<String>,
    /// Number of the LoRA adapter.
    pub lora_id: Option<i64>,
    /// What a block's hash depends on besides tokens and adapter, for each block.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// Where the blocks are.
    pub place: Place,
}

/// Blocks that are gone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockRemoved {
    /// Their hashes.
    pub block_hashes: Vec<u64>,
    /// Where they were.
    pub place: Place,
}

/// Which cache of an engine a block is in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// `GPU`, `CPU`, …; absent means the device.
    pub medium: Option<String>,
    /// Number of the group of layers, in models whose layers differ in what they keep.
    pub group: Option<u32>,
    /// What the layers of the group keep: `full_attention`, `sliding_window`, ….
    pub kind: Option<String>,
}

/// Tokens of a run of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenIds {
    /// As many as the blocks hold.
    Tokens(Vec<u32>),
    /// The first of each pair of neighbours, and the second of the last pair: what a draft model in EAGLE's way keeps.
    Bigrams(Vec<u32>),
}

impl Default for TokenIds {
    fn default() -> Self {
        Self::Tokens(Vec::new())
    }
}

/// Part of what a block's hash depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// A name alone: of the adapter, of a cache namespace, or of a medium in versions that do not tell where it is.
    Name(String),
    /// A medium (image, sound) that begins or goes on in this block.
    Media(String),
    /// Anything else.
    Other,
}

/// A payload that is no batch of events.
#[derive(Debug, thiserror::Error)]
#[error("malformed engine events: {0}")]
pub struct MalformedBatch(#[from] rmp_serde::decode::Error);

/// Reads the last part of a message.
pub fn decode_batch(payload: &[u8]) -> Result<EventBatch, MalformedBatch> {
    let mut reader = rmp_serde::Deserializer::from_read_ref(payload);
    Ok(EventBatch::deserialize(&mut reader)?)
}

/// Reads the sequence of a message.
pub fn decode_sequence(part: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(part.try_into().ok()?))
}

#[cfg(test)]
mod tests;
