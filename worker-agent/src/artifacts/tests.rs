//! The files as a router uses them: loaded by the `tokenizers` crate, against the token table of the engine.

use std::path::Path;
use std::str::FromStr;

use tokenizers::Tokenizer;

use super::byte_level::Decoder;
use super::*;
use crate::engine::builtin::gguf::fixture::GgufBuilder;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

fn real_model() -> Artifacts {
    open(&integration_tests::model::path()).expect("the default model is supported")
}

fn open(path: &Path) -> Result<Artifacts, ArtifactError> {
    Artifacts::from_gguf(&Gguf::open(path)?)
}

fn build(builder: &GgufBuilder) -> Result<Artifacts, ArtifactError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    open(&builder.write(dir.path()))
}

fn tokenizer(artifacts: &Artifacts) -> Tokenizer {
    let json = std::str::from_utf8(&artifacts.files[artifact::TOKENIZER]).expect("UTF-8");
    Tokenizer::from_str(json).expect("a tokenizer.json that Hugging Face's library loads")
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).expect("any text can be encoded").get_ids().to_vec()
}

fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    tokenizer.encode(text, false).expect("any text can be encoded").get_tokens().to_vec()
}

/// A byte-level vocabulary: one end token, all bytes, and the merges given, in order.
fn byte_level(pre: &str, merges: &[&str]) -> GgufBuilder {
    let mut tokens = vec!["<|im_end|>".to_owned()];
    tokens.extend(Decoder::new().alphabet());
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut kinds = vec![NORMAL; tokens.len()];
    kinds[0] = CONTROL;
    GgufBuilder::default()
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>())
        .i32s("tokenizer.ggml.token_type", &kinds)
        .strings("tokenizer.ggml.merges", merges)
        .u32("tokenizer.ggml.eos_token_id", 0)
}

/// A SentencePiece vocabulary: three control tokens, all bytes, and the scored pieces given.
fn sentence_piece(pieces: &[(&str, f32)]) -> GgufBuilder {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    let mut kinds = vec![UNKNOWN, CONTROL, CONTROL];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    kinds.resize(tokens.len(), BYTE);
    let mut scores = vec![0.0; tokens.len()];
    tokens.extend(pieces.iter().map(|(text, _)| (*text).to_owned()));
    kinds.resize(tokens.len(), NORMAL);
    scores.extend(pieces.iter().map(|(_, score)| *score));
    let scores: Vec<u8> = scores.iter().flat_map(|score: &f32| score.to_le_bytes()).collect();
    GgufBuilder::default()
        .str("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>())
        .i32s("tokenizer.ggml.token_type", &kinds)
        .array("tokenizer.ggml.scores", 6, tokens.len() as u64, &scores)
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
}

#[test]
fn the_default_models_files_are_complete() {
    let artifacts = real_model();
    assert_eq!(artifacts.eos_token_ids, [2, 0], "the declared <|im_end|>, and <|endoftext|> by its name");
    assert_eq!(artifacts.bos_token_id, None, "the file says that none is added");
    assert_eq!(artifacts.token_bytes.len(), 49152);
    let special: Value = serde_json::from_slice(&artifacts.files[artifact::SPECIAL_TOKENS]).expect("JSON");
    let expected = serde_json::json!({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>", "add_bos_token": false});
    assert_eq!(special, expected);
    assert!(artifacts.files[artifact::CHAT_TEMPLATE].starts_with(b"{% for message in messages %}"));
    let digests = artifacts.digests();
    assert_eq!(digests.len(), 3);
    assert!(digests.values().all(|digest| digest.len() == 21 && digest.starts_with("xxh3:")));
}

#[test]
fn the_default_models_tokenizer_and_token_bytes_agree_on_any_text() {
    let artifacts = real_model();
    let tokenizer = tokenizer(&artifacts);
    assert_eq!(encode(&tokenizer, "<|im_start|>user\n"), [1, 4093, 198]);
    assert_eq!(pieces(&tokenizer, "in 2026"), ["in", "\u{120}", "2", "0", "2", "6"], "digits are single");
    for text in [
        "The capital of France is Paris.",
        "  leading, trailing and\n\n\ttabs  ",
        "let x = vec![1, 22, 333]; // caf\u{e9} na\u{ef}ve",
        "\u{1f469}\u{200d}\u{1f680} \u{4f60}\u{597d} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{0} \u{ad}",
        "it's we'll I'D",
    ] {
        let ids = encode(&tokenizer, text);
        assert_eq!(tokenizer.decode(&ids, true).expect("own ids"), text);
        let bytes: Vec<u8> = ids.iter().flat_map(|id| artifacts.token_bytes.get(*id)).copied().collect();
        assert_eq!(String::from_utf8(bytes).expect("whole characters"), text);
    }
    assert!(artifacts.token_bytes.get(1).is_empty(), "control tokens have no text");
}

#[test]
fn each_pre_tokenizer_splits_as_its_family_does() {
    let merges = ["1 2", "12 3", "123 4", "\u{120} a"];
    let split = |pre: &str, text: &str| pieces(&tokenizer(&build(&byte_level(pre, &merges)).expect("supported")), text);
    assert_eq!(split("gpt-2", "1234 a"), ["1234", "\u{120}a"]);
    assert_eq!(split("llama-bpe", "1234 a"), ["123", "4", "\u{120}a"]);
    assert_eq!(split("qwen2", "1234 a"), ["1", "2", "3", "4", "\u{120}a"]);
    assert_eq!(split("smollm", "1234 a"), ["1", "2", "3", "4", "\u{120}a"]);
    // Composed on the way in: e + U+0301 is U+00E9, two bytes.
    assert_eq!(split("qwen2", "e\u{301}").len(), 2);
    assert_eq!(split("llama-bpe", "e\u{301}").len(), 3);
}

#[test]
fn llama3_takes_a_whole_word_before_merging() {
    // "abc" is a token, but the merges cannot build it.
    let tokens_json = |pre: &str| {
        let builder = byte_level(pre, &["a b", "b c", "ab c"]);
        tokenizer(&build(&builder).expect("supported"))
    };
    assert_eq!(pieces(&tokens_json("llama-bpe"), "abc"), ["abc"]);
    let json: Value = serde_json::from_slice(
        &build(&byte_level("llama-bpe", &["a b"])).expect("supported").files[artifact::TOKENIZER],
    )
    .expect("JSON");
    assert_eq!(json["model"]["ignore_merges"], true);
}

#[test]
fn llama3_wants_a_bos_token_unless_the_file_says_otherwise() {
    let builder = byte_level("llama-bpe", &["a b"]).u32("tokenizer.ggml.bos_token_id", 5);
    assert_eq!(build(&builder).expect("supported").bos_token_id, Some(5));
    let builder = builder.raw("tokenizer.ggml.add_bos_token", 7, &[0]);
    assert_eq!(build(&builder).expect("supported").bos_token_id, None);
}

#[test]
fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
    let vocabulary =
        [("\u{2581}", -9.0), ("a", -9.0), ("b", -9.0), ("ab", -1.0), ("\u{2581}a", -2.0), ("\u{2581}ab", -3.0)];
    let artifacts = build(&sentence_piece(&vocabulary)).expect("supported");
    assert_eq!((artifacts.bos_token_id, &artifacts.eos_token_ids[..]), (Some(1), &[2][..]));
    let tokenizer = tokenizer(&artifacts);
    assert_eq!(pieces(&tokenizer, "ab"), ["\u{2581}ab"]);
    assert_eq!(pieces(&tokenizer, "aab"), ["\u{2581}a", "ab"]);
    assert_eq!(pieces(&tokenizer, "a\u{e9}"), ["\u{2581}a", "<0xC3>", "<0xA9>"]);
    let ids = encode(&tokenizer, "ab \u{e9}b a");
    assert_eq!(tokenizer.decode(&ids, true).expect("own ids"), "ab \u{e9}b a");
    let bytes: Vec<u8> = ids.iter().flat_map(|id| artifacts.token_bytes.get(*id)).copied().collect();
    assert_eq!(String::from_utf8(bytes).expect("whole characters"), " ab \u{e9}b a");
}

#[test]
fn what_cannot_be_rebuilt_is_named() {
    let error = |builder: GgufBuilder| build(&builder).expect_err("unsupported").to_string();
    assert!(error(GgufBuilder::default().str("tokenizer.ggml.model", "t5")).contains("\"t5\""));
    let unknown = error(byte_level("tekken", &["a b"]));
    assert!(unknown.contains("\"tekken\"") && unknown.contains("llama-bpe"), "{unknown}");
    assert!(error(byte_level("gpt-2", &["ab"])).contains("merge \"ab\" is no pair"));
    assert!(error(byte_level("gpt-2", &["a b"]).u32("tokenizer.ggml.eot_token_id", 9999)).contains("eot token 9999"));
    assert!(error(GgufBuilder::default()).contains("tokenizer.ggml.model"));
}
