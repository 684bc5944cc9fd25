//! Tells the special tokens that a template writes from those that come about otherwise.
//!
//! `guard` breaks special tokens in users' strings, but a template may change such a string: it lowers its case, cuts
//! it, or replaces a part of it with nothing, and a token is there that was not. So each special token in the
//! template's own text gets an invisible mark before it, which no user's string can contain; after rendering, a
//! special token without that mark is broken. Tokens that the template puts together from pieces
//! (`'<|' + role + '|>'`) cannot be told apart like this; which ones those are is seen in conversations without any
//! special token of a user's, and for them the guard alone has to do.

use std::ops::Range;

use super::guard::MARK;
use super::percent::literal_len;
use crate::model::segments::SpecialScanner;
use crate::model::vocabulary::SpecialToken;

/// Stands before a special token of the template's own. A Unicode noncharacter, as those of the guard.
pub(super) const ORIGIN: char = '\u{fdd2}';

/// Knows the special tokens of a model, and which of them its template assembles.
pub(super) struct Origin {
    scanner: SpecialScanner,
    /// Ids, sorted; nothing while that is not known: all of them.
    assembled: Option<Vec<u32>>,
}

impl Origin {
    /// For this template; also its source with the marks.
    pub(super) fn new(source: &str, special: &[SpecialToken]) -> (Origin, String) {
        let mut tokens = special.to_vec();
        // The prompt is split at tokens of two and more characters only.
        tokens.retain(|token| token.text.chars().nth(1).is_some());
        let origin = Origin { scanner: SpecialScanner::over(tokens), assembled: None };
        let mut marked = String::with_capacity(source.len() + 64);
        let mut from = 0;
        for range in literals(source) {
            marked.push_str(&source[from..range.start]);
            marked.push_str(&origin.mark(&source[range.clone()]));
            from = range.end;
        }
        marked.push_str(&source[from..]);
        (origin, marked)
    }

    /// `text`, which is the template's or the model's own, with a mark before each special token.
    pub(super) fn mark(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + ORIGIN.len_utf8());
        let mut from = 0;
        while let Some((at, token)) = self.scanner.find(text, from) {
            out.push_str(&text[from..at]);
            out.push(ORIGIN);
            out.push_str(&token.text);
            from = at + token.text.len();
        }
        out.push_str(&text[from..]);
        out
    }

    /// Learns from what the template made of harmless conversations, before [`Origin::settle`], which tokens it
    /// assembles. Without any, each may be one.
    pub(super) fn learn(&mut self, rendered: &[String]) {
        if rendered.is_empty() {
            return;
        }
        let mut seen = Vec::new();
        for rendered in rendered {
            let (text, own) = unmark(rendered);
            seen.extend(self.foreign(&text, &own, |_| true).into_iter().map(|(_, token)| token.id));
        }
        seen.sort_unstable();
        seen.dedup();
        self.assembled = Some(seen);
    }

    /// Takes the marks out of rendered text, and breaks each special token that had none.
    pub(super) fn settle(&self, rendered: &str) -> String {
        let (text, own) = unmark(rendered);
        let assembled = |token: &SpecialToken| match &self.assembled {
            Some(ids) => ids.binary_search(&token.id).is_ok(),
            None => true,
        };
        let foreign = self.foreign(&text, &own, assembled);
        let broken = foreign.into_iter().filter(|(_, token)| !assembled(token));
        let cuts: Vec<usize> = broken.map(|(at, token)| at + first_char_len(&token.text)).collect();
        if cuts.is_empty() {
            return text;
        }
        let mut out = String::with_capacity(text.len() + cuts.len() * MARK.len_utf8());
        let mut from = 0;
        for cut in cuts {
            out.push_str(&text[from..cut]);
            out.push(MARK);
            from = cut;
        }
        out.push_str(&text[from..]);
        out
    }

    /// Special tokens that begin at no place of `own`; one that is `accepted` hides those that begin inside of it.
    fn foreign(
        &self,
        text: &str,
        own: &[usize],
        accepted: impl Fn(&SpecialToken) -> bool,
    ) -> Vec<(usize, &SpecialToken)> {
        let mut found = Vec::new();
        let mut from = 0;
        while let Some((at, token)) = self.scanner.find(text, from) {
            let is_own = own.binary_search(&at).is_ok();
            if !is_own {
                found.push((at, token));
            }
            from = at + if is_own || accepted(token) { token.text.len() } else { first_char_len(&token.text) };
        }
        found
    }
}

/// Text without the marks, and where they were.
fn unmark(rendered: &str) -> (String, Vec<usize>) {
    let mut text = String::with_capacity(rendered.len());
    let mut own = Vec::with_capacity(16);
    for (at, part) in rendered.split(ORIGIN).enumerate() {
        if at > 0 {
            own.push(text.len());
        }
        text.push_str(part);
    }
    (text, own)
}

fn first_char_len(text: &str) -> usize {
    text.chars().next().map_or(1, char::len_utf8)
}

/// Where the source has text: outside of tags, and inside of string literals, without their quotes.
fn literals(source: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    loop {
        let tags = [("{{", "}}"), ("{%", "%}"), ("{#", "#}")];
        let next = tags.iter().filter_map(|(open, close)| Some((at + source[at..].find(open)?, *close))).min();
        let Some((open, close)) = next else { break };
        found.push(at..open);
        at = open + 2;
        while !source[at..].starts_with(close) {
            let Some(c) = source[at..].chars().next() else { return found };
            let literal = close != "#}" && matches!(c, '\'' | '"');
            let len = if literal { literal_len(&source[at..], c) } else { c.len_utf8() };
            if literal && len >= 2 && source[at + 1..at + len].ends_with(c) {
                found.push(at + 1..at + len - 1);
            }
            at += len;
        }
        at += 2;
    }
    found.push(at..source.len());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(source: &str) -> (Origin, String) {
        let tokens = ["<s>", "</s>", "<|user|>", "<|end|>", "[INST]"].iter().zip(0..);
        let special: Vec<SpecialToken> =
            tokens.map(|(text, id)| SpecialToken { id, text: (*text).into(), lstrip: false, rstrip: false }).collect();
        Origin::new(source, &special)
    }

    #[test]
    fn marks_are_in_text_and_strings_alone() {
        for (source, marked) in [
            ("<s>{{ m }}</s>", "@<s>{{ m }}@</s>"),
            ("{{ '<s>' + m['a'] + \"x</s>\" }}", "{{ '@<s>' + m['a'] + \"x@</s>\" }}"),
            ("{% if a == '<s>' %}{# <s> it's #}<s>{% endif %}", "{% if a == '@<s>' %}{# <s> it's #}@<s>{% endif %}"),
            ("{{ a[INST] }}[INST]", "{{ a[INST] }}@[INST]"),
            ("{{ '\\'<s>' }}", "{{ '\\'@<s>' }}"),
            ("{{ '<s>", "{{ '<s>"),
            ("", ""),
        ] {
            assert_eq!(origin(source).1, marked.replace('@', "\u{fdd2}"), "{source}");
        }
    }

    #[test]
    fn what_the_template_did_not_write_is_broken() {
        let (mut origin, _) = origin("<s>");
        assert_eq!(origin.settle("<s>"), "<s>", "as long as nothing is known");
        origin.learn(&["\u{fdd2}<s><|user|>".into(), "\u{fdd2}<|end|>".into()]);
        assert_eq!(origin.settle("<|user|><|end|>"), "<|user|><\u{fdd0}|end|>");
        assert_eq!(origin.settle("a \u{fdd2}<s>b</s><s>"), "a <s>b<\u{fdd0}/s><\u{fdd0}s>");
        assert_eq!(origin.settle("<\u{fdd2}<s>"), "<<s>");
        assert_eq!(origin.settle("[\u{fdd2}<s>INST]"), "[<s>INST]");
    }
}
