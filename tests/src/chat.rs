//! A conversation with a router over HTTP, as a client has it.

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// Says which worker served an answer.
pub const WORKER_HEADER: &str = "x-armature-worker";

/// A router.
#[derive(Clone)]
pub struct Router {
    base: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// One answer.
#[derive(Debug)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Name or id of the worker that served it.
    pub worker: String,
    /// The `usage` object.
    pub usage: Value,
    /// The last `finish_reason`.
    pub finish_reason: String,
}

impl Answer {
    /// Prompt tokens that were not computed again.
    pub fn cached_tokens(&self) -> u64 {
        self.usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    }
}

impl Router {
    /// The router at `http://host:port`.
    pub fn new(base: &str) -> Self {
        Self { base: base.trim_end_matches('/').into(), client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Its address, as `http://host:port`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Sends a request and returns status, serving worker and body.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, String, Bytes)> {
        let (status, worker, rest) = self.begin(method, path, body).await?;
        Ok((status, worker, rest.collect().await?.to_bytes()))
    }

    /// Sends a request and returns status, serving worker and the body that is still to be read.
    pub async fn begin(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, String, Incoming)> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("content-type", "application/json");
        let body = body.map(ToString::to_string).unwrap_or_default();
        let answer = self.client.request(request.body(Full::from(body))?).await?;
        let worker = answer.headers().get(WORKER_HEADER).map_or("", |value| value.to_str().unwrap_or("?")).to_owned();
        Ok((answer.status(), worker, answer.into_body()))
    }

    /// One turn of a conversation, streamed.
    pub async fn chat(&self, model: &str, messages: &[Value], max_tokens: u32) -> anyhow::Result<Answer> {
        let body = request(model, messages, max_tokens);
        let (status, worker, bytes) = self.send(Method::POST, "/v1/chat/completions", Some(&body)).await?;
        let text = std::str::from_utf8(&bytes).context("the stream is not UTF-8")?;
        if status != StatusCode::OK {
            bail!("{status}: {text}");
        }
        read_stream(text, worker)
    }
}

/// The body of a streamed request for a greedy answer.
pub fn request(model: &str, messages: &[Value], max_tokens: u32) -> Value {
    json!({"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": true,
        "stream_options": {"include_usage": true}})
}

/// Reads a whole event stream; an error event or a stream without an end is an error.
pub fn read_stream(text: &str, worker: String) -> anyhow::Result<Answer> {
    let mut answer = Answer { text: String::new(), worker, usage: Value::Null, finish_reason: String::new() };
    let mut events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    for event in events.by_ref().take_while(|event| *event != "[DONE]") {
        let event: Value = serde_json::from_str(event).with_context(|| format!("event {event}"))?;
        if !event["error"].is_null() {
            bail!("error event: {event}");
        }
        let choice = &event["choices"][0];
        answer.text += choice["delta"]["content"].as_str().unwrap_or_default();
        if let Some(reason) = choice["finish_reason"].as_str() {
            reason.clone_into(&mut answer.finish_reason);
        }
        if event["usage"].is_object() {
            answer.usage = event["usage"].clone();
        }
    }
    if !text.trim_end().ends_with("data: [DONE]") || answer.finish_reason.is_empty() {
        bail!("the stream has no end: {text}");
    }
    Ok(answer)
}

/// A message of a conversation.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The first turn of a conversation that shares no block with another one: several blocks of 16 tokens, different from the
/// first on. (A chat template may begin with a system message of its own, which all conversations without one share.)
pub fn story(number: usize) -> Vec<Value> {
    let sentence = "Anna went to the market and bought some apples. ".repeat(8);
    let question = format!("{sentence}Who went to the market, and what did they buy there?");
    vec![message("system", &format!("{number} is the number of this story.")), message("user", &question)]
}
