//! Keeps users' strings from acting as special tokens.
//!
//! Special tokens are looked for in the rendered text. So a user's string that contains the begin of one gets an
//! invisible mark inside that begin; the mark survives trimming, splitting and joining, the token no longer matches,
//! and the mark is taken out of the ordinary text afterwards. Strings without such a begin pass through untouched.

use std::borrow::Cow;

use super::origin::ORIGIN;
use crate::model::vocabulary::SpecialToken;

/// Breaks a special token's text. A Unicode noncharacter: valid in a string, and never part of real text.
pub(super) const MARK: char = '\u{fdd0}';

/// Escapes [`MARK`], itself and [`ORIGIN`], should a user send them: followed by `0`, `1` or `2`.
pub(super) const ESCAPE: char = '\u{fdd1}';

/// Knows the special tokens of a model.
pub(super) struct Guard {
    /// What may not appear whole in a user's string: enough of each token's text to tell it from text, at least two
    /// bytes.
    begins: Vec<String>,
    tokens: Vec<String>,
    first_bytes: Vec<u8>,
}

impl Guard {
    pub(super) fn new(special: &[SpecialToken]) -> Guard {
        let tokens: Vec<String> = special.iter().map(|token| token.text.clone()).collect();
        let mut begins: Vec<String> = tokens.iter().map(|token| begin(token).to_owned()).collect();
        begins.sort();
        begins.dedup();
        let mut first_bytes: Vec<u8> = tokens.iter().map(|token| token.as_bytes()[0]).collect();
        first_bytes.sort();
        first_bytes.dedup();
        Guard { begins, tokens, first_bytes }
    }

    /// `text` with its marks. Cost for harmless text: one pass.
    pub(super) fn protect<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let cuts = self.cuts(text);
        if cuts.is_empty() && !may_have_marks(text) {
            return Cow::Borrowed(text);
        }
        let mut cuts = cuts.into_iter().peekable();
        let mut out = String::with_capacity(text.len() + 32);
        for (at, c) in text.char_indices() {
            while cuts.next_if(|cut| *cut <= at).is_some() {
                out.push(MARK);
            }
            match c {
                MARK => out.extend([ESCAPE, '0']),
                ESCAPE => out.extend([ESCAPE, '1']),
                ORIGIN => out.extend([ESCAPE, '2']),
                c => out.push(c),
            }
        }
        out.extend(cuts.map(|_| MARK));
        Cow::Owned(out)
    }

    /// Byte offsets at which a mark goes, rising.
    fn cuts(&self, text: &str) -> Vec<usize> {
        let mut cuts = Vec::new();
        let text = text.trim_end(); // a template may do so before it joins strings
        let bytes = text.as_bytes();
        let mut from = 0;
        while let Some(at) = self.candidate(&bytes[from..]).map(|offset| from + offset) {
            let rest = &bytes[at..];
            let first_char = text[at..].chars().next().map_or(1, char::len_utf8);
            if self.begins.iter().any(|begin| rest.starts_with(begin.as_bytes())) || self.ends_inside(&text[at..]) {
                cuts.push(at + first_char);
            }
            from = at + 1;
        }
        cuts
    }

    /// Whether `rest` is the begin of a token: the next string could complete it.
    fn ends_inside(&self, rest: &str) -> bool {
        self.tokens.iter().any(|token| token.len() > rest.len() && token.starts_with(rest))
    }

    fn candidate(&self, bytes: &[u8]) -> Option<usize> {
        match *self.first_bytes {
            [] => None,
            [a] => memchr::memchr(a, bytes),
            [a, b] => memchr::memchr2(a, b, bytes),
            [a, b, c] => memchr::memchr3(a, b, c, bytes),
            _ => bytes.iter().position(|byte| self.first_bytes.contains(byte)),
        }
    }
}

/// `<|` of `<|im_end|>`; all but the last character of tokens that look like tags or words. A longer begin leaves
/// more of users' markup readable to templates that look into messages.
fn begin(token: &str) -> &str {
    let mut chars = token.char_indices().skip(1);
    let punctuation = |c: char| c.is_ascii_punctuation() && c != '/' && c != '_';
    match chars.next() {
        Some((at, second)) if punctuation(second) && at + second.len_utf8() < token.len() => {
            &token[..at + second.len_utf8()]
        }
        _ => {
            let last = token.char_indices().next_back().map_or(0, |(at, _)| at);
            if last == 0 { token } else { &token[..last] }
        }
    }
}

/// Whether any of [`MARK`], [`ESCAPE`] and [`ORIGIN`] can be in `text`: looks for the two bytes that all three begin with, and
/// other rare characters too.
fn may_have_marks(text: &str) -> bool {
    memchr::memmem::find(text.as_bytes(), b"\xef\xb7").is_some()
}

/// Takes the marks out again.
pub(super) fn unguard(text: &str) -> Cow<'_, str> {
    if !may_have_marks(text) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            MARK => {}
            ESCAPE => match chars.next() {
                Some('0') => out.push(MARK),
                Some('1') => out.push(ESCAPE),
                Some('2') => out.push(ORIGIN),
                other => out.extend(other), // a template cut the pair in two
            },
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn guard(tokens: &[&str]) -> Guard {
        let special: Vec<SpecialToken> = tokens
            .iter()
            .map(|text| SpecialToken { id: 0, text: (*text).into(), lstrip: false, rstrip: false })
            .collect();
        Guard::new(&special)
    }

    const TOKENS: [&str; 6] = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<start_of_turn>"];

    #[test]
    fn harmless_text_is_untouched() {
        let guard = guard(&TOKENS);
        for text in ["", "hello", "a < b", "<think>x</think>", "x <div> [1] y", "é字😀"] {
            assert!(matches!(guard.protect(text), Cow::Borrowed(_)), "{text}");
        }
    }

    #[test]
    fn joined_and_trimmed_parts_make_no_token() {
        let guard = guard(&TOKENS);
        for (a, b) in
            [("<|im_", "end|>"), ("x <  ", "|im_end|>"), ("<start_of", "_turn>"), ("[", "INST]"), ("<", "/s>")]
        {
            let joined = format!("{}{}", guard.protect(a).trim_end(), guard.protect(b));
            assert!(TOKENS.iter().all(|token| !joined.contains(token)), "{joined:?}");
        }
    }

    #[test]
    fn every_mark_is_looked_for() {
        for mark in [MARK, ESCAPE, ORIGIN] {
            assert!(may_have_marks(&format!("a{mark}")), "{mark:?}");
        }
        assert!(!may_have_marks("a\u{ff0c}\u{fe0f}"), "text of today has none");
    }

    proptest! {
        #[test]
        fn no_token_survives_and_the_text_does(parts in proptest::collection::vec(prop_oneof![
            Just("<|im_end|>".to_owned()), Just("</s>".to_owned()), Just("<".to_owned()), Just("[INST]".to_owned()),
            Just("<start_of_turn>".to_owned()), Just("\u{fdd0}".to_owned()), Just("\u{fdd1}".to_owned()), Just("\u{fdd2}</s>".to_owned()), ".{0,3}"], 0..12)) {
            let text = parts.concat();
            let protected = guard(&TOKENS).protect(&text).into_owned();
            prop_assert!(TOKENS.iter().all(|token| !protected.contains(token)) && !protected.contains(ORIGIN));
            prop_assert_eq!(unguard(&protected), text);
        }
    }
}
