//! Request bodies of both generating endpoints: OpenAI's fields and vLLM's extras.
//!
//! One type for both, because they share nearly all fields. Every field may be absent or null; unknown ones are
//! accepted. Fields that would change the answer in a way that is not built are kept, so that the checks can refuse
//! them by name.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

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
    // refused when they ask for something
    pub modalities: Option<Vec<String>>,
    pub audio: Option<Value>,
    pub functions: Option<Value>,
    pub function_call: Option<Value>,
    pub prediction: Option<Value>,
    pub web_search_options: Option<Value>,
    pub store: Option<Value>,
    pub chat_template: Option<Value>,
    pub continue_final_message: Option<Value>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<Value>,
    pub guided_choice: Option<Value>,
    pub guided_grammar: Option<Value>,
    pub structured_outputs: Option<Value>,
    pub use_beam_search: Option<Value>,
    pub truncate_prompt_tokens: Option<Value>,
    pub prompt_logprobs: Option<Value>,
    pub allowed_token_ids: Option<Value>,
    pub bad_words: Option<Value>,
    pub return_token_ids: Option<Value>,
    pub return_tokens_as_token_ids: Option<Value>,
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
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of content parts")]
pub enum MessageContent {
    /// A text.
    Text(String),
    /// Parts.
    Parts(Vec<ContentPart>),
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
    fn nulls_are_absent_and_unknown_fields_accepted() {
        let body = r#"{"model": "m", "stop": null, "logprobs": null, "user": "u", "x": {"y": 1},
            "messages": [{"role": "assistant", "content": null, "name": null, "tool_calls": []}]}"#;
        let request: Request = serde_json::from_str(body).expect("valid");
        let message = &request.messages.expect("present")[0];
        assert!(request.stop.is_none() && message.content.is_none());
        assert_eq!(message.fields.len(), 1);
    }
}
