//! A model's tokenizer, chat template and special tokens, from a directory as Hugging Face lays it out.
//!
//! Whoever reads the files brings them; here is what they mean. Weights are of no interest.

use serde::Deserialize;
use serde_json::{Map, Value};

/// A file that cannot be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{name}: {reason}")]
pub struct FileError {
    /// Its name in the directory.
    pub name: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

/// What the files say.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDirectory {
    /// `tokenizer.json`, as it is.
    pub tokenizer_json: Vec<u8>,
    /// The chat template; a base model has none.
    pub chat_template: Option<String>,
    /// Special tokens by role (`bos_token`, …), as a chat template sees them.
    pub special_tokens: Value,
    /// The token that servers put before a completion prompt.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

/// `tokenizer_config.json`, as far as it is read here.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    chat_template: Option<Value>,
    #[serde(default)]
    add_bos_token: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// `tokenizer.json`, as far as it tells which tokens there are and what is put before a prompt.
#[derive(Deserialize)]
struct Framing {
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// `generation_config.json` and `config.json`, as far as they are read here.
#[derive(Default, Deserialize)]
struct EndTokens {
    #[serde(default)]
    eos_token_id: Value,
}

impl Framing {
    fn id(&self, role: Option<&Value>) -> Option<u32> {
        let role = role?;
        let text = role.as_str().or_else(|| role["content"].as_str())?;
        self.added_tokens.iter().find(|token| token.content == text).map(|token| token.id)
    }
}

/// Understands a directory, of which `read` gives a file, or nothing where there is none.
pub fn read(read: impl Fn(&str) -> Result<Option<Vec<u8>>, String>) -> Result<ModelDirectory, FileError> {
    let file = |name: &'static str| read(name).map_err(|reason| FileError { name, reason });
    let missing = || FileError { name: TOKENIZER, reason: "is not there".into() };
    let tokenizer_json = file(TOKENIZER)?.ok_or_else(missing)?;
    let framing: Framing = parse(TOKENIZER, &tokenizer_json)?;
    let config: TokenizerConfig = file(TOKENIZER_CONFIG)?
        .map_or_else(|| Ok(TokenizerConfig::default()), |text| parse(TOKENIZER_CONFIG, &text))?;
    let roles: Map<String, Value> = config.rest.into_iter().filter(|(name, _)| name.ends_with("_token")).collect();
    let bos_token_id = match config.add_bos_token {
        Some(true) => framing.id(roles.get("bos_token")),
        Some(false) => None,
        None => framed_by(&framing.post_processor),
    };
    let mut eos_token_ids = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let tokens: EndTokens = file(name)?.map_or_else(|| Ok(EndTokens::default()), |text| parse(name, &text))?;
        add_tokens(&tokens.eos_token_id, &mut eos_token_ids);
    }
    eos_token_ids.extend(framing.id(roles.get("eos_token")).filter(|id| !eos_token_ids.contains(id)));
    let chat_template = match file(CHAT_TEMPLATE)? {
        Some(text) => Some(
            String::from_utf8(text).map_err(|error| FileError { name: CHAT_TEMPLATE, reason: error.to_string() })?,
        ),
        None => chat_template(config.chat_template),
    };
    Ok(ModelDirectory {
        tokenizer_json,
        chat_template,
        special_tokens: Value::Object(roles),
        bos_token_id,
        eos_token_ids,
    })
}

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

fn parse<'a, T: Deserialize<'a>>(name: &'static str, text: &'a [u8]) -> Result<T, FileError> {
    serde_json::from_slice(text).map_err(|error| FileError { name, reason: error.to_string() })
}

/// The field of the tokenizer's configuration has one text, or several with names.
fn chat_template(field: Option<Value>) -> Option<String> {
    match field {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|template| template["name"] == "default").or(named.first());
            default.and_then(|template| template["template"].as_str()).map(str::to_owned)
        }
        _ => None,
    }
}

/// One token or a list.
fn add_tokens(value: &Value, to: &mut Vec<u32>) {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    for id in list.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()) {
        if !to.contains(&id) {
            to.push(id);
        }
    }
}

/// The token that a post-processor puts before a single text.
fn framed_by(post_processor: &Value) -> Option<u32> {
    if let Some(steps) = post_processor["processors"].as_array() {
        return steps.iter().find_map(framed_by);
    }
    let name = post_processor["single"][0]["SpecialToken"]["id"].as_str()?;
    u32::try_from(post_processor["special_tokens"][name]["ids"][0].as_u64()?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(files: &[(&str, Value)]) -> Result<ModelDirectory, FileError> {
        super::read(|name| Ok(files.iter().find(|file| file.0 == name).map(|file| file.1.to_string().into_bytes())))
    }

    fn tokenizer() -> (&'static str, Value) {
        ("tokenizer.json", json!({"added_tokens": [{"id": 7, "content": "</s>"}, {"id": 1, "content": "<s>"}]}))
    }

    #[test]
    fn end_tokens_come_from_all_that_name_some() {
        let config = ("tokenizer_config.json", json!({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}));
        let generation = ("generation_config.json", json!({"eos_token_id": [9, 7]}));
        let model = ("config.json", json!({"eos_token_id": 3}));
        assert_eq!(
            of(&[tokenizer(), config.clone(), generation.clone(), model]).expect("reads").eos_token_ids,
            [9, 7, 3]
        );
        let found = of(&[tokenizer(), config]).expect("reads");
        assert_eq!((found.eos_token_ids, found.bos_token_id), (vec![7], None));
        assert_eq!(found.special_tokens["bos_token"], "<s>");
        assert_eq!(of(&[tokenizer(), generation]).expect("reads").eos_token_ids, [9, 7]);
        assert!(of(&[tokenizer()]).expect("reads").eos_token_ids.is_empty());
    }

    #[test]
    fn what_is_missing_or_broken_is_named() {
        assert_eq!(of(&[]).expect_err("nothing there").name, "tokenizer.json");
        let broken = of(&[tokenizer(), ("generation_config.json", json!("x"))]).expect_err("no object");
        assert_eq!(broken.name, "generation_config.json");
        let unreadable = super::read(|_| Err("permission denied".into())).expect_err("unreadable");
        assert_eq!(unreadable.to_string(), "tokenizer.json: permission denied");
    }
}
