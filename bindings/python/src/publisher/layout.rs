//! The payload of one message as vLLM writes it: msgpack of `[timestamp, [event], dp_rank]`, an event a map with `type`.

use std::time::UNIX_EPOCH;

use serde::Serialize;

use super::outbox::Message;

/// An event; names and order of the fields are vLLM's.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
pub(super) enum Event {
    #[serde(rename = "BlockStored")]
    Stored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: u32,
        /// Superseded by `lora_name`; readers expect the key.
        lora_id: Option<u64>,
        medium: &'static str,
        lora_name: Option<String>,
    },
    #[serde(rename = "BlockRemoved")]
    Removed { block_hashes: Vec<u64>, medium: &'static str },
    #[serde(rename = "AllBlocksCleared")]
    Cleared {},
}

/// The payload of a message.
pub(super) fn payload(message: &Message, dp_rank: u32) -> Vec<u8> {
    let at = message.at.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let events: Vec<&Event> = message.event.iter().collect();
    rmp_serde::to_vec_named(&(at, events, dp_rank)).expect("an event is always serializable")
}
