//! Text to tokens: the trait, its two engines, and the choice between them.
//!
//! `fastokens` is the fast engine and `tokenizers` the reference. At load both encode a fixed probe; the fast one is kept
//! only when every id agrees, and the other is dropped. Neither sees special tokens: [`super::segments`] splits the text at
//! those first, so an engine always gets ordinary text.

use serde_json::Value;

use super::ModelError;

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

/// The fast engine.
struct Fast(fastokens::Tokenizer);

impl Tokenizer for Fast {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let ids = self.0.encode_with_policy(text, false, fastokens::AddedTokenPolicy::SkipSpecial);
        out.extend(ids.map_err(|e| TokenizerError(e.to_string()))?);
        Ok(())
    }

    fn name(&self) -> &'static str {
        "fastokens"
    }
}

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

/// The fast engine over a parsed `tokenizer.json`.
pub fn fast(mut file: Value) -> Result<Box<dyn Tokenizer>, ModelError> {
    neutralize(&mut file);
    let engine = fastokens::Tokenizer::from_json(file).map_err(|e| ModelError::Tokenizer(e.to_string()))?;
    Ok(Box::new(Fast(engine)))
}

/// The reference engine over a parsed `tokenizer.json`.
pub fn reference(mut file: Value) -> Result<Box<dyn Tokenizer>, ModelError> {
    neutralize(&mut file);
    let bytes = serde_json::to_vec(&file).map_err(|e| ModelError::Tokenizer(e.to_string()))?;
    drop(file);
    let mut engine = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| ModelError::Tokenizer(e.to_string()))?;
    engine.set_encode_special_tokens(true);
    Ok(Box::new(Reference(engine)))
}

/// Whether the tokenizer puts a blank before the text at the very begin of a prompt and nowhere else. The engines are then
/// told not to: they see pieces, and every piece would look like a begin to them.
pub fn take_first_prefix(file: &mut Value) -> bool {
    let step = |step: &mut Value| {
        let first = step["type"] == "Metaspace" && step["prepend_scheme"] == "first";
        if first {
            step["prepend_scheme"] = "never".into();
        }
        first
    };
    match &mut file["pre_tokenizer"] {
        sequence if sequence["type"] == "Sequence" => {
            sequence["pretokenizers"].as_array_mut().is_some_and(|steps| steps.iter_mut().any(step))
        }
        single if single.is_object() => step(single),
        _ => false,
    }
}

/// The fast engine when it agrees with the reference on [`PROBE`], else the reference.
pub fn choose(file: Value) -> Result<Box<dyn Tokenizer>, ModelError> {
    let copy = file.clone();
    let (fast, reference) = std::thread::scope(|scope| {
        let fast = scope.spawn(move || fast(copy));
        let reference = reference(file);
        (fast.join().unwrap_or_else(|_| Err(ModelError::Tokenizer("the fast engine panicked".into()))), reference)
    });
    let reference = reference?;
    let reason = match fast {
        Err(error) => error.to_string(),
        Ok(fast) => match first_difference(&*fast, &*reference) {
            None => return Ok(fast),
            Some(text) => format!("ids differ on {text:?}"),
        },
    };
    tracing::warn!(%reason, "the fast tokenizer cannot be used for this model; using the reference");
    Ok(reference)
}

/// The first string of the probe on which two engines disagree.
pub fn first_difference(a: &dyn Tokenizer, b: &dyn Tokenizer) -> Option<String> {
    let encode = |engine: &dyn Tokenizer, text: &str| {
        let mut ids = Vec::new();
        engine.encode(text, &mut ids).map(|()| ids).ok()
    };
    probe().find(|text| {
        let ids = encode(a, text);
        ids.is_none() || ids != encode(b, text)
    })
}

/// Limits and padding belong to training; `ignore_merges` and the rest stay.
fn neutralize(file: &mut Value) {
    if let Some(file) = file.as_object_mut() {
        file.insert("truncation".into(), Value::Null);
        file.insert("padding".into(), Value::Null);
        file.insert("post_processor".into(), Value::Null);
    }
}

/// What both engines must agree on: contractions, digits, white space, scripts, emoji, control characters, special tokens'
/// texts, code.
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

/// [`PROBE`], and long strings of one kind.
fn probe() -> impl Iterator<Item = String> {
    let long = ["a", " ", "\n", "1", "=", "é", "字", "word "].map(|part| part.repeat(300));
    PROBE.into_iter().map(str::to_owned).chain(long)
}
