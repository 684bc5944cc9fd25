//! Stop strings in a stream of text.
//!
//! Text that may still become a stop string is held back. The match that ends first wins, and of those the one that
//! begins first: what counts is where the answer could first have been stopped, so the chunking makes no difference.

/// Watches one answer.
pub struct StopMatcher {
    strings: Vec<String>,
    /// Keep the stop string in the text.
    include: bool,
    /// Text not handed on yet. Between calls: the longest end of the text that begins a stop string.
    held: String,
    matched: bool,
}

impl StopMatcher {
    /// No string of `strings` is empty.
    pub fn new(strings: Vec<String>, include: bool) -> StopMatcher {
        StopMatcher { strings, include, held: String::new(), matched: false }
    }

    /// Whether a stop string was seen; no text comes after it.
    pub fn matched(&self) -> bool {
        self.matched
    }

    /// Takes `text` and appends to `out` what is certain to belong to the answer.
    pub fn push(&mut self, text: &str, out: &mut String) {
        if self.matched {
            return;
        }
        if self.strings.is_empty() {
            out.push_str(text);
            return;
        }
        self.held.push_str(text);
        if let Some((from, to)) = self.first_match() {
            out.push_str(&self.held[..if self.include { to } else { from }]);
            self.held.clear();
            self.matched = true;
            return;
        }
        let certain = self.held.len() - self.undecided();
        out.extend(self.held.drain(..certain));
    }

    /// The answer ended: nothing can complete a stop string any more.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Earliest end, then earliest begin.
    fn first_match(&self) -> Option<(usize, usize)> {
        let found = self.strings.iter().filter_map(|stop| self.held.find(stop).map(|from| (from, from + stop.len())));
        found.min_by_key(|&(from, to)| (to, from))
    }

    /// Length of the longest end of `held` that is the begin of a stop string.
    fn undecided(&self) -> usize {
        let bytes = self.held.as_bytes();
        let longest = self.strings.iter().map(|stop| stop.len() - 1).max().unwrap_or(0).min(bytes.len());
        (1..=longest)
            .rev()
            .find(|&len| {
                let end = &bytes[bytes.len() - len..];
                self.strings.iter().any(|stop| stop.len() > len && stop.as_bytes().starts_with(end))
            })
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<'a>(stops: &[&str], include: bool, chunks: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), include);
        let mut out = String::new();
        for chunk in chunks {
            matcher.push(chunk, &mut out);
        }
        matcher.finish(&mut out);
        (out, matcher.matched())
    }

    #[test]
    fn text_is_trimmed_at_the_stop_string_even_across_chunks() {
        assert_eq!(run(&["STOP"], false, ["ab S", "TO", "P cd"]), ("ab ".into(), true));
        assert_eq!(run(&["STOP"], true, ["ab S", "TO", "P cd"]), ("ab STOP".into(), true));
        assert_eq!(run(&["STOP"], false, ["ab S", "TO"]), ("ab STO".into(), false));
        assert_eq!(run(&["aab"], false, ["aa", "a", "b"]), ("a".into(), true));
    }

    #[test]
    fn the_match_that_ends_first_wins() {
        assert_eq!(run(&["abcde", "c"], false, ["abcdef"]), ("ab".into(), true));
        assert_eq!(run(&["bc", "abc"], false, ["xabc"]), ("x".into(), true));
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut matcher = StopMatcher::new(vec!["\n\nUser:".into(), "é!".into()], false);
        let mut out = String::new();
        matcher.push("Hello\n", &mut out);
        assert_eq!(out, "Hello");
        matcher.push("world é", &mut out);
        assert_eq!(out, "Hello\nworld ");
    }

    proptest! {
        #[test]
        fn chunking_makes_no_difference(
            text in "[abé]{0,40}",
            stops in proptest::collection::vec("[abé]{1,4}", 1..4),
            cuts in proptest::collection::vec(0usize..40, 0..8),
            include: bool,
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut at: Vec<usize> = cuts.into_iter().filter(|cut| text.is_char_boundary(*cut)).collect();
            at.extend([0, text.len()]);
            at.sort();
            let chunks = at.windows(2).map(|pair| &text[pair[0]..pair[1]]);
            let whole = run(&stops, include, [text.as_str()]);
            prop_assert_eq!(run(&stops, include, chunks), whole.clone());
            if !include {
                prop_assert!(stops.iter().all(|stop| !whole.0.contains(stop)));
                prop_assert!(text.starts_with(&whole.0));
            }
        }
    }
}
