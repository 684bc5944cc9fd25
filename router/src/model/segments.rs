//! Prompt text to tokens: splits at special tokens, encodes what lies between, and remembers the pieces.
//!
//! A tokenizer treats the text between two special tokens on its own, so a piece has the same ids in every prompt:
//! encoding piece by piece, and taking a piece from the cache, is exact. In a chat a piece is one message, and a long
//! conversation costs only its new turn.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::tokenizer::{Tokenizer, TokenizerError};
use super::vocabulary::{SpecialToken, Vocabulary};

/// Finds special tokens in text: leftmost, and of several at one place the longest.
pub struct SpecialScanner {
    /// Longest first among those with the same first byte.
    tokens: Vec<SpecialToken>,
    /// Range of `tokens` that begin with a byte.
    by_first_byte: Box<[(u32, u32); 256]>,
    /// The distinct first bytes.
    first_bytes: Vec<u8>,
}

/// Pieces of a prompt there is room for at once: those of a chat with four messages.
const PIECES: usize = 16;

/// A piece of prompt text.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Ordinary text, not empty.
    Text(&'a str),
    /// A special token.
    Special(u32),
}

impl SpecialScanner {
    /// A scanner for the special tokens of a vocabulary.
    pub fn new(vocabulary: &Vocabulary) -> SpecialScanner {
        let mut tokens = vocabulary.special_tokens().to_vec();
        // A text of one character cannot be told from users' text, nor be broken there: it stays ordinary text.
        tokens.retain(|token| token.text.chars().nth(1).is_some());
        SpecialScanner::over(tokens)
    }

    /// A scanner for some tokens, special or not. None may have an empty text.
    pub(super) fn over(mut tokens: Vec<SpecialToken>) -> SpecialScanner {
        tokens.sort_by(|a, b| {
            (a.text.as_bytes()[0], b.text.len()).cmp(&(b.text.as_bytes()[0], a.text.len())).then(a.id.cmp(&b.id))
        });
        let mut by_first_byte = Box::new([(0, 0); 256]);
        let mut first_bytes = Vec::new();
        for (at, token) in tokens.iter().enumerate() {
            let first = token.text.as_bytes()[0];
            let range = &mut by_first_byte[first as usize];
            if range.1 == 0 {
                *range = (at as u32, at as u32);
                first_bytes.push(first);
            }
            range.1 = at as u32 + 1;
        }
        SpecialScanner { tokens, by_first_byte, first_bytes }
    }

    /// The special tokens, those with the same first byte together.
    pub fn tokens(&self) -> &[SpecialToken] {
        &self.tokens
    }

    /// The first special token at or after `from`: its start, and the token.
    pub fn find(&self, text: &str, mut from: usize) -> Option<(usize, &SpecialToken)> {
        let bytes = text.as_bytes();
        while let Some(at) = self.next_candidate(&bytes[from..]).map(|offset| from + offset) {
            let (low, high) = self.by_first_byte[bytes[at] as usize];
            let candidates = &self.tokens[low as usize..high as usize];
            if let Some(token) = candidates.iter().find(|token| bytes[at..].starts_with(token.text.as_bytes())) {
                return Some((at, token));
            }
            from = at + 1;
        }
        None
    }

    fn next_candidate(&self, bytes: &[u8]) -> Option<usize> {
        match *self.first_bytes {
            [] => None,
            [a] => memchr::memchr(a, bytes),
            [a, b] => memchr::memchr2(a, b, bytes),
            [a, b, c] => memchr::memchr3(a, b, c, bytes),
            _ => bytes.iter().position(|byte| self.by_first_byte[*byte as usize].1 != 0),
        }
    }

    /// Splits `text` at its special tokens.
    pub fn split<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = Vec::with_capacity(PIECES);
        let mut from = 0;
        while let Some((at, token)) = self.find(text, from) {
            let before = &text[from..at];
            let before = if token.lstrip { before.trim_end() } else { before };
            if !before.is_empty() {
                pieces.push(Piece::Text(before));
            }
            pieces.push(Piece::Special(token.id));
            from = at + token.text.len();
            if token.rstrip {
                from = text.len() - text[from..].trim_start().len();
            }
        }
        if from < text.len() {
            pieces.push(Piece::Text(&text[from..]));
        }
        pieces
    }
}

/// Counters of a [`SegmentCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCacheStats {
    /// Pieces found.
    pub hits: u64,
    /// Pieces encoded.
    pub misses: u64,
    /// Bytes held: text, ids and bookkeeping; ≤ the budget.
    pub bytes: usize,
}

/// Ids of pieces of text, least recently used out first, within a budget of bytes.
pub struct SegmentCache {
    budget: usize,
    /// Random, so that nobody can prepare texts with equal hashes.
    seed: u64,
    state: Mutex<CacheState>,
}

#[derive(Default)]
struct CacheState {
    by_hash: HashMap<u64, Entry>,
    /// Hash by time of last use.
    by_use: BTreeMap<u64, u64>,
    clock: u64,
    stats: SegmentCacheStats,
}

struct Entry {
    used: u64,
    segment: Arc<Segment>,
}

struct Segment {
    text: Box<str>,
    ids: Box<[u32]>,
}

/// Pieces shorter than this are cheaper to encode than to look up.
const MIN_CACHED_BYTES: usize = 24;

/// Map entry, tree entry and allocations of one segment, in bytes.
const ENTRY_OVERHEAD: usize = 160;

impl Segment {
    fn cost(&self) -> usize {
        self.text.len() + self.ids.len() * size_of::<u32>() + ENTRY_OVERHEAD
    }
}

impl SegmentCache {
    /// An empty cache of at most `budget` bytes; 0 turns it off.
    pub fn new(budget: usize) -> SegmentCache {
        SegmentCache { budget, seed: rand::random(), state: Mutex::default() }
    }

    /// What it did so far.
    pub fn stats(&self) -> SegmentCacheStats {
        self.state.lock().stats
    }

    /// Appends the ids of `text`, encoding it when it is new.
    pub fn encode(&self, engine: &dyn Tokenizer, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        // One entry may take an eighth, so that a huge prompt does not empty the cache.
        if text.len() < MIN_CACHED_BYTES || text.len() > self.budget / 16 {
            return engine.encode(text, out);
        }
        let hash = xxh3_64_with_seed(text.as_bytes(), self.seed);
        if let Some(segment) = self.lookup(hash) {
            // The text is compared too: equal hashes of different texts must not mix up two users' prompts.
            if *segment.text == *text {
                out.extend_from_slice(&segment.ids);
                return Ok(());
            }
        }
        let from = out.len();
        engine.encode(text, out)?;
        self.insert(hash, Segment { text: text.into(), ids: out[from..].into() });
        Ok(())
    }

    fn lookup(&self, hash: u64) -> Option<Arc<Segment>> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(entry) = state.by_hash.get_mut(&hash) else {
            state.stats.misses += 1;
            return None;
        };
        state.stats.hits += 1;
        state.clock += 1;
        state.by_use.remove(&entry.used);
        entry.used = state.clock;
        state.by_use.insert(entry.used, hash);
        Some(entry.segment.clone())
    }

    fn insert(&self, hash: u64, segment: Segment) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.clock += 1;
        state.stats.bytes += segment.cost();
        let used = state.clock;
        if let Some(old) = state.by_hash.insert(hash, Entry { used, segment: Arc::new(segment) }) {
            state.by_use.remove(&old.used);
            state.stats.bytes -= old.segment.cost();
        }
        state.by_use.insert(used, hash);
        while state.stats.bytes > self.budget {
            let Some((_, oldest)) = state.by_use.pop_first() else { break };
            if let Some(entry) = state.by_hash.remove(&oldest) {
                state.stats.bytes -= entry.segment.cost();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tokenizer_json::TokenizerJson;
    use super::*;

    /// One id per byte.
    struct Bytes;

    impl Tokenizer for Bytes {
        fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
            out.extend(text.bytes().map(u32::from));
            Ok(())
        }

        fn name(&self) -> &'static str {
            "bytes"
        }
    }

    fn scanner(tokens: &[(&str, bool, bool)]) -> SpecialScanner {
        let added: Vec<_> = tokens
            .iter()
            .enumerate()
            .map(|(id, (text, lstrip, rstrip))| {
                json!({"id": id, "content": text, "special": true, "lstrip": lstrip, "rstrip": rstrip})
            })
            .collect();
        let file = json!({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": added});
        let file = file.to_string();
        let file = TokenizerJson::parse(file.as_bytes()).expect("valid");
        SpecialScanner::new(&Vocabulary::new(&file).expect("valid"))
    }

    #[test]
    fn splits_leftmost_longest_and_strips_white_space() {
        let scanner = scanner(&[("<|a|>", false, false), ("<|a|>b", false, false), ("[X]", true, true)]);
        assert_eq!(
            scanner.split("hi<|a|>b there  [X] \n<<|a|>"),
            [
                Piece::Text("hi"),
                Piece::Special(1),
                Piece::Text(" there"),
                Piece::Special(2),
                Piece::Text("<"),
                Piece::Special(0),
            ]
        );
        assert_eq!(scanner.split(""), []);
        assert_eq!(self::scanner(&[("<", false, false)]).split("<"), [Piece::Text("<")]);
        assert_eq!(scanner.split("<|a|"), [Piece::Text("<|a|")]);
    }

    #[test]
    fn the_cache_answers_what_the_engine_would_and_keeps_its_budget() {
        let cache = SegmentCache::new(8 << 10);
        for round in 0..3 {
            for n in 0..200 {
                let text = format!("a piece of text with the number {n}");
                let mut ids = Vec::new();
                cache.encode(&Bytes, &text, &mut ids).expect("encodes");
                assert!(ids.iter().copied().eq(text.bytes().map(u32::from)), "round {round}");
                assert!(cache.stats().bytes <= 8 << 10);
            }
        }
        assert!(cache.stats().bytes > 4 << 10);
    }

    #[test]
    fn the_least_recently_used_piece_leaves_first() {
        let cache = SegmentCache::new(8 << 10);
        let encode = |text: &str| cache.encode(&Bytes, text, &mut Vec::new()).expect("encodes");
        let kept = "this piece is asked for again and again";
        for n in 0..100 {
            encode(kept);
            encode(&format!("a piece that is asked for only once, {n}"));
        }
        let before = cache.stats();
        encode(kept);
        assert_eq!(cache.stats().hits, before.hits + 1);
    }

    #[test]
    fn a_piece_that_would_fill_the_cache_is_not_kept() {
        let cache = SegmentCache::new(1 << 10);
        cache.encode(&Bytes, &"x".repeat(500), &mut Vec::new()).expect("encodes");
        assert_eq!(cache.stats(), SegmentCacheStats::default());
    }
}
