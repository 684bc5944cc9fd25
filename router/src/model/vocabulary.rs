//! The vocabulary as the way out needs it: the bytes of each token, and which tokens are special.
//!
//! Built from `tokenizer.json` alone, in two flat arrays. Turning ids into text needs no tokenizer engine: a token always
//! stands for the same bytes, and only their concatenation has to be UTF-8.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use super::ModelError;

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
    /// Special tokens, by id.
    special: Vec<SpecialToken>,
}

/// An entry of `added_tokens`.
#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

/// How the strings of the vocabulary encode bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// GPT-2's: each byte is one printable character.
    ByteLevel,
    /// SentencePiece's: `▁` is a blank, `<0x0A>` a byte.
    SentencePiece,
}

/// Ids above this are refused: the arrays are indexed by id, and no real vocabulary comes near it.
const MAX_TOKEN_ID: u32 = 1 << 22;

impl Vocabulary {
    /// Reads a parsed `tokenizer.json`.
    pub fn from_json(tokenizer: &Value) -> Result<Vocabulary, ModelError> {
        let alphabet = alphabet(&tokenizer["decoder"])?;
        let mut tokens: Vec<(u32, Vec<u8>)> = Vec::new();
        match &tokenizer["model"]["vocab"] {
            Value::Object(vocab) => {
                let decode = Decoder::new(alphabet);
                for (text, id) in vocab {
                    tokens.push((token_id(id)?, decode.bytes(text)));
                }
            }
            Value::Array(pieces) => {
                let decode = Decoder::new(alphabet);
                for (id, piece) in pieces.iter().enumerate() {
                    let text = piece[0].as_str().ok_or_else(|| malformed("model.vocab"))?;
                    tokens.push((id as u32, decode.bytes(text)));
                }
            }
            _ => return Err(malformed("model.vocab")),
        }
        let added: Vec<AddedToken> = match &tokenizer["added_tokens"] {
            Value::Null => Vec::new(),
            list => Vec::deserialize(list).map_err(|e| ModelError::Tokenizer(format!("added_tokens: {e}")))?,
        };
        let mut special = Vec::new();
        for token in added {
            tokens.push((token_id(&token.id.into())?, token.content.clone().into_bytes()));
            if token.special && !token.content.is_empty() {
                let AddedToken { id, content: text, lstrip, rstrip, .. } = token;
                special.push(SpecialToken { id, text, lstrip, rstrip });
            }
        }
        Ok(Vocabulary::new(tokens, special))
    }

    /// Later entries of `tokens` replace earlier ones of the same id.
    fn new(mut tokens: Vec<(u32, Vec<u8>)>, mut special: Vec<SpecialToken>) -> Vocabulary {
        tokens.sort_by_key(|(id, _)| *id); // stable: the last of equal ids is the one that counts
        let size = tokens.last().map_or(0, |(id, _)| *id as usize + 1);
        let mut bytes = Vec::with_capacity(tokens.iter().map(|(_, b)| b.len()).sum());
        let mut starts = Vec::with_capacity(size + 1);
        let mut next = tokens.iter().peekable();
        for id in 0..size as u32 {
            starts.push(bytes.len() as u32);
            let mut last = None;
            while let Some((_, token)) = next.next_if(|(at, _)| *at == id) {
                last = Some(token);
            }
            bytes.extend_from_slice(last.map_or(&[], Vec::as_slice));
        }
        starts.push(bytes.len() as u32);
        special.sort_by_key(|token| token.id);
        Vocabulary { bytes, starts, special }
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

/// Strings of the vocabulary to bytes.
struct Decoder {
    alphabet: Alphabet,
    byte_of: HashMap<char, u8>,
}

impl Decoder {
    fn new(alphabet: Alphabet) -> Decoder {
        let byte_of = (0..=u8::MAX).map(|byte| (byte_level_char(byte), byte)).collect();
        Decoder { alphabet, byte_of }
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        match self.alphabet {
            // A token with a character outside of the alphabet stands for itself, as in the reference implementation.
            Alphabet::ByteLevel => token
                .chars()
                .map(|c| self.byte_of.get(&c).copied())
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| token.as_bytes().to_vec()),
            Alphabet::SentencePiece => match raw_byte(token) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// `<0x0A>` → 10.
fn raw_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// The character that stands for `byte` in a byte-level vocabulary: itself when it is printable in Latin-1, else the next
/// free one from U+0100 on.
pub(super) fn byte_level_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte as char;
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("U+0100 to U+0143 are characters")
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

fn token_id(id: &Value) -> Result<u32, ModelError> {
    let id = id.as_u64().ok_or_else(|| malformed("a token id"))?;
    u32::try_from(id)
        .ok()
        .filter(|id| *id <= MAX_TOKEN_ID)
        .ok_or_else(|| ModelError::Tokenizer(format!("token id {id} is over {MAX_TOKEN_ID}")))
}

fn malformed(what: &str) -> ModelError {
    ModelError::Tokenizer(format!("{what} is missing or malformed"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
        let vocabulary = Vocabulary::from_json(&file).expect("valid");
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
        let vocabulary = Vocabulary::from_json(&file).expect("valid");
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
            assert!(matches!(Vocabulary::from_json(&file), Err(ModelError::Tokenizer(_))), "{file}");
        }
    }
}
