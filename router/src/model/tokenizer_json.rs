//! `tokenizer.json` as far as it is read here: typed, its strings borrowed from the file.
//!
//! A vocabulary has some hundred thousand strings. None is copied before it is decoded to bytes, so that reading a model
//! needs little more memory than its file.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::ModelError;

/// The file.
#[derive(serde::Deserialize)]
pub struct TokenizerJson<'a> {
    /// Tokens that are found in the text before the model sees it.
    #[serde(borrow, default)]
    pub added_tokens: Option<Vec<AddedToken<'a>>>,
    /// What is done to the text.
    #[serde(default)]
    pub normalizer: Value,
    /// How it is cut into pieces.
    #[serde(default)]
    pub pre_tokenizer: Value,
    /// How the strings of tokens become text.
    #[serde(default)]
    pub decoder: Value,
    /// How a piece becomes tokens.
    #[serde(borrow)]
    pub model: TokenModel<'a>,
}

/// An entry of `added_tokens`.
#[derive(serde::Deserialize)]
pub struct AddedToken<'a> {
    /// Its id.
    pub id: u32,
    /// Its text.
    #[serde(borrow)]
    pub content: Cow<'a, str>,
    /// It is left out of answers and never made from users' text.
    #[serde(default)]
    pub special: bool,
    /// It swallows the white space before it.
    #[serde(default)]
    pub lstrip: bool,
    /// It swallows the white space after it.
    #[serde(default)]
    pub rstrip: bool,
    /// It is no part of a longer word.
    #[serde(default)]
    pub single_word: bool,
    /// It is looked for in the normalized text; by default when it is not special.
    #[serde(default)]
    pub normalized: Option<bool>,
}

/// The `model`; settings that a kind of model lacks are `None`.
#[derive(serde::Deserialize)]
pub struct TokenModel<'a> {
    /// `BPE`, `Unigram`, …
    #[serde(borrow, default, rename = "type")]
    pub kind: Option<Cow<'a, str>>,
    /// The tokens.
    #[serde(borrow)]
    pub vocab: Vocab<'a>,
    /// Pairs that are joined, the first ones first.
    #[serde(borrow, default)]
    pub merges: Option<Vec<Merge<'a>>>,
    /// Chance to leave a merge out.
    #[serde(default)]
    pub dropout: Option<f32>,
    /// What stands for a character that no token has.
    #[serde(borrow, default)]
    pub unk_token: Option<Cow<'a, str>>,
    /// What a token inside of a word begins with.
    #[serde(borrow, default)]
    pub continuing_subword_prefix: Option<Cow<'a, str>>,
    /// What a token at the end of a word ends with.
    #[serde(borrow, default)]
    pub end_of_word_suffix: Option<Cow<'a, str>>,
    /// Characters that no token has are written as the tokens of their bytes.
    #[serde(default)]
    pub byte_fallback: Option<bool>,
    /// A piece that is a token is that token, whatever the merges say.
    #[serde(default)]
    pub ignore_merges: Option<bool>,
}

/// Tokens and ids, in the order of the file.
pub struct Vocab<'a>(pub Vec<(Cow<'a, str>, u32)>);

/// A pair of tokens, as `"left right"` or `["left", "right"]`.
pub struct Merge<'a>(pub Cow<'a, str>, pub Cow<'a, str>);

/// Ids above this are refused: arrays are indexed by id, and no real vocabulary comes near it.
const MAX_TOKEN_ID: u32 = 1 << 22;

impl<'a> TokenizerJson<'a> {
    /// Reads the file.
    pub fn parse(bytes: &'a [u8]) -> Result<TokenizerJson<'a>, ModelError> {
        let file: TokenizerJson = serde_json::from_slice(bytes).map_err(|e| ModelError::Tokenizer(e.to_string()))?;
        match file.added_tokens().iter().find(|token| token.id > MAX_TOKEN_ID) {
            Some(token) => Err(ModelError::Tokenizer(format!("token id {} is over {MAX_TOKEN_ID}", token.id))),
            None => Ok(file),
        }
    }

    /// The added tokens, in the order of the file.
    pub fn added_tokens(&self) -> &[AddedToken<'a>] {
        self.added_tokens.as_deref().unwrap_or_default()
    }
}

/// A string that borrows where it can; serde only borrows a `Cow` that is a field.
#[derive(serde::Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = Vocab<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from token to id, or a list of tokens and scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tokens = Vec::new();
        while let Some((Text(token), id)) = map.next_entry::<Text, u32>()? {
            if id > MAX_TOKEN_ID {
                return Err(A::Error::custom(format_args!("token id {id} is over {MAX_TOKEN_ID}")));
            }
            tokens.push((token, id));
        }
        Ok(Vocab(tokens))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut tokens = Vec::new();
        while let Some((Text(token), _)) = seq.next_element::<(Text, IgnoredAny)>()? {
            if tokens.len() > MAX_TOKEN_ID as usize {
                return Err(A::Error::custom(format_args!("more than {MAX_TOKEN_ID} tokens")));
            }
            tokens.push((token, tokens.len() as u32));
        }
        Ok(Vocab(tokens))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("two tokens, in a list or with a blank between them")
    }

    fn visit_borrowed_str<E: Error>(self, pair: &'de str) -> Result<Self::Value, E> {
        let (left, right) = two_tokens(pair)?;
        Ok(Merge(left.into(), right.into()))
    }

    fn visit_str<E: Error>(self, pair: &str) -> Result<Self::Value, E> {
        let (left, right) = two_tokens(pair)?;
        Ok(Merge(left.to_owned().into(), right.to_owned().into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut next = |at| seq.next_element::<Text>()?.ok_or_else(|| A::Error::invalid_length(at, &"two tokens"));
        let (left, right) = (next(0)?, next(1)?);
        match seq.next_element::<IgnoredAny>()? {
            None => Ok(Merge(left.0, right.0)),
            Some(_) => Err(A::Error::invalid_length(3, &"two tokens")),
        }
    }
}

fn two_tokens<E: Error>(pair: &str) -> Result<(&str, &str), E> {
    pair.split_once(' ')
        .filter(|(_, right)| !right.contains(' '))
        .ok_or_else(|| E::custom(format_args!("{pair:?} is not two tokens")))
}
