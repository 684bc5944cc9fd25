//! The mocker's answers: words by a hash of the sequence before them.
//!
//! The same sequence continues with the same token on every mocker of a model, so an answer that goes on elsewhere after
//! its worker has died reads as if nothing had happened. Words are plain ASCII: each token is text by itself.

use std::fmt;

use crate::engine::builtin::stop::Vocabulary;
use crate::engine::builtin::{Context, NextToken};

/// Chooses among the words of a vocabulary.
pub struct PlainText {
    /// Not empty.
    words: Vec<u32>,
    eos: Option<u32>,
    /// A hash below it ends the answer.
    eos_below: u64,
}

impl PlainText {
    /// With `answer_tokens` an answer ends after each token with the same probability, so that it has so many on average.
    pub fn new(vocabulary: &Vocabulary, answer_tokens: Option<f64>) -> Self {
        let ids = 0..vocabulary.token_bytes.len() as u32;
        let usable = |id: &u32| !vocabulary.eos_token_ids.contains(id);
        let word = |id: &u32| {
            let bytes = vocabulary.token_bytes.get(*id);
            let letters = bytes.strip_prefix(b" ").unwrap_or(bytes);
            usable(id) && !letters.is_empty() && letters.iter().all(u8::is_ascii_alphanumeric)
        };
        let mut words: Vec<u32> = ids.clone().filter(word).collect();
        if words.is_empty() {
            // A vocabulary without a word of ours; any token is as good as another.
            words = ids.filter(usable).collect();
        }
        if words.is_empty() {
            words.push(0);
        }
        let share = answer_tokens.map_or(0.0, |mean| 1.0 / mean.max(1.0));
        Self { words, eos: vocabulary.eos_token_ids.first().copied(), eos_below: (share * u64::MAX as f64) as u64 }
    }
}

impl fmt::Debug for PlainText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainText").field("words", &self.words.len()).field("eos", &self.eos).finish_non_exhaustive()
    }
}

impl NextToken for PlainText {
    fn next(&self, context: Context<'_>, masked: &[u32]) -> u32 {
        let before = context.prefix.map_or(0, |hash| hash.0);
        let hash = context.tail.iter().fold(scramble(before), |hash, &token| scramble(hash ^ u64::from(token)));
        if let Some(eos) = self.eos.filter(|eos| hash < self.eos_below && !masked.contains(eos)) {
            return eos;
        }
        let first = (scramble(hash) % self.words.len() as u64) as usize;
        let (head, tail) = self.words.split_at(first);
        let mut others = tail.iter().chain(head).copied();
        others.find(|word| !masked.contains(word)).unwrap_or(self.words[first])
    }
}

/// SplitMix64's step: golden-ratio increment, then its output function.
fn scramble(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
