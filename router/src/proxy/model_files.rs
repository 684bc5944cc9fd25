//! A model's tokenizer and chat template from a directory, as Hugging Face lays it out.

use std::path::PathBuf;

use protocol::metadata::{ArmatureCard, ModelCard};
use protocol::model_directory::{self, FileError};

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

/// Loads the model of a source. Reads the disk and computes for some 0.2 s: call it on a blocking thread.
pub(super) fn load(source: &ModelSource) -> Result<Model, ModelFilesError> {
    let path = &source.path;
    let directory = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let read = |name: &str| match std::fs::read(directory.join(name)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    let found = model_directory::read(read).map_err(|error| {
        let FileError { name, reason } = error;
        ModelFilesError::File(directory.join(name), reason)
    })?;
    let armature = ArmatureCard { bos_token_id: found.bos_token_id, ..ArmatureCard::default() };
    let files = ModelFiles {
        tokenizer_json: found.tokenizer_json,
        chat_template: found.chat_template,
        special_tokens: Some(found.special_tokens.to_string().into_bytes()),
    };
    let card = ModelCard { armature: Some(armature), ..ModelCard::default() };
    Model::load(files, &card).map_err(|error| ModelFilesError::Model(directory.to_owned(), error))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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
            let content = Content::Text("ab");
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
