//! Chat messages to prompt text, through the model's own template.
//!
//! The template is compiled once. It sees what Hugging Face's Jinja set-up shows it (`python` closes the
//! differences). Users' strings pass through `guard` and the output through `origin`, so that no string of theirs acts as
//! a special token, whatever the template does with it.

mod fields;
mod guard;
mod origin;
mod percent;
mod python;

use std::borrow::Cow;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, syntax::SyntaxConfig};
use serde_json::{Value as Json, json};

use super::ModelError;
use super::vocabulary::SpecialToken;
use fields::map;
use guard::Guard;
use origin::Origin;

/// Tells the time to templates that put the date into the prompt.
pub type Clock = fn() -> jiff::Zoned;

/// A compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    guard: Guard,
    origin: Origin,
    /// `bos_token`, `eos_token`, … with their texts.
    special: Vec<(String, Value)>,
    takes_text: bool,
    takes_parts: bool,
}

/// Content of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// One text.
    Text(&'a str),
    /// Texts of the parts.
    Parts(Vec<&'a str>),
}

/// A message as the template sees it.
#[derive(Clone, Debug)]
pub struct TemplateMessage<'a> {
    /// `system`, `user`, `assistant`, `tool`, …
    pub role: &'a str,
    /// What it says.
    pub content: Option<&'a Content<'a>>,
    /// Everything else: `name`, `tool_calls`, `tool_call_id`, …
    pub fields: Vec<(&'a str, Cow<'a, Json>)>,
}

/// What is rendered.
#[derive(Clone, Debug, Default)]
pub struct TemplateInput<'a> {
    /// The conversation.
    pub messages: Vec<TemplateMessage<'a>>,
    /// Tool definitions.
    pub tools: Option<&'a [Json]>,
    /// End with the begin of the assistant's message.
    pub add_generation_prompt: bool,
    /// More variables: `enable_thinking`, `documents`, …
    pub variables: Vec<(&'a str, &'a Json)>,
}

/// Why a conversation could not be rendered.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    /// The template called `raise_exception`: the conversation is not one that the model takes.
    #[error("{0}")]
    Raised(String),
    /// Anything else.
    #[error("the model's chat template failed: {0}")]
    Failed(String),
}

/// The text of `raise_exception`, as a source of the engine's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

const NAME: &str = "chat_template";

/// Text that the probe looks for in the output.
const PROBE: &str = "probe-4f1c";

/// Conversations that show how a template writes the roles; one that it does not take shows nothing.
const PROBED_ROLES: [&[&str]; 6] = [
    &["user"],
    &["system", "user", "assistant", "user"],
    &["user", "assistant", "user"],
    &["user", "assistant", "tool"],
    &["user", "assistant", "function"],
    &["developer", "user"],
];

impl ChatTemplate {
    /// Compiles `source`. `roles` are texts of special tokens by role, `special` all special tokens.
    pub fn new(
        source: &str,
        roles: impl IntoIterator<Item = (String, String)>,
        special: &[SpecialToken],
        clock: Clock,
    ) -> Result<ChatTemplate, ModelError> {
        let failed = |e: Error| ModelError::Template(e.to_string());
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(python::format_output);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", python::string);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(RaisedException(message)))
        });
        environment.add_function("strftime_now", move |format: String| {
            jiff::fmt::strtime::format(&format, &clock())
                .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
        });
        let source = percent::rewrite(&python::rewrite_generation_tags(source));
        let (origin, source) = Origin::new(&source, special);
        environment.add_template_owned(NAME, source).map_err(failed)?;
        let special_values = roles.into_iter().map(|(role, text)| (role, Value::from(origin.mark(&text)))).collect();
        let mut template = ChatTemplate {
            environment,
            guard: Guard::new(special),
            origin,
            special: special_values,
            takes_text: true,
            takes_parts: false,
        };
        template.takes_text = template.probe(&Content::Text(PROBE), true, false);
        template.takes_parts = template.probe(&Content::Parts(vec![PROBE]), false, true);
        // A template that refuses the probe (it wants a system message, say) is taken as one for plain text.
        template.takes_text |= !template.takes_parts;
        template.learn_assembled();
        Ok(template)
    }

    /// Whether content of this form comes out as its text.
    fn probe(&mut self, content: &Content<'_>, takes_text: bool, takes_parts: bool) -> bool {
        (self.takes_text, self.takes_parts) = (takes_text, takes_parts);
        let message = TemplateMessage { role: "user", content: Some(content), fields: Vec::new() };
        let input = TemplateInput { messages: vec![message], ..Default::default() };
        self.render(&input).is_ok_and(|text| text.contains(PROBE) && !text.contains("type"))
    }

    /// Has the template render conversations of every role, with and without tools, for `origin` to learn from.
    fn learn_assembled(&mut self) {
        let content = Content::Text(PROBE);
        let function = json!({"type": "function", "function": {"name": PROBE, "description": PROBE,
            "parameters": {"type": "object", "properties": {}}}});
        let calls = json!([{"type": "function", "id": PROBE, "function": {"name": PROBE, "arguments": {}}}]);
        let mut rendered = Vec::new();
        for (roles, tools) in PROBED_ROLES.iter().flat_map(|roles| [(roles, false), (roles, true)]) {
            let message = |role: &&'static str| {
                let calls = (tools && *role == "assistant").then_some(("tool_calls", Cow::Borrowed(&calls)));
                TemplateMessage { role, content: Some(&content), fields: calls.into_iter().collect() }
            };
            let input = TemplateInput {
                messages: roles.iter().map(message).collect(),
                tools: tools.then_some(std::slice::from_ref(&function)),
                add_generation_prompt: true,
                ..Default::default()
            };
            rendered.extend(self.render_marked(&input));
        }
        self.origin.learn(&rendered);
    }

    /// The prompt text. Special tokens in it come from the template alone: [`ChatTemplate::unguard`] what lies
    /// between them.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        self.render_marked(input).map(|text| self.origin.settle(&text))
    }

    /// The prompt text with the marks of `origin`.
    fn render_marked(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let messages: Vec<Value> = input.messages.iter().map(|message| self.message(message)).collect();
        let tools = input.tools.map(|tools| tools.iter().map(|tool| self.json(tool)).collect::<Value>());
        let mut context: Vec<(Value, Value)> = Vec::with_capacity(8 + self.special.len() + input.variables.len());
        for (name, value) in &self.special {
            context.push((name.as_str().into(), value.clone()));
        }
        for (name, value) in &input.variables {
            context.push(((*name).into(), self.json(value)));
        }
        context.push(("messages".into(), messages.into()));
        context.push(("tools".into(), tools.unwrap_or_else(|| ().into())));
        context.push(("add_generation_prompt".into(), input.add_generation_prompt.into()));
        let template = self.environment.get_template(NAME).map_err(|e| TemplateError::Failed(e.to_string()))?;
        template.render(map(context)).map_err(|error| raised(&error))
    }

    /// The text as the user wrote it. Cost without guarded strings in it: one search.
    pub fn unguard<'a>(&self, text: &'a str) -> Cow<'a, str> {
        guard::unguard(text)
    }

    fn message(&self, message: &TemplateMessage<'_>) -> Value {
        let mut fields: Vec<(Value, Value)> = Vec::with_capacity(2 + message.fields.len());
        fields.push(("role".into(), self.text(message.role)));
        fields.push(("content".into(), self.content(message.content)));
        for (name, value) in &message.fields {
            fields.push((self.text(name), self.json(value)));
        }
        map(fields)
    }

    fn content(&self, content: Option<&Content<'_>>) -> Value {
        let parts = |texts: &[&str]| -> Value {
            let part = |text: &&str| map(vec![("type".into(), "text".into()), ("text".into(), self.text(text))]);
            texts.iter().map(part).collect()
        };
        match content {
            None => "".into(),
            Some(Content::Text(text)) if self.takes_text => self.text(text),
            Some(Content::Text(text)) => parts(std::slice::from_ref(text)),
            Some(Content::Parts(texts)) if self.takes_parts => parts(texts),
            Some(Content::Parts(texts)) => self.text(&texts.join("\n")),
        }
    }

    fn text(&self, text: &str) -> Value {
        self.guard.protect(text).into()
    }

    fn json(&self, json: &Json) -> Value {
        match json {
            Json::Null => ().into(),
            Json::Bool(flag) => (*flag).into(),
            Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(integer), ..) => integer.into(),
                (_, Some(integer), _) => integer.into(),
                (.., float) => float.unwrap_or_default().into(),
            },
            Json::String(text) => self.text(text),
            Json::Array(items) => items.iter().map(|item| self.json(item)).collect(),
            Json::Object(fields) => {
                map(fields.iter().map(|(name, value)| (self.text(name), self.json(value))).collect())
            }
        }
    }
}

fn raised(error: &Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(this) = cause {
        if let Some(RaisedException(message)) = this.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        cause = this.source();
    }
    TemplateError::Failed(error.to_string())
}

#[cfg(test)]
mod tests;
