//! A model's tokenizer and chat template from a directory, as Hugging Face lays it out.

use std::path::{Path, PathBuf};

use protocol::metadata::{ArmatureCard, ModelCard};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::config::ModelSource;
use crate::model::{Model, ModelError, ModelFiles};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelFilesError {
    /// A file cannot be read.
    #[error("--model-path: {path}: {reason}", path = .0.display(), reason = .1)]
    File(PathBuf, String),
    /// The files cannot be used.
    #[error("--model-path: {path}: {reason}", path = .0.display(), reason = .1)]
    Model(PathBuf, ModelError),
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

/// `tokenizer.json`, as far as it tells what is put before a prompt.
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

/// Loads the model of a source. Reads the disk and computes for some 0.2 s: call it on a blocking thread.
pub(super) fn load(source: &ModelSource) -> Result<Model, ModelFilesError> {
    let path = &source.path;
    let directory = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let tokenizer = directory.join("tokenizer.json");
    let tokenizer_json = std::fs::read(&tokenizer).map_err(|error| bad(&tokenizer, error))?;
    let config = directory.join("tokenizer_config.json");
    let config = match read_if_there(&config)? {
        Some(text) => serde_json::from_slice(&text).map_err(|error| bad(&config, error))?,
        None => TokenizerConfig::default(),
    };
    let framing: Framing = serde_json::from_slice(&tokenizer_json).map_err(|error| bad(&tokenizer, error))?;
    let roles: Map<String, Value> =
        config.rest.iter().filter(|(name, _)| name.ends_with("_token")).map(owned).collect();
    let armature = ArmatureCard { bos_token_id: begin_token(&config, &framing, &roles), ..ArmatureCard::default() };
    let files = ModelFiles {
        tokenizer_json,
        chat_template: chat_template(directory, config.chat_template)?,
        special_tokens: Some(Value::Object(roles).to_string().into_bytes()),
    };
    let card = ModelCard { armature: Some(armature), ..ModelCard::default() };
    Model::load(files, &card).map_err(|error| ModelFilesError::Model(directory.to_owned(), error))
}

fn owned((name, value): (&String, &Value)) -> (String, Value) {
    (name.clone(), value.clone())
}

fn bad(path: &Path, reason: impl ToString) -> ModelFilesError {
    ModelFilesError::File(path.to_owned(), reason.to_string())
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, ModelFilesError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(bad(path, error)),
    }
}

/// The template has a file of its own, or is a field of the tokenizer's configuration: one text, or several with names.
fn chat_template(directory: &Path, field: Option<Value>) -> Result<Option<String>, ModelFilesError> {
    let own = directory.join("chat_template.jinja");
    if let Some(text) = read_if_there(&own)? {
        return String::from_utf8(text).map(Some).map_err(|error| bad(&own, error));
    }
    Ok(match field {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|template| template["name"] == "default").or(named.first());
            default.and_then(|template| template["template"].as_str()).map(str::to_owned)
        }
        _ => None,
    })
}

/// The token that the servers put before a completion prompt.
fn begin_token(config: &TokenizerConfig, framing: &Framing, roles: &Map<String, Value>) -> Option<u32> {
    match config.add_bos_token {
        Some(true) => {
            let role = roles.get("bos_token")?;
            let text = role.as_str().or_else(|| role["content"].as_str())?;
            framing.added_tokens.iter().find(|token| token.content == text).map(|token| token.id)
        }
        Some(false) => None,
        None => framed_by(&framing.post_processor),
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
    use crate::model::chat_template::{Content, TemplateInput, TemplateMessage};

    const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}";

    fn byte_level() -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
    }

    /// A directory with these files; `tokenizer.json` is small, and the rest of it `framing`.
    fn directory(framing: Value, files: &[(&str, Value)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let special = json!({"id": 2, "content": "<s>", "special": true, "lstrip": false, "rstrip": false, "single_word": false,
            "normalized": false});
        let mut tokenizer = json!({"version": "1.0", "added_tokens": [special], "normalizer": null, "pre_tokenizer": null,
            "decoder": byte_level(), "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}});
        tokenizer.as_object_mut().expect("an object").extend(framing.as_object().expect("an object").clone());
        let all = [("tokenizer.json", tokenizer)];
        for (name, content) in all.iter().chain(files) {
            let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
            std::fs::write(directory.path().join(name), text).expect("a file");
        }
        directory
    }

    fn load_from(directory: &tempfile::TempDir) -> Result<Model, ModelFilesError> {
        load(&ModelSource { path: directory.path().to_owned(), name: None })
    }

    fn prompt(directory: &tempfile::TempDir) -> Vec<u32> {
        load_from(directory).expect("loads").encode_prompt("ab").expect("encodes")
    }

    #[test]
    fn the_begin_token_is_what_the_files_say() {
        let frame = json!({"post_processor": {"type": "Sequence", "processors": [byte_level(),
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}}]}});
        let config =
            |add: Value| ("tokenizer_config.json", json!({"bos_token": {"content": "<s>"}, "add_bos_token": add}));
        assert_eq!(prompt(&directory(json!({}), &[])), [0, 1]);
        assert_eq!(prompt(&directory(frame.clone(), &[])), [2, 0, 1]);
        assert_eq!(prompt(&directory(frame, &[config(json!(false))])), [0, 1]);
        assert_eq!(prompt(&directory(json!({}), &[config(json!(true))])), [2, 0, 1]);
    }

    #[test]
    fn chat_templates_are_found_in_each_of_their_places() {
        let bos = json!({"bos_token": "<s>"});
        let with = |template: Value| {
            let mut config = bos.clone();
            config["chat_template"] = template;
            ("tokenizer_config.json", config)
        };
        let named = json!([{"name": "tools", "template": "{{ 1 }}"}, {"name": "default", "template": TEMPLATE}]);
        for files in [
            vec![with(json!(TEMPLATE))],
            vec![with(named)],
            vec![with(json!("{{ 'old' }}")), ("chat_template.jinja", json!(TEMPLATE))],
        ] {
            let model = load_from(&directory(json!({}), &files)).expect("loads");
            let content = Content::Text("ab".into());
            let message = TemplateMessage { role: "user", content: Some(&content), fields: Vec::new() };
            let input = TemplateInput { messages: vec![message], ..TemplateInput::default() };
            assert_eq!(model.encode_chat(&input).expect("renders"), [2, 0, 1]);
        }
    }

    #[test]
    fn errors_name_the_flag_and_the_file() {
        let error = |path: PathBuf| load(&ModelSource { path, name: None }).err().expect("fails").to_string();
        let directory = tempfile::tempdir().expect("a temporary directory");
        let missing = error(directory.path().to_owned());
        assert!(missing.contains("--model-path") && missing.contains("tokenizer.json"), "{missing}");
        std::fs::write(directory.path().join("tokenizer.json"), "{}").expect("a file");
        assert!(error(directory.path().join("tokenizer.json")).contains("--model-path"));
    }
}
