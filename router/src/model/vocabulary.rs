//! The vocabulary as the way out needs it: the bytes of each token, and which tokens are special.
//!
//! Built from `tokenizer.json` alone, in two flat arrays. Turning ids into text needs no tokenizer engine: a token
//! always stands for the same bytes, and only their concatenation has to be UTF-8.

use serde_json::Value;

use super::ModelError;
use super::tokenizer_json::TokenizerJson;

/// A special token and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// Its text, never empty.
    pub text: String,
    /// It swallows the white space before it.
    pub lstrip: bool,
    /// It swallows the white space after it.
    pub rstrip: bool,
}

/// Bytes of each token, and the special tokens.
pub struct Vocabulary {
    /// Bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// Token `id` is `bytes[starts[id]..starts[id + 1]]`.
    starts: Vec<u32>,
    /// Bytes of the longest token.
    longest: usize,
    /// Special tokens, by id.
    special: Vec<SpecialToken>,
}

/// How the strings of the vocabulary encode bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// GPT-2's: each byte is one printable character.
    ByteLevel,
    /// SentencePiece's: `▁` is a blank, `<0x0A>` a byte.
    SentencePiece,
    /// None: the string is the text, as in added tokens.
    Verbatim,
}

impl Vocabulary {
    /// The tokens of a file; of several with one id the last counts, and added tokens come last.
    pub fn new(file: &TokenizerJson<'_>) -> Result<Vocabulary, ModelError> {
        let alphabet = alphabet(&file.decoder)?;
        let listed = file.model.vocab.0.iter().map(|(text, id)| (*id, &**text, alphabet));
        let added = file.added_tokens().iter().map(|token| (token.id, &*token.content, Alphabet::Verbatim));
        let mut tokens: Vec<(u32, &str, Alphabet)> = listed.chain(added).collect();
        tokens.sort_by_key(|(id, ..)| *id); // stable: the order of equal ids is that of the file
        let size = tokens.last().map_or(0, |(id, ..)| *id as usize + 1);
        let mut bytes = Vec::with_capacity(tokens.iter().map(|(_, text, _)| text.len()).sum());
        let mut starts = Vec::with_capacity(size + 1);
        let mut next = tokens.iter().peekable();
        for id in 0..size as u32 {
            starts.push(bytes.len() as u32);
            let mut last = None;
            while let Some((_, text, alphabet)) = next.next_if(|(at, ..)| *at == id) {
                last = Some((text, alphabet));
            }
            if let Some((text, alphabet)) = last {
                alphabet.push_bytes(text, &mut bytes);
            }
        }
        starts.push(bytes.len() as u32);
        bytes.shrink_to_fit();
        let longest = starts.windows(2).map(|token| (token[1] - token[0]) as usize).max().unwrap_or(0);
        Ok(Vocabulary { bytes, starts, longest, special: special_tokens(file) })
    }

    /// Bytes of the longest token.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// One more than the largest token id.
    pub fn size(&self) -> usize {
        self.starts.len() - 1
    }

    /// The bytes that a token stands for; empty for an id that the vocabulary lacks.
    pub fn bytes(&self, id: u32) -> &[u8] {
        match self.starts.get(id as usize..id as usize + 2) {
            Some(&[from, to]) => &self.bytes[from as usize..to as usize],
            _ => &[],
        }
    }

    /// Whether the token is special: left out of answers, and never made from users' text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search_by_key(&id, |token| token.id).is_ok()
    }

    /// The special tokens, by id.
    pub fn special_tokens(&self) -> &[SpecialToken] {
        &self.special
    }

    /// Text of some tokens, special ones included, with U+FFFD where their bytes are not UTF-8.
    pub fn text(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.bytes(id));
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(broken) => String::from_utf8_lossy(broken.as_bytes()).into_owned(),
        }
    }
}

fn special_tokens(file: &TokenizerJson<'_>) -> Vec<SpecialToken> {
    let special = file.added_tokens().iter().filter(|token| token.special && !token.content.is_empty());
    let mut tokens: Vec<SpecialToken> = special
        .map(|token| SpecialToken {
            id: token.id,
            text: token.content.clone().into_owned(),
            lstrip: token.lstrip,
            rstrip: token.rstrip,
        })
        .collect();
    tokens.sort_by_key(|token| token.id);
    tokens
}

impl Alphabet {
    /// Appends the bytes that the string of a token stands for.
    fn push_bytes(self, token: &str, out: &mut Vec<u8>) {
        match self {
            // A token with a character outside of the alphabet stands for itself, as in the reference implementation.
            Alphabet::ByteLevel => match byte_level_bytes(token) {
                Some(bytes) => out.extend(bytes),
                None => out.extend_from_slice(token.as_bytes()),
            },
            Alphabet::SentencePiece => match raw_byte(token) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(token.replace('▁', " ").as_bytes()),
            },
            Alphabet::Verbatim => out.extend_from_slice(token.as_bytes()),
        }
    }
}

/// `<0x0A>` → 10.
fn raw_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// The character that stands for `byte` in a byte-level vocabulary: itself when it is printable in Latin-1, else the
/// next free one from U+0100 on.
pub(super) const fn byte_level_char(byte: u8) -> char {
    const fn printable(b: u8) -> bool {
        matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
    }
    if printable(byte) {
        return byte as char;
    }
    let (mut code, mut before) = (0x100, 0);
    while before < byte {
        code += !printable(before) as u32;
        before += 1;
    }
    char::from_u32(code).expect("U+0100 to U+0143 are characters")
}

/// Byte of each character of the byte-level alphabet; [`NO_BYTE`] for the others below U+0144.
const BYTE_LEVEL_BYTES: [u16; 0x144] = {
    let mut bytes = [NO_BYTE; 0x144];
    let mut byte = 0;
    while byte < 256 {
        bytes[byte_level_char(byte as u8) as usize] = byte;
        byte += 1;
    }
    bytes
};

const NO_BYTE: u16 = u16::MAX;

/// The bytes of a string of the byte-level alphabet; none when a character is not of it.
pub(super) fn byte_level_bytes(token: &str) -> Option<impl Iterator<Item = u8>> {
    let byte = |c: char| BYTE_LEVEL_BYTES.get(c as usize).copied().unwrap_or(NO_BYTE);
    token.chars().all(|c| byte(c) != NO_BYTE).then(|| token.chars().map(move |c| byte(c) as u8))
}

fn alphabet(decoder: &Value) -> Result<Alphabet, ModelError> {
    let mut kinds = Vec::new();
    let list = match decoder["type"].as_str() {
        Some("Sequence") => decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice),
        _ => std::slice::from_ref(decoder),
    };
    for step in list {
        kinds.extend(step["type"].as_str());
    }
    if kinds.contains(&"ByteLevel") {
        Ok(Alphabet::ByteLevel)
    } else if kinds.contains(&"Metaspace") || kinds.contains(&"ByteFallback") {
        Ok(Alphabet::SentencePiece)
    } else {
        Err(ModelError::Tokenizer(format!("decoder {kinds:?} is neither ByteLevel nor SentencePiece's")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vocabulary(file: &Value) -> Result<Vocabulary, ModelError> {
        Vocabulary::new(&TokenizerJson::parse(file.to_string().as_bytes())?)
    }

    #[test]
    fn the_byte_level_alphabet_is_a_bijection_with_the_known_corners() {
        let all: std::collections::HashSet<char> = (0..=255).map(byte_level_char).collect();
        assert_eq!(all.len(), 256);
        assert_eq!((byte_level_char(b' '), byte_level_char(b'\n'), byte_level_char(b'A')), ('Ġ', 'Ċ', 'A'));
    }

    #[test]
    fn sentence_piece_tokens_are_blanks_and_raw_bytes() {
        let file = json!({
            "model": {"vocab": [["<unk>", 0.0], ["<0x0A>", 0.0], ["▁the", -1.0]]},
            "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        });
        let vocabulary = vocabulary(&file).expect("valid");
        assert_eq!((vocabulary.bytes(1), vocabulary.bytes(2)), (&b"\n"[..], &b" the"[..]));
        assert_eq!((vocabulary.size(), vocabulary.bytes(99)), (3, &b""[..]));
    }

    #[test]
    fn an_added_token_replaces_the_entry_of_its_id_and_gaps_are_empty() {
        let file = json!({
            "model": {"vocab": {"a": 0, "b": 3}},
            "added_tokens": [{"id": 3, "content": "<|b|>", "special": true}],
            "decoder": {"type": "ByteLevel"},
        });
        let vocabulary = vocabulary(&file).expect("valid");
        assert_eq!((vocabulary.text(&[0, 1, 3]), vocabulary.size()), ("a<|b|>".into(), 4));
        assert!(vocabulary.is_special(3) && !vocabulary.is_special(0));
    }

    #[test]
    fn broken_files_are_errors() {
        for file in [
            json!(null),
            json!({"decoder": {"type": "ByteLevel"}}),
            json!({"decoder": {"type": "WordPiece"}, "model": {"vocab": {}}}),
            json!({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": -1}}}),
            json!({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 4294967295u64}}}),
            json!({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {}}, "added_tokens": [{"id": "x"}]}),
        ] {
            assert!(matches!(vocabulary(&file), Err(ModelError::Tokenizer(_))), "{file}");
        }
    }
}
