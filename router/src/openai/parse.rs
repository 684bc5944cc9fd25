//! JSON bodies to typed requests, with an error that names the field.
//!
//! The hot path is one typed pass. Only when it fails is the body, unless it is a large one, read again, to find the
//! smallest part that fails alone.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, error::Category};

use super::error::ApiError;

/// Of a larger body that is malformed only the place is told: to find the field takes many times as long as to read it.
const EXPLAINED_BYTES: usize = 64 << 10;

/// Values and names in a JSON text: one, and as many as there are commas, colons and opening brackets outside of strings.
/// `None` when they are over `most`. What they become in memory is many times the two bytes that one of them can have.
/// Cost: 1 ns for each byte outside of strings, until `most` is reached.
pub fn count_values(json: &[u8], most: usize) -> Option<usize> {
    let (mut count, mut at) = (1, 0);
    while let Some(byte) = json.get(at) {
        at += 1;
        match byte {
            b'"' => at = string_end(json, at),
            b',' | b':' | b'[' | b'{' => {
                count += 1;
                if count > most {
                    return None;
                }
            }
            _ => {}
        }
    }
    (count <= most).then_some(count)
}

/// Where the string that has begun before `at` has ended.
fn string_end(json: &[u8], mut at: usize) -> usize {
    while let Some(found) = memchr::memchr2(b'"', b'\\', json.get(at..).unwrap_or_default()) {
        let quote = json[at + found] == b'"';
        at += found + 1;
        if quote {
            return at;
        }
        // Whatever was escaped.
        at += 1;
    }
    json.len()
}

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
    let malformed = || ApiError::bad_request(format!("request body is malformed: {error}"));
    if body.len() > EXPLAINED_BYTES {
        return malformed();
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
        _ => malformed(),
    }
}

/// The deepest part of `value` that `fails` by itself, with its path and error. A part is found by halving: a list fails as soon
/// as the part at fault is in it.
fn locate(fails: &dyn Fn(Value) -> Option<String>, value: &Value, path: String) -> Option<(String, String)> {
    let message = fails(value.clone())?;
    let deeper = match value {
        Value::Object(fields) => {
            let begin = |len| Value::Object(fields.iter().take(len).map(|(k, v)| (k.clone(), v.clone())).collect());
            let at = first_at_fault(fields.len(), |len| fails(begin(len)).is_some());
            at.and_then(|at| fields.iter().nth(at)).and_then(|(name, field)| {
                let within = |part| fails(Value::Object(Map::from_iter([(name.clone(), part)])));
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                locate(&within, field, path)
            })
        }
        Value::Array(items) => {
            let at = first_at_fault(items.len(), |len| fails(Value::Array(items[..len].to_vec())).is_some());
            at.and_then(|at| {
                let within = |part| fails(Value::Array(vec![part]));
                locate(&within, &items[at], format!("{path}[{at}]"))
            })
        }
        _ => None,
    };
    deeper.or(Some((path, message)))
}

/// The index of the last item of the shortest begin that fails, of a list of `len` that does; `None` when the empty one does.
fn first_at_fault(len: usize, fails: impl Fn(usize) -> bool) -> Option<usize> {
    if fails(0) {
        return None;
    }
    let (mut right, mut wrong) = (0, len);
    while right + 1 < wrong {
        let middle = right.midpoint(wrong);
        *(if fails(middle) { &mut wrong } else { &mut right }) = middle;
    }
    wrong.checked_sub(1)
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
            (&format!(r#"{{"messages": [{}4]}}"#, r#"{"role": "user"}, "#.repeat(1000)), Some("messages[1000]")),
            (&format!(r#"{{"model": 3, "x": "{}"}}"#, "x".repeat(EXPLAINED_BYTES)), None),
        ] {
            let error = parse::<Request>(body.as_bytes()).expect_err(body);
            assert_eq!(error.param.as_deref(), param, "{body}: {}", error.message);
        }
    }

    #[test]
    fn values_are_counted_outside_of_strings() {
        for (json, count) in [
            ("1", 1),
            ("[]", 2),
            (r#"{"a": [1, 2], "b": {}}"#, 8),
            (r#""[,:{""#, 1),
            (r#"["\"[,", []]"#, 4),
            (r#"["\\", []]"#, 4),
            (r#"["", "[,"]"#, 3),
            (r#"["open"#, 2),
            (r#"["open\"#, 2),
            ("", 1),
        ] {
            assert_eq!(
                (count_values(json.as_bytes(), count), count_values(json.as_bytes(), count - 1)),
                (Some(count), None),
                "{json}"
            );
        }
    }
}
