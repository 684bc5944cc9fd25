//! A GGUF file's tokenizer metadata, read and checked.

use crate::engine::builtin::gguf::Gguf;

use super::ArtifactError;

/// SentencePiece's mark of a space.
pub(super) const SPACE: &str = "\u{2581}";

/// What a token is for; GGUF's numbers, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// How text becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Byte-level BPE.
    ByteLevel {
        /// How text is split first.
        pre: PreTokenizer,
    },
    /// SentencePiece BPE with byte fallback.
    SentencePiece {
        /// A space is put before the text.
        space_prefix: bool,
    },
}

/// The splits of byte-level BPE that we rebuild.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreTokenizer {
    /// GPT-2's pattern; also for files of older converters, which name none or `default`.
    Gpt2,
    /// Single digits, then GPT-2's pattern.
    Smollm,
    /// Llama 3's pattern: digits in threes.
    Llama3,
    /// Qwen 2's pattern, on NFC text: single digits.
    Qwen2,
}

impl Scheme {
    /// Accepted values of `tokenizer.ggml.pre`.
    pub(super) const PRE_NAMES: [&'static str; 9] =
        ["gpt-2", "default", "smollm", "starcoder", "refact", "llama-bpe", "llama3", "llama-v3", "qwen2"];

    fn read(gguf: &Gguf) -> Result<Self, ArtifactError> {
        match gguf.require::<&str>("tokenizer.ggml.model")? {
            "gpt2" => {
                let name = gguf.get::<&str>("tokenizer.ggml.pre")?.unwrap_or("default");
                let pre = match name {
                    "gpt-2" | "default" => PreTokenizer::Gpt2,
                    "smollm" | "starcoder" | "refact" => PreTokenizer::Smollm,
                    "llama-bpe" | "llama3" | "llama-v3" => PreTokenizer::Llama3,
                    "qwen2" => PreTokenizer::Qwen2,
                    _ => return Err(ArtifactError::PreTokenizer(name.into())),
                };
                Ok(Self::ByteLevel { pre })
            }
            "llama" => {
                let space_prefix = gguf.get("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                Ok(Self::SentencePiece { space_prefix })
            }
            other => Err(ArtifactError::Model(other.into())),
        }
    }

    /// Whether a BOS token is added where the file does not say.
    fn adds_bos(self) -> bool {
        matches!(self, Self::SentencePiece { .. } | Self::ByteLevel { pre: PreTokenizer::Llama3 })
    }
}

/// The vocabulary and what belongs to it. All ids are below `tokens.len()`.
#[derive(Debug)]
pub(super) struct TokenTable<'a> {
    pub(super) scheme: Scheme,
    /// By id.
    pub(super) tokens: Vec<&'a str>,
    /// As many as tokens.
    pub(super) kinds: Vec<TokenKind>,
    /// Pairs in order of rank; byte-level BPE.
    pub(super) merges: Vec<(&'a str, &'a str)>,
    /// As many as tokens; SentencePiece.
    pub(super) scores: Vec<f32>,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    pub(super) eom: Option<u32>,
    pub(super) unk: Option<u32>,
    pub(super) pad: Option<u32>,
    pub(super) add_bos: bool,
}

impl<'a> TokenTable<'a> {
    pub(super) fn read(gguf: &'a Gguf) -> Result<Self, ArtifactError> {
        let scheme = Scheme::read(gguf)?;
        let tokens: Vec<&str> = gguf.require("tokenizer.ggml.tokens")?;
        let kinds = kinds(gguf, tokens.len())?;
        let scores = match scheme {
            Scheme::ByteLevel { .. } => Vec::new(),
            Scheme::SentencePiece { .. } => gguf.require("tokenizer.ggml.scores")?,
        };
        if !scores.is_empty() && scores.len() != tokens.len() {
            return inconsistent(format!("{} tokens, but {} scores", tokens.len(), scores.len()));
        }
        let id = |role: &str| -> Result<Option<u32>, ArtifactError> {
            match gguf.get::<u32>(&format!("tokenizer.ggml.{role}_token_id"))? {
                Some(id) if id as usize >= tokens.len() => {
                    inconsistent(format!("{role} token {id} of {} tokens", tokens.len()))
                }
                id => Ok(id),
            }
        };
        Ok(Self {
            bos: id("bos")?,
            eos: id("eos")?,
            eot: id("eot")?,
            eom: id("eom")?,
            unk: id("unknown")?,
            pad: id("padding")?,
            add_bos: gguf.get("tokenizer.ggml.add_bos_token")?.unwrap_or(scheme.adds_bos()),
            merges: merges(gguf, scheme)?,
            scheme,
            tokens,
            kinds,
            scores,
        })
    }

    /// Every token: id, text, kind.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &'a str, TokenKind)> {
        (0u32..).zip(&self.tokens).zip(&self.kinds).map(|((id, text), kind)| (id, *text, *kind))
    }
}

fn kinds(gguf: &Gguf, tokens: usize) -> Result<Vec<TokenKind>, ArtifactError> {
    let Some(numbers) = gguf.get::<Vec<i32>>("tokenizer.ggml.token_type")? else {
        return Ok(vec![TokenKind::Normal; tokens]);
    };
    if numbers.len() != tokens {
        return inconsistent(format!("{tokens} tokens, but {} token types", numbers.len()));
    }
    let kind = |number: i32| match TokenKind::from_number(number) {
        Some(kind) => Ok(kind),
        None => inconsistent(format!("unknown token type {number}")),
    };
    numbers.into_iter().map(kind).collect()
}

fn merges(gguf: &Gguf, scheme: Scheme) -> Result<Vec<(&str, &str)>, ArtifactError> {
    let Scheme::ByteLevel { .. } = scheme else { return Ok(Vec::new()) };
    let pair = |merge| match str::split_once(merge, ' ') {
        Some(pair) => Ok(pair),
        None => inconsistent(format!("merge {merge:?} is no pair")),
    };
    gguf.require::<Vec<&str>>("tokenizer.ggml.merges")?.into_iter().map(pair).collect()
}

/// The byte that `<0x41>` stands for.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

fn inconsistent<T>(what: String) -> Result<T, ArtifactError> {
    Err(ArtifactError::Inconsistent(what))
}
