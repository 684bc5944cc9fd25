//! The files a router needs of a model, made from a GGUF file's metadata or taken from a directory.
//!
//! A router tokenizes, applies the chat template and detokenizes, but has no model volume: it fetches `tokenizer.json`,
//! `chat_template.jinja` and `special_tokens.json` from a worker. A tokenizer that cannot be rebuilt exactly is refused
//! by name, never approximated.

use std::collections::BTreeMap;

use bytes::Bytes;
use protocol::metadata::{artifact, artifact_digest};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use crate::engine::builtin::gguf::{Gguf, GgufError};
use crate::engine::builtin::stop::{TokenBytes, Vocabulary};

mod byte_level;
pub mod directory;
#[cfg(test)]
mod tests;
mod token_table;
mod tokenizer_json;

use token_table::{Scheme, TokenKind, TokenTable};

/// Names of control tokens that end an answer in some model family, whatever the file declares as its end token.
const END_OF_TURN: [&str; 7] =
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"];

/// Why a model's files cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The metadata cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A kind of tokenizer that is not rebuilt.
    #[error(
        "tokenizer model {0:?} is not supported; supported are \"gpt2\" (byte-level BPE) and \"llama\" (SentencePiece)"
    )]
    Model(String),
    /// A pre-tokenizer that is not known.
    #[error("pre-tokenizer {0:?} is not supported; supported are {known}", known = Scheme::PRE_NAMES.join(", "))]
    PreTokenizer(String),
    /// The metadata contradicts itself.
    #[error("the tokenizer's metadata is inconsistent: {0}")]
    Inconsistent(String),
}

/// A model's files, and what the engine and the model card need of its tokenizer.
#[derive(Clone, Debug)]
pub struct Artifacts {
    /// By the names in [`protocol::metadata::artifact`]. A model without a chat template has no such file.
    pub files: BTreeMap<String, Bytes>,
    /// Tokens that end an answer: the declared one first.
    pub eos_token_ids: Vec<u32>,
    /// Token to put before a completion prompt, where the model wants one.
    pub bos_token_id: Option<u32>,
    /// Text of every token; control tokens have none.
    pub token_bytes: TokenBytes,
}

impl Artifacts {
    /// Makes the files. Cost: about 50 ms for 50 000 tokens.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ArtifactError> {
        let table = TokenTable::read(gguf)?;
        let mut files = BTreeMap::new();
        files.insert(artifact::TOKENIZER.to_owned(), Bytes::from(tokenizer_json::build(&table)));
        files.insert(artifact::SPECIAL_TOKENS.to_owned(), Bytes::from(special_tokens(&table)));
        if let Some(template) = gguf.get::<&str>("tokenizer.chat_template")? {
            files.insert(artifact::CHAT_TEMPLATE.to_owned(), Bytes::copy_from_slice(template.as_bytes()));
        }
        Ok(Self {
            files,
            eos_token_ids: eos_token_ids(&table),
            bos_token_id: table.bos.filter(|_| table.add_bos),
            token_bytes: token_bytes(&table),
        })
    }

    /// Name and digest of every file, as a model card carries them.
    pub fn digests(&self) -> BTreeMap<String, String> {
        self.files.iter().map(|(name, bytes)| (name.clone(), artifact_digest(xxh3_64(bytes)))).collect()
    }

    /// What the engine needs to end sequences.
    pub fn vocabulary(&self) -> Vocabulary {
        Vocabulary { token_bytes: self.token_bytes.clone(), eos_token_ids: self.eos_token_ids.clone() }
    }
}

/// Special tokens by role, as a chat template sees them.
fn special_tokens(table: &TokenTable<'_>) -> Vec<u8> {
    let roles =
        [("bos_token", table.bos), ("eos_token", table.eos), ("unk_token", table.unk), ("pad_token", table.pad)];
    let mut object: Map<String, Value> = roles
        .into_iter()
        .filter_map(|(role, id)| Some((role.to_owned(), Value::from(table.tokens[id? as usize]))))
        .collect();
    object.insert("add_bos_token".into(), Value::from(table.add_bos));
    Value::from(object).to_string().into_bytes()
}

fn eos_token_ids(table: &TokenTable<'_>) -> Vec<u32> {
    let mut ids: Vec<u32> = [table.eos, table.eot, table.eom].into_iter().flatten().collect();
    let by_name = table.iter().filter(|(_, text, kind)| *kind == TokenKind::Control && END_OF_TURN.contains(text));
    ids.extend(by_name.map(|(id, ..)| id));
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    ids
}

fn token_bytes(table: &TokenTable<'_>) -> TokenBytes {
    let byte_level = byte_level::Decoder::new();
    let bytes = |(_, text, kind): (u32, &str, TokenKind)| match (kind, table.scheme) {
        (TokenKind::Control | TokenKind::Unknown | TokenKind::Unused, _) => Vec::new(),
        (TokenKind::UserDefined, Scheme::ByteLevel { .. }) => text.as_bytes().to_vec(),
        (_, Scheme::ByteLevel { .. }) => byte_level.bytes(text),
        (TokenKind::Byte, Scheme::SentencePiece { .. }) => token_table::byte_token(text).into_iter().collect(),
        (_, Scheme::SentencePiece { .. }) => text.replace(token_table::SPACE, " ").into_bytes(),
    };
    table.iter().map(bytes).collect()
}
