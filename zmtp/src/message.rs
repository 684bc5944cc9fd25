//! Frames: flags, length, body. A message is one frame or several; commands stand between messages.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::ZmtpError;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Most parts of a message; ours have four, an engine's three.
const MAX_PARTS: usize = 16;

/// What a peer sends after the greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A whole message.
    Message(Vec<Bytes>),
    /// Body of a command: its name with a length byte, then its data.
    Command(Bytes),
}

/// Cuts a stream of bytes into messages of at most `limit` bytes.
#[derive(Debug)]
pub(super) struct Decoder {
    limit: usize,
    parts: Vec<Bytes>,
    bytes: usize,
}

impl Decoder {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, parts: Vec::new(), bytes: 0 }
    }

    /// The next message, if `buffer` has all of it; else what must be there at least before another look is worth while.
    pub(super) fn next(&mut self, buffer: &mut BytesMut) -> Result<Result<Incoming, usize>, ZmtpError> {
        loop {
            let [flags, ..] = buffer[..] else { return Ok(Err(2)) };
            let header = if flags & LONG != 0 { 9 } else { 2 };
            if buffer.len() < header {
                return Ok(Err(header));
            }
            let length = match flags & LONG {
                0 => u64::from(buffer[1]),
                _ => (&buffer[1..header]).get_u64(),
            };
            // Before anything is set aside for it.
            let length = usize::try_from(length).ok().filter(|length| self.bytes.saturating_add(*length) <= self.limit);
            let length = length.ok_or(ZmtpError::TooLarge(self.limit))?;
            if buffer.len() < header + length {
                return Ok(Err(header + length));
            }
            buffer.advance(header);
            let body = buffer.split_to(length).freeze();
            if flags & COMMAND != 0 {
                return Ok(Ok(Incoming::Command(body)));
            }
            self.bytes += length;
            self.parts.push(body);
            if self.parts.len() > MAX_PARTS {
                return Err(ZmtpError::TooLarge(self.limit));
            }
            if flags & MORE == 0 {
                self.bytes = 0;
                return Ok(Ok(Incoming::Message(std::mem::take(&mut self.parts))));
            }
        }
    }

    /// Whether nothing of a message has come yet.
    pub(super) fn is_between(&self) -> bool {
        self.parts.is_empty()
    }

    /// Bytes of the parts that have come.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A message as it goes over the wire.
pub(super) fn encode(parts: &[Bytes]) -> Bytes {
    let mut out = BytesMut::with_capacity(parts.iter().map(|part| part.len() + 9).sum());
    for (at, part) in parts.iter().enumerate() {
        frame(if at + 1 < parts.len() { MORE } else { 0 }, part, &mut out);
    }
    out.freeze()
}

/// A command: `name`, then `data`.
pub(super) fn encode_command(name: &str, data: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(1 + name.len() + data.len());
    // Names are ours, and short.
    body.put_u8(name.len() as u8);
    body.put_slice(name.as_bytes());
    body.put_slice(data);
    let mut out = BytesMut::with_capacity(body.len() + 9);
    frame(COMMAND, &body, &mut out);
    out.freeze()
}

/// Name and data of a command.
pub(super) fn command(body: &Bytes) -> Option<(&[u8], &[u8])> {
    let (length, rest) = body.split_first()?;
    rest.split_at_checked(usize::from(*length))
}

fn frame(flags: u8, body: &[u8], out: &mut BytesMut) {
    match u8::try_from(body.len()) {
        Ok(length) => out.put_slice(&[flags, length]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 2000;

    fn all(mut bytes: &[u8], chunk: usize) -> Result<Vec<Incoming>, ZmtpError> {
        let (mut decoder, mut buffer, mut found) = (Decoder::new(LIMIT), BytesMut::new(), Vec::new());
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(chunk.min(bytes.len()));
            buffer.put_slice(now);
            bytes = later;
            while let Ok(incoming) = decoder.next(&mut buffer)? {
                found.push(incoming);
            }
        }
        assert!(buffer.is_empty() && decoder.is_between());
        Ok(found)
    }

    proptest! {
        #[test]
        fn messages_survive_however_they_are_cut(
            sizes in prop::collection::vec(prop::collection::vec(0..600_usize, 1..4), 1..5),
            chunk in 1..700_usize,
        ) {
            let message = |sizes: Vec<usize>| sizes.into_iter().map(|size| vec![7; size].into()).collect();
            let messages: Vec<Vec<Bytes>> = sizes.into_iter().map(message).collect();
            let bytes = messages.iter().map(|parts| encode(parts)).collect::<Vec<_>>().concat();
            let expected: Vec<Incoming> = messages.into_iter().map(Incoming::Message).collect();
            prop_assert_eq!(all(&bytes, chunk).expect("within the limit"), expected);
        }

        #[test]
        fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (mut decoder, mut buffer) = (Decoder::new(LIMIT), BytesMut::from(&bytes[..]));
            while let Ok(Ok(_)) = decoder.next(&mut buffer) {}
        }
    }

    #[test]
    fn what_is_too_large_is_refused_before_it_has_come() {
        let huge = [LONG, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        let refused = |bytes: &[u8]| matches!(all(bytes, 9), Err(ZmtpError::TooLarge(LIMIT)));
        assert!(refused(&huge));
        assert!(refused(&encode(&[vec![0; LIMIT].into(), vec![0; 1].into()])), "all parts together");
        assert!(refused(&encode(&vec![Bytes::new(); MAX_PARTS + 1])), "parts without end");
        assert!(!refused(&encode(&[vec![0; LIMIT].into()])));
    }

    #[test]
    fn a_command_has_a_name_and_data() {
        let found = all(&encode_command("READY", b"data"), 3).expect("valid");
        let [Incoming::Command(body)] = &found[..] else { panic!("{found:?}") };
        assert_eq!(command(body), Some((&b"READY"[..], &b"data"[..])));
        assert_eq!(command(&Bytes::from_static(&[9, b'R'])), None);
    }
}
