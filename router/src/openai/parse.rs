//! JSON bodies to typed requests, with an error that names the field.
//!
//! The hot path is one typed pass. Only when it fails is the body read again, to find the smallest part that fails
//! alone.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, error::Category};

use super::error::ApiError;

/// Reads a body. `T` must accept an object with any subset of its fields.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let request = serde_json::from_slice(body).map_err(|error| explain::<T>(body, &error))?;
    // serde reads an array as the fields in order; that is no request.
    match body.trim_ascii_start().first() {
        Some(b'{') => Ok(request),
        _ => Err(ApiError::bad_request("request body must be a JSON object")),
    }
}

fn explain<T: DeserializeOwned>(body: &[u8], error: &serde_json::Error) -> ApiError {
    if error.classify() != Category::Data {
        return ApiError::bad_request(format!("request body is not valid JSON: {error}"));
    }
    let value: Value = match serde_json::from_slice(body) {
        Ok(value @ Value::Object(_)) => value,
        Ok(_) => return ApiError::bad_request("request body must be a JSON object"),
        Err(error) => return ApiError::bad_request(format!("request body is not valid JSON: {error}")),
    };
    let fails = |part: Value| T::deserialize(part).err().map(|error| error.to_string());
    match locate(&fails, &value, String::new()) {
        Some((path, message)) if !path.is_empty() => {
            let message = format!("{path}: {message}");
            ApiError::invalid(path, message)
        }
        _ => ApiError::bad_request(format!("request body is malformed: {error}")),
    }
}

/// The deepest part of `value` that `fails` by itself, with its path and error.
fn locate(fails: &dyn Fn(Value) -> Option<String>, value: &Value, path: String) -> Option<(String, String)> {
    let message = fails(value.clone())?;
    let deeper = match value {
        Value::Object(fields) if fails(Value::Object(Map::new())).is_none() => {
            fields.iter().find_map(|(name, field)| {
                let within = |part| fails(Value::Object(Map::from_iter([(name.clone(), part)])));
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                locate(&within, field, path)
            })
        }
        Value::Array(items) if fails(Value::Array(Vec::new())).is_none() => {
            items.iter().enumerate().find_map(|(at, item)| {
                let within = |part| fails(Value::Array(vec![part]));
                locate(&within, item, format!("{path}[{at}]"))
            })
        }
        _ => None,
    };
    deeper.or(Some((path, message)))
}

#[cfg(test)]
mod tests {
    use super::super::request::Request;
    use super::*;

    #[test]
    fn the_field_at_fault_is_named() {
        for (body, param) in [
            (r#"{"model": 3}"#, Some("model")),
            (r#"{"model": "m", "max_tokens": -1}"#, Some("max_tokens")),
            (
                r#"{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 4}]}"#,
                Some("messages[1].content"),
            ),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}"#,
                Some("messages[0].content[0].text"),
            ),
            (r#"{"prompt": [1, "a"]}"#, Some("prompt")),
            (r#"{"stop": ["a", 1]}"#, Some("stop[1]")),
            (r#"{"temperature": NaN}"#, None),
            (r#"{"temperature": 1"#, None),
            ("[]", None),
            ("", None),
        ] {
            let error = parse::<Request>(body.as_bytes()).expect_err(body);
            assert_eq!(error.param.as_deref(), param, "{body}: {}", error.message);
        }
    }
}
