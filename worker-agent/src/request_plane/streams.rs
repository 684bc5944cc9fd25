//! The Generate streams of one connection: engine outputs in, frames out, by credit.
//!
//! Each stream polls its engine channel with a waker of its own that notes the stream's id, so a wake-up costs work only
//! for the streams that have something. A stream out of credit is not polled at all: its tokens wait in the engine's
//! channel, and leave in one frame when credit comes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use bytes::BytesMut;
use futures::task::AtomicWaker;
use parking_lot::Mutex;
use prost::Message;
use protocol::request_plane::{
    ErrorCode, Failed, FinishReason, Finished, MAX_FRAME_BYTES, Output, ServerFrame, TokenLogprobs, encode_frame,
    server_frame::Body,
};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use super::failed;
use crate::drain::Admitted;
use crate::engine::{EngineOutput, Finish, Prefilled};
use crate::metrics::{Ending, Metrics, observe};
use crate::transfer;

/// Output frames a stream may send before it needs credit.
pub(super) const INITIAL_CREDIT: u32 = 64;
/// Most tokens in one Output: 4,096 tokens are 12 KB, or 1 MB with 20 alternatives each.
const MAX_OUTPUT_TOKENS: usize = 4096;

/// Most streams of which is remembered what they left behind; leases of earlier ones end by themselves.
const MAX_LEFT: usize = 1024;

/// The open streams of a connection.
pub(super) struct Streams {
    open: HashMap<u64, Stream>,
    /// Leases of streams that have ended, the newest last.
    left: VecDeque<(u64, u64)>,
    ready: Arc<Ready>,
    /// The ids taken from `ready` by the last poll.
    taken: Vec<u64>,
}

/// Which streams have something, and whom to wake for them.
#[derive(Default)]
struct Ready {
    ids: Mutex<Vec<u64>>,
    connection: AtomicWaker,
}

/// Notes a stream as ready when its engine channel wakes it.
struct Signal {
    id: u64,
    noted: AtomicBool,
    ready: Arc<Ready>,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.noted.swap(true, Ordering::AcqRel) {
            self.ready.ids.lock().push(self.id);
            self.ready.connection.wake();
        }
    }
}

impl Streams {
    pub(super) fn new() -> Self {
        Self { open: HashMap::new(), left: VecDeque::new(), ready: Arc::default(), taken: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.open.contains_key(&id)
    }

    /// Adds a stream, which is polled with the next turn.
    pub(super) fn open(
        &mut self,
        id: u64,
        outputs: mpsc::UnboundedReceiver<EngineOutput>,
        account: Account,
        admitted: Admitted,
    ) {
        let signal = Arc::new(Signal { id, noted: AtomicBool::new(false), ready: self.ready.clone() });
        signal.wake_by_ref();
        let waker = Waker::from(signal.clone());
        let pending = Output::default();
        self.open.insert(
            id,
            Stream {
                outputs,
                signal,
                waker,
                credit: INITIAL_CREDIT,
                pending,
                account,
                lease: None,
                _admitted: admitted,
            },
        );
    }

    /// Drops a stream: the engine frees its blocks within one step. `None` when there is none of this id; else the lease of a prompt
    /// that was kept meanwhile, of which the router has not heard.
    pub(super) fn cancel(&mut self, id: u64) -> Option<Option<u64>> {
        self.open.remove(&id).map(Stream::give_up)
    }

    /// Drops all streams; returns such leases of theirs.
    pub(super) fn give_up(&mut self) -> Vec<u64> {
        self.open.drain().filter_map(|(_, stream)| stream.give_up()).collect()
    }

    /// The lease that a stream left behind when it ended; once.
    pub(super) fn take_lease(&mut self, id: u64) -> Option<u64> {
        let at = self.left.iter().position(|(stream, _)| *stream == id)?;
        self.left.remove(at).map(|(_, lease)| lease)
    }

    /// Ends a stream whose deadline has passed; returns the lease as [`Self::cancel`] does.
    pub(super) fn pass_deadline(&mut self, id: u64, out: &mut BytesMut) -> Option<u64> {
        let mut stream = self.open.remove(&id)?;
        stream.account.end(Ending::deadline);
        encode_frame(&failed(id, ErrorCode::Deadline, "the request's deadline passed"), out);
        stream.give_up()
    }

    /// Writes what all streams have, and ends those that are not done, because the worker ends.
    pub(super) fn cut_short(&mut self, why: &str, out: &mut BytesMut) {
        for (id, mut stream) in self.open.drain() {
            if stream.write_ready(id, out) == State::Ended {
                continue;
            }
            stream.account.end(Ending::draining);
            encode_frame(&failed(id, ErrorCode::Draining, why), out);
        }
    }

    /// The router has room for more frames of a stream. Unknown streams have just ended.
    pub(super) fn add_credit(&mut self, id: u64, frames: u32) {
        if let Some(stream) = self.open.get_mut(&id) {
            stream.credit = stream.credit.saturating_add(frames);
            stream.signal.wake_by_ref();
        }
    }

    /// Ready when a stream may have something to write.
    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.taken.is_empty() {
            self.ready.connection.register(cx.waker());
            std::mem::swap(&mut *self.ready.ids.lock(), &mut self.taken);
        }
        if self.taken.is_empty() { Poll::Pending } else { Poll::Ready(()) }
    }

    /// Writes what the ready streams have, at most one Output each, until `out` holds `mark` bytes; the other streams stay
    /// ready and come first next time.
    pub(super) fn write_ready(&mut self, out: &mut BytesMut, mark: usize) {
        let mut served = 0;
        while let Some(&id) = self.taken.get(served).filter(|_| out.len() < mark) {
            served += 1;
            if let Some(stream) = self.open.get_mut(&id)
                && stream.write_ready(id, out) == State::Ended
            {
                let lease = stream.lease;
                self.open.remove(&id);
                self.leave(id, lease);
            }
        }
        self.taken.drain(..served);
    }

    fn leave(&mut self, id: u64, lease: Option<u64>) {
        let Some(lease) = lease else { return };
        if self.left.len() >= MAX_LEFT {
            self.left.pop_front();
        }
        self.left.push_back((id, lease));
    }
}

#[derive(PartialEq)]
enum State {
    Open,
    Ended,
}

/// One Generate stream. Dropping it cancels the request.
struct Stream {
    outputs: mpsc::UnboundedReceiver<EngineOutput>,
    signal: Arc<Signal>,
    waker: Waker,
    credit: u32,
    /// Tokens taken from the engine and not yet written; at most one while out of credit.
    pending: Output,
    account: Account,
    /// Keeps the prompt's blocks for another worker, after its last frame.
    lease: Option<u64>,
    _admitted: Admitted,
}

impl Stream {
    fn write_ready(&mut self, id: u64, out: &mut BytesMut) -> State {
        // Before polling: a wake-up from now on notes the stream again.
        self.signal.noted.store(false, Ordering::Release);
        let waker = self.waker.clone();
        let mut cx = Context::from_waker(&waker);
        let mut ended = None;
        while ended.is_none() {
            if self.credit == 0 && !self.pending.token_ids.is_empty() {
                self.account.metrics.credit_stalls.inc();
                return State::Open;
            }
            if self.pending.token_ids.len() >= MAX_OUTPUT_TOKENS {
                // The rest follows in the next turn, after the other streams.
                self.signal.wake_by_ref();
                break;
            }
            match self.outputs.poll_recv(&mut cx) {
                Poll::Ready(output) => ended = self.take(output),
                Poll::Pending => break,
            }
        }
        if !self.pending.token_ids.is_empty() {
            self.credit -= 1;
            let output = std::mem::take(&mut self.pending);
            if output.encoded_len() > MAX_FRAME_BYTES - 64 {
                ended =
                    Some(self.fail(
                        Ending::failed,
                        format!("log-probabilities of over {MAX_FRAME_BYTES} bytes; ask for fewer"),
                    ));
            } else {
                encode_frame(&ServerFrame { stream_id: id, body: Some(Body::Output(output)) }, out);
            }
        }
        let Some(body) = ended else { return State::Open };
        encode_frame(&ServerFrame { stream_id: id, body: Some(body) }, out);
        State::Ended
    }

    /// Adds one engine output to `pending`; returns the last frame when the engine is done.
    fn take(&mut self, output: Option<EngineOutput>) -> Option<Body> {
        match output {
            Some(EngineOutput::First { token, logprobs, reused_blocks, prompt_blocks, prompt_logprobs }) => {
                observe(&self.account.metrics.time_to_first_token, self.account.arrived.elapsed());
                self.pending.first = true;
                self.pending.reused_blocks = reused_blocks as u32;
                self.pending.prompt_blocks = prompt_blocks as u32;
                self.pending.prompt_logprobs = prompt_logprobs;
                self.push(token, logprobs);
                None
            }
            Some(EngineOutput::Token { token, logprobs }) => {
                self.push(token, logprobs);
                None
            }
            Some(EngineOutput::Finished(finish)) => Some(Body::Finished(self.account.finish(finish))),
            Some(EngineOutput::Prefilled(prefilled)) => {
                self.lease = prefilled.disaggregated_params.as_deref().and_then(transfer::Source::lease_of);
                Some(Body::Finished(self.account.hand_over(prefilled)))
            }
            Some(EngineOutput::Failed(message)) => Some(self.fail(Ending::failed, message)),
            Some(EngineOutput::Refused { code, message, not_begun }) => {
                self.account.end(match code {
                    ErrorCode::InvalidRequest => Ending::invalid,
                    ErrorCode::Overloaded => Ending::overloaded,
                    ErrorCode::Draining => Ending::draining,
                    _ => Ending::failed,
                });
                Some(Body::Failed(Failed { code: code.into(), message, not_begun }))
            }
            None => Some(self.fail(Ending::failed, "the engine gave the request up".into())),
        }
    }

    fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>) {
        self.pending.token_ids.push(token);
        self.pending.logprobs.extend(logprobs);
        self.account.metrics.generation_tokens.inc();
    }

    /// Cancels the request. The lease of what the engine has kept of it, if nobody was told: none is granted any more.
    fn give_up(mut self) -> Option<u64> {
        self.outputs.close();
        loop {
            match self.outputs.try_recv() {
                Ok(EngineOutput::Prefilled(Prefilled { disaggregated_params: Some(params), .. })) => {
                    return transfer::Source::lease_of(&params);
                }
                Ok(_) => {}
                // Closed and not at its end: the engine is putting in what it has begun to send.
                Err(TryRecvError::Empty) => std::thread::yield_now(),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn fail(&mut self, ending: Ending, message: String) -> Body {
        self.account.end(ending);
        Body::Failed(Failed { code: ErrorCode::Engine.into(), message, not_begun: false })
    }
}

/// Counts a request once, however it ends; one that is dropped was cancelled.
pub(super) struct Account {
    metrics: Arc<Metrics>,
    arrived: Instant,
    ended: bool,
}

impl Account {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, arrived: Instant::now(), ended: false }
    }

    fn finish(&mut self, finish: Finish) -> Finished {
        self.end(match finish.reason {
            FinishReason::Eos => Ending::eos,
            FinishReason::Length => Ending::length,
            FinishReason::StopString => Ending::stop_string,
            FinishReason::StopToken => Ending::stop_token,
            FinishReason::Cancelled | FinishReason::Unspecified => Ending::cancelled,
        });
        self.metrics.prompt_tokens.inc_by(finish.prompt_tokens as u64);
        self.metrics.reused_tokens.inc_by(finish.reused_tokens as u64);
        Finished {
            reason: finish.reason.into(),
            prompt_tokens: finish.prompt_tokens as u32,
            completion_tokens: finish.completion_tokens as u32,
            reused_tokens: finish.reused_tokens as u32,
            stop_string: finish.stop_string.unwrap_or_default(),
            stop_token: finish.stop_token.unwrap_or_default(),
            disaggregated_params: String::new(),
        }
    }

    /// The end of this worker's part: there is no reason, since the answer has not ended.
    fn hand_over(&mut self, prefilled: Prefilled) -> Finished {
        self.end(Ending::prefilled);
        self.metrics.prompt_tokens.inc_by(prefilled.prompt_tokens as u64);
        self.metrics.reused_tokens.inc_by(prefilled.reused_tokens as u64);
        Finished {
            reason: FinishReason::Unspecified.into(),
            prompt_tokens: prefilled.prompt_tokens as u32,
            completion_tokens: prefilled.completion_tokens as u32,
            reused_tokens: prefilled.reused_tokens as u32,
            stop_string: String::new(),
            stop_token: 0,
            disaggregated_params: prefilled.disaggregated_params.unwrap_or_default(),
        }
    }

    fn end(&mut self, ending: Ending) {
        if !std::mem::replace(&mut self.ended, true) {
            self.metrics.request_ended(ending);
            observe(&self.metrics.request_duration, self.arrived.elapsed());
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.end(Ending::cancelled);
    }
}

#[cfg(test)]
mod tests {
    use kv_hashing::BlockSize;
    use protocol::request_plane::decode_frame;

    use super::*;
    use crate::drain::Drain;
    use crate::engine::EngineInfo;

    /// Open streams, from id 1 on, and what their engines say.
    fn streams(count: u64) -> (Streams, Vec<mpsc::UnboundedSender<EngineOutput>>) {
        let info = EngineInfo {
            block_size: BlockSize::new(16).expect("not zero"),
            total_blocks: 8,
            max_num_seqs: 8,
            max_num_batched_tokens: 8,
            context_length: 128,
        };
        let (metrics, drain, mut streams) = (Arc::new(Metrics::new(&info)), Drain::default(), Streams::new());
        let open = |id| {
            let (engine, outputs) = mpsc::unbounded_channel();
            streams.open(id, outputs, Account::new(metrics.clone()), drain.admit().expect("not draining"));
            engine
        };
        let engines = (1..=count).map(open).collect();
        (streams, engines)
    }

    #[test]
    fn a_turn_stops_at_the_mark_and_the_next_goes_on_behind_it() {
        let (mut streams, engines) = streams(8);
        for engine in &engines {
            for token in 0..100 {
                engine.send(EngineOutput::Token { token, logprobs: None }).expect("the stream is open");
            }
        }
        let mut cx = Context::from_waker(Waker::noop());
        let mut turns = Vec::new();
        while streams.poll_ready(&mut cx).is_ready() {
            let mut out = BytesMut::new();
            // An Output of 100 tokens takes more than 100 bytes: the second one passes the mark.
            streams.write_ready(&mut out, 150);
            let mut ids = Vec::new();
            while let Some(frame) = decode_frame::<ServerFrame>(&mut out).expect("whole frames") {
                ids.push(frame.stream_id);
            }
            turns.push(ids);
        }
        assert_eq!(turns, [[1, 2], [3, 4], [5, 6], [7, 8]]);
    }

    #[test]
    fn of_a_prompt_that_was_kept_when_nobody_wanted_it_any_more_the_lease_is_not_lost() {
        let (mut streams, engines) = streams(4);
        for engine in &engines[1..] {
            engine.send(EngineOutput::Token { token: 1, logprobs: None }).expect("the stream is open");
            let disaggregated_params = Some(r#"{"lease": "00000000000000ff"}"#.to_owned());
            let (prompt_tokens, completion_tokens, reused_tokens) = (32, 1, 0);
            let prefilled = Prefilled { prompt_tokens, completion_tokens, reused_tokens, disaggregated_params };
            engine.send(EngineOutput::Prefilled(prefilled)).expect("the stream is open");
        }
        assert_eq!((streams.cancel(1), streams.cancel(2), streams.cancel(2)), (Some(None), Some(Some(255)), None));
        assert_eq!(streams.pass_deadline(3, &mut BytesMut::new()), Some(255));
        assert_eq!((streams.give_up(), streams.len()), (vec![255], 0));
        assert!(engines.iter().all(mpsc::UnboundedSender::is_closed), "whatever comes later is refused");
    }
}
