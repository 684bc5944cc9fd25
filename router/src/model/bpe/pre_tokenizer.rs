//! How text is cut into pieces: the patterns in use with byte-level BPE, scanned by hand.
//!
//! A file names its pattern as a regular expression. Those below are known by their exact text, and each cuts every text
//! as the expression does; a file with another one is refused.

use serde::Deserialize;
use serde_json::Value;

use super::classes::{Class, class_at};
use super::{Unsupported, unsupported};

/// Steps of cutting, each applied to the pieces of the one before.
pub(super) struct PreTokenizer(Box<[Step]>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Numeric characters apart from the others; each on its own if `individual`.
    Digits { individual: bool },
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
    Cl100k {
        /// Most digits of a piece.
        digits_max: usize,
        /// `'ſ` is `'s` too: without regard to case, the long s is an s.
        long_s: bool,
    },
}

const LLAMA3: Step = Step::Cl100k { digits_max: 3, long_s: true };
const QWEN2: Step = Step::Cl100k { digits_max: 1, long_s: true };
const GPT4: Step = Step::Cl100k { digits_max: 3, long_s: false };

/// Known patterns, as they are written in files.
pub(super) const PATTERNS: [&str; 7] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// What cuts as each of [`PATTERNS`] does.
const STEPS: [Step; PATTERNS.len()] =
    [Step::Gpt2, Step::Gpt2, LLAMA3, LLAMA3, QWEN2, GPT4, Step::Cl100k { digits_max: 1, long_s: false }];

/// `pre_tokenizer`, as far as it is known.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Json {
    ByteLevel { add_prefix_space: bool, use_regex: Option<bool> },
    Digits { individual_digits: bool },
    Split { pattern: PatternJson, behavior: String, invert: bool },
    Sequence { pretokenizers: Vec<Json> },
}

/// A regular expression; a plain string, which has another key, is not known.
#[derive(Deserialize)]
struct PatternJson {
    #[serde(rename = "Regex")]
    regex: Option<String>,
}

impl PreTokenizer {
    pub(super) fn from_json(json: &Value) -> Result<PreTokenizer, Unsupported> {
        let json = Json::deserialize(json).map_err(|e| Unsupported(format!("pre_tokenizer: {e}")))?;
        let list = match json {
            Json::Sequence { pretokenizers } => pretokenizers,
            single => vec![single],
        };
        let Some((Json::ByteLevel { add_prefix_space: false, use_regex }, before)) = list.split_last() else {
            return unsupported("a pre_tokenizer that does not end with ByteLevel, or puts a blank before the text");
        };
        let mut steps = before.iter().map(step).collect::<Result<Vec<Step>, _>>()?;
        if use_regex.unwrap_or(true) {
            steps.push(Step::Gpt2);
        }
        Ok(PreTokenizer(steps.into()))
    }

    /// Calls `emit` with each piece, in order. None is empty.
    pub(super) fn cut(&self, text: &str, emit: &mut impl FnMut(&str)) {
        if !text.is_empty() {
            cut(&self.0, text, emit);
        }
    }
}

fn step(json: &Json) -> Result<Step, Unsupported> {
    match json {
        Json::Digits { individual_digits } => Ok(Step::Digits { individual: *individual_digits }),
        // Every character is part of a match, so that to remove what lies between them is to keep them apart.
        Json::Split { pattern: PatternJson { regex: Some(pattern) }, behavior, invert }
            if matches!((behavior.as_str(), invert), ("Isolated", false) | ("Removed", true)) =>
        {
            match PATTERNS.iter().position(|known| known == pattern) {
                Some(at) => Ok(STEPS[at]),
                None => unsupported(format!("pattern {pattern:?}")),
            }
        }
        Json::Split { .. } => unsupported("a Split in another way than at matches of a pattern"),
        Json::ByteLevel { .. } | Json::Sequence { .. } => unsupported("a ByteLevel or Sequence inside of a Sequence"),
    }
}

fn cut<F: FnMut(&str)>(steps: &[Step], text: &str, emit: &mut F) {
    let Some((step, rest)) = steps.split_first() else { return emit(text) };
    let mut from = 0;
    while from < text.len() {
        let end = step.end(text, from);
        let piece = &text[from..end];
        if rest.is_empty() {
            emit(piece)
        } else {
            cut(rest, piece, emit)
        }
        from = end;
    }
}

impl Step {
    /// End of the piece that begins at `from`, which is not the end of the text.
    #[inline]
    fn end(self, text: &str, from: usize) -> usize {
        match self {
            Step::Digits { individual } => digits(text, from, individual),
            Step::Gpt2 => gpt2(text, from),
            Step::Cl100k { digits_max, long_s } => cl100k(text, from, digits_max, long_s),
        }
    }
}

fn digits(text: &str, from: usize, individual: bool) -> usize {
    let Some((first, len)) = numeric_at(text, from) else { return from };
    let mut end = from + len;
    if individual && first {
        return end;
    }
    while let Some((numeric, len)) = numeric_at(text, end)
        && numeric == first
    {
        end += len;
    }
    end
}

/// Whether the character at `at` is numeric, and its length in bytes. As the reference engine has it here, that is what
/// the standard library says, not the patterns' `\p{N}`.
#[inline]
fn numeric_at(text: &str, at: usize) -> Option<(bool, usize)> {
    let byte = *text.as_bytes().get(at)?;
    if byte.is_ascii() {
        return Some((byte.is_ascii_digit(), 1));
    }
    let c = text[at..].chars().next()?;
    Some((c.is_numeric(), c.len_utf8()))
}

fn gpt2(text: &str, from: usize) -> usize {
    let bytes = text.as_bytes();
    if let Some(end) = contraction(bytes, from, |letter, byte| letter == byte) {
        return end;
    }
    let start = from + usize::from(bytes[from] == b' ');
    match class_at(text, start) {
        Some((class, len)) if class != Class::Space => run(text, start + len, class),
        _ => white_space(text, from),
    }
}

fn cl100k(text: &str, from: usize, digits_max: usize, long_s: bool) -> usize {
    let bytes = text.as_bytes();
    if let Some(end) = contraction(bytes, from, |letter, byte| letter == byte | 0x20) {
        return end;
    }
    if long_s && bytes[from..].starts_with("'ſ".as_bytes()) {
        return from + "'ſ".len();
    }
    let Some((class, len)) = class_at(text, from) else { return from };
    let after = from + len;
    match class {
        Class::Letter => return run(text, after, Class::Letter),
        Class::Number => {
            let mut end = after;
            for _ in 1..digits_max {
                match class_at(text, end) {
                    Some((Class::Number, len)) => end += len,
                    _ => break,
                }
            }
            return end;
        }
        Class::Space | Class::Other => {}
    }
    let next = class_at(text, after);
    if let Some((Class::Letter, len)) = next
        && !is_newline(bytes[from])
    {
        return run(text, after + len, Class::Letter);
    }
    let others = match (class, next) {
        (Class::Other, _) => Some(after),
        (_, Some((Class::Other, len))) if bytes[from] == b' ' => Some(after + len),
        _ => None,
    };
    if let Some(start) = others {
        let end = run(text, start, Class::Other);
        return end + bytes[end..].iter().take_while(|byte| is_newline(**byte)).count();
    }
    let blanks = run(text, after, Class::Space);
    match bytes[from..blanks].iter().rposition(|byte| is_newline(*byte)) {
        Some(last) => from + last + 1,
        None => white_space(text, from),
    }
}

fn is_newline(byte: u8) -> bool {
    matches!(byte, b'\r' | b'\n')
}

/// End of an English contraction: `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`.
#[inline]
fn contraction(bytes: &[u8], from: usize, is: impl Fn(u8, u8) -> bool) -> Option<usize> {
    if bytes[from] != b'\'' {
        return None;
    }
    let first = *bytes.get(from + 1)?;
    if [b's', b't', b'm', b'd'].into_iter().any(|letter| is(letter, first)) {
        return Some(from + 2);
    }
    let second = *bytes.get(from + 2)?;
    [(b'r', b'e'), (b'v', b'e'), (b'l', b'l')]
        .into_iter()
        .any(|(a, b)| is(a, first) && is(b, second))
        .then_some(from + 3)
}

/// End of the characters of one class from `at` on.
#[inline]
fn run(text: &str, mut at: usize, class: Class) -> usize {
    while let Some((found, len)) = class_at(text, at)
        && found == class
    {
        at += len;
    }
    at
}

/// `\s+(?!\S)|\s+`: all white space at the end of the text; else all but the last character, which belongs to the word
/// after it, unless it is the only one.
fn white_space(text: &str, from: usize) -> usize {
    let (mut end, mut last) = (from, from);
    while let Some((Class::Space, len)) = class_at(text, end) {
        last = end;
        end += len;
    }
    if end == text.len() || last == from { end } else { last }
}
