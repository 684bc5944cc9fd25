//! Tokens to text, one at a time.
//!
//! A character may span tokens. Its bytes are held back until it is whole; what can never become a character is
//! U+FFFD, and an unfinished one is only given up at the end. However the tokens are chunked, the text is the same.

use std::sync::Arc;

use super::vocabulary::Vocabulary;

/// Turns the tokens of one answer into text.
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// The begin of a character: at most three bytes between calls.
    held: Vec<u8>,
}

impl Detokenizer {
    /// `skip_special` leaves special tokens out of the text.
    pub fn new(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Detokenizer {
        Detokenizer { vocabulary, skip_special, held: Vec::new() }
    }

    /// Appends the text that `token` completes to `out`; returns how many characters begin in this token.
    pub fn push(&mut self, token: u32, out: &mut String) -> usize {
        if self.skip_special && self.vocabulary.is_special(token) {
            return 0;
        }
        let bytes = self.vocabulary.bytes(token);
        if self.held.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            out.push_str(text);
        } else {
            self.held.extend_from_slice(bytes);
            take_whole(&mut self.held, out);
        }
        bytes.iter().filter(|byte| *byte & 0xc0 != 0x80).count()
    }

    /// Gives up on what is held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&self.held));
        self.held.clear();
    }
}

/// Moves all but the unfinished last character from `held` to `out`.
fn take_whole(held: &mut Vec<u8>, out: &mut String) {
    let mut rest = &held[..];
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                rest = &[];
                break;
            }
            Err(error) => {
                let (whole, tail) = rest.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(whole).expect("valid up to here"));
                rest = tail;
                let Some(broken) = error.error_len() else { break };
                out.push(char::REPLACEMENT_CHARACTER);
                rest = &rest[broken..];
            }
        }
    }
    let taken = held.len() - rest.len();
    held.drain(..taken);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::tokenizer_json::TokenizerJson;
    use super::super::vocabulary::byte_level_char;
    use super::*;

    /// Token `b` is the byte `b`; 256 is special.
    fn bytes_vocabulary() -> Arc<Vocabulary> {
        let vocab: serde_json::Map<_, _> =
            (0..=255u8).map(|byte| (byte_level_char(byte).to_string(), json!(byte))).collect();
        let file = json!({
            "model": {"vocab": vocab},
            "decoder": {"type": "ByteLevel"},
            "added_tokens": [{"id": 256, "content": "<|end|>", "special": true}],
        });
        let file = file.to_string();
        let file = TokenizerJson::parse(file.as_bytes()).expect("valid");
        Arc::new(Vocabulary::new(&file).expect("valid"))
    }

    #[test]
    fn a_character_appears_when_its_last_byte_does() {
        let mut detokenizer = Detokenizer::new(bytes_vocabulary(), true);
        let mut seen = Vec::new();
        for byte in "é😀".bytes() {
            let mut out = String::new();
            detokenizer.push(byte.into(), &mut out);
            seen.push(out);
        }
        assert_eq!(seen, ["", "é", "", "", "", "😀"]);
    }

    #[test]
    fn special_tokens_are_left_out_or_shown() {
        for (skip, expected) in [(true, "ab"), (false, "a<|end|>b")] {
            let mut detokenizer = Detokenizer::new(bytes_vocabulary(), skip);
            let mut out = String::new();
            for token in [u32::from(b'a'), 256, u32::from(b'b')] {
                detokenizer.push(token, &mut out);
            }
            assert_eq!(out, expected);
        }
    }

    proptest! {
        #[test]
        fn the_text_is_the_lossy_reading_of_all_bytes(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(0xe2), Just(0x82), Just(0xac), Just(0xf0), Just(0x9f)], 0..64)) {
            let mut detokenizer = Detokenizer::new(bytes_vocabulary(), true);
            let mut out = String::new();
            for &byte in &bytes {
                detokenizer.push(byte.into(), &mut out);
                prop_assert!(detokenizer.held.len() < 4);
            }
            detokenizer.finish(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
