//! One answer in the making: a worker's tokens in, text deltas out, and how it ended.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use protocol::request_plane::{FinishReason, Finished, Output, TokenLogprobs};

use super::stop::StopMatcher;
use crate::backend::{DispatchError, OutputStream, Routed, ServedModel, StreamItem};
use crate::model::detokenizer::Detokenizer;
use crate::openai::validate::Params;

/// Room for the text of a token, in bytes.
const TOKEN_BYTES: usize = 6;

/// A token as the answer reports it, when log-probabilities are asked for.
#[derive(Clone, Debug)]
pub struct TokenEntry {
    /// Characters of the text before it.
    pub offset: usize,
    /// The token.
    pub token: u32,
    /// Nothing for the first token of a prompt.
    pub logprobs: Option<TokenLogprobs>,
}

/// What is new since it was last taken.
#[derive(Debug, Default)]
pub struct Delta {
    /// Text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<TokenEntry>,
}

impl Delta {
    /// Whether there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

/// The prompt, when the answer begins with it.
pub struct Echo {
    /// As text.
    pub text: String,
    /// As tokens.
    pub tokens: Vec<u32>,
}

/// Who serves a choice.
#[derive(Clone, Debug)]
pub struct ServedBy {
    /// Name of the worker.
    pub name: String,
    /// Its instance id.
    pub id: u64,
    /// Prompt blocks that the router expects it to reuse.
    pub overlap_blocks: u32,
}

/// A worker being found for a choice.
pub type Starting = Pin<Box<dyn Future<Output = Result<Routed, DispatchError>> + Send>>;

/// Where a choice's tokens come from.
enum Source {
    /// No worker has taken it yet.
    Starting(Starting),
    Running(OutputStream),
    /// It has ended or failed.
    Ended,
}

/// One answer.
pub struct Choice {
    source: Source,
    served_by: Option<ServedBy>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Tokens that end the answer and are no part of its text.
    end_tokens: Vec<u32>,
    /// Stop strings and end tokens count after this many tokens.
    min_tokens: usize,
    with_logprobs: bool,
    echo: Option<Arc<Echo>>,
    prompt_tokens: usize,
    block_size: usize,
    tokens: usize,
    chars: usize,
    first_output: Option<u32>,
    finished: Option<Finished>,
    finish: Option<&'static str>,
    piece: String,
    delta: Delta,
}

impl Choice {
    /// Reads what a worker answers to a prompt of `prompt_tokens` tokens, once `starting` has found one.
    pub fn new(
        starting: Starting,
        served: &ServedModel,
        params: &Params,
        prompt_tokens: usize,
        echo: Option<Arc<Echo>>,
    ) -> Choice {
        let mut end_tokens = params.stop.token_ids.clone();
        if let (false, Some(card)) = (params.stop.ignore_eos, &served.card.armature) {
            end_tokens.extend_from_slice(&card.eos_token_ids);
        }
        Choice {
            source: Source::Starting(starting),
            served_by: None,
            detokenizer: Detokenizer::new(served.model.vocabulary().clone(), params.skip_special),
            stops: StopMatcher::new(params.stop.strings.clone(), params.include_stop),
            end_tokens,
            min_tokens: params.stop.min_tokens as usize,
            with_logprobs: params.logprobs.is_some(),
            echo,
            prompt_tokens,
            block_size: served.card.kv_cache_block_size as usize,
            tokens: 0,
            chars: 0,
            first_output: None,
            finished: None,
            finish: None,
            piece: String::new(),
            delta: Delta::default(),
        }
    }

    /// Takes one step: a worker takes the request, or says something. Pending means that one has to do so first.
    /// Dropping the choice cancels it in either state.
    pub fn poll_advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), DispatchError>> {
        match &mut self.source {
            Source::Ended => Poll::Ready(Ok(())),
            Source::Starting(starting) => {
                let routed = ready!(starting.as_mut().poll(cx));
                self.source = Source::Ended;
                Poll::Ready(routed.map(|routed| self.run(routed)))
            }
            Source::Running(stream) => {
                let item = ready!(stream.as_mut().poll_next(cx));
                Poll::Ready(self.take(item))
            }
        }
    }

    fn run(&mut self, routed: Routed) {
        let Routed { worker_id: id, worker_name: name, overlap_blocks, stream } = routed;
        self.served_by = Some(ServedBy { name, id, overlap_blocks });
        self.source = Source::Running(stream);
    }

    fn take(&mut self, item: Option<Result<StreamItem, DispatchError>>) -> Result<(), DispatchError> {
        let failed = |choice: &Choice, message: &str| {
            let stage = if choice.tokens == 0 { "waiting for the first token" } else { "generating" };
            let worker = choice.served_by.as_ref().map_or(String::new(), |served_by| served_by.name.clone());
            Err(DispatchError::Worker { worker, stage, message: message.into() })
        };
        match item {
            // The answer is complete at its stop string, whatever the worker says next.
            _ if self.stops.matched() => {
                if let Some(Ok(StreamItem::Finished(finished))) = item {
                    self.finished = Some(finished);
                }
                self.end("stop");
            }
            Some(Ok(StreamItem::Output(output))) => self.output(output),
            Some(Ok(StreamItem::Finished(finished))) => match finish_reason(finished.reason()) {
                Some(reason) => {
                    self.finished = Some(finished);
                    self.end(reason);
                }
                None => return failed(self, &format!("it ended the request with {:?}", finished.reason())),
            },
            Some(Err(error)) => return Err(error),
            None => return failed(self, "its stream ended without a finish reason"),
        }
        Ok(())
    }

    fn output(&mut self, output: Output) {
        if self.first_output.is_none() {
            self.first_output = Some(output.reused_blocks);
            self.begin_with_prompt(output.prompt_logprobs);
        }
        let mut logprobs = output.logprobs.into_iter();
        self.delta.text.reserve(TOKEN_BYTES * output.token_ids.len());
        for token in output.token_ids {
            if self.stops.matched() {
                break;
            }
            self.tokens += 1;
            let entry = TokenEntry { offset: self.chars, token, logprobs: logprobs.next() };
            if self.with_logprobs {
                self.delta.tokens.push(entry);
            }
            let free_to_stop = self.tokens >= self.min_tokens;
            if free_to_stop && self.end_tokens.contains(&token) {
                continue;
            }
            self.piece.clear();
            self.chars += self.detokenizer.push(token, &mut self.piece);
            if free_to_stop {
                self.stops.push(&self.piece, &mut self.delta.text);
            } else {
                self.delta.text.push_str(&self.piece);
            }
        }
    }

    fn begin_with_prompt(&mut self, prompt_logprobs: Vec<TokenLogprobs>) {
        let Some(echo) = self.echo.take() else { return };
        self.delta.text.push_str(&echo.text);
        if self.with_logprobs {
            let mut logprobs = prompt_logprobs.into_iter();
            let mut text = String::new();
            for (at, &token) in echo.tokens.iter().enumerate() {
                let logprobs = if at == 0 { None } else { logprobs.next() };
                self.delta.tokens.push(TokenEntry { offset: self.chars, token, logprobs });
                text.clear();
                self.chars += self.detokenizer.push(token, &mut text);
            }
            self.detokenizer.finish(&mut text);
        }
        self.chars = echo.text.chars().count();
    }

    fn end(&mut self, reason: &'static str) {
        if self.first_output.is_none() {
            self.begin_with_prompt(Vec::new());
        }
        self.piece.clear();
        self.detokenizer.finish(&mut self.piece);
        self.stops.push(&self.piece, &mut self.delta.text);
        self.stops.finish(&mut self.delta.text);
        self.finish = Some(if self.stops.matched() { "stop" } else { reason });
        self.source = Source::Ended;
    }

    /// Who serves it, once that is known.
    pub fn served_by(&self) -> Option<&ServedBy> {
        self.served_by.as_ref()
    }

    /// Why it ended; `None` while it runs.
    pub fn finish(&self) -> Option<&'static str> {
        self.finish
    }

    /// Tokens seen so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// What is new.
    pub fn delta(&self) -> &Delta {
        &self.delta
    }

    /// Forgets what was new; keeps the buffers.
    pub fn clear_delta(&mut self) {
        self.delta.text.clear();
        self.delta.tokens.clear();
    }

    /// Prompt blocks that the worker reused, once it has said so.
    pub fn reused_blocks(&self) -> Option<u32> {
        self.first_output
    }

    /// Tokens of the answer, the end token included.
    pub fn completion_tokens(&self) -> usize {
        self.finished.as_ref().map_or(self.tokens, |finished| finished.completion_tokens as usize)
    }

    /// Tokens of the prompt whose KV was reused.
    pub fn cached_tokens(&self) -> usize {
        match &self.finished {
            Some(finished) => finished.reused_tokens as usize,
            None => (self.first_output.unwrap_or(0) as usize * self.block_size).min(self.prompt_tokens),
        }
    }
}

/// OpenAI's word; `None` for an end that is no answer.
fn finish_reason(reason: FinishReason) -> Option<&'static str> {
    match reason {
        FinishReason::Eos | FinishReason::StopString | FinishReason::StopToken => Some("stop"),
        FinishReason::Length => Some("length"),
        FinishReason::Cancelled | FinishReason::Unspecified => None,
    }
}
