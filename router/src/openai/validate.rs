//! The checks that need no tokens: every range and type rule, before a model is even looked at.
//!
//! [`Params::check`] returns the proof: what sampling, stopping and answering need, in the request plane's own types.

use protocol::request_plane::{Sampling, Stop};
use serde_json::Value;

use super::Endpoint;
use super::error::ApiError;
use super::request::{Asks, Logprobs, Message, MessageContent, Request, StopStrings};
use super::routing::BodyHints;

/// Most stop strings of a request. OpenAI allows 4, vLLM any number; the text held back grows with them.
pub const MAX_STOP_STRINGS: usize = 16;

/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;

/// Most alternatives for each token, as in OpenAI's chat API.
pub const MAX_TOP_LOGPROBS: u64 = 20;

/// Most entries of `logit_bias` and of `stop_token_ids`.
pub const MAX_TOKEN_LIST: usize = 1024;

/// Roles a message may have.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// A request whose parameters are right.
#[derive(Clone, Debug, Default)]
pub struct Params {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When to stop; `max_tokens` is 0 until the prompt's length is known.
    pub stop: Stop,
    /// What the client said about the length of the answer.
    pub max_tokens: Option<u32>,
    /// The field in which it said so.
    pub max_tokens_field: &'static str,
    /// Answers for each prompt, ≥ 1.
    pub n: usize,
    /// Answer with events.
    pub stream: bool,
    /// End the events with the usage.
    pub include_usage: bool,
    /// Alternatives to report with each token.
    pub logprobs: Option<u32>,
    /// Begin the answer with the prompt.
    pub echo: bool,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// Keep the stop string that matched in the text.
    pub include_stop: bool,
    /// Higher runs first.
    pub priority: i32,
    /// Part of the block hashes; empty: none.
    pub cache_namespace: String,
    /// Where it may run, and when.
    pub routing: BodyHints,
}

impl Params {
    /// Checks everything but the prompt's tokens. `max_choices` bounds `n`.
    pub fn check(request: &Request, endpoint: Endpoint, max_choices: usize) -> Result<Params, ApiError> {
        refuse_unsupported(request, endpoint)?;
        Params::check_values(request, endpoint, max_choices)
    }

    /// Checks what holds for every server of this API: which features a request may use is not looked at.
    pub fn check_values(request: &Request, endpoint: Endpoint, max_choices: usize) -> Result<Params, ApiError> {
        let stream = request.stream.unwrap_or(false);
        if request.stream_options.is_some() && !stream {
            return Err(ApiError::invalid("stream_options", "stream_options is only allowed when stream is true"));
        }
        let (max_tokens, max_tokens_field) = match request.max_completion_tokens {
            Some(limit) if endpoint == Endpoint::Chat => (Some(limit), "max_completion_tokens"),
            _ => (request.max_tokens, "max_tokens"),
        };
        let max_tokens = max_tokens.map(|limit| positive_u32(max_tokens_field, limit)).transpose()?;
        let min_tokens = request.min_tokens.map_or(Ok(0), |least| {
            u32::try_from(least).map_err(|_| ApiError::invalid("min_tokens", "min_tokens is too large"))
        })?;
        if max_tokens.is_some_and(|limit| min_tokens > limit) {
            return Err(ApiError::invalid("min_tokens", format!("min_tokens must be at most {max_tokens_field}")));
        }
        let stop = Stop {
            max_tokens: 0,
            min_tokens,
            ignore_eos: request.ignore_eos.unwrap_or(false),
            strings: stop_strings(request.stop.as_ref())?,
            token_ids: request.stop_token_ids.clone().unwrap_or_default(),
        };
        if stop.token_ids.len() > MAX_TOKEN_LIST {
            return Err(ApiError::invalid("stop_token_ids", format!("at most {MAX_TOKEN_LIST} are allowed")));
        }
        // vLLM's lower value runs first; on the request plane the higher one does.
        let priority = request.priority.unwrap_or(0).saturating_neg();
        let routing = BodyHints::check(request.nvext.as_ref(), priority)?;
        Ok(Params {
            sampling: sampling(request)?,
            stop,
            max_tokens,
            max_tokens_field,
            n: choices(request, endpoint, max_choices)?,
            stream,
            include_usage: request.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false),
            logprobs: logprobs(request, endpoint)?,
            echo: request.echo.unwrap_or(false),
            skip_special: request.skip_special_tokens.unwrap_or(true),
            include_stop: request.include_stop_str_in_output.unwrap_or(false),
            // The worker's own queue is to serve it as the router's does.
            priority: routing.hints.priority.round() as i32,
            cache_namespace: request.cache_salt.clone().unwrap_or_default(),
            routing,
        })
    }

    /// Checks the token ids among the parameters.
    pub fn check_tokens(&self, vocabulary_size: usize) -> Result<(), ApiError> {
        let outside = |id: &u32| *id as usize >= vocabulary_size;
        let refuse = |param: &'static str, id: u32| {
            Err(ApiError::invalid(
                param,
                format!("{param}: token id {id} is outside of the vocabulary of {vocabulary_size}"),
            ))
        };
        if let Some(id) = self.stop.token_ids.iter().copied().find(outside) {
            return refuse("stop_token_ids", id);
        }
        match self.sampling.logit_bias.keys().copied().find(outside) {
            Some(id) => refuse("logit_bias", id),
            None => Ok(()),
        }
    }
}

/// Checks the form of a chat's messages, all parts of which must be text.
pub fn check_messages(messages: Option<&[Message]>) -> Result<&[Message], ApiError> {
    let messages = check_roles(messages)?;
    for (at, message) in messages.iter().enumerate() {
        if let Some(MessageContent::Parts(parts)) = &message.content {
            for (index, part) in parts.iter().enumerate() {
                check_part(part, &format!("messages[{at}].content[{index}]"))?;
            }
        }
    }
    Ok(messages)
}

/// Checks that a chat's messages have roles, and contents where they must.
pub fn check_roles(messages: Option<&[Message]>) -> Result<&[Message], ApiError> {
    let messages = messages.ok_or_else(|| ApiError::invalid("messages", "messages is required"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    for (at, message) in messages.iter().enumerate() {
        let param = |field: &str| format!("messages[{at}].{field}");
        match message.role.as_deref() {
            None => return Err(ApiError::invalid(param("role"), format!("{} is required", param("role")))),
            Some(role) if !ROLES.contains(&role) => {
                let message = format!("{}: {role:?} is none of {}", param("role"), ROLES.join(", "));
                return Err(ApiError::invalid(param("role"), message));
            }
            Some("assistant") => {}
            Some(_) if message.content.is_none() => {
                return Err(ApiError::invalid(param("content"), format!("{} is required", param("content"))));
            }
            Some(_) => {}
        }
    }
    Ok(messages)
}

fn check_part(part: &super::request::ContentPart, path: &str) -> Result<(), ApiError> {
    let missing =
        |field: &str| Err(ApiError::invalid(format!("{path}.{field}"), format!("{path}.{field} is required")));
    match part.kind.as_deref() {
        None => missing("type"),
        Some("text") if part.text.is_none() => missing("text"),
        Some("refusal") if part.refusal.is_none() => missing("refusal"),
        Some("text" | "refusal") => Ok(()),
        Some(kind) => Err(ApiError::invalid(
            format!("{path}.type"),
            format!("{path}.type: {kind:?} is not supported; only text parts are"),
        )),
    }
}

/// Checks tool definitions; returns those that the template is to show.
pub fn check_tools(request: &Request) -> Result<Option<&[Value]>, ApiError> {
    let Some(tools) = request.tools.as_deref() else { return Ok(None) };
    for (at, tool) in tools.iter().enumerate() {
        if tool["type"] != "function" {
            return Err(ApiError::invalid(format!("tools[{at}].type"), "only tools of type function are supported"));
        }
        if tool["function"]["name"].as_str().is_none_or(str::is_empty) {
            let param = format!("tools[{at}].function.name");
            return Err(ApiError::invalid(param.clone(), format!("{param} is required")));
        }
    }
    let hidden = request.tool_choice.as_ref().is_some_and(|choice| choice == "none");
    Ok((!hidden && !tools.is_empty()).then_some(tools))
}

fn positive_u32(field: &'static str, value: u64) -> Result<u32, ApiError> {
    match u32::try_from(value) {
        Ok(0) => Err(ApiError::invalid(field, format!("{field} must be at least 1"))),
        Ok(value) => Ok(value),
        Err(_) => Err(ApiError::invalid(field, format!("{field} must be at most {}", u32::MAX))),
    }
}

fn choices(request: &Request, endpoint: Endpoint, max_choices: usize) -> Result<usize, ApiError> {
    let n = request.n.unwrap_or(1);
    if n == 0 || n > max_choices as u64 {
        return Err(ApiError::invalid("n", format!("n must be from 1 to {max_choices}")));
    }
    if endpoint == Endpoint::Completions && request.best_of.is_some_and(|best_of| best_of != n) {
        return Err(ApiError::invalid("best_of", "best_of is only supported when it equals n"));
    }
    Ok(n as usize)
}

fn stop_strings(stop: Option<&StopStrings>) -> Result<Vec<String>, ApiError> {
    let strings = match stop {
        None => return Ok(Vec::new()),
        Some(StopStrings::One(string)) => vec![string.clone()],
        Some(StopStrings::Many(strings)) => strings.clone(),
    };
    if strings.len() > MAX_STOP_STRINGS {
        return Err(ApiError::invalid("stop", format!("at most {MAX_STOP_STRINGS} stop strings are allowed")));
    }
    if strings.iter().any(|string| string.is_empty() || string.len() > MAX_STOP_BYTES) {
        return Err(ApiError::invalid("stop", format!("a stop string has from 1 to {MAX_STOP_BYTES} bytes")));
    }
    Ok(strings)
}

fn logprobs(request: &Request, endpoint: Endpoint) -> Result<Option<u32>, ApiError> {
    let in_range = |param: &'static str, count: u64| {
        if count > MAX_TOP_LOGPROBS {
            return Err(ApiError::invalid(param, format!("{param} must be from 0 to {MAX_TOP_LOGPROBS}")));
        }
        Ok(Some(count as u32))
    };
    match (endpoint, request.logprobs) {
        (Endpoint::Chat, Some(Logprobs::Flag(true))) => in_range("top_logprobs", request.top_logprobs.unwrap_or(0)),
        (Endpoint::Chat, Some(Logprobs::Count(_))) => {
            Err(ApiError::invalid("logprobs", "logprobs must be true or false here; use top_logprobs for a number"))
        }
        (Endpoint::Chat, _) if request.top_logprobs.is_some_and(|count| count > 0) => {
            Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"))
        }
        (Endpoint::Completions, Some(Logprobs::Count(count))) => in_range("logprobs", count),
        (Endpoint::Completions, Some(Logprobs::Flag(true))) => {
            Err(ApiError::invalid("logprobs", "logprobs must be a number here"))
        }
        _ => Ok(None),
    }
}

fn sampling(request: &Request) -> Result<Sampling, ApiError> {
    let top_k = match request.top_k {
        None | Some(-1 | 0) => 0,
        Some(k) => u32::try_from(k).map_err(|_| ApiError::invalid("top_k", "top_k must be -1 or at least 0"))?,
    };
    Ok(Sampling {
        temperature: ranged("temperature", request.temperature, 1.0, 0.0..=2.0)?,
        top_p: ranged("top_p", request.top_p, 1.0, f64::MIN_POSITIVE..=1.0)?,
        top_k,
        min_p: ranged("min_p", request.min_p, 0.0, 0.0..=1.0)?,
        seed: request.seed.map(|seed| seed as u64),
        repetition_penalty: ranged("repetition_penalty", request.repetition_penalty, 1.0, 0.01..=100.0)?,
        presence_penalty: ranged("presence_penalty", request.presence_penalty, 0.0, -2.0..=2.0)?,
        frequency_penalty: ranged("frequency_penalty", request.frequency_penalty, 0.0, -2.0..=2.0)?,
        logit_bias: logit_bias(request)?,
    })
}

fn ranged(
    param: &'static str,
    value: Option<f64>,
    default: f64,
    range: std::ops::RangeInclusive<f64>,
) -> Result<f32, ApiError> {
    let value = value.unwrap_or(default);
    if range.contains(&value) {
        // A tiny positive top_p must not become 0, which means "off" on the request plane.
        return Ok(if value > 0.0 { (value as f32).max(f32::MIN_POSITIVE) } else { value as f32 });
    }
    let (low, high) = (range.start(), range.end());
    let message = match *low == f64::MIN_POSITIVE {
        true => format!("{param} must be over 0 and at most {high}"),
        false => format!("{param} must be from {low} to {high}"),
    };
    Err(ApiError::invalid(param, message))
}

fn logit_bias(request: &Request) -> Result<std::collections::HashMap<u32, f32>, ApiError> {
    let Some(bias) = &request.logit_bias else { return Ok(Default::default()) };
    if bias.len() > MAX_TOKEN_LIST {
        return Err(ApiError::invalid("logit_bias", format!("at most {MAX_TOKEN_LIST} entries are allowed")));
    }
    let entry = |(token, value): (&String, &f64)| match token.parse::<u32>() {
        Ok(token) if (-100.0..=100.0).contains(value) => Ok((token, *value as f32)),
        Ok(_) => Err(ApiError::invalid("logit_bias", format!("logit_bias: {value} is not from -100 to 100"))),
        Err(_) => Err(ApiError::invalid("logit_bias", format!("logit_bias: {token:?} is no token id"))),
    };
    bias.iter().map(entry).collect()
}

/// Refuses what would change the answer in a way that is not built, instead of ignoring it.
fn refuse_unsupported(request: &Request, endpoint: Endpoint) -> Result<(), ApiError> {
    let unsupported = |param: &'static str| Err(ApiError::invalid(param, format!("{param} is not supported")));
    let fields: [(&'static str, Asks); 20] = [
        ("audio", request.audio),
        ("functions", request.functions),
        ("function_call", request.function_call),
        ("prediction", request.prediction),
        ("web_search_options", request.web_search_options),
        ("store", request.store),
        ("chat_template", request.chat_template),
        ("continue_final_message", request.continue_final_message),
        ("guided_json", request.guided_json),
        ("guided_regex", request.guided_regex),
        ("guided_choice", request.guided_choice),
        ("guided_grammar", request.guided_grammar),
        ("structured_outputs", request.structured_outputs),
        ("use_beam_search", request.use_beam_search),
        ("truncate_prompt_tokens", request.truncate_prompt_tokens),
        ("prompt_logprobs", request.prompt_logprobs),
        ("allowed_token_ids", request.allowed_token_ids),
        ("bad_words", request.bad_words),
        ("return_token_ids", request.return_token_ids),
        ("return_tokens_as_token_ids", request.return_tokens_as_token_ids),
    ];
    if let Some((param, _)) = fields.into_iter().find(|(_, asks)| asks.0) {
        return unsupported(param);
    }
    if request.response_format.as_ref().is_some_and(|format| format["type"] != "text") {
        return unsupported("response_format");
    }
    if request.modalities.as_ref().is_some_and(|list| list.iter().any(|kind| kind != "text")) {
        return unsupported("modalities");
    }
    if request.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return unsupported("suffix");
    }
    if request.stream_options.as_ref().and_then(|options| options.continuous_usage_stats) == Some(true) {
        return unsupported("stream_options.continuous_usage_stats");
    }
    if endpoint == Endpoint::Chat && request.echo == Some(true) {
        return unsupported("echo");
    }
    match &request.tool_choice {
        Some(choice) if choice != "none" && choice != "auto" && !choice.is_null() => {
            Err(ApiError::invalid("tool_choice", "only the tool choices none and auto are supported"))
        }
        _ => Ok(()),
    }
}
