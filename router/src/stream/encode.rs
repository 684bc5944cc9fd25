//! Answers as JSON, written by hand into one buffer: what is the same in every chunk of a stream is written once.

use std::io::Write;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use super::choice::{Choice, Delta, TokenEntry};
use crate::model::vocabulary::Vocabulary;
use crate::openai::Endpoint;
use crate::openai::error::ApiError;

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts, each once.
    pub prompt_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// Prompt tokens whose KV was reused.
    pub cached_tokens: usize,
}

impl Usage {
    /// Sums up: `prompts` are the token counts of the prompts, `choices` come in groups of `n` for each.
    pub fn of(prompts: impl IntoIterator<Item = usize>, choices: &[Choice], n: usize) -> Usage {
        Usage {
            prompt_tokens: prompts.into_iter().sum(),
            completion_tokens: choices.iter().map(Choice::completion_tokens).sum(),
            cached_tokens: choices.iter().step_by(n.max(1)).map(Choice::cached_tokens).sum(),
        }
    }
}

/// Writes the answer to one request.
pub struct Encoder {
    endpoint: Endpoint,
    vocabulary: Arc<Vocabulary>,
    with_logprobs: bool,
    include_usage: bool,
    /// All of a chunk before the choice's index.
    chunk_begin: Bytes,
    /// `"id":…,"created":…,"model":…`, without braces; a part of it.
    identity: Bytes,
}

/// Lowest log-probability reported: JSON has no infinity.
const LOWEST_LOGPROB: f32 = -9999.0;

impl Encoder {
    /// `id` is the response's id, `created_s` seconds since 1970.
    pub fn new(
        endpoint: Endpoint,
        id: &str,
        created_s: u64,
        model: &str,
        vocabulary: Arc<Vocabulary>,
        (with_logprobs, include_usage): (bool, bool),
    ) -> Encoder {
        let mut chunk = BytesMut::with_capacity(160 + id.len() + model.len());
        chunk.put_slice(b"data: {");
        let from = chunk.len();
        chunk.put_slice(b"\"id\":");
        json(&mut chunk, id);
        chunk.put_slice(b",\"created\":");
        json(&mut chunk, &created_s);
        chunk.put_slice(b",\"model\":");
        json(&mut chunk, model);
        let identity = from..chunk.len();
        chunk.put_slice(b",\"object\":");
        json(
            &mut chunk,
            match endpoint {
                Endpoint::Chat => "chat.completion.chunk",
                Endpoint::Completions => "text_completion",
            },
        );
        chunk.put_slice(b",\"choices\":[");
        let chunk_begin = chunk.freeze();
        let identity = chunk_begin.slice(identity);
        Encoder { endpoint, vocabulary, with_logprobs, include_usage, chunk_begin, identity }
    }

    fn begin(&self, out: &mut BytesMut, index: usize) {
        out.put_slice(&self.chunk_begin);
        out.put_slice(b"{\"index\":");
        json(out, &index);
    }

    fn end(&self, out: &mut BytesMut, finish: Option<&'static str>) {
        out.put_slice(b",\"finish_reason\":");
        json(out, &finish);
        out.put_slice(if self.include_usage { b"}],\"usage\":null}\n\n" } else { b"}]}\n\n" });
    }

    /// The first chunk of a choice of a chat; completions have none.
    pub fn role(&self, out: &mut BytesMut, index: usize) {
        if self.endpoint == Endpoint::Chat {
            self.begin(out, index);
            out.put_slice(b",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null");
            self.end(out, None);
        }
    }

    /// A chunk with new text.
    pub fn delta(&self, out: &mut BytesMut, index: usize, delta: &Delta) {
        self.begin(out, index);
        match self.endpoint {
            Endpoint::Chat => {
                out.put_slice(b",\"delta\":{\"content\":");
                json(out, delta.text.as_str());
                out.put_slice(b"}");
            }
            Endpoint::Completions => {
                out.put_slice(b",\"text\":");
                json(out, delta.text.as_str());
            }
        }
        self.logprobs(out, &delta.tokens);
        self.end(out, None);
    }

    /// The last chunk of a choice.
    pub fn finish(&self, out: &mut BytesMut, index: usize, reason: &'static str) {
        self.begin(out, index);
        out.put_slice(match self.endpoint {
            Endpoint::Chat => b",\"delta\":{},\"logprobs\":null",
            Endpoint::Completions => b",\"text\":\"\",\"logprobs\":null",
        });
        self.end(out, Some(reason));
    }

    /// The end of the events.
    pub fn done(&self, out: &mut BytesMut, usage: &Usage) {
        if self.include_usage {
            out.put_slice(&self.chunk_begin);
            out.put_slice(b"],");
            write_usage(out, usage);
            out.put_slice(b"}\n\n");
        }
        out.put_slice(b"data: [DONE]\n\n");
    }

    /// An error in place of the rest of the events.
    pub fn error(&self, out: &mut BytesMut, error: &ApiError) {
        out.put_slice(b"data: ");
        out.put_slice(&error.body());
        out.put_slice(b"\n\ndata: [DONE]\n\n");
    }

    /// The whole response.
    pub fn response(&self, choices: &[Choice], usage: &Usage) -> Bytes {
        let mut out = BytesMut::with_capacity(512);
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completions => "text_completion",
        };
        out.put_slice(b"{");
        out.put_slice(&self.identity);
        out.put_slice(b",\"object\":");
        json(&mut out, object);
        out.put_slice(b",\"choices\":[");
        for (index, choice) in choices.iter().enumerate() {
            out.put_slice(if index > 0 { b",{\"index\":" } else { b"{\"index\":" });
            json(&mut out, &index);
            let text = choice.delta().text.as_str();
            match self.endpoint {
                Endpoint::Chat => {
                    out.put_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
                    json(&mut out, text);
                    out.put_slice(b",\"refusal\":null}");
                }
                Endpoint::Completions => {
                    out.put_slice(b",\"text\":");
                    json(&mut out, text);
                }
            }
            self.logprobs(&mut out, &choice.delta().tokens);
            out.put_slice(b",\"finish_reason\":");
            json(&mut out, &choice.finish());
            out.put_slice(b"}");
        }
        out.put_slice(b"],");
        write_usage(&mut out, usage);
        out.put_slice(b"}");
        out.freeze()
    }

    fn logprobs(&self, out: &mut BytesMut, tokens: &[TokenEntry]) {
        out.put_slice(b",\"logprobs\":");
        match self.endpoint {
            _ if !self.with_logprobs => out.put_slice(b"null"),
            Endpoint::Chat => self.chat_logprobs(out, tokens),
            Endpoint::Completions => self.completion_logprobs(out, tokens),
        }
    }

    fn chat_logprobs(&self, out: &mut BytesMut, tokens: &[TokenEntry]) {
        out.put_slice(b"{\"content\":[");
        for (at, entry) in tokens.iter().enumerate() {
            out.put_slice(if at > 0 { b",{" } else { b"{" });
            self.token(out, entry.token, entry.logprobs.as_ref().map_or(0.0, |logprobs| logprobs.logprob));
            out.put_slice(b",\"top_logprobs\":[");
            for (at, top) in entry.logprobs.iter().flat_map(|logprobs| &logprobs.top).enumerate() {
                out.put_slice(if at > 0 { b",{" } else { b"{" });
                self.token(out, top.token_id, top.logprob);
                out.put_slice(b"}");
            }
            out.put_slice(b"]}");
        }
        out.put_slice(b"],\"refusal\":null}");
    }

    fn token(&self, out: &mut BytesMut, token: u32, logprob: f32) {
        out.put_slice(b"\"token\":");
        json(out, self.text(token).as_str());
        out.put_slice(b",\"logprob\":");
        json(out, &reportable(logprob));
        out.put_slice(b",\"bytes\":");
        json(out, self.vocabulary.bytes(token));
    }

    fn completion_logprobs(&self, out: &mut BytesMut, tokens: &[TokenEntry]) {
        let texts: Vec<String> = tokens.iter().map(|entry| self.text(entry.token)).collect();
        let logprobs: Vec<Option<f32>> =
            tokens.iter().map(|entry| entry.logprobs.as_ref().map(|logprobs| reportable(logprobs.logprob))).collect();
        let offsets: Vec<usize> = tokens.iter().map(|entry| entry.offset).collect();
        out.put_slice(b"{\"tokens\":");
        json(out, &texts);
        out.put_slice(b",\"token_logprobs\":");
        json(out, &logprobs);
        out.put_slice(b",\"text_offset\":");
        json(out, &offsets);
        out.put_slice(b",\"top_logprobs\":[");
        for (at, (entry, text)) in tokens.iter().zip(&texts).enumerate() {
            if at > 0 {
                out.put_u8(b',');
            }
            let Some(logprobs) = &entry.logprobs else {
                out.put_slice(b"null");
                continue;
            };
            let mut top = serde_json::Map::new();
            for best in &logprobs.top {
                top.entry(self.text(best.token_id)).or_insert_with(|| reportable(best.logprob).into());
            }
            top.entry(text.clone()).or_insert_with(|| reportable(logprobs.logprob).into());
            json(out, &top);
        }
        out.put_slice(b"]}");
    }

    fn text(&self, token: u32) -> String {
        self.vocabulary.text(&[token])
    }
}

fn write_usage(out: &mut BytesMut, usage: &Usage) {
    let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
    let total = prompt_tokens + completion_tokens;
    write!(
        out.writer(),
        "\"usage\":{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":{completion_tokens},\"total_tokens\":{total},\
         \"prompt_tokens_details\":{{\"cached_tokens\":{cached_tokens}}}}}"
    )
    .expect("a buffer in memory takes everything");
}

fn reportable(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOWEST_LOGPROB) } else { LOWEST_LOGPROB }
}

fn json<T: Serialize + ?Sized>(out: &mut BytesMut, value: &T) {
    serde_json::to_writer(out.writer(), value).expect("plain values are JSON, and a buffer in memory takes everything");
}
