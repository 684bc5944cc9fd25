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

/// Ids of pieces of text within a budget of bytes.
///
/// Most pieces are a user's last words, which may never come again. So the least recently used of those that were asked for
/// once go first, and no number of new ones pushes out those that were asked for again. These have three quarters of the
/// budget at most; the least recently used of them then counts as new.
pub struct SegmentCache {
    budget: usize,
    /// Random, so that nobody can prepare texts with equal hashes.
    seed: u64,
    state: Mutex<CacheState>,
}

#[derive(Default)]
struct CacheState {
    by_hash: HashMap<u64, Entry>,
    once: ByUse,
    again: ByUse,
    clock: u64,
    hits: u64,
    misses: u64,
}

/// Entries of one kind.
#[derive(Default)]
struct ByUse {
    /// Hash by time of last use.
    hashes: BTreeMap<u64, u64>,
    bytes: usize,
}

struct Entry {
    used: u64,
    again: bool,
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
        let state = self.state.lock();
        SegmentCacheStats { hits: state.hits, misses: state.misses, bytes: state.once.bytes + state.again.bytes }
    }

    /// Appends the ids of `text`, encoding it when it is new.
    pub fn encode(&self, engine: &dyn Tokenizer, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.len() < MIN_CACHED_BYTES || text.len() > self.most() {
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
        let segment = Segment { text: text.into(), ids: out[from..].into() };
        if segment.cost() <= self.most() {
            self.insert(hash, segment);
        }
        Ok(())
    }

    /// Bytes that one piece may take, so that a huge prompt does not empty the cache.
    fn most(&self) -> usize {
        self.budget / 8
    }

    fn lookup(&self, hash: u64) -> Option<Arc<Segment>> {
        let mut state = self.state.lock();
        let Some(entry) = state.take(hash) else {
            state.misses += 1;
            return None;
        };
        state.hits += 1;
        state.put(hash, entry.segment.clone(), true);
        while state.again.bytes > self.budget / 4 * 3
            && let Some((hash, entry)) = state.take_oldest(true)
        {
            state.put(hash, entry.segment, false);
        }
        Some(entry.segment)
    }

    fn insert(&self, hash: u64, segment: Segment) {
        let mut state = self.state.lock();
        state.take(hash);
        state.put(hash, Arc::new(segment), false);
        while state.once.bytes + state.again.bytes > self.budget && state.take_oldest(false).is_some() {}
    }
}

impl CacheState {
    /// The entry, which is out then.
    fn take(&mut self, hash: u64) -> Option<Entry> {
        let entry = self.by_hash.remove(&hash)?;
        let kind = self.kind(entry.again);
        kind.hashes.remove(&entry.used);
        kind.bytes -= entry.segment.cost();
        Some(entry)
    }

    /// The least recently used of its kind, which is out then.
    fn take_oldest(&mut self, again: bool) -> Option<(u64, Entry)> {
        let (_, hash) = self.kind(again).hashes.first_key_value()?;
        let hash = *hash;
        Some((hash, self.take(hash)?))
    }

    /// Adds an entry that is not in, as the most recently used.
    fn put(&mut self, hash: u64, segment: Arc<Segment>, again: bool) {
        self.clock += 1;
        let used = self.clock;
        let kind = self.kind(again);
        kind.hashes.insert(used, hash);
        kind.bytes += segment.cost();
        self.by_hash.insert(hash, Entry { used, again, segment });
    }

    fn kind(&mut self, again: bool) -> &mut ByUse {
        if again { &mut self.again } else { &mut self.once }
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
                for _ in 0..1 + n % 2 {
                    let mut ids = Vec::new();
                    cache.encode(&Bytes, &text, &mut ids).expect("encodes");
                    assert!(ids.iter().copied().eq(text.bytes().map(u32::from)), "round {round}");
                    assert!(cache.stats().bytes <= 8 << 10);
                }
            }
        }
        assert!(cache.stats().bytes > 7 << 10);
        assert_eq!(cache.stats().hits, 3 * 100);
    }

    #[test]
    fn pieces_that_are_asked_for_once_push_out_none_that_came_again() {
        let cache = SegmentCache::new(8 << 10);
        let encode = |text: &str| {
            let before = cache.stats().hits;
            cache.encode(&Bytes, text, &mut Vec::new()).expect("encodes");
            cache.stats().hits > before
        };
        let kept: Vec<String> = (0..10).map(|n| format!("this piece is asked for again, {n}")).collect();
        for text in &kept {
            assert_eq!((encode(text), encode(text)), (false, true));
        }
        for n in 0..100 {
            assert!(!encode(&format!("a piece that is asked for only once, {n}")));
        }
        assert!(kept.iter().all(|text| encode(text)));
    }

    #[test]
    fn the_whole_budget_is_for_pieces_that_come_again_in_turn() {
        let cache = SegmentCache::new(8 << 10);
        for round in 0..3 {
            for n in 0..20 {
                cache
                    .encode(&Bytes, &format!("a piece of text with the number {n}"), &mut Vec::new())
                    .expect("encodes");
            }
            assert_eq!(cache.stats().hits, 20 * round);
        }
        assert!(cache.stats().bytes > 6 << 10, "more than those that came again may take");
    }

    #[test]
    fn the_least_recently_used_piece_leaves_first() {
        let cache = SegmentCache::new(8 << 10);
        let encode = |n: usize| {
            let before = cache.stats().hits;
            cache.encode(&Bytes, &format!("a piece of text with the number {n}"), &mut Vec::new()).expect("encodes");
            cache.stats().hits > before
        };
        for n in 0..100 {
            encode(n);
            encode(n);
            assert!(encode(0), "used between all others");
        }
        assert!(!encode(1) && encode(99));
    }

    #[test]
    fn a_piece_that_would_fill_the_cache_is_not_kept() {
        let cache = SegmentCache::new(1 << 10);
        cache.encode(&Bytes, &"x".repeat(500), &mut Vec::new()).expect("encodes");
        assert_eq!(cache.stats(), SegmentCacheStats::default());
    }
}
