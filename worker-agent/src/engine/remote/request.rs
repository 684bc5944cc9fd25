//! One request on its way through the server: said in its dialect, its answer told as an engine of ours would tell it.
//!
//! A request ends with its last output, when nobody waits for it any more, or when the server is lost. Each wait has a
//! deadline, far beyond those of routers: they are the ones who decide how long a client waits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::body::Incoming;
use kv_hashing::HashSpace;
use protocol::request_plane::{ErrorCode, FinishReason, Generate, TokenLogprobs};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::Shared;
use super::dialect::{Call, Calls, End, HandOver, Piece, Refusal};
use super::http::{self, HttpError, Stage};
use super::sse::Events;
use crate::engine::{EngineInfo, EngineOutput, Finish, Prefilled, SubmitError};

/// Time for bringing KV here from another server; then it is computed.
const FETCH: Duration = Duration::from_secs(60);

/// Time for another server to fetch KV from here, its wait for a place included.
const LEASE: Duration = Duration::from_secs(300);
/// Time for the server to hear that a request is given up.
const ABORT: Duration = Duration::from_secs(2);

/// A request that the server can be asked.
#[derive(Debug)]
pub(super) struct Checked {
    /// With `stop.max_tokens` lowered to what is left to generate.
    request: Generate,
    /// Tokens of the prompt.
    prompt_tokens: usize,
}

impl Checked {
    /// Checks what would make the server's answer a riddle; the rest it checks itself.
    pub(super) fn new(mut request: Generate, info: &EngineInfo, prefill_generates: bool) -> Result<Self, SubmitError> {
        let invalid = |message: String| Err(SubmitError::Invalid(message));
        let (count, context) = (request.token_ids.len(), info.context_length);
        let generated = request.generated as usize;
        if count == 0 || generated >= count {
            return invalid(format!("token_ids holds {count} tokens, of which {generated} are generated: no prompt"));
        }
        if count >= context {
            return invalid(format!("a prompt of {count} tokens leaves no room in the context of {context}"));
        }
        let stop = request.stop.get_or_insert_default();
        if stop.max_tokens <= request.generated {
            let max_tokens = stop.max_tokens;
            return invalid(format!("stop.max_tokens of {max_tokens} does not exceed the {generated} generated"));
        }
        stop.max_tokens = (stop.max_tokens - request.generated).min((context - count) as u32);
        stop.min_tokens = stop.min_tokens.saturating_sub(request.generated).min(stop.max_tokens);
        stop.strings.retain(|string| !string.is_empty());
        // Whoever generated the first token delivered them.
        request.prompt_logprobs &= generated == 0;
        // An answer of one token ends with it: nobody goes on, unless it is the other half that generates it.
        request.prefill_only &= stop.max_tokens > 1 || !prefill_generates;
        Ok(Self { request, prompt_tokens: count - generated })
    }
}

/// Runs a request to its end.
pub(super) async fn run(
    shared: Arc<Shared>,
    checked: Checked,
    outputs: UnboundedSender<EngineOutput>,
    _place: OwnedSemaphorePermit,
) {
    let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
    let calls = match shared.dialect.calls(&checked.request, number) {
        Ok(calls) => calls,
        Err(refusal) => {
            let mut told = Trouble::Refused(refusal).told(&shared).await;
            if let EngineOutput::Refused { not_begun, .. } = &mut told {
                *not_begun = true;
            }
            let _ = outputs.send(told);
            return;
        }
    };
    if let Some(hand_over) = &calls.handed_over {
        let _until_rid_of_it = shared.lent.token();
        let lent = lend(&shared, &checked, &calls, hand_over, outputs).await;
        return if lent == Lent::GivenUp {
            give_up(&shared, &checked, number).await
        };
    }
    let ended = {
        let mut answer = Answer::new(&shared, &checked, &outputs);
        tokio::select! {
            biased;
            // Dropping the answer closes its connection, and the server gives the request up.
            () = outputs.closed() => None,
            () = shared.lost.cancelled() => Some(Err(Trouble::Lost)),
            ended = answer.run(&checked.request, calls) => Some(ended),
        }
    };
    let last = match ended {
        Some(Ok(output)) => output,
        Some(Err(trouble)) => trouble.told(&shared).await,
        None => return give_up(&shared, &checked, number).await,
    };
    let _ = outputs.send(last);
}

/// What became of KV that another server was to fetch.
#[derive(PartialEq)]
enum Lent {
    /// It was fetched, or cannot be.
    Ended,
    /// Nobody wants it any more, or not in time.
    GivenUp,
}

/// Tells at once how another server fetches the KV, and sees the request through that it fetches it from.
async fn lend(
    shared: &Shared,
    checked: &Checked,
    calls: &Calls,
    hand_over: &HandOver,
    outputs: UnboundedSender<EngineOutput>,
) -> Lent {
    let (lent, given_up) = oneshot::channel::<()>();
    shared.leases.lock().insert(hand_over.lease, lent);
    let reused_tokens = reused_blocks(shared, &checked.request) * shared.info.block_size.get();
    let _counted = shared.load.begin(checked.request.token_ids.len() - reused_tokens);
    let told = outputs.send(EngineOutput::Prefilled(Prefilled {
        prompt_tokens: checked.prompt_tokens,
        completion_tokens: checked.request.generated as usize,
        reused_tokens,
        disaggregated_params: Some(hand_over.params.clone()),
    }));
    drop(outputs);
    if told.is_err() {
        // Nobody will fetch what nobody was told of, and the server has not been asked yet.
        shared.leases.lock().remove(&hand_over.lease);
        return Lent::Ended;
    }
    let ended = tokio::select! {
        biased;
        _ = given_up => Lent::GivenUp,
        () = shared.lost.cancelled() => Lent::Ended,
        fetched = fetch(shared, &calls.main, LEASE) => {
            match fetched {
                Ok(()) => Lent::Ended,
                Err(trouble) => {
                    tracing::warn!(?trouble, "the KV of a prompt was not fetched from here");
                    if matches!(trouble, Trouble::Http(HttpError::Deadline { .. })) { Lent::GivenUp } else { Lent::Ended }
                }
            }
        }
    };
    shared.leases.lock().remove(&hand_over.lease);
    ended
}

/// Leading blocks of a request that the server has, as far as its events tell.
fn reused_blocks(shared: &Shared, request: &Generate) -> usize {
    let space = HashSpace::new(Some(&request.lora), Some(&request.cache_namespace));
    // The last token is always computed, to have something to go on from; log-probabilities need all of them.
    let reusable = if request.prompt_logprobs { 0 } else { request.token_ids.len() - 1 };
    shared.held.lock().prefix(space, &request.token_ids[..reusable])
}

/// Tells the server that nobody waits for a request; its place is free only then.
async fn give_up(shared: &Shared, checked: &Checked, number: u64) {
    let Some(call) = shared.dialect.abort(&checked.request, number) else { return };
    if !shared.lost.is_cancelled()
        && let Err(error) = shared.server.call(&call, Stage::Answer, ABORT).await
    {
        tracing::debug!(%error, "the engine was not told that a request is given up");
    }
}

/// Time for bringing KV here: half of what the router waits for the first token at most, so that the prompt can still be computed.
fn fetch_limit(request: &Generate) -> Duration {
    match request.first_token_ms {
        0 => FETCH,
        ms => FETCH.min(Duration::from_millis(ms.into()) / 2),
    }
}

/// A call whose answer is of no interest.
async fn fetch(shared: &Shared, call: &Call, limit: Duration) -> Result<(), Trouble> {
    let until = Instant::now() + limit;
    let answer = shared.server.call(call, Stage::Answer, limit).await?;
    let status = answer.status();
    let body =
        http::read_whole(answer.into_body(), Stage::Answer, until.saturating_duration_since(Instant::now())).await?;
    if status.is_success() {
        // Some servers tell of a failure in an answer like any other.
        return match shared.dialect.read(&body).map_err(Trouble::Refused)?.end {
            Some(End::GivenUp(reason)) => Err(Trouble::GivenUp(reason)),
            _ => Ok(()),
        };
    }
    Err(Trouble::Refused(shared.dialect.refusal(status.as_u16(), &body)))
}

/// Why a request did not end as it should.
#[derive(Debug)]
enum Trouble {
    /// With the server.
    Lost,
    /// The connection, or a deadline.
    Http(HttpError),
    /// The server said so.
    Refused(Refusal),
    /// The server said so instead of beginning.
    TurnedAway(Refusal),
    /// The server gave the request up, for this reason.
    GivenUp(String),
    /// The answer ends without an end.
    CutOff,
    /// The answer cannot be read.
    Unreadable(&'static str),
}

impl From<HttpError> for Trouble {
    fn from(error: HttpError) -> Self {
        Self::Http(error)
    }
}

impl Trouble {
    /// The last output. What may be the end of the whole server is told only when that is known.
    async fn told(self, shared: &Shared) -> EngineOutput {
        let suspicious = match &self {
            Self::Lost => true,
            Self::Http(error) => !matches!(error, HttpError::TooLarge(_)),
            Self::GivenUp(_) | Self::CutOff => true,
            Self::Refused(refusal) | Self::TurnedAway(refusal) => matches!(refusal, Refusal::Failed(_)),
            Self::Unreadable(_) => false,
        };
        if suspicious && (matches!(self, Self::Lost) || shared.is_lost().await) {
            let why = shared.loss.get().map_or_else(|| "no reason is known".to_owned(), ToString::to_string);
            let message = format!("the engine is lost: {why}");
            return EngineOutput::Refused { code: ErrorCode::Draining, message, not_begun: false };
        }
        // Who is full fetches nothing first; of other refusals that is not known.
        let not_begun = matches!(&self, Self::TurnedAway(Refusal::Overloaded(_)));
        let (code, message) = match self {
            Self::Lost => (ErrorCode::Draining, "the engine is lost".to_owned()),
            Self::Refused(refusal) | Self::TurnedAway(refusal) => match refusal {
                Refusal::Invalid(message) => (ErrorCode::InvalidRequest, message),
                Refusal::Overloaded(message) => (ErrorCode::Overloaded, message),
                Refusal::Failed(message) => (ErrorCode::Engine, format!("the engine failed: {message}")),
            },
            Self::GivenUp(reason) => (ErrorCode::Engine, format!("the engine gave the request up: {reason}")),
            Self::Http(error) => (ErrorCode::Engine, format!("the engine's server: {error}")),
            Self::CutOff => (ErrorCode::Engine, "the engine's answer was cut off".to_owned()),
            Self::Unreadable(what) => (ErrorCode::Engine, format!("the engine's answer is unreadable: {what}")),
        };
        match code {
            ErrorCode::Engine => EngineOutput::Failed(message),
            code => EngineOutput::Refused { code, message, not_begun },
        }
    }
}

/// What has been told of an answer.
struct Answer<'a> {
    shared: &'a Shared,
    outputs: &'a UnboundedSender<EngineOutput>,
    /// Removes what the load counts of it when it ends.
    counted: super::load::Counted<'a>,
    /// The server has to get somewhere with it.
    asking: super::pulse::Asking<'a>,
    prompt_tokens: usize,
    /// Tokens of the prompt, and those generated elsewhere.
    given: usize,
    /// Tokens that came from here, one that only signals the end included.
    generated: usize,
    /// Tokens of the answer that the server has said, those that came with the request included.
    said: usize,
    /// Its first tokens, if they came with the request.
    repeats: Vec<u32>,
    /// Alternatives wanted with each token; `None`: no log-probabilities.
    alternatives: Option<usize>,
    /// Something was told: the request cannot begin anew.
    begun: bool,
    /// Leading blocks that the server has, as far as its events tell.
    reused_blocks: usize,
    /// Prompt tokens whose KV the server says it reused.
    reused_tokens: Option<usize>,
    prompt_logprobs: Vec<TokenLogprobs>,
    end: Option<End>,
    disaggregated_params: Option<String>,
}

impl<'a> Answer<'a> {
    fn new(shared: &'a Shared, checked: &Checked, outputs: &'a UnboundedSender<EngineOutput>) -> Self {
        let request = &checked.request;
        let reused_blocks = reused_blocks(shared, request);
        let size = shared.info.block_size.get();
        Self {
            shared,
            outputs,
            counted: shared.load.begin(request.token_ids.len() - reused_blocks * size),
            asking: shared.pulse.asks(),
            prompt_tokens: checked.prompt_tokens,
            given: request.token_ids.len(),
            generated: 0,
            said: 0,
            repeats: Vec::new(),
            alternatives: request.logprobs.map(|n| n as usize),
            begun: false,
            reused_blocks,
            reused_tokens: None,
            prompt_logprobs: Vec::new(),
            end: None,
            disaggregated_params: None,
        }
    }

    /// Asks the server, and tells what it answers; returns the last output.
    async fn run(&mut self, request: &Generate, calls: Calls) -> Result<EngineOutput, Trouble> {
        if let Some(why) = calls.unusable {
            self.fall_back(&why);
        }
        if let Some(call) = &calls.fetch
            && let Err(error) = fetch(self.shared, call, fetch_limit(request)).await
        {
            self.fall_back(&error);
        }
        match (self.ask(&calls.main).await, &calls.local) {
            (Err(trouble), Some(local)) if !self.begun && !self.shared.lost.is_cancelled() => {
                self.fall_back(&trouble);
                self.ask(local).await?;
            }
            (asked, _) => asked?,
        }
        self.last(request)
    }

    fn fall_back(&self, why: &dyn std::fmt::Debug) {
        self.shared.metrics.kv_fallbacks.inc();
        tracing::warn!(?why, "KV could not be had from another engine; the prompt is computed here");
    }

    /// Makes a call and tells its answer, up to the end.
    async fn ask(&mut self, call: &Call) -> Result<(), Trouble> {
        (self.said, self.repeats) = (0, call.repeats.clone());
        let stage = if call.streamed { Stage::Answer } else { Stage::FirstToken };
        let answer = self.shared.server.call(call, stage, self.shared.first_token_max).await?;
        let status = answer.status();
        if !status.is_success() {
            let body = http::read_whole(answer.into_body(), stage, self.shared.token_max).await?;
            return Err(Trouble::TurnedAway(self.shared.dialect.refusal(status.as_u16(), &body)));
        }
        if call.streamed {
            return self.events(answer.into_body()).await;
        }
        let body = http::read_whole(answer.into_body(), stage, self.shared.token_max).await?;
        self.take(&body)?;
        if self.end.is_some() { Ok(()) } else { Err(Trouble::CutOff) }
    }

    async fn events(&mut self, mut body: Incoming) -> Result<(), Trouble> {
        let mut events = Events::default();
        loop {
            let (stage, limit) = match self.begun {
                true => (Stage::Generating, self.shared.token_max),
                false => (Stage::FirstToken, self.shared.first_token_max),
            };
            let Some(bytes) = http::next_bytes(&mut body, stage, limit).await? else {
                // Some servers close instead of saying that they are done.
                return if self.end.is_some() { Ok(()) } else { Err(Trouble::CutOff) };
            };
            events.push(&bytes)?;
            while let Some(event) = events.next() {
                if event == b"[DONE]" {
                    // Read to its end, the connection can be used again.
                    let _ = http::next_bytes(&mut body, Stage::Generating, super::VERDICT).await;
                    return if self.end.is_some() { Ok(()) } else { Err(Trouble::CutOff) };
                }
                self.take(&event)?;
            }
        }
    }

    /// Takes a piece of the answer.
    fn take(&mut self, text: &[u8]) -> Result<(), Trouble> {
        let mut piece = self.shared.dialect.read(text).map_err(Trouble::Refused)?;
        if !piece.tokens.is_empty() {
            self.asking.tokens();
        }
        self.leave_out(&mut piece)?;
        if !piece.logprobs.is_empty() && piece.logprobs.len() != piece.tokens.len() {
            return Err(Trouble::Unreadable("not as many log-probabilities as tokens"));
        }
        if self.end.is_some() && !piece.tokens.is_empty() {
            return Err(Trouble::Unreadable("tokens after the end"));
        }
        if let Some(End::GivenUp(reason)) = piece.end {
            return Err(Trouble::GivenUp(reason));
        }
        self.reused_tokens = piece.reused_tokens.or(self.reused_tokens);
        self.disaggregated_params = piece.disaggregated_params.take().or(self.disaggregated_params.take());
        match self.alternatives {
            Some(most) => piece.logprobs.iter_mut().for_each(|token| token.top.truncate(most)),
            None => piece.logprobs.clear(),
        }
        let most = self.alternatives.unwrap_or(0);
        piece.prompt_logprobs.iter_mut().for_each(|token| token.top.truncate(most));
        if !self.begun {
            self.prompt_logprobs.append(&mut piece.prompt_logprobs);
        }
        self.end = piece.end.take().or(self.end.take());
        self.tell(piece);
        Ok(())
    }

    /// Leaves out what was said before, here or elsewhere.
    fn leave_out(&mut self, piece: &mut Piece) -> Result<(), Trouble> {
        if let Some(so_far) = piece.so_far {
            let news = so_far.checked_sub(self.said).filter(|&news| news <= piece.tokens.len());
            let news = news.ok_or(Trouble::Unreadable("tokens are missing"))?;
            piece.tokens.drain(..piece.tokens.len() - news);
            piece.logprobs.drain(..piece.logprobs.len().saturating_sub(news));
        }
        let repeats = self.repeats.get(self.said..).unwrap_or_default();
        let repeated = repeats.len().min(piece.tokens.len());
        if piece.tokens[..repeated] != repeats[..repeated] {
            return Err(Trouble::Unreadable("it does not begin with the tokens that came with the request"));
        }
        self.said += piece.tokens.len();
        piece.tokens.drain(..repeated);
        piece.logprobs.drain(..repeated.min(piece.logprobs.len()));
        Ok(())
    }

    fn tell(&mut self, piece: Piece) {
        let count = piece.tokens.len();
        let mut logprobs = piece.logprobs.into_iter();
        for (at, token) in piece.tokens.into_iter().enumerate() {
            self.generated += 1;
            let logprobs = logprobs.next();
            let first = self.generated == 1;
            // One that only signals the end is no part of the answer; it may have to carry the prompt's log-probabilities.
            let carries = first && !self.prompt_logprobs.is_empty();
            if at + 1 == count && self.is_signal(token) && !carries {
                continue;
            }
            let output = if first { self.first(token, logprobs) } else { EngineOutput::Token { token, logprobs } };
            self.begun = true;
            let _ = self.outputs.send(output);
        }
    }

    fn first(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> EngineOutput {
        self.counted.prefilled();
        let size = self.shared.info.block_size.get();
        EngineOutput::First {
            token,
            logprobs,
            reused_blocks: self.reused_tokens.map_or(self.reused_blocks, |tokens| tokens / size),
            prompt_blocks: self.given / size,
            prompt_logprobs: std::mem::take(&mut self.prompt_logprobs),
        }
    }

    /// Whether the newest token is only the signal to end.
    fn is_signal(&self, token: u32) -> bool {
        match self.end {
            Some(End::Token(end)) => token == end,
            Some(End::LastToken) => {
                let eos = &self.shared.eos_token_ids;
                eos.is_empty() || eos.contains(&token)
            }
            _ => false,
        }
    }

    /// The last output of an answer that ended as it should.
    fn last(&mut self, request: &Generate) -> Result<EngineOutput, Trouble> {
        let end = self.end.take().ok_or(Trouble::CutOff)?;
        if self.generated == 0 && end == End::Length {
            return Err(Trouble::Unreadable("an end without tokens"));
        }
        let completion_tokens = self.given - self.prompt_tokens + self.generated;
        let estimate = self.reused_blocks * self.shared.info.block_size.get();
        let reused_tokens = self.reused_tokens.unwrap_or(estimate).min(self.prompt_tokens);
        if request.prefill_only && end == End::Length {
            let disaggregated_params = self.disaggregated_params.take();
            let prompt_tokens = self.prompt_tokens;
            return Ok(EngineOutput::Prefilled(Prefilled {
                prompt_tokens,
                completion_tokens,
                reused_tokens,
                disaggregated_params,
            }));
        }
        let asked_for = |token: &u32| {
            let eos = self.shared.eos_token_ids.contains(token);
            request.stop.as_ref().is_some_and(|stop| stop.token_ids.contains(token) && (stop.ignore_eos || !eos))
        };
        let (reason, stop_string, stop_token) = match end {
            End::Length => (FinishReason::Length, None, None),
            End::String(string) => (FinishReason::StopString, Some(string), None),
            End::Token(token) if asked_for(&token) => (FinishReason::StopToken, None, Some(token)),
            // One that the model's own configuration names.
            End::Token(_) | End::LastToken => (FinishReason::Eos, None, None),
            End::GivenUp(reason) => return Err(Trouble::GivenUp(reason)),
        };
        let prompt_tokens = self.prompt_tokens;
        Ok(EngineOutput::Finished(Finish {
            reason,
            prompt_tokens,
            completion_tokens,
            reused_tokens,
            stop_string,
            stop_token,
        }))
    }
}
