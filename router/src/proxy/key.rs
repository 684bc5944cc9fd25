//! What a request is to the router: its model, its prompt as blocks, and the little else that routing and counting need. The
//! body itself goes on as it came.

use std::sync::Arc;

use kv_hashing::{BlockHash, HashSpace, sequence_hashes};
use routing::Prompt;

use super::fleet::Route;
use crate::model::{Model, PromptError};
use crate::openai::Endpoint;
use crate::openai::error::ApiError;
use crate::openai::parse;
use crate::openai::request::{self, Request};
use crate::openai::routing::BodyHints;
use crate::openai::validate::{Params, check_roles};
use crate::preprocess::{check_size, max_tokens, render_chat};

/// A request that has been checked and can be routed.
pub(crate) struct Key {
    /// Where it may go.
    pub(super) route: Arc<Route>,
    /// Hashes of its full blocks, each alone.
    pub(super) blocks: Vec<BlockHash>,
    /// The same as the load sees it.
    pub(super) prompt: Prompt,
    /// Tokens of all its prompts; an estimate without the model's tokenizer.
    pub(crate) prompt_tokens: usize,
    /// What it says of where it may go.
    pub(crate) hints: BodyHints,
    /// It is to be answered with events.
    pub(crate) stream: bool,
    /// The last event is to tell the usage.
    pub(super) include_usage: bool,
    /// First events of the answer that carry no token: one for each choice of a chat.
    pub(super) silent_events: usize,
}

impl Key {
    /// The model's name.
    pub(crate) fn model(&self) -> &str {
        &self.route.served.card.display_name
    }
}

/// Reads and checks a body. What only its server can judge is not refused; `route` finds where a model is served, or says why
/// it is not.
pub(super) fn read(
    body: &[u8],
    endpoint: Endpoint,
    max_choices: usize,
    plain: &Model,
    route: impl FnOnce(&str) -> Result<Arc<Route>, ApiError>,
) -> Result<Key, ApiError> {
    let request: Request = parse::parse(body)?;
    let name = request.model.as_deref().unwrap_or_default();
    if name.is_empty() {
        return Err(ApiError::invalid("model", "model is required"));
    }
    let route = route(name)?;
    let params = Params::check_values(&request, endpoint, max_choices)?;
    check_size(&route.served, &request, endpoint)?;
    let Tokens { prompts, exact } = tokens(&route, &request, endpoint, plain)?;
    let card = &route.served.card;
    for tokens in &prompts {
        if tokens.is_empty() {
            return Err(ApiError::invalid(endpoint.prompt_field(), "the prompt has no tokens"));
        }
        if exact {
            max_tokens(tokens.len(), &params, card, endpoint)?;
        }
    }
    // Of several prompts that go to one server the first one decides.
    let first = prompts.first().map_or(&[][..], Vec::as_slice);
    let space = HashSpace::new(route.adapter.as_deref(), Some(&params.cache_namespace));
    let blocks = space.blocks(first, route.block_size);
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let prompt =
        Prompt { blocks: sequence_hashes(&blocks).into(), tokens: prompt_tokens, block_size: route.block_size };
    Ok(Key {
        route,
        blocks,
        prompt,
        prompt_tokens,
        hints: params.routing,
        stream: params.stream,
        include_usage: params.include_usage,
        silent_events: if endpoint == Endpoint::Chat { params.n } else { 0 },
    })
}

/// Tokens of a request's prompts.
struct Tokens {
    prompts: Vec<Vec<u32>>,
    /// They are those that the server will see.
    exact: bool,
}

fn tokens(route: &Route, request: &Request, endpoint: Endpoint, plain: &Model) -> Result<Tokens, ApiError> {
    let model = &route.served.model;
    let failed = |error: &dyn std::fmt::Display| ApiError::internal(error.to_string());
    if endpoint == Endpoint::Chat {
        let messages = check_roles(request.messages.as_deref())?;
        return match render_chat(model, request, messages)? {
            Ok(tokens) => Ok(Tokens { prompts: vec![tokens], exact: route.exact && all_text(messages) }),
            Err(PromptError::Tokenizer(error)) => Err(failed(&error)),
            // The server may know the conversation better than our copy of the template does.
            Err(PromptError::NoTemplate | PromptError::Template(_)) => {
                let tokens = render_chat(plain, request, messages)?.map_err(|error| failed(&error))?;
                Ok(Tokens { prompts: vec![tokens], exact: false })
            }
        };
    }
    let prompts = match &request.prompt {
        None => return Err(ApiError::invalid("prompt", "prompt is required")),
        Some(request::Prompt::Texts(texts)) => {
            let encoded = texts.iter().map(|text| model.encode_prompt(text)).collect::<Result<_, _>>();
            encoded.map_err(|error| failed(&error))?
        }
        Some(request::Prompt::Tokens(lists)) => lists.clone(),
    };
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt must not be empty"));
    }
    Ok(Tokens { prompts, exact: route.exact })
}

/// Other parts stand for tokens that only the server knows.
fn all_text(messages: &[request::Message]) -> bool {
    messages.iter().all(|message| match &message.content {
        Some(request::MessageContent::Parts(parts)) => parts.iter().all(|part| part.kind.as_deref() == Some("text")),
        _ => true,
    })
}
