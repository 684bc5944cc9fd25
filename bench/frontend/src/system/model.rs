//! The model's files as routers read them from a folder: tokenizer, chat template, and the little that Dynamo wants besides.

use std::path::PathBuf;

use anyhow::Context;
use protocol::metadata::artifact;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use worker_agent::artifacts::Artifacts;
use worker_agent::engine::builtin::gguf::Gguf;

/// Longest context that any server is told of, in tokens.
const CONTEXT: u32 = 131_072;

/// The GGUF file whose tokenizer is used.
pub fn file() -> anyhow::Result<PathBuf> {
    std::env::var_os("ARMATURE_MODEL").map(PathBuf::from).context("ARMATURE_MODEL is not set; use `cargo xtask bench`")
}

/// A folder with the files; removed when dropped.
pub fn folder() -> anyhow::Result<TempDir> {
    let artifacts = Artifacts::from_gguf(&Gguf::open(&file()?)?)?;
    let folder = tempfile::tempdir()?;
    let artifact = |name: &str| artifacts.files.get(name).with_context(|| format!("the model has no {name}"));
    let tokenizer = artifact(artifact::TOKENIZER)?;
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer)?;
    let mut config: Map<String, Value> = serde_json::from_slice(artifact(artifact::SPECIAL_TOKENS)?)?;
    config.insert("chat_template".into(), std::str::from_utf8(artifact(artifact::CHAT_TEMPLATE)?)?.into());
    config.insert("model_max_length".into(), CONTEXT.into());
    std::fs::write(folder.path().join("tokenizer_config.json"), Value::Object(config).to_string())?;
    // No weights belong to it: only lengths and ids mean anything.
    let (bos, eos) = (artifacts.bos_token_id, artifacts.eos_token_ids.first());
    let model = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": CONTEXT,
        "bos_token_id": bos.or(eos.copied()), "eos_token_id": eos, "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "torch_dtype": "bfloat16"});
    std::fs::write(folder.path().join("config.json"), model.to_string())?;
    Ok(folder)
}
