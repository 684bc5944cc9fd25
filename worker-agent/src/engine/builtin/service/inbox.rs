//! What callers and the engine's thread share: the bounded inbox, errands of those who move blocks, and the load.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kv_hashing::{BlockHash, SequenceHash};
use parking_lot::{Condvar, Mutex};
use protocol::request_plane::Generate;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

use crate::engine::builtin::BlockId;
use crate::engine::builtin::exchange::Import;
use crate::engine::builtin::exchange::queue::Ask;
use crate::engine::builtin::scheduler::{Limits, Request};
use crate::engine::builtin::tiers::Done;
use crate::engine::{EngineLoad, EngineOutput, SubmitError};

/// What callers and the engine's thread share.
pub(in crate::engine::builtin) struct Shared {
    pub(super) inbox: Mutex<Inbox>,
    pub(super) wake: Condvar,
    pub(super) load: LoadCells,
    /// The engine's thread has ended.
    pub(super) stopped: CancellationToken,
    limits: Limits,
    max_waiting: usize,
}

impl Shared {
    pub(super) fn new(limits: Limits, max_waiting: usize) -> Self {
        let (inbox, wake, load, stopped) = Default::default();
        Self { inbox, wake, load, stopped, limits, max_waiting }
    }

    /// Checks a request and takes a place in the queue for it. There is no place where the answer had ended before it came
    /// here: the receiver has its last message then.
    pub(in crate::engine::builtin) fn place(
        self: &Arc<Self>,
        request: Generate,
    ) -> Result<(Option<Place>, UnboundedReceiver<EngineOutput>), SubmitError> {
        if !request.lora.is_empty() {
            return Err(SubmitError::Invalid(format!("this engine has no LoRA adapter {:?}", request.lora)));
        }
        let request = Request::new(request, &self.limits, rand::random())?;
        let (outputs, receiver) = unbounded_channel();
        if let Some(finish) = request.finished() {
            let _ = outputs.send(EngineOutput::Finished(finish));
            return Ok((None, receiver));
        }
        let mut inbox = self.inbox.lock();
        if inbox.closed {
            return Err(SubmitError::Stopped);
        }
        if inbox.len() >= self.max_waiting {
            inbox.forget_cancelled();
        }
        if inbox.len() >= self.max_waiting {
            return Err(SubmitError::Overloaded(self.max_waiting));
        }
        inbox.placed += 1;
        drop(inbox);
        Ok((Some(Place { shared: self.clone(), request: Some((request, outputs)) }), receiver))
    }

    /// Leaves something for the engine's thread to do between two steps. An engine that has stopped drops it.
    pub(in crate::engine::builtin) fn send(&self, errand: Errand) {
        let mut inbox = self.inbox.lock();
        if !inbox.closed {
            inbox.errands.push(errand);
            drop(inbox);
            self.wake.notify_one();
        }
    }

    /// Whether there are sequences in the running batch.
    pub(in crate::engine::builtin) fn is_running(&self) -> bool {
        self.load.running.load(Relaxed) > 0
    }

    pub(super) fn load(&self) -> EngineLoad {
        let in_inbox = {
            let inbox = self.inbox.lock();
            inbox.requests.len() + inbox.placed
        };
        let load = self.load.read();
        EngineLoad { waiting: load.waiting + in_inbox, ..load }
    }
}

/// A place in the queue for a request that does not begin yet. Dropping it gives the place up.
pub struct Place {
    shared: Arc<Shared>,
    request: Option<(Request, UnboundedSender<EngineOutput>)>,
}

impl Place {
    /// The blocks that the request can reuse, in order.
    pub fn reusable(&self) -> &[(BlockHash, SequenceHash)] {
        self.request.as_ref().map_or(&[], |(request, _)| request.reusable())
    }

    /// Waits until the engine has stopped.
    pub async fn stopped(&self) {
        self.shared.stopped.cancelled().await;
    }

    /// Waits until nobody waits for the request.
    pub async fn cancelled(&self) {
        if let Some((_, outputs)) = &self.request {
            outputs.closed().await;
        }
    }

    /// Lets the request begin. What `import` brings is cached before the scheduler looks for its prompt.
    pub fn enter(mut self, import: Option<Import>) {
        let Some((request, outputs)) = self.request.take() else { return };
        let mut inbox = self.shared.inbox.lock();
        inbox.placed -= 1;
        if inbox.closed {
            // A receiver that is gone needs no message.
            let _ = outputs.send(EngineOutput::Failed("the engine has stopped".into()));
            return;
        }
        inbox.requests.push_back(Submission { request, outputs, import });
        drop(inbox);
        self.shared.wake.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.request.is_some() {
            self.shared.inbox.lock().placed -= 1;
        }
    }
}

#[derive(Default)]
pub(super) struct Inbox {
    pub(super) requests: VecDeque<Submission>,
    /// Requests that have a place and have not entered.
    placed: usize,
    /// Of the requests that the scheduler has and that wait for their first step; weak, for only the engine's thread ends them.
    pub(super) not_started: Vec<WeakUnboundedSender<EngineOutput>>,
    /// Bounded by leases and reservations, which leave one at their beginning and one at their end, and by the disk's queues.
    pub(super) errands: Vec<Errand>,
    /// No request will be taken any more.
    pub(super) closed: bool,
}

impl Inbox {
    /// Requests that wait for their first step, here and in the scheduler.
    fn len(&self) -> usize {
        self.requests.len() + self.placed + self.not_started.len()
    }

    /// Counts only those that somebody waits for: a step can take long, and until it ends the scheduler keeps the others.
    fn forget_cancelled(&mut self) {
        // What an import holds, only the engine's thread can give back.
        self.requests.retain(|submission| submission.import.is_some() || !submission.outputs.is_closed());
        self.not_started.retain(|outputs| outputs.upgrade().is_some_and(|outputs| !outputs.is_closed()));
    }

    /// Whether there is nothing to take out.
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.errands.is_empty() && !self.closed
    }
}

pub(super) struct Submission {
    pub(super) request: Request,
    pub(super) outputs: UnboundedSender<EngineOutput>,
    pub(super) import: Option<Import>,
}

/// What those who move blocks ask of the engine's thread.
pub(in crate::engine::builtin) enum Errand {
    /// Hold blocks, the ones that are not here being reserved.
    Reserve(Ask),
    /// Give back what was held.
    Release(Vec<BlockId>),
    /// A move of the disk has ended.
    Done(Done),
}

/// The load after the last change, each figure on its own: a reader may see two figures of neighbouring steps.
#[derive(Default)]
pub(super) struct LoadCells {
    running: AtomicUsize,
    waiting: AtomicUsize,
    active_blocks: AtomicUsize,
    used_blocks: AtomicUsize,
    pending_prefill_tokens: AtomicUsize,
}

impl LoadCells {
    fn read(&self) -> EngineLoad {
        EngineLoad {
            running: self.running.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            active_blocks: self.active_blocks.load(Relaxed),
            used_blocks: self.used_blocks.load(Relaxed),
            pending_prefill_tokens: self.pending_prefill_tokens.load(Relaxed),
        }
    }

    pub(super) fn write(&self, load: EngineLoad) {
        self.running.store(load.running, Relaxed);
        self.waiting.store(load.waiting, Relaxed);
        self.active_blocks.store(load.active_blocks, Relaxed);
        self.used_blocks.store(load.used_blocks, Relaxed);
        self.pending_prefill_tokens.store(load.pending_prefill_tokens, Relaxed);
    }
}
