//! Messages of the event plane: topics, the envelope around each payload, and the load report.
//!
//! Over ZeroMQ a message has four parts: topic, publisher id (u64 big endian), sequence (u64 big endian, per publisher and
//! topic) and the envelope frame: one version byte, u32 big endian length, msgpack [`Envelope`].

use serde::{Deserialize, Serialize};

use crate::kv_event::RouterEvent;

/// Topic of [`RouterEvent`] batches.
pub const KV_EVENTS: &str = "kv-events";
/// Topic of [`ActiveLoad`].
pub const KV_METRICS: &str = "kv_metrics";

/// Version byte of an envelope frame.
const VERSION: u8 = 1;

/// Most events in one message.
pub const MAX_BATCH_EVENTS: usize = 128;
/// Most blocks in one message, over all its events.
pub const MAX_BATCH_BLOCKS: usize = 8192;

/// What surrounds a payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// Instance id of the publisher.
    pub publisher_id: u64,
    /// Rises by one with each message of this publisher and topic.
    pub sequence: u64,
    /// Wall clock of the publisher, milliseconds since 1970.
    pub published_at: u64,
    /// The topic again.
    pub topic: String,
    /// msgpack of the topic's type.
    #[serde(with = "byte_payload")]
    pub payload: Vec<u8>,
}

/// How busy a worker is, and how far its event stream has come. Sent after each change, at most every 100 ms, and once a
/// second when nothing changes: a router that sees a higher `last_event_id` than its own has missed events.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ActiveLoad {
    /// Instance id.
    pub worker_id: u64,
    /// Data-parallel rank.
    #[serde(default)]
    pub dp_rank: u32,
    /// Blocks held by running sequences.
    #[serde(default)]
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens admitted and not yet computed.
    #[serde(default)]
    pub active_prefill_tokens: Option<u64>,
    /// Blocks that hold anything reusable or in use, of the total in the model card.
    #[serde(default)]
    pub kv_used_blocks: Option<u64>,
    /// Requests running.
    #[serde(default)]
    pub running_requests: Option<u64>,
    /// Requests waiting for a place.
    #[serde(default)]
    pub waiting_requests: Option<u64>,
    /// Id of the newest KV event of this rank; absent when there has been none.
    #[serde(default)]
    pub last_event_id: Option<u64>,
    /// The worker refuses new requests.
    #[serde(default)]
    pub draining: bool,
}

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EventFrameError {
    /// Too short, or the length does not fit.
    #[error("event frame is truncated")]
    Truncated,
    /// A version this build does not know.
    #[error("event frame has version {0}, this build reads version {VERSION}")]
    Version(u8),
    /// The msgpack is not what the topic promises.
    #[error("malformed event payload: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
}

/// Encodes the last part of a message.
pub fn encode_envelope(envelope: &Envelope) -> Vec<u8> {
    let body = rmp_serde::to_vec_named(envelope).expect("an envelope is always serializable");
    let mut frame = Vec::with_capacity(5 + body.len());
    frame.push(VERSION);
    frame.extend((body.len() as u32).to_be_bytes());
    frame.extend(body);
    frame
}

/// Decodes the last part of a message.
pub fn decode_envelope(frame: &[u8]) -> Result<Envelope, EventFrameError> {
    let (&version, rest) = frame.split_first().ok_or(EventFrameError::Truncated)?;
    if version != VERSION {
        return Err(EventFrameError::Version(version));
    }
    let (len, body) = rest.split_first_chunk::<4>().ok_or(EventFrameError::Truncated)?;
    let body = body.get(..u32::from_be_bytes(*len) as usize).ok_or(EventFrameError::Truncated)?;
    Ok(rmp_serde::from_slice(body)?)
}

/// Payload of [`KV_EVENTS`].
pub fn encode_events(events: &[RouterEvent]) -> Vec<u8> {
    rmp_serde::to_vec_named(events).expect("events are always serializable")
}

/// Payload of [`KV_EVENTS`].
pub fn decode_events(payload: &[u8]) -> Result<Vec<RouterEvent>, EventFrameError> {
    Ok(rmp_serde::from_slice(payload)?)
}

/// Payload of [`KV_METRICS`].
pub fn encode_load(load: &ActiveLoad) -> Vec<u8> {
    rmp_serde::to_vec_named(load).expect("a load report is always serializable")
}

/// Payload of [`KV_METRICS`].
pub fn decode_load(payload: &[u8]) -> Result<ActiveLoad, EventFrameError> {
    Ok(rmp_serde::from_slice(payload)?)
}

/// msgpack `bin` for a byte vector, which serde would write as an array of numbers.
mod byte_payload {
    use serde::de::{Deserializer, SeqAccess, Visitor};
    use serde::ser::Serializer;

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        struct Bytes;
        impl<'de> Visitor<'de> for Bytes {
            type Value = Vec<u8>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, v: &[u8]) -> Result<Vec<u8>, E> {
                Ok(v.to_vec())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u8>, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = seq.next_element()? {
                    bytes.push(byte);
                }
                Ok(bytes)
            }
        }
        from.deserialize_byte_buf(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_envelope_survives_the_wire() {
        let payload = encode_load(&ActiveLoad { worker_id: 7, last_event_id: Some(3), ..Default::default() });
        let sent = Envelope { publisher_id: 7, sequence: 1, published_at: 2, topic: KV_METRICS.into(), payload };
        let got = decode_envelope(&encode_envelope(&sent)).expect("own output");
        assert_eq!(got, sent);
        assert_eq!(decode_load(&got.payload).expect("own output").last_event_id, Some(3));
    }

    #[test]
    fn cut_frames_and_other_versions_are_errors() {
        let frame = encode_envelope(&Envelope {
            publisher_id: 1,
            sequence: 0,
            published_at: 0,
            topic: KV_EVENTS.into(),
            payload: encode_events(&[]),
        });
        for end in 0..frame.len() {
            assert!(decode_envelope(&frame[..end]).is_err(), "{end} bytes");
        }
        assert!(matches!(decode_envelope(&[9, 0, 0, 0, 0]), Err(EventFrameError::Version(9))));
    }
}
