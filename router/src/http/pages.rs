//! What programs read with GET: models, health, metrics.

use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::backend::{Backend, ServedModel};
use crate::openai::error::ApiError;

/// `GET /v1/models`.
pub(super) fn models(backend: &impl Backend) -> String {
    let models: Vec<Value> = sorted(backend).iter().map(|model| describe(model)).collect();
    json!({"object": "list", "data": models}).to_string()
}

/// `GET /v1/models/{id}`; an id may contain slashes.
pub(super) fn model(backend: &impl Backend, id: &str) -> Result<String, ApiError> {
    let id = percent_decode(id);
    backend.model(&id).map(|model| describe(&model).to_string()).ok_or_else(|| ApiError::model_not_found(&id))
}

fn describe(model: &ServedModel) -> Value {
    json!({
        "id": model.card.display_name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "armature",
        "max_model_len": model.card.context_length,
    })
}

/// `GET /health`: healthy with at least one model to serve.
pub(super) fn health(backend: &impl Backend, ready: bool) -> (bool, String) {
    let models: Vec<String> = sorted(backend).iter().map(|model| model.card.display_name.clone()).collect();
    let healthy = ready && !models.is_empty();
    let status = match (ready, healthy) {
        (_, true) => "healthy",
        (true, false) => "no models",
        (false, false) => "not ready",
    };
    let warnings = backend.warnings();
    let warnings: Vec<Value> =
        warnings.iter().map(|warning| json!({"worker": warning.worker, "kv_events": warning.reason})).collect();
    (healthy, json!({"status": status, "models": models, "warnings": warnings}).to_string())
}

/// `GET /metrics`.
pub(super) fn metrics(registry: &Registry) -> Result<String, ApiError> {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, registry) {
        Ok(()) => Ok(text),
        Err(error) => Err(ApiError::internal(format!("metrics cannot be written: {error}"))),
    }
}

/// Every model, by name.
pub(super) fn sorted(backend: &impl Backend) -> Vec<std::sync::Arc<ServedModel>> {
    let mut models = backend.models();
    models.sort_by(|a, b| a.card.display_name.cmp(&b.card.display_name));
    models
}

/// `%2F` → `/`; what is no valid escape stays.
pub(super) fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_in_paths_are_read() {
        for (text, expected) in [("a%2Fb", "a/b"), ("%e4%bd%a0", "你"), ("100%", "100%"), ("%zz%2", "%zz%2"), ("", "")]
        {
            assert_eq!(percent_decode(text), expected);
        }
    }
}
