//! Byte-level BPE: text is cut into pieces, and in a piece the neighbours whose merge comes first are joined until no
//! merge is left.
//!
//! Takes the files it can encode exactly as the reference engine does and refuses all others by name. A piece costs a
//! look-up when it was seen lately, and `n log n` otherwise.

mod cache;
mod classes;
mod merges;
mod pre_tokenizer;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};
use xxhash_rust::xxh3::xxh3_64;

use cache::PieceCache;
use merges::MergeTable;
use pre_tokenizer::PreTokenizer;

use super::segments::SpecialScanner;
use super::tokenizer::{Tokenizer, TokenizerError};
use super::tokenizer_json::{TokenModel, TokenizerJson};
use super::vocabulary::{SpecialToken, Vocabulary, byte_level_bytes, byte_level_char};

/// What a file asks for that this engine does not do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(String);

fn unsupported<T>(what: impl Into<String>) -> Result<T, Unsupported> {
    Err(Unsupported(what.into()))
}

/// The engine.
pub struct Bpe {
    /// Text is brought into normal form C.
    nfc: bool,
    added: AddedTokens,
    pre_tokenizer: PreTokenizer,
    /// Pieces that are tokens, where those need no merges.
    whole: Option<WholePieces>,
    /// Token of each byte; [`NO_TOKEN`] for those that have none and are left out.
    byte_tokens: Box<[u32; 256]>,
    merges: MergeTable,
    cache: PieceCache,
}

/// No id, where an id is expected.
const NO_TOKEN: u32 = u32::MAX;

impl Bpe {
    /// The engine for a file. Cost: some 10 ms for 100 000 tokens.
    pub fn new(file: &TokenizerJson<'_>, vocabulary: &Arc<Vocabulary>) -> Result<Bpe, Unsupported> {
        check_model(&file.model)?;
        let nfc = match file.normalizer["type"].as_str() {
            None if file.normalizer.is_null() => false,
            Some("NFC") => true,
            kind => return unsupported(format!("normalizer {}", kind.unwrap_or("without a type"))),
        };
        let pre_tokenizer = PreTokenizer::from_json(&file.pre_tokenizer)?;
        let added = AddedTokens::new(file)?;
        let ids: HashMap<&str, u32> = file.model.vocab.0.iter().map(|(text, id)| (&**text, *id)).collect();
        let byte_tokens = byte_tokens(&ids, file.model.unk_token.is_some())?;
        let merges = merges(&file.model, &ids)?;
        let whole = match file.model.ignore_merges {
            Some(true) => Some(WholePieces::new(&file.model, vocabulary)?),
            _ => None,
        };
        Ok(Bpe { nfc, added, pre_tokenizer, whole, byte_tokens, merges, cache: PieceCache::new() })
    }

    /// Text without added tokens.
    fn encode_ordinary(&self, text: &str, out: &mut Vec<u32>) {
        let text = if self.nfc { to_nfc(text) } else { text.into() };
        self.pre_tokenizer.cut(&text, &mut |piece| self.encode_piece(piece.as_bytes(), out));
    }

    fn encode_piece(&self, piece: &[u8], out: &mut Vec<u32>) {
        let key = match self.cache.find(piece, out) {
            Ok(()) => return,
            Err(key) => key,
        };
        let from = out.len();
        if let Some(id) = self.whole.as_ref().and_then(|whole| whole.find(piece)) {
            out.push(id);
        } else {
            let symbols = piece.iter().map(|byte| self.byte_tokens[*byte as usize]).filter(|id| *id != NO_TOKEN);
            out.extend(symbols);
            self.merges.apply(out, from);
        }
        if let Some(key) = key {
            self.cache.keep(key, &out[from..]);
        }
    }
}

impl Tokenizer for Bpe {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut from = 0;
        for (start, end, id) in self.added.find(text) {
            self.encode_ordinary(&text[from..start], out);
            out.push(id);
            from = end;
        }
        self.encode_ordinary(&text[from..], out);
        Ok(())
    }

    fn name(&self) -> &'static str {
        "bpe"
    }
}

fn check_model(model: &TokenModel<'_>) -> Result<(), Unsupported> {
    let nonempty = |affix: &Option<Cow<'_, str>>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
    match model.kind.as_deref() {
        Some("BPE") => {}
        kind => return unsupported(format!("model {}", kind.unwrap_or("without a type"))),
    }
    if model.dropout.is_some_and(|chance| chance != 0.0) {
        return unsupported("dropout");
    }
    if model.byte_fallback == Some(true) {
        return unsupported("byte_fallback");
    }
    if nonempty(&model.continuing_subword_prefix) || nonempty(&model.end_of_word_suffix) {
        return unsupported("a prefix or suffix of subwords");
    }
    Ok(())
}

/// Token of each byte. A byte without one is left out of the ids, unless the file names a token for such a case.
fn byte_tokens(ids: &HashMap<&str, u32>, has_unk: bool) -> Result<Box<[u32; 256]>, Unsupported> {
    let mut tokens = Box::new([NO_TOKEN; 256]);
    for (byte, token) in (0..=u8::MAX).zip(tokens.iter_mut()) {
        match ids.get(byte_level_char(byte).encode_utf8(&mut [0; 4]) as &str) {
            Some(id) => *token = *id,
            // These are in no UTF-8 text.
            None if matches!(byte, 0xc0 | 0xc1 | 0xf5..) => {}
            None if has_unk => return unsupported(format!("unk_token with no token for byte {byte:#04x}")),
            None => {}
        }
    }
    Ok(tokens)
}

fn merges(model: &TokenModel<'_>, ids: &HashMap<&str, u32>) -> Result<MergeTable, Unsupported> {
    let Some(merges) = &model.merges else { return unsupported("BPE without merges") };
    let mut table = MergeTable::with_capacity(merges.len());
    let mut joined = String::new();
    for (rank, merge) in merges.iter().enumerate() {
        if merge.0.starts_with("#version") {
            return unsupported("a version among the merges");
        }
        joined.clear();
        joined.push_str(&merge.0);
        joined.push_str(&merge.1);
        match [&*merge.0, &*merge.1, &joined].map(|token| ids.get(token)) {
            [Some(left), Some(right), Some(id)] => table.insert(*left, *right, rank as u32, *id),
            _ => return unsupported(format!("merge {rank} of tokens that are not in the vocabulary")),
        }
    }
    Ok(table)
}

/// Normal form C, by the tables that the reference engine uses.
fn to_nfc(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return text.into();
    }
    text.nfc().map(|(c, _)| c).collect::<String>().into()
}

/// Tokens that are found in the text as it is, before it is normalized and cut.
struct AddedTokens {
    /// All of them: a special token is ordinary text here, but hides the others that begin inside of it.
    scanner: Option<SpecialScanner>,
    special: Vec<u32>,
}

impl AddedTokens {
    fn new(file: &TokenizerJson<'_>) -> Result<AddedTokens, Unsupported> {
        let added = || file.added_tokens().iter().filter(|token| !token.content.is_empty());
        let is_normalized = |token: &super::tokenizer_json::AddedToken<'_>| token.normalized.unwrap_or(!token.special);
        for token in added().filter(|token| !token.special) {
            if token.lstrip || token.rstrip || token.single_word || is_normalized(token) {
                return unsupported(format!("the way that added token {:?} is matched", token.content));
            }
        }
        if added().all(|token| token.special) {
            return Ok(AddedTokens { scanner: None, special: Vec::new() });
        }
        let raw = || added().filter(|token| !is_normalized(token));
        let tokens = raw().map(|token| SpecialToken {
            id: token.id,
            text: token.content.clone().into_owned(),
            lstrip: false,
            rstrip: false,
        });
        let mut special: Vec<u32> = raw().filter(|token| token.special).map(|token| token.id).collect();
        special.sort_unstable();
        Ok(AddedTokens { scanner: Some(SpecialScanner::over(tokens.collect())), special })
    }

    /// Start, end and id of each that is not special.
    fn find(&self, text: &str) -> impl Iterator<Item = (usize, usize, u32)> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let scanner = self.scanner.as_ref()?;
            loop {
                let (start, token) = scanner.find(text, from)?;
                from = start + token.text.len();
                if self.special.binary_search(&token.id).is_err() {
                    return Some((start, from, token.id));
                }
            }
        })
    }
}

/// Open-addressed set of the tokens that a piece may be.
struct WholePieces {
    vocabulary: Arc<Vocabulary>,
    /// Ids, or [`NO_TOKEN`]; a power of two of them, at most half of them taken.
    slots: Box<[u32]>,
}

impl WholePieces {
    fn new(model: &TokenModel<'_>, vocabulary: &Arc<Vocabulary>) -> Result<WholePieces, Unsupported> {
        let tokens = &model.vocab.0;
        let slots = vec![NO_TOKEN; (tokens.len() * 2).next_power_of_two()].into_boxed_slice();
        let mut set = WholePieces { vocabulary: vocabulary.clone(), slots };
        for (text, id) in tokens {
            // A string that is not of the alphabet is no piece.
            let Some(bytes) = byte_level_bytes(text) else { continue };
            let bytes: Vec<u8> = bytes.collect();
            if vocabulary.bytes(*id) != bytes {
                return unsupported(format!("token {id} with two texts"));
            }
            let at = set.slot(&bytes);
            set.slots[at] = *id;
        }
        Ok(set)
    }

    fn find(&self, piece: &[u8]) -> Option<u32> {
        Some(self.slots[self.slot(piece)]).filter(|id| *id != NO_TOKEN)
    }

    /// Where the piece is, or would be.
    fn slot(&self, piece: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = xxh3_64(piece) as usize & mask;
        while self.slots[at] != NO_TOKEN && self.vocabulary.bytes(self.slots[at]) != piece {
            at = (at + 1) & mask;
        }
        at
    }
}
