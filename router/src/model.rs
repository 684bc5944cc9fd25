//! What the frontend knows of a model: its tokenizer, its chat template, and its vocabulary.
//!
//! Built once per distinct set of files from what a worker serves over the request plane; immutable and shared
//! afterwards. Nothing here touches the network or the disk.

pub mod bpe;
pub mod chat_template;
pub mod detokenizer;
mod pieces;
pub mod segments;
pub mod tokenizer;
pub mod tokenizer_json;
pub mod vocabulary;

use std::borrow::Cow;
use std::sync::Arc;

use protocol::metadata::ModelCard;

use crate::memory;
use chat_template::{ChatTemplate, TemplateError, TemplateInput};
use pieces::Pieces;
use segments::{Piece, SegmentCache, SpecialScanner};
use tokenizer::{Tokenizer, TokenizerError};
use tokenizer_json::TokenizerJson;
use vocabulary::Vocabulary;

/// The files of a model that a router needs, as fetched from a worker.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// `tokenizer.json`, as Hugging Face writes it.
    pub tokenizer_json: Vec<u8>,
    /// Text of the chat template; a model without one serves completions only.
    pub chat_template: Option<String>,
    /// JSON object: text of the special tokens by role (`bos_token`, `eos_token`, …).
    pub special_tokens: Option<Vec<u8>>,
}

/// Why a model's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// `tokenizer.json` is unusable.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    /// The chat template has a syntax error.
    #[error("chat template: {0}")]
    Template(String),
    /// `special_tokens.json` is unusable.
    #[error("special_tokens.json: {0}")]
    SpecialTokens(String),
}

/// Why a prompt could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The model has no chat template.
    #[error("the model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template refused the conversation or failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Tokenizer, vocabulary and chat template of one model.
pub struct Model {
    tokenizer: Box<dyn Tokenizer>,
    vocabulary: Arc<Vocabulary>,
    scanner: SpecialScanner,
    cache: SegmentCache,
    chat_template: Option<ChatTemplate>,
    bos: Option<u32>,
    /// Text at the begin of a prompt gets a blank before it.
    first_prefix: bool,
}

/// Room for the first tokens of an answer behind those of its prompt: what is delivered is kept there, for another worker to go
/// on with.
pub(crate) const ANSWER_TOKENS: usize = 64;

/// Budget of a model's segment cache: three dozen documents of 220 KB, or twenty thousand chat messages.
const SEGMENT_CACHE_BYTES: usize = 16 << 20;

impl Model {
    /// Builds a model from its files. Cost: 0.2 s of CPU for 50 000 tokens; call it on a blocking thread.
    pub fn load(files: ModelFiles, card: &ModelCard) -> Result<Model, ModelError> {
        let file = TokenizerJson::parse(&files.tokenizer_json)?;
        let vocabulary = Arc::new(Vocabulary::new(&file)?);
        let first_prefix = tokenizer::has_first_prefix(&file.pre_tokenizer);
        let tokenizer = tokenizer::choose(&files.tokenizer_json, &file, &vocabulary)?;
        drop(file);
        drop(files.tokenizer_json);
        // Loading needs several times the memory that stays in use.
        memory::give_back();
        let roles = files.special_tokens.as_deref().map_or(Ok(Vec::new()), special_token_roles)?;
        let chat_template = files
            .chat_template
            .map(|source| ChatTemplate::new(&source, roles, vocabulary.special_tokens(), jiff::Zoned::now))
            .transpose()?;
        let scanner = SpecialScanner::new(&vocabulary);
        let bos = card.armature.as_ref().and_then(|card| card.bos_token_id);
        let cache = SegmentCache::new(SEGMENT_CACHE_BYTES);
        Ok(Model { tokenizer, vocabulary, scanner, cache, chat_template, bos, first_prefix })
    }

    /// A stand-in for a model whose files nobody has: it takes pieces of text for tokens, so that prompts can be compared and
    /// weighed, but no worker would understand them.
    pub fn untokenized() -> Model {
        let file = TokenizerJson::parse(pieces::TOKENIZER_JSON).expect("it is valid");
        let vocabulary = Arc::new(Vocabulary::new(&file).expect("it is valid"));
        let chat_template = ChatTemplate::new(pieces::CHAT_TEMPLATE, Vec::new(), &[], jiff::Zoned::now);
        Model {
            tokenizer: Box::new(Pieces),
            scanner: SpecialScanner::new(&vocabulary),
            vocabulary,
            // Nothing is cheaper than the pieces themselves.
            cache: SegmentCache::new(0),
            chat_template: Some(chat_template.expect("it is valid")),
            bos: None,
            first_prefix: false,
        }
    }

    /// Bytes of each token.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Name of the tokenizer engine in use.
    pub fn tokenizer_name(&self) -> &'static str {
        self.tokenizer.name()
    }

    /// Tokens of a completion prompt. The client writes the whole prompt, so special tokens in it are special; the
    /// begin-of-sequence token is put before it where the model wants one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3 + ANSWER_TOKENS);
        ids.extend(self.bos);
        self.encode_pieces(text, &mut ids, Cow::Borrowed)?;
        if let Some(bos) = self.bos
            && ids.get(1) == Some(&bos)
        {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Tokens of a chat prompt. Special tokens come from the template alone.
    pub fn encode_chat(&self, input: &TemplateInput<'_>) -> Result<Vec<u32>, PromptError> {
        let template = self.chat_template.as_ref().ok_or(PromptError::NoTemplate)?;
        let text = template.render(input)?;
        let mut ids = Vec::with_capacity(text.len() / 3 + ANSWER_TOKENS);
        self.encode_pieces(&text, &mut ids, |piece| template.unguard(piece))?;
        Ok(ids)
    }

    /// Encodes what lies between special tokens; `restore` gives a piece as the user wrote it.
    fn encode_pieces<'a>(
        &self,
        text: &'a str,
        ids: &mut Vec<u32>,
        restore: impl Fn(&'a str) -> Cow<'a, str>,
    ) -> Result<(), TokenizerError> {
        for (at, piece) in self.scanner.split(text).into_iter().enumerate() {
            match piece {
                Piece::Special(id) => ids.push(id),
                Piece::Text(text) => {
                    let mut text = restore(text);
                    if at == 0 && self.first_prefix && !text.starts_with([' ', '▁']) {
                        text.to_mut().insert(0, ' ');
                    }
                    self.cache.encode(&*self.tokenizer, &text, ids)?;
                }
            }
        }
        Ok(())
    }
}

/// Roles and texts; a value is a string, or an object with the string in `content`.
fn special_token_roles(json: &[u8]) -> Result<Vec<(String, String)>, ModelError> {
    let map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(json).map_err(|e| ModelError::SpecialTokens(e.to_string()))?;
    let text = |value: &serde_json::Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    Ok(map.iter().filter_map(|(role, value)| Some((role.clone(), text(value)?))).collect())
}
