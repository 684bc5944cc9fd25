//! GPT-2's writing of bytes as printable characters, which byte-level BPE vocabularies are stored in.

use std::collections::HashMap;

/// Bytes that are written as the character of the same number: the printable ones of Latin-1.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// From characters back to bytes.
pub(super) struct Decoder(HashMap<char, u8>);

impl Decoder {
    pub(super) fn new() -> Self {
        // The other bytes are written as the characters from 256 on, in their order.
        let mut next = 256u32;
        let map = (0..=u8::MAX).map(|byte| {
            let written = if is_printable(byte) {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).expect("256..324 are characters")
            };
            (written, byte)
        });
        Self(map.collect())
    }

    /// The bytes of a token; a character that stands for no byte is taken as it is.
    pub(super) fn bytes(&self, token: &str) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(token.len());
        for c in token.chars() {
            match self.0.get(&c) {
                Some(&byte) => bytes.push(byte),
                None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        bytes
    }

    #[cfg(test)]
    pub(super) fn alphabet(&self) -> Vec<String> {
        let mut pairs: Vec<(u8, String)> = self.0.iter().map(|(c, byte)| (*byte, c.to_string())).collect();
        pairs.sort_unstable();
        pairs.into_iter().map(|(_, written)| written).collect()
    }
}
