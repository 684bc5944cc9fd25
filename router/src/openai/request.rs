//! Request bodies of both generating endpoints: OpenAI's fields and vLLM's extras.
//!
//! One type for both, because they share nearly all fields. Every field may be absent or null; unknown ones are
//! accepted. Fields that would change the answer in a way that is not built are kept, so that the checks can refuse
//! them by name.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::routing::NvExt;

/// Body of `POST /v1/chat/completions` or `POST /v1/completions`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "OpenAI's and vLLM's documentation define the fields")]
pub struct Request {
    pub model: Option<String>,
    // chat
    pub messages: Option<Vec<Message>>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub response_format: Option<Value>,
    pub max_completion_tokens: Option<u64>,
    pub top_logprobs: Option<u64>,
    pub add_generation_prompt: Option<bool>,
    pub chat_template_kwargs: Option<serde_json::Map<String, Value>>,
    pub documents: Option<Value>,
    pub reasoning_effort: Option<Value>,
    // completions
    pub prompt: Option<Prompt>,
    pub echo: Option<bool>,
    pub suffix: Option<String>,
    pub best_of: Option<u64>,
    // both
    pub max_tokens: Option<u64>,
    pub min_tokens: Option<u64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub logit_bias: Option<HashMap<String, f64>>,
    pub seed: Option<i64>,
    pub n: Option<u64>,
    pub stop: Option<StopStrings>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub logprobs: Option<Logprobs>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub cache_salt: Option<String>,
    pub priority: Option<i32>,
    pub nvext: Option<NvExt>,
    // refused when they ask for something
    pub modalities: Option<Vec<String>>,
    pub audio: Asks,
    pub functions: Asks,
    pub function_call: Asks,
    pub prediction: Asks,
    pub web_search_options: Asks,
    pub store: Asks,
    pub chat_template: Asks,
    pub continue_final_message: Asks,
    pub guided_json: Asks,
    pub guided_regex: Asks,
    pub guided_choice: Asks,
    pub guided_grammar: Asks,
    pub structured_outputs: Asks,
    pub use_beam_search: Asks,
    pub truncate_prompt_tokens: Asks,
    pub prompt_logprobs: Asks,
    pub allowed_token_ids: Asks,
    pub bad_words: Asks,
    pub return_token_ids: Asks,
    pub return_tokens_as_token_ids: Asks,
}

/// A field that is refused when it asks for something: all that is kept of it is whether it does. Absent, null, false and an
/// empty list do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asks(pub bool);

impl<'de> Deserialize<'de> for Asks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Asks, D::Error> {
        struct AsksVisitor;
        impl<'de> Visitor<'de> for AsksVisitor {
            type Value = Asks;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_unit<E>(self) -> Result<Asks, E> {
                Ok(Asks(false))
            }

            fn visit_bool<E>(self, flag: bool) -> Result<Asks, E> {
                Ok(Asks(flag))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Asks, E> {
                Ok(Asks(true))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Asks, E> {
                Ok(Asks(true))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Asks, E> {
                Ok(Asks(true))
            }

            fn visit_str<E>(self, _: &str) -> Result<Asks, E> {
                Ok(Asks(true))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Asks, A::Error> {
                let mut asks = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    asks = true;
                }
                Ok(Asks(asks))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Asks, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Asks(true))
            }
        }
        deserializer.deserialize_any(AsksVisitor)
    }
}

/// `stream_options`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: Option<bool>,
    /// vLLM: usage in each chunk.
    pub continuous_usage_stats: Option<bool>,
}

/// `stop`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub enum StopStrings {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// `logprobs`: a flag in chats, a number in completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "expected true, false or a number")]
pub enum Logprobs {
    /// In chats.
    Flag(bool),
    /// In completions.
    Count(u64),
}

/// `prompt`.
#[derive(Debug, PartialEq, Eq)]
pub enum Prompt {
    /// One or several texts.
    Texts(Vec<String>),
    /// One or several token arrays.
    Tokens(Vec<Vec<u32>>),
}

/// An element of a `prompt` array.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string, a token id or an array of token ids")]
enum PromptElement {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Prompt, D::Error> {
        struct PromptVisitor;
        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string, an array of strings, an array of token ids or an array of such arrays")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Texts(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
                let (mut texts, mut tokens, mut lists) = (Vec::new(), Vec::new(), Vec::new());
                while let Some(element) = seq.next_element()? {
                    match element {
                        PromptElement::Text(text) => texts.push(text),
                        PromptElement::Token(token) => tokens.push(token),
                        PromptElement::Tokens(list) => lists.push(list),
                    }
                }
                match (texts.is_empty(), tokens.is_empty(), lists.is_empty()) {
                    (false, true, true) => Ok(Prompt::Texts(texts)),
                    (true, false, true) => Ok(Prompt::Tokens(vec![tokens])),
                    (true, true, _) => Ok(Prompt::Tokens(lists)),
                    _ => Err(A::Error::custom("strings and token ids cannot be mixed")),
                }
            }
        }
        deserializer.deserialize_any(PromptVisitor)
    }
}

/// A message of a chat.
#[derive(Debug, Default)]
pub struct Message {
    /// Who speaks.
    pub role: Option<String>,
    /// What is said.
    pub content: Option<MessageContent>,
    /// All other fields, as they are: `name`, `tool_calls`, `tool_call_id`, …
    pub fields: Vec<(String, Value)>,
}

/// `content` of a message.
#[derive(Debug)]
pub enum MessageContent {
    /// A text.
    Text(String),
    /// Parts.
    Parts(Vec<ContentPart>),
}

impl<'de> Deserialize<'de> for MessageContent {
    /// Not derived as an untagged enum: that would copy a long text once more.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MessageContent, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = MessageContent;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string or an array of content parts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<MessageContent, E> {
                Ok(MessageContent::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MessageContent, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(MessageContent::Parts(parts))
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

/// A part of a message's content.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ContentPart {
    /// `text`, `image_url`, …
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// With kind `text`.
    pub text: Option<String>,
    /// With kind `refusal`.
    pub refusal: Option<String>,
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Message, D::Error> {
        struct MessageVisitor;
        impl<'de> Visitor<'de> for MessageVisitor {
            type Value = Message;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a message object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
                let mut message = Message::default();
                while let Some(name) = map.next_key::<String>()? {
                    match &*name {
                        "role" => message.role = map.next_value()?,
                        "content" => message.content = map.next_value()?,
                        _ => match map.next_value()? {
                            Value::Null => {}
                            value => message.fields.push((name, value)),
                        },
                    }
                }
                Ok(message)
            }
        }
        deserializer.deserialize_map(MessageVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_prompt_is_read() {
        let read = |json: &str| serde_json::from_str::<Prompt>(json);
        let texts = |texts: &[&str]| Prompt::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
        assert_eq!(read(r#""a""#).expect("valid"), texts(&["a"]));
        assert_eq!(read(r#"["a", "b"]"#).expect("valid"), texts(&["a", "b"]));
        assert_eq!(read("[1, 2]").expect("valid"), Prompt::Tokens(vec![vec![1, 2]]));
        assert_eq!(read("[[1], [2]]").expect("valid"), Prompt::Tokens(vec![vec![1], vec![2]]));
        assert!(read("[1, [2]]").is_err() && read("[-1]").is_err() && read("{}").is_err());
    }

    #[test]
    fn of_a_refused_field_only_what_it_asks_is_kept() {
        for (json, asks) in [
            ("null", false),
            ("false", false),
            ("[]", false),
            ("true", true),
            ("0", true),
            ("-1.5", true),
            ("\"\"", true),
            ("[[]]", true),
            ("{}", true),
            (r#"{"a": [{"b": 1}]}"#, true),
        ] {
            let request: Request = serde_json::from_str(&format!(r#"{{"audio": {json}}}"#)).expect("valid");
            assert_eq!(request.audio, Asks(asks), "{json}");
        }
        assert_eq!(Request::default().store, Asks(false));
    }

    #[test]
    fn nulls_are_absent_and_unknown_fields_accepted() {
        let body = r#"{"model": "m", "stop": null, "logprobs": null, "user": "u", "x": {"y": 1},
            "messages": [{"role": "assistant", "content": null, "name": null, "tool_calls": []}]}"#;
        let request: Request = serde_json::from_str(body).expect("valid");
        let message = &request.messages.expect("present")[0];
        assert!(request.stop.is_none() && message.content.is_none());
        assert_eq!(message.fields.len(), 1);
    }
}
