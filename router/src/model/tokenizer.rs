//! Text to tokens: the trait, the reference engine, and the choice between it and our own.
//!
//! [`Bpe`] takes the tokenizers that most models have; `tokenizers` takes them all, and is the reference. At load both
//! encode a fixed probe; ours is kept only when every id agrees, and the reference is dropped. Neither makes special
//! tokens of text: [`super::segments`] splits at those first, so an engine always gets ordinary text.

use std::sync::Arc;

use serde_json::Value;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{PostProcessorWrapper, TruncationParams};

use super::ModelError;
use super::bpe::Bpe;
use super::tokenizer_json::TokenizerJson;
use super::vocabulary::Vocabulary;
use crate::memory;

/// Encodes ordinary text: the texts of special tokens are text like any other here.
pub trait Tokenizer: Send + Sync {
    /// Appends the ids of `text`. No token is put before or after it.
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError>;

    /// Name of the engine, for logs.
    fn name(&self) -> &'static str;
}

/// An engine failed on a text.
#[derive(Debug, thiserror::Error)]
#[error("tokenizer failed: {0}")]
pub struct TokenizerError(String);

/// The reference engine.
struct Reference(tokenizers::Tokenizer);

impl Tokenizer for Reference {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let encoding = self.0.encode_fast(text, false).map_err(|e| TokenizerError(e.to_string()))?;
        out.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn name(&self) -> &'static str {
        "tokenizers"
    }
}

/// The reference engine for the text of a `tokenizer.json`. Cost: some 100 ms for 50 000 tokens, and ten times the
/// memory of the file.
pub fn reference(json: &[u8]) -> Result<Box<dyn Tokenizer>, ModelError> {
    let error = |e: tokenizers::Error| ModelError::Tokenizer(e.to_string());
    let mut engine = tokenizers::Tokenizer::from_bytes(json).map_err(error)?;
    engine.set_encode_special_tokens(true);
    // Limits and padding belong to training.
    engine.with_truncation(None::<TruncationParams>).map_err(error)?;
    engine.with_padding(None).with_post_processor(None::<PostProcessorWrapper>);
    if let Some(mut steps) = engine.get_pre_tokenizer().cloned() {
        drop_first_prefix(&mut steps);
        engine.with_pre_tokenizer(Some(steps));
    }
    Ok(Box::new(Reference(engine)))
}

/// Whether the tokenizer puts a blank before the text at the very begin of a prompt and nowhere else. The engines do not:
/// they see pieces, and every piece would look like a begin to them.
pub fn has_first_prefix(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["pretokenizers"].as_array() {
        Some(steps) => steps.iter().any(has_first_prefix),
        None => pre_tokenizer["type"] == "Metaspace" && pre_tokenizer["prepend_scheme"] == "first",
    }
}

fn drop_first_prefix(step: &mut PreTokenizerWrapper) {
    match step {
        PreTokenizerWrapper::Metaspace(step) if step.prepend_scheme == PrependScheme::First => {
            step.set_prepend_scheme(PrependScheme::Never);
        }
        PreTokenizerWrapper::Sequence(steps) => steps.as_mut().iter_mut().for_each(drop_first_prefix),
        _ => {}
    }
}

/// Our own engine when it knows this kind of file and agrees with the reference on a fixed probe, else the reference.
pub fn choose(
    json: &[u8],
    file: &TokenizerJson<'_>,
    vocabulary: &Arc<Vocabulary>,
) -> Result<Box<dyn Tokenizer>, ModelError> {
    // The reference takes the longest to build of all there is to a model. It stays on this thread, and so does its memory, which
    // the caller gives back.
    let (own, reference) = std::thread::scope(|scope| {
        let own = scope.spawn(|| {
            let own = Bpe::new(file, vocabulary);
            memory::give_back_end();
            own
        });
        let reference = reference(json);
        (own.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), reference)
    });
    let reference = reference?;
    let own = match own {
        Ok(own) => own,
        Err(reason) => {
            tracing::info!(%reason, "the reference tokenizer is used for this model");
            return Ok(reference);
        }
    };
    let added = file.added_tokens().iter().filter(|token| !token.special).map(|token| token.content.to_string());
    match first_difference(&own, &*reference, probe().chain(added)) {
        None => Ok(Box::new(own)),
        Some(text) => {
            tracing::warn!(%text, "engines differ; the reference tokenizer is used for this model");
            Ok(reference)
        }
    }
}

/// The first text on which two engines disagree.
pub fn first_difference(
    a: &dyn Tokenizer,
    b: &dyn Tokenizer,
    texts: impl IntoIterator<Item = String>,
) -> Option<String> {
    let encode = |engine: &dyn Tokenizer, text: &str| {
        let mut ids = Vec::new();
        engine.encode(text, &mut ids).map(|()| ids).ok()
    };
    texts.into_iter().find(|text| {
        let ids = encode(a, text);
        ids.is_none() || ids != encode(b, text)
    })
}

/// What both engines must agree on: contractions, digits, white space, scripts, emoji, control characters, special
/// tokens' texts, code.
const PROBE: [&str; 44] = [
    "Hello, world!",
    " leading and trailing ",
    "  two  blanks   three    four",
    "tabs\tand\nnewlines\r\nand\n\n\nmany",
    "\n",
    " \n ",
    "I'm you're he's we'll they'd I've CAN'T 'S 's'",
    "1 12 123 1234 3.14159 1,000,000 0x1F 1e-9",
    "It's 9's and \"it's\" and '90s",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "fn main() { println!(\"{}\", 1 + 1); }",
    "def f(x):\n    return x ** 2  # square\n",
    "<html><body class=\"a\">&amp;</body></html>",
    "https://example.com/path?query=1&other=%20#fragment",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\"}}",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|begin_of_text|><|eot_id|><s></s>[INST] [/INST]",
    "<|endoftext|>",
    "<think>\n\n</think>",
    "naïve café résumé Zürich Ærøskøbing",
    "e\u{301} decomposed, é composed",
    "Привет, как дела?",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "你好,世界。你好吗?",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "Xin chào thế giới",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️",
    "\u{0}\u{1}\u{1f}\u{7f}",
    "\u{feff}byte order mark",
    "a\u{200b}b\u{200d}c\u{ad}d",
    "non\u{a0}breaking\u{202f}blanks\u{3000}wide",
    "𝕸𝖆𝖙𝖍 ∑∫√ ≤≥≠ ½ ² ① Ⅷ",
    "!!!???...---___***///\\\\\\",
    "((([[[{{{<<<>>>}}}])))",
    "$100 €50 £20 ¥1000 50% @user #tag ^caret ~tilde `tick`",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "ALLCAPS allsmall MiXeD",
    "1st 2nd 3rd a1b2c3 x86_64 v1.2.3-rc.4",
    "final sentence without a full stop",
];

/// What both engines must agree on: one text for each thing that goes wrong, and long strings of one kind.
pub fn probe() -> impl Iterator<Item = String> {
    let long = ["a", " ", "\n", "1", "=", "é", "字", "word "].map(|part| part.repeat(300));
    PROBE.into_iter().map(str::to_owned).chain(long)
}
