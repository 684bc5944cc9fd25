//! When a sequence ends: end-of-sequence and stop tokens, stop strings, and the limits of length.
//!
//! Stop strings are matched on the bytes of the generated tokens, across token boundaries. Cutting the text at the match is
//! the router's work.

use std::sync::Arc;

use protocol::request_plane::{FinishReason, Stop};

/// Bytes of every token, by id; a token without text (control tokens) has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBytes {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl TokenBytes {
    /// Bytes of `token`; empty for a token that does not exist.
    pub fn get(&self, token: u32) -> &[u8] {
        let index = token as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |previous| self.ends[previous]);
        &self.bytes[start as usize..end as usize]
    }

    /// Tokens in the table.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the table has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

impl<B: AsRef<[u8]>> FromIterator<B> for TokenBytes {
    fn from_iter<I: IntoIterator<Item = B>>(tokens: I) -> Self {
        let mut table = Self::default();
        for token in tokens {
            table.bytes.extend_from_slice(token.as_ref());
            table.ends.push(u32::try_from(table.bytes.len()).expect("a vocabulary is far below 4 GiB"));
        }
        table
    }
}

/// What ending a sequence needs to know of the model.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    /// Text of the tokens.
    pub token_bytes: TokenBytes,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

/// Why a sequence ends with its newest token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The reason.
    pub reason: FinishReason,
    /// With [`FinishReason::StopString`]: which.
    pub stop_string: Option<String>,
    /// With [`FinishReason::StopToken`]: which.
    pub stop_token: Option<u32>,
}

impl Ending {
    fn new(reason: FinishReason) -> Self {
        Self { reason, stop_string: None, stop_token: None }
    }

    /// Whether the newest token is only the signal to end, and no part of the answer.
    pub fn by_token(&self) -> bool {
        matches!(self.reason, FinishReason::Eos | FinishReason::StopToken)
    }
}

/// Watches one sequence for its end.
#[derive(Clone, Debug)]
pub struct StopWatch {
    vocabulary: Arc<Vocabulary>,
    max_tokens: usize,
    min_tokens: usize,
    ignore_eos: bool,
    strings: Vec<String>,
    token_ids: Vec<u32>,
    /// Tokens that must not be chosen before `min_tokens`.
    suppressed: Vec<u32>,
    generated: usize,
    /// The last bytes that could be the beginning of a stop string, and one whole one.
    tail: Vec<u8>,
    /// Bytes of the longest stop string.
    longest: usize,
}

impl StopWatch {
    /// `room` is how many tokens the context has left for the answer.
    pub fn new(wire: Stop, room: usize, vocabulary: Arc<Vocabulary>) -> Self {
        let eos: &[u32] = if wire.ignore_eos { &[] } else { &vocabulary.eos_token_ids };
        let suppressed = eos.iter().chain(&wire.token_ids).copied().collect();
        let strings: Vec<String> = wire.strings.into_iter().filter(|s| !s.is_empty()).collect();
        Self {
            max_tokens: (wire.max_tokens as usize).min(room),
            min_tokens: wire.min_tokens as usize,
            ignore_eos: wire.ignore_eos,
            longest: strings.iter().map(String::len).max().unwrap_or(0),
            strings,
            token_ids: wire.token_ids,
            suppressed,
            generated: 0,
            tail: Vec::new(),
            vocabulary,
        }
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Tokens that must not be chosen next: while fewer than `min_tokens` are generated, all those that would end the
    /// sequence.
    pub fn masked(&self) -> &[u32] {
        if self.generated < self.min_tokens { &self.suppressed } else { &[] }
    }

    /// Takes the next generated token; says whether the sequence ends with it.
    pub fn push(&mut self, token: u32) -> Option<Ending> {
        self.generated += 1;
        let string = self.push_bytes(token);
        if self.generated >= self.min_tokens {
            if !self.ignore_eos && self.vocabulary.eos_token_ids.contains(&token) {
                return Some(Ending::new(FinishReason::Eos));
            }
            if self.token_ids.contains(&token) {
                return Some(Ending { stop_token: Some(token), ..Ending::new(FinishReason::StopToken) });
            }
            if let Some(index) = string {
                let stop_string = Some(self.strings[index].clone());
                return Some(Ending { stop_string, ..Ending::new(FinishReason::StopString) });
            }
        }
        (self.generated >= self.max_tokens).then(|| Ending::new(FinishReason::Length))
    }

    /// Takes tokens that were generated elsewhere; says whether the sequence had ended with the last of them.
    pub fn replay(&mut self, output: &[u32]) -> Option<Ending> {
        output.iter().map(|&token| self.push(token)).last().flatten()
    }

    /// The stop string that is complete first with the bytes of `token`; the longest of those that end together.
    fn push_bytes(&mut self, token: u32) -> Option<usize> {
        if self.strings.is_empty() {
            return None;
        }
        let old = self.tail.len();
        self.tail.extend_from_slice(self.vocabulary.token_bytes.get(token));
        let found = (old + 1..=self.tail.len()).find_map(|end| {
            let complete = |(_, s): &(usize, &String)| self.tail[..end].ends_with(s.as_bytes());
            self.strings.iter().enumerate().filter(complete).max_by_key(|(_, s)| s.len()).map(|(index, _)| index)
        });
        let surplus = self.tail.len().saturating_sub(self.longest);
        self.tail.drain(..surplus);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: u32 = 0;

    fn watch(wire: Stop) -> StopWatch {
        let token_bytes = ["", "ab", "c", "\u{20ac}", "STOP", "ST", "OP"].iter().map(|s| s.as_bytes()).collect();
        let vocabulary = Vocabulary { token_bytes, eos_token_ids: vec![EOS] };
        StopWatch::new(wire, 100, Arc::new(vocabulary))
    }

    fn run(mut watch: StopWatch, tokens: &[u32]) -> Option<(usize, Ending)> {
        tokens.iter().enumerate().find_map(|(i, &token)| Some((i, watch.push(token)?)))
    }

    fn limit(max_tokens: u32) -> Stop {
        Stop { max_tokens, ..Default::default() }
    }

    #[test]
    fn eos_ends_unless_ignored() {
        let ending = Ending::new(FinishReason::Eos);
        assert!(ending.by_token());
        assert_eq!(run(watch(limit(9)), &[1, EOS]), Some((1, ending)));
        assert_eq!(run(watch(Stop { ignore_eos: true, ..limit(9) }), &[1, EOS]), None);
    }

    #[test]
    fn a_stop_token_ends_and_is_named() {
        let (at, ending) = run(watch(Stop { token_ids: vec![2], ..limit(9) }), &[1, 2]).expect("ends");
        assert_eq!((at, ending.reason, ending.stop_token), (1, FinishReason::StopToken, Some(2)));
    }

    #[test]
    fn stop_strings_match_across_tokens_and_inside_one() {
        let stops = |s: &str| watch(Stop { strings: vec![s.into()], ..limit(9) });
        assert_eq!(run(stops("bc"), &[1, 1, 2]).expect("ends").0, 2);
        assert_eq!(run(stops("TO"), &[5, 6]).expect("ends").0, 1);
        assert_eq!(run(stops("TO"), &[4]).expect("ends").0, 0);
        assert_eq!(run(stops("c\u{20ac}a"), &[2, 3, 1]).expect("ends").0, 2);
        assert_eq!(run(stops("STOPS"), &[5, 6, 1, 5]), None);
        assert_eq!(run(stops(""), &[1, 2]), None, "an empty string never matches");
    }

    #[test]
    fn the_string_complete_first_wins_and_the_longer_of_two() {
        let strings = vec!["OP".into(), "ST".into(), "xST".into()];
        let (_, ending) = run(watch(Stop { strings, ..limit(9) }), &[4]).expect("ends");
        assert_eq!(ending.stop_string.as_deref(), Some("ST"));
        let strings = vec!["b".into(), "ab".into()];
        let (_, ending) = run(watch(Stop { strings, ..limit(9) }), &[1]).expect("ends");
        assert_eq!(ending.stop_string.as_deref(), Some("ab"));
    }

    #[test]
    fn nothing_but_length_ends_before_min_tokens() {
        let wire = Stop { min_tokens: 3, strings: vec!["ab".into()], token_ids: vec![2], ..limit(9) };
        let mut watch = watch(wire);
        assert_eq!(watch.masked(), [EOS, 2]);
        assert_eq!(watch.push(1), None);
        assert_eq!(watch.push(3), None);
        assert_eq!(watch.masked(), [EOS, 2]);
        assert_eq!(watch.push(3), None, "a string that matched before min_tokens is past");
        assert!(watch.masked().is_empty());
        assert_eq!(watch.push(1).expect("ends").reason, FinishReason::StopString);
    }

    #[test]
    fn length_is_the_smaller_of_max_tokens_and_room() {
        assert_eq!(run(watch(limit(2)), &[1, 1, 1]).expect("ends"), (1, Ending::new(FinishReason::Length)));
        let short = StopWatch::new(limit(50), 1, Arc::default());
        assert_eq!(run(short, &[1, 1]).expect("ends").0, 0);
    }

    #[test]
    fn a_replayed_beginning_counts_as_if_it_had_been_generated_here() {
        let wire = Stop { min_tokens: 3, strings: vec!["bc".into()], ..limit(4) };
        let mut begun = watch(wire.clone());
        assert_eq!(begun.replay(&[2, 1]), None);
        assert_eq!((begun.generated(), begun.masked()), (2, &[EOS][..]));
        assert_eq!(begun.push(2).expect("ends").stop_string.as_deref(), Some("bc"), "across the seam");
        let mut begun = watch(wire.clone());
        assert_eq!(begun.replay(&[2, 2, 1]), None);
        assert_eq!(begun.push(1).expect("ends").reason, FinishReason::Length);
        let ended = watch(wire.clone()).replay(&[2, 1, 2]).expect("the last of them ended it");
        assert_eq!(ended.reason, FinishReason::StopString);
        assert_eq!(watch(wire).replay(&[]), None);
    }

    #[test]
    fn unknown_tokens_have_no_bytes() {
        let table: TokenBytes = ["a", "", "bc"].iter().collect();
        assert_eq!(
            (table.get(0), table.get(1), table.get(2), table.get(3)),
            (&b"a"[..], &b""[..], &b"bc"[..], &b""[..])
        );
    }
}
