//! Frames of the request plane: generated messages (see `proto/request_plane.proto`) and the length-prefixed codec.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

#[allow(missing_docs, clippy::all, reason = "generated; the .proto file carries the documentation")]
mod generated {
    include!("generated/armature.v1.rs");
}
pub use generated::*;

/// The version a [`Hello`] carries.
pub const PROTOCOL_VERSION: u32 = 2;

/// Largest frame either side accepts, in bytes: a 1M-token prompt (4 MB) with room to spare.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

/// Bytes of payload in one `KvAnswer` or `ArtifactChunk` frame: small enough not to delay the streams that share the connection.
pub const CHUNK_BYTES: usize = 256 << 10;

/// Why a frame could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer announced a frame over [`MAX_FRAME_BYTES`].
    #[error("frame of {0} bytes is over the limit of {MAX_FRAME_BYTES}")]
    TooLarge(usize),
    /// The payload is no valid message.
    #[error("malformed frame: {0}")]
    Malformed(#[from] prost::DecodeError),
}

/// Appends one length-prefixed frame to `out`.
pub fn encode_frame<M: Message>(message: &M, out: &mut BytesMut) {
    let len = message.encoded_len();
    out.reserve(4 + len);
    out.put_u32(len as u32);
    message.encode(out).expect("a BytesMut grows as needed");
}

/// Takes the next whole frame from the front of `buffer`; `None` when more bytes are needed.
pub fn decode_frame<M: Message + Default>(buffer: &mut BytesMut) -> Result<Option<M>, FrameError> {
    let Some(header) = buffer.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_be_bytes(*header) as usize;
    if len > MAX_FRAME_BYTES {
        return Err(FrameError::TooLarge(len));
    }
    if buffer.len() < 4 + len {
        buffer.reserve(4 + len - buffer.len());
        return Ok(None);
    }
    buffer.advance(4);
    let payload: Bytes = buffer.split_to(len).freeze();
    Ok(Some(M::decode(payload)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(stream_id: u64) -> ClientFrame {
        let generate = Generate { request_id: "r".into(), token_ids: vec![1, 2, 300], ..Default::default() };
        ClientFrame { stream_id, body: Some(client_frame::Body::Generate(generate)) }
    }

    #[test]
    fn frames_survive_any_split_of_the_bytes() {
        let mut wire = BytesMut::new();
        encode_frame(&frame(1), &mut wire);
        encode_frame(&frame(2), &mut wire);
        let (mut buffer, mut seen) = (BytesMut::new(), Vec::new());
        for byte in wire {
            buffer.put_u8(byte);
            while let Some(f) = decode_frame::<ClientFrame>(&mut buffer).expect("valid") {
                seen.push(f);
            }
        }
        assert_eq!(seen, [frame(1), frame(2)]);
        assert!(buffer.is_empty());
    }

    /// So that a long prompt is measured without looking at it.
    #[test]
    fn each_token_of_a_prompt_takes_four_bytes() {
        let len = |token_ids: Vec<u32>| {
            let generate = Generate { token_ids, ..Default::default() };
            generate.encoded_len()
        };
        assert_eq!(len(vec![1; 1000]) - len(vec![1; 500]), 2000);
        assert_eq!(len(vec![u32::MAX; 1000]), len(vec![1; 1000]));
    }

    #[test]
    fn an_oversized_frame_is_refused_from_its_header() {
        let mut buffer = BytesMut::from(&u32::MAX.to_be_bytes()[..]);
        assert!(matches!(decode_frame::<ClientFrame>(&mut buffer), Err(FrameError::TooLarge(_))));
    }

    #[test]
    fn garbage_is_malformed_not_a_panic() {
        let mut buffer = BytesMut::from(&[0, 0, 0, 2, 0xff, 0xff][..]);
        assert!(matches!(decode_frame::<ClientFrame>(&mut buffer), Err(FrameError::Malformed(_))));
    }
}
