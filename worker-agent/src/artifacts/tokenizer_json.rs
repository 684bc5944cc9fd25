//! `tokenizer.json` in Hugging Face's format, for the tokenizers that a GGUF file can describe.
//!
//! No post-processor: the BOS token is the router's decision, taken from the model card.

use std::collections::HashMap;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::token_table::{PreTokenizer, SPACE, Scheme, TokenKind, TokenTable};

/// How Llama 3's published tokenizer splits text.
const LLAMA3_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// How Qwen 2's does.
const QWEN2_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

#[derive(Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Option<()>,
    decoder: Value,
    model: Bpe<'a>,
}

#[derive(Serialize)]
struct AddedToken<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Bpe<'a> {
    r#type: &'static str,
    dropout: Option<()>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<()>,
    end_of_word_suffix: Option<()>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

/// A map from token to id, in order of id.
struct Vocab<'a>(&'a [&'a str]);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().zip(0u32..))
    }
}

/// The file.
pub(super) fn build(table: &TokenTable<'_>) -> Vec<u8> {
    let json = match table.scheme {
        Scheme::ByteLevel { pre } => byte_level(table, pre),
        Scheme::SentencePiece { space_prefix } => sentence_piece(table, space_prefix),
    };
    serde_json::to_vec(&json).expect("strings and numbers are JSON")
}

fn byte_level<'a>(table: &'a TokenTable<'a>, pre: PreTokenizer) -> TokenizerJson<'a> {
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let sequence = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
    let pre_tokenizer = match pre {
        PreTokenizer::Gpt2 => bytes(true),
        PreTokenizer::Smollm => sequence(json!({"type": "Digits", "individual_digits": true}), bytes(true)),
        PreTokenizer::Llama3 => sequence(split(LLAMA3_PATTERN), bytes(false)),
        PreTokenizer::Qwen2 => sequence(split(QWEN2_PATTERN), bytes(false)),
    };
    let model = Bpe { ignore_merges: pre == PreTokenizer::Llama3, ..bpe(table, table.merges.clone()) };
    let normalizer = if pre == PreTokenizer::Qwen2 { json!({"type": "NFC"}) } else { Value::Null };
    assemble(table, normalizer, pre_tokenizer, bytes(true), model)
}

fn sentence_piece<'a>(table: &'a TokenTable<'a>, space_prefix: bool) -> TokenizerJson<'a> {
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if space_prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unk_token = table.unk.map(|id| table.tokens[id as usize]);
    let model = Bpe { fuse_unk: true, byte_fallback: true, unk_token, ..bpe(table, merges_by_score(table)) };
    let normalizer = json!({"type": "Sequence", "normalizers": normalizers});
    let decoder = json!({"type": "Sequence", "decoders": decoders});
    assemble(table, normalizer, Value::Null, decoder, model)
}

fn bpe<'a>(table: &'a TokenTable<'a>, merges: Vec<(&'a str, &'a str)>) -> Bpe<'a> {
    Bpe {
        r#type: "BPE",
        dropout: None,
        unk_token: None,
        continuing_subword_prefix: None,
        end_of_word_suffix: None,
        fuse_unk: false,
        byte_fallback: false,
        ignore_merges: false,
        vocab: Vocab(&table.tokens),
        merges,
    }
}

fn assemble<'a>(
    table: &TokenTable<'a>,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Bpe<'a>,
) -> TokenizerJson<'a> {
    let added_tokens = table
        .iter()
        .filter(|(_, _, kind)| matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined))
        .map(|(id, content, kind)| AddedToken {
            id,
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: kind != TokenKind::UserDefined,
        })
        .collect();
    TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens,
        normalizer,
        pre_tokenizer,
        post_processor: None,
        decoder,
        model,
    }
}

/// SentencePiece joins the pair whose piece has the best score; as a ranked list that is every way to cut a piece in two
/// known ones, best piece first, longer left part first among equals.
fn merges_by_score<'a>(table: &TokenTable<'a>) -> Vec<(&'a str, &'a str)> {
    let is_piece = |kind: TokenKind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined);
    let pieces = || table.iter().filter(|(_, _, kind)| is_piece(*kind));
    let id_of: HashMap<&str, u32> = pieces().map(|(id, text, _)| (text, id)).collect();
    let mut merges: Vec<(f32, &str, &str)> = Vec::new();
    for (id, text, _) in pieces() {
        let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let mut known: Vec<_> = cuts.filter(|(l, r)| id_of.contains_key(l) && id_of.contains_key(r)).collect();
        known.sort_by_key(|(l, r)| (id_of[l], id_of[r]));
        merges.extend(known.into_iter().map(|(l, r)| (table.scores[id as usize], l, r)));
    }
    let chars = |text: &str| text.chars().count();
    merges.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then_with(|| chars(b.1).cmp(&chars(a.1))).then_with(|| chars(b.2).cmp(&chars(a.2)))
    });
    merges.into_iter().map(|(_, left, right)| (left, right)).collect()
}
