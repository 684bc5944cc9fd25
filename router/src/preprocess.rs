//! From a request to what workers need: templating, tokenizing, and the checks that depend on tokens. Pure and
//! synchronous.

use std::borrow::Cow;
use std::sync::Arc;

use protocol::metadata::ModelCard;
use protocol::request_plane::Generate;
use serde_json::Value;

use crate::backend::ServedModel;
use crate::model::chat_template::{Content, TemplateError, TemplateInput, TemplateMessage};
use crate::model::{ANSWER_TOKENS, Model, PromptError};
use crate::openai::Endpoint;
use crate::openai::error::ApiError;
use crate::openai::request::{ContentPart, Message, MessageContent, Prompt, Request};
use crate::openai::validate::{Params, check_messages, check_tools};
use crate::stream::choice::Echo;

/// A request that is ready for workers.
pub struct Prepared {
    /// Checked parameters.
    pub params: Params,
    /// Tokens of the prompts; one in a chat.
    pub prompts: Vec<Vec<u32>>,
    /// The prompts, when the answer begins with them.
    pub echo: Vec<Arc<Echo>>,
}

/// Templates, tokenizes and checks a request. Cost: a few µs, and for long prompts about 0.1 ms for each KB that no
/// cached segment covers.
pub fn prepare(
    served: &ServedModel,
    request: &Request,
    endpoint: Endpoint,
    max_choices: usize,
) -> Result<Prepared, ApiError> {
    let params = Params::check(request, endpoint, max_choices)?;
    params.check_tokens(served.model.vocabulary().size())?;
    check_count(request, endpoint, params.n, max_choices)?;
    check_size(served, request, endpoint)?;
    let prompts = match endpoint {
        Endpoint::Chat => vec![chat_tokens(&served.model, request)?],
        Endpoint::Completions => completion_tokens(&served.model, request)?,
    };
    for tokens in &prompts {
        if tokens.is_empty() {
            return Err(ApiError::invalid(endpoint.prompt_field(), "the prompt has no tokens"));
        }
        max_tokens(tokens.len(), &params, &served.card, endpoint)?;
    }
    let echo = if params.echo { echo(&served.model, request, &prompts) } else { Vec::new() };
    Ok(Prepared { params, prompts, echo })
}

/// Prompts times `n`; before anything is tokenized.
fn check_count(request: &Request, endpoint: Endpoint, n: usize, max_choices: usize) -> Result<(), ApiError> {
    let prompts = match (endpoint, &request.prompt) {
        (Endpoint::Chat, _) | (_, None) => 1,
        (_, Some(Prompt::Texts(texts))) => texts.len(),
        (_, Some(Prompt::Tokens(lists))) => lists.len(),
    };
    if prompts * n <= max_choices {
        return Ok(());
    }
    let message = format!("{prompts} prompts times n = {n} are over the limit of {max_choices}");
    Err(ApiError::invalid("prompt", message))
}

/// How many bytes of text a normalizer makes one of, at most: a Hangul syllable of three letters takes a third of their room.
const NORMALIZER_SHRINK: usize = 3;

/// Refuses text that cannot fit into the context even if it were all made of the longest token; its exact length
/// would take seconds to find out.
pub(crate) fn check_size(served: &ServedModel, request: &Request, endpoint: Endpoint) -> Result<(), ApiError> {
    let context = served.card.context_length as usize;
    let most = context.saturating_mul(served.model.vocabulary().longest().max(1)).saturating_mul(NORMALIZER_SHRINK);
    let bytes = match endpoint {
        Endpoint::Chat => request.messages.iter().flatten().map(kept_bytes).sum(),
        Endpoint::Completions => match &request.prompt {
            Some(Prompt::Texts(texts)) => texts.iter().map(String::len).max().unwrap_or(0),
            _ => 0,
        },
    };
    // Pieces of text that stand in for tokens are no measure.
    if context == 0 || served.model.vocabulary().size() == 0 {
        return Ok(());
    }
    if bytes > most {
        let message = format!("a prompt of {bytes} bytes does not fit into the context of {context} tokens");
        return Err(ApiError::context_length(endpoint.prompt_field(), message));
    }
    if endpoint != Endpoint::Chat {
        return Ok(());
    }
    // A template may show less of them, but nobody sends it this much for that.
    let named = |(name, value): (&String, &Value)| name.len() + text_bytes(value);
    let shown = [
        ("tools", request.tools.iter().flatten().map(text_bytes).sum()),
        ("chat_template_kwargs", request.chat_template_kwargs.iter().flatten().map(named).sum()),
        ("documents", request.documents.as_ref().map_or(0, text_bytes)),
    ];
    match shown.into_iter().find(|(_, bytes)| *bytes > most) {
        None => Ok(()),
        Some((param, bytes)) => {
            let message = format!("{param} with {bytes} bytes of text do not fit into the context of {context} tokens");
            Err(ApiError::context_length(param, message))
        }
    }
}

/// Bytes of all strings in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + text_bytes(value)).sum(),
        _ => 0,
    }
}

/// Bytes of a message that templates keep; of an assistant's some leave its reasoning out.
fn kept_bytes(message: &Message) -> usize {
    match &message.content {
        _ if message.role.as_deref() == Some("assistant") => 0,
        Some(MessageContent::Text(text)) => text.len(),
        Some(MessageContent::Parts(parts)) => parts.iter().filter_map(|part| part.text.as_ref()).map(String::len).sum(),
        None => 0,
    }
}

/// One `Generate` for each choice: all of the first prompt, then all of the next.
pub fn generates(
    prompts: Vec<Vec<u32>>,
    params: &Params,
    id: &str,
    served: &ServedModel,
    endpoint: Endpoint,
) -> Result<Vec<Generate>, ApiError> {
    let count = prompts.len() * params.n;
    // Several answers to one prompt must differ, and a client's seed must still fix all of them.
    let seed = params.sampling.seed.or_else(|| (params.n > 1).then(rand::random));
    let mut generates = Vec::with_capacity(count);
    let choices = prompts.into_iter().flat_map(|tokens| std::iter::repeat_n(tokens, params.n));
    for (index, token_ids) in choices.enumerate() {
        let mut sampling = params.sampling.clone();
        sampling.seed = seed.map(|seed| seed.wrapping_add((index % params.n) as u64));
        let mut stop = params.stop.clone();
        stop.max_tokens = max_tokens(token_ids.len(), params, &served.card, endpoint)?;
        generates.push(Generate {
            request_id: if count == 1 { id.to_owned() } else { format!("{id}-{index}") },
            model: served.card.display_name.clone(),
            lora: served.card.adapter().unwrap_or_default().to_owned(),
            token_ids,
            cache_namespace: params.cache_namespace.clone(),
            sampling: Some(sampling),
            stop: Some(stop),
            logprobs: params.logprobs,
            prompt_logprobs: params.echo && params.logprobs.is_some(),
            priority: params.priority,
            ..Default::default()
        });
    }
    Ok(generates)
}

/// How many tokens the answer may have: what the client said, or what the context has left.
pub(crate) fn max_tokens(
    prompt: usize,
    params: &Params,
    card: &ModelCard,
    endpoint: Endpoint,
) -> Result<u32, ApiError> {
    let context = card.context_length as usize;
    if context == 0 {
        return Ok(params.max_tokens.unwrap_or(u32::MAX)); // the worker does not say; it will apply its own limit
    }
    let left = context.saturating_sub(prompt);
    if left == 0 {
        let message = format!("the prompt has {prompt} tokens; with the answer at most {context} fit into the context");
        return Err(ApiError::context_length(endpoint.prompt_field(), message));
    }
    let wanted = params.max_tokens.map_or(left, |limit| limit as usize);
    if wanted > left {
        let field = params.max_tokens_field;
        let message = format!(
            "{field} is {wanted}, but after a prompt of {prompt} tokens the context of {context} has {left} left"
        );
        return Err(ApiError::context_length(field, message));
    }
    Ok(wanted as u32)
}

fn chat_tokens(model: &Model, request: &Request) -> Result<Vec<u32>, ApiError> {
    let messages = check_messages(request.messages.as_deref())?;
    render_chat(model, request, messages)?.map_err(|error| match error {
        PromptError::NoTemplate => ApiError::invalid("model", error.to_string()),
        PromptError::Template(TemplateError::Raised(message)) => ApiError::invalid("messages", message),
        PromptError::Template(TemplateError::Failed(_)) => ApiError::invalid("messages", error.to_string()),
        PromptError::Tokenizer(_) => ApiError::internal(error.to_string()),
    })
}

/// Tokens of a chat whose messages have been checked. The outer error is the client's, the inner one the model's.
pub(crate) fn render_chat(
    model: &Model,
    request: &Request,
    messages: &[Message],
) -> Result<Result<Vec<u32>, PromptError>, ApiError> {
    let tools = check_tools(request)?;
    let contents: Vec<Option<Content<'_>>> =
        messages.iter().map(|message| message.content.as_ref().map(content)).collect();
    let mut input = TemplateInput {
        tools,
        add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
        ..Default::default()
    };
    for (at, (message, content)) in messages.iter().zip(&contents).enumerate() {
        input.messages.push(TemplateMessage {
            role: message.role.as_deref().unwrap_or_default(),
            content: content.as_ref(),
            fields: fields(message, at)?,
        });
    }
    let named = [("documents", &request.documents), ("reasoning_effort", &request.reasoning_effort)];
    input.variables.extend(named.iter().filter_map(|(name, value)| Some((*name, value.as_ref()?))));
    for (name, value) in request.chat_template_kwargs.iter().flatten() {
        input.variables.push((name, value));
    }
    Ok(model.encode_chat(&input))
}

fn content(content: &MessageContent) -> Content<'_> {
    fn text(part: &ContentPart) -> &str {
        part.text.as_deref().or(part.refusal.as_deref()).unwrap_or_default()
    }
    match content {
        MessageContent::Text(text) => Content::Text(text),
        MessageContent::Parts(parts) => Content::Parts(parts.iter().map(text).collect()),
    }
}

/// The other fields of a message. Templates want a tool call's arguments as an object; the API carries them as a
/// string.
fn fields(message: &Message, at: usize) -> Result<Vec<(&str, Cow<'_, Value>)>, ApiError> {
    let mut fields = Vec::with_capacity(message.fields.len());
    for (name, value) in &message.fields {
        if name != "tool_calls" {
            fields.push((name.as_str(), Cow::Borrowed(value)));
            continue;
        }
        let Some(calls) = value.as_array() else {
            let param = format!("messages[{at}].tool_calls");
            return Err(ApiError::invalid(param.clone(), format!("{param} must be an array")));
        };
        let is_text = |call: &Value| call.pointer("/function/arguments").is_some_and(Value::is_string);
        if !calls.iter().any(is_text) {
            fields.push((name.as_str(), Cow::Borrowed(value)));
            continue;
        }
        let mut calls = calls.clone();
        for (index, call) in calls.iter_mut().enumerate() {
            let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
            let Some(text) = arguments.as_str() else { continue };
            let parsed =
                if text.trim().is_empty() { Ok(Value::Object(Default::default())) } else { serde_json::from_str(text) };
            *arguments = parsed.map_err(|error| {
                let param = format!("messages[{at}].tool_calls[{index}].function.arguments");
                ApiError::invalid(param.clone(), format!("{param} is not JSON: {error}"))
            })?;
        }
        fields.push((name.as_str(), Cow::Owned(Value::Array(calls))));
    }
    Ok(fields)
}

fn completion_tokens(model: &Model, request: &Request) -> Result<Vec<Vec<u32>>, ApiError> {
    let size = model.vocabulary().size();
    match &request.prompt {
        None => Err(ApiError::invalid("prompt", "prompt is required")),
        Some(Prompt::Texts(texts)) => texts
            .iter()
            .map(|text| model.encode_prompt(text).map_err(|error| ApiError::internal(error.to_string())))
            .collect(),
        Some(Prompt::Tokens(lists)) if lists.is_empty() => Err(ApiError::invalid("prompt", "prompt must not be empty")),
        Some(Prompt::Tokens(lists)) => match lists.iter().flatten().find(|id| **id as usize >= size) {
            Some(id) => {
                Err(ApiError::invalid("prompt", format!("token id {id} is outside of the vocabulary of {size} tokens")))
            }
            None => Ok(lists.iter().map(|ids| with_room(ids)).collect()),
        },
    }
}

fn with_room(ids: &[u32]) -> Vec<u32> {
    let mut with_room = Vec::with_capacity(ids.len() + ANSWER_TOKENS);
    with_room.extend_from_slice(ids);
    with_room
}

fn echo(model: &Model, request: &Request, prompts: &[Vec<u32>]) -> Vec<Arc<Echo>> {
    let echo = |(at, tokens): (usize, &Vec<u32>)| {
        let text = match &request.prompt {
            Some(Prompt::Texts(texts)) => texts[at].clone(),
            _ => model.vocabulary().text(tokens),
        };
        Arc::new(Echo { text, tokens: tokens.clone() })
    };
    prompts.iter().enumerate().map(echo).collect()
}
