//! The engine against the reference: on random text, at every class of character, and on what it must refuse.

use std::collections::HashMap;
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use tokenizers::utils::SysRegex;

use super::pre_tokenizer::{PATTERNS, PreTokenizer};
use super::*;
use crate::model::tokenizer::{first_difference, probe, reference};

/// Text to learn merges from: code, and the probe with its many scripts.
const CORPUS: &str = include_str!("../tokenizer.rs");

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn sequence(step: Value, use_regex: bool) -> Value {
    json!({"type": "Sequence", "pretokenizers": [step, byte_level(use_regex)]})
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

/// The most frequent pair of neighbours, again and again, in words that begin with their blanks.
fn learn_merges(rounds: usize) -> Vec<(String, String)> {
    let mut words: Vec<Vec<String>> = vec![Vec::new()];
    for (before, c) in std::iter::once('\n').chain(CORPUS.chars()).zip(CORPUS.chars()) {
        if c.is_whitespace() && !before.is_whitespace() {
            words.push(Vec::new());
        }
        let bytes = c.to_string().into_bytes();
        let word = words.last_mut().expect("there is one");
        word.extend(bytes.into_iter().map(|byte| byte_level_char(byte).to_string()));
    }
    let mut merges = Vec::new();
    for _ in 0..rounds {
        let mut counts: HashMap<(&str, &str), usize> = HashMap::new();
        for pair in words.iter().flat_map(|word| word.windows(2)) {
            *counts.entry((&pair[0], &pair[1])).or_default() += 1;
        }
        let best = counts.into_iter().max_by_key(|(pair, count)| (*count, *pair)).expect("the corpus is long").0;
        let (left, right) = (best.0.to_owned(), best.1.to_owned());
        for word in &mut words {
            while let Some(at) = word.windows(2).position(|pair| pair[0] == left && pair[1] == right) {
                word.splice(at..at + 2, [format!("{left}{right}")]);
            }
        }
        merges.push((left, right));
    }
    merges
}

fn file(pre_tokenizer: Value, normalizer: Value, ignore_merges: bool) -> Value {
    static MERGES: LazyLock<Vec<(String, String)>> = LazyLock::new(|| learn_merges(300));
    let mut vocab = serde_json::Map::new();
    let mut add = |token: String| {
        let id = vocab.len();
        vocab.entry(token).or_insert(id.into());
    };
    (0..=255).for_each(|byte| add(byte_level_char(byte).to_string()));
    MERGES.iter().for_each(|(left, right)| add(format!("{left}{right}")));
    // No merge leads to these: they are tokens only where whole pieces are.
    ["Ġunreachable", "xyzzy", "<tool>", "<tool>s"].into_iter().for_each(|token| add(token.into()));
    let added = |content: &str, special: bool, id: usize| {
        json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let tools = [added("<tool>", false, vocab.len() - 2), added("<tool>s", false, vocab.len() - 1)];
    let end = added("<|end|>", true, vocab.len());
    let nested = added("<|end|><", true, vocab.len() + 1);
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
        "added_tokens": [tools[0], tools[1], end, nested],
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": byte_level(true),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocab, "merges": *MERGES},
    })
}

fn own(file: &Value) -> Result<Bpe, Unsupported> {
    let bytes = file.to_string();
    let file = TokenizerJson::parse(bytes.as_bytes()).expect("a tokenizer");
    Bpe::new(&file, &Arc::new(Vocabulary::new(&file).expect("a vocabulary")))
}

/// One of each kind: GPT-2, SmolLM, Llama 3 and Qwen 2.
static ENGINES: LazyLock<Vec<(Bpe, Box<dyn Tokenizer>)>> = LazyLock::new(|| {
    let digits = json!({"type": "Digits", "individual_digits": true});
    let numbers = json!({"type": "Digits", "individual_digits": false});
    [
        file(byte_level(true), Value::Null, false),
        file(sequence(digits, true), Value::Null, false),
        file(sequence(numbers, true), Value::Null, false),
        file(sequence(split(PATTERNS[2]), false), Value::Null, true),
        file(sequence(split(PATTERNS[4]), false), json!({"type": "NFC"}), false),
    ]
    .iter()
    .map(|file| (own(file).expect("supported"), reference(file.to_string().as_bytes()).expect("loads")))
    .collect()
});

fn assert_same(text: &str) {
    for (kind, (own, reference)) in ENGINES.iter().enumerate() {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        own.encode(text, &mut ours).expect("encodes");
        reference.encode(text, &mut theirs).expect("encodes");
        assert_eq!(ours, theirs, "engine {kind} on {text:?}");
    }
}

/// What patterns, normal forms and added tokens trip over.
fn fragment() -> impl Strategy<Value = &'static str> {
    let white = vec![" ", "  ", "\t", "\n", "\r\n", "\n\n", "\u{a0}", "\u{3000}", "\u{85}", "\u{2028}", "\u{b}"];
    let quotes = vec!["'", "'s", "'S", "'ſ", "'t", "'ll", "'LL", "'l", "'re", "'RE", "'ve", "'m", "'d", "’s"];
    let words = vec![
        "a",
        "the",
        " the",
        "xyzzy",
        " unreachable",
        "été",
        "e\u{301}",
        "字",
        "한",
        "ㅎㅏㄴ",
        "\u{1112}\u{1161}",
        "ǅ",
        "ª",
        "ſ",
        "K",
        "ß",
        "мир",
        "นี่",
        "हिन्दी",
        "\u{327}\u{301}",
        "𝕸",
    ];
    let rest = vec![
        "1",
        "12345",
        "²",
        "Ⅷ",
        "١٢",
        "፩",
        "🄁",
        "_",
        "--",
        "====",
        "()",
        "\";",
        "😀",
        "👩\u{200d}👧",
        "\u{feff}",
        "\0",
        "<tool>",
        "<tool>s",
        "<|end|>",
        "<|end|><tool>",
        "<",
        "\u{378}",
        "\u{e000}",
        "\u{10ffff}",
    ];
    prop_oneof![select(white), select(quotes), select(words), select(rest)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn fragments_are_encoded_as_the_reference_does(parts in proptest::collection::vec(fragment(), 0..40)) {
        assert_same(&parts.concat());
    }

    #[test]
    fn random_text_is_encoded_as_the_reference_does(text in prop_oneof![
        any::<String>(), ".{0,80}", "[ -~]{0,120}", "[a-c ']{0,200}", "\\PC{0,60}", "[\\pL\\pN\\pM\\pZ\n]{0,60}"]) {
        assert_same(&text);
    }

    #[test]
    fn pieces_of_the_corpus_are_encoded_as_the_reference_does(from in 0..CORPUS.len(), len in 0..600usize) {
        let from = CORPUS.ceil_char_boundary(from);
        assert_same(&CORPUS[from..CORPUS.ceil_char_boundary((from + len).min(CORPUS.len()))]);
    }
}

#[test]
fn the_probe_is_encoded_as_the_reference_does() {
    for (own, reference) in ENGINES.iter() {
        assert_eq!(first_difference(own, &**reference, probe()), None);
    }
}

#[test]
fn a_piece_of_any_length_costs_no_more_than_its_length() {
    for part in ["a", "=", " ", "ab", "e"] {
        assert_same(&part.repeat(100_000 / part.len()));
    }
}

/// Each pattern as the regular expression cuts it, around the characters at the edges of every class.
#[test]
fn every_pattern_cuts_as_its_regular_expression() {
    let edges = classes::edges().chain((0..0x3000).filter_map(char::from_u32)).chain("ſKﬀﬆ".chars());
    let text: String = edges.map(|c| format!("a{c}1{c}{c} {c}b'{c}'{c}s {c}\n {c}\r\n{c}  {c}'s?{c}")).collect();
    for pattern in PATTERNS {
        let cut = PreTokenizer::from_json(&sequence(split(pattern), false)).expect("known");
        let regex = SysRegex::new(pattern).expect("a pattern");
        let mut expected = regex.find_iter(&text);
        cut.cut(&text, &mut |piece| {
            let (from, to) = expected.next().expect("the expression has a piece too");
            assert_eq!(piece, &text[from..to], "{pattern} at {from}");
        });
        assert_eq!(expected.next(), None, "{pattern}");
    }
}

#[test]
fn a_string_merge_is_a_pair_and_the_last_of_two_counts() {
    let mut pairs = file(byte_level(true), Value::Null, false);
    let merges = json!([["a", "b"], ["Ġ", "a"], ["Ġa", "b"], ["a", "b"]]);
    let strings = json!(["a b", "Ġ a", "Ġa b", "a b"]);
    for token in ["ab", "Ġa", "Ġab"] {
        let size = pairs["model"]["vocab"].as_object().expect("a map").len() + 10;
        pairs["model"]["vocab"].as_object_mut().expect("a map").entry(token).or_insert(size.into());
    }
    for merges in [merges, strings] {
        pairs["model"]["merges"] = merges;
        let (own, reference) =
            (own(&pairs).expect("supported"), reference(pairs.to_string().as_bytes()).expect("loads"));
        assert_eq!(first_difference(&own, &*reference, ["ab ab aab".to_owned()]), None);
    }
}

#[test]
fn bytes_without_a_token_are_left_out_as_in_the_reference() {
    let mut file = file(byte_level(true), Value::Null, false);
    file["model"]["vocab"].as_object_mut().expect("a map").shift_remove("q").expect("it was there");
    file["model"]["merges"] = json!([]);
    let texts = ["quite a question", "q", "qqq"].map(str::to_owned);
    let reference = reference(file.to_string().as_bytes()).expect("loads");
    assert_eq!(first_difference(&own(&file).expect("supported"), &*reference, texts), None);
    file["model"]["unk_token"] = json!("a");
    assert!(own(&file).is_err_and(|e| e.to_string().contains("unk_token")));
}

#[test]
fn what_it_cannot_encode_is_refused_by_name() {
    let refused = |path: &str, value: Value, reason: &str| {
        let mut file = file(byte_level(true), Value::Null, false);
        *file.pointer_mut(path).expect("it is in the file") = value;
        let error = own(&file).err().unwrap_or_else(|| panic!("{path} is accepted")).to_string();
        assert!(error.contains(reason), "{error}");
    };
    refused("/model/type", json!("WordPiece"), "WordPiece");
    refused("/model/type", Value::Null, "without a type");
    refused("/model/dropout", json!(0.1), "dropout");
    refused("/model/byte_fallback", json!(true), "byte_fallback");
    refused("/model/continuing_subword_prefix", json!("##"), "prefix");
    refused("/model/end_of_word_suffix", json!("</w>"), "suffix");
    refused("/model/merges", json!([["a", "unknown"]]), "merge 0");
    refused("/model/merges", json!(["#version: 0.2"]), "version");
    refused("/model/merges", Value::Null, "without merges");
    refused("/normalizer", json!({"type": "NFKC"}), "NFKC");
    refused("/pre_tokenizer", Value::Null, "pre_tokenizer");
    refused("/pre_tokenizer", json!({"type": "Metaspace"}), "Metaspace");
    refused("/pre_tokenizer", sequence(split(r"\w+|\W+"), false), r"\\w+|\\W+");
    refused("/pre_tokenizer", sequence(byte_level(true), true), "inside");
    refused("/pre_tokenizer/add_prefix_space", json!(true), "blank");
    for how in ["lstrip", "rstrip", "single_word", "normalized"] {
        refused(&format!("/added_tokens/0/{how}"), json!(true), "<tool>");
    }
}
