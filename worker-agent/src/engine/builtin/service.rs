//! The thread that runs the built-in engine: requests in by a bounded queue, outputs and events out by channels.
//!
//! The thread owns scheduler and forward pass; callers share only the inbox and a few counters with it. It is parked while
//! there is nothing to do. Whatever ends it, every request gets its last message: nobody waits for a dead engine.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use protocol::request_plane::Generate;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel};

use super::Forward;
use super::scheduler::{InvalidConfig, Limits, Request, RequestId, Scheduler, SchedulerConfig};
use super::stop::Vocabulary;
use crate::engine::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, SubmitError};

#[cfg(test)]
mod tests;

/// Why the engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The sizes cannot work.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// No thread could be had.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// The built-in engine. Dropping it stops its thread.
pub struct BuiltIn {
    info: EngineInfo,
    limits: Limits,
    max_waiting: usize,
    shared: Arc<Shared>,
    events: Mutex<Option<UnboundedReceiver<ArenaEvent>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl BuiltIn {
    /// Starts the thread. `forward` must have an arena of `config.engine.total_blocks` blocks of `block_size` tokens.
    pub fn start(
        forward: impl Forward + 'static,
        config: SchedulerConfig,
        vocabulary: impl Into<Arc<Vocabulary>>,
    ) -> Result<Self, StartError> {
        let max_waiting = config.max_waiting;
        let scheduler = match forward.next_token() {
            None => Scheduler::new(config, forward.vocab())?,
            Some(next_token) => Scheduler::without_logits(config, forward.vocab(), next_token)?,
        };
        let (events, events_receiver) = unbounded_channel();
        let (info, limits) = (scheduler.info().clone(), scheduler.limits(vocabulary.into()));
        let shared = Arc::new(Shared::default());
        let runner =
            Runner { scheduler, forward, shared: shared.clone(), outputs: HashMap::new(), events, logits: Vec::new() };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || runner.run())?;
        let (events, thread) = (Mutex::new(Some(events_receiver)), Mutex::new(Some(thread)));
        Ok(Self { info, limits, max_waiting, shared, events, thread })
    }

    /// Stops the thread after the step it is in, and waits for it. Requests that still run fail; a drain comes before this.
    pub fn shutdown(&self) {
        self.shared.inbox.lock().closed = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread panicked while it stopped");
        }
    }

    /// Whether the engine has stopped, by [`Self::shutdown`] or by a failure.
    pub fn is_stopped(&self) -> bool {
        self.shared.inbox.lock().closed
    }
}

impl Drop for BuiltIn {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Engine for BuiltIn {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn submit(&self, request: Generate) -> Result<UnboundedReceiver<EngineOutput>, SubmitError> {
        if !request.lora.is_empty() {
            return Err(SubmitError::Invalid(format!("this engine has no LoRA adapter {:?}", request.lora)));
        }
        let request = Request::new(request, &self.limits, rand::random())?;
        let (outputs, receiver) = unbounded_channel();
        let mut inbox = self.shared.inbox.lock();
        if inbox.closed {
            return Err(SubmitError::Stopped);
        }
        if inbox.len() >= self.max_waiting {
            inbox.forget_cancelled();
        }
        if inbox.len() >= self.max_waiting {
            return Err(SubmitError::Overloaded(self.max_waiting));
        }
        inbox.requests.push_back(Submission { request, outputs });
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(receiver)
    }

    fn load(&self) -> EngineLoad {
        let in_inbox = self.shared.inbox.lock().requests.len();
        let load = self.shared.load.read();
        EngineLoad { waiting: load.waiting + in_inbox, ..load }
    }

    fn take_events(&self) -> Option<UnboundedReceiver<ArenaEvent>> {
        self.events.lock().take()
    }
}

/// What callers and the engine's thread share.
#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
    load: LoadCells,
}

#[derive(Default)]
struct Inbox {
    requests: VecDeque<Submission>,
    /// Of the requests that the scheduler has and that wait for their first step; weak, for only the engine's thread ends them.
    not_started: Vec<WeakUnboundedSender<EngineOutput>>,
    /// No request will be taken any more.
    closed: bool,
}

impl Inbox {
    /// Requests that wait for their first step, here and in the scheduler.
    fn len(&self) -> usize {
        self.requests.len() + self.not_started.len()
    }

    /// Counts only those that somebody waits for: a step can take long, and until it ends the scheduler keeps the others.
    fn forget_cancelled(&mut self) {
        self.requests.retain(|submission| !submission.outputs.is_closed());
        self.not_started.retain(|outputs| outputs.upgrade().is_some_and(|outputs| !outputs.is_closed()));
    }
}

struct Submission {
    request: Request,
    outputs: UnboundedSender<EngineOutput>,
}

/// The load after the last change, each figure on its own: a reader may see two figures of neighbouring steps.
#[derive(Default)]
struct LoadCells {
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

    fn write(&self, load: EngineLoad) {
        self.running.store(load.running, Relaxed);
        self.waiting.store(load.waiting, Relaxed);
        self.active_blocks.store(load.active_blocks, Relaxed);
        self.used_blocks.store(load.used_blocks, Relaxed);
        self.pending_prefill_tokens.store(load.pending_prefill_tokens, Relaxed);
    }
}

/// The engine's thread.
struct Runner<F> {
    scheduler: Scheduler,
    forward: F,
    shared: Arc<Shared>,
    /// Of the requests that have not ended.
    outputs: HashMap<RequestId, UnboundedSender<EngineOutput>>,
    events: UnboundedSender<ArenaEvent>,
    /// Kept between steps, to allocate once.
    logits: Vec<f32>,
}

impl<F: Forward> Runner<F> {
    fn run(mut self) {
        let cause = loop {
            if !self.take_requests() {
                break "the engine was shut down".to_owned();
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.step())) {
                let cause = format!("the engine failed: {}", message(&*panic));
                tracing::error!(unfinished = self.outputs.len(), "{cause}");
                break cause;
            }
        };
        self.stop(&cause);
    }

    /// Moves new requests to the scheduler; parked while there is nothing at all to do. False when the engine shall stop.
    fn take_requests(&mut self) -> bool {
        let idle = self.scheduler.is_idle();
        let shared = self.shared.clone();
        let mut inbox = shared.inbox.lock();
        while idle && inbox.requests.is_empty() && !inbox.closed {
            shared.wake.wait(&mut inbox);
        }
        if inbox.closed {
            return false;
        }
        self.drop_cancelled();
        for Submission { request, outputs } in inbox.requests.drain(..) {
            if outputs.is_closed() {
                continue;
            }
            match self.scheduler.enqueue(request) {
                Ok(id) => drop(self.outputs.insert(id, outputs)),
                // Inbox and queue share one bound, so this is no path of normal work; the caller learns of it anyway.
                Err(refused) => drop(outputs.send(EngineOutput::Failed(refused.to_string()))),
            }
        }
        self.note_not_started(&mut inbox);
        self.publish_load();
        if idle {
            self.forward.resume();
        }
        true
    }

    /// Drops what nobody waits for: it shall neither be computed nor take the place of a new request.
    fn drop_cancelled(&mut self) {
        self.outputs.retain(|_, outputs| !outputs.is_closed());
        self.scheduler.retain(|id| self.outputs.contains_key(&id));
    }

    /// Tells callers who takes a place in the queue.
    fn note_not_started(&self, inbox: &mut Inbox) {
        let waiting = self.scheduler.waiting_ids().filter_map(|id| self.outputs.get(&id));
        inbox.not_started.clear();
        inbox.not_started.extend(waiting.map(UnboundedSender::downgrade));
    }

    /// Runs one step.
    fn step(&mut self) {
        self.scheduler.plan();
        self.note_not_started(&mut self.shared.inbox.lock());
        self.publish_load();
        self.publish_events();
        self.logits.clear();
        let chunks = self.scheduler.chunks();
        if !chunks.is_empty() {
            self.forward.forward(&chunks, &mut self.logits);
        }
        let outputs = self.scheduler.apply(&mut self.logits);
        self.publish_load();
        self.publish_events();
        for (id, output) in outputs {
            let last = matches!(output, EngineOutput::Finished(_) | EngineOutput::Failed(_));
            if let Some(outputs) = self.outputs.get(&id) {
                // A receiver that is gone is a cancellation, which the next step sees.
                let _ = outputs.send(output);
            }
            if last {
                self.outputs.remove(&id);
            }
        }
    }

    fn publish_load(&self) {
        self.shared.load.write(self.scheduler.load());
    }

    fn publish_events(&mut self) {
        for event in self.scheduler.take_events() {
            // Without a publisher nobody wants them.
            let _ = self.events.send(event);
        }
    }

    /// Refuses new requests, and tells those that have not ended why they end now.
    fn stop(mut self, cause: &str) {
        let rest: Vec<Submission> = {
            let mut inbox = self.shared.inbox.lock();
            inbox.closed = true;
            inbox.requests.drain(..).collect()
        };
        let waiting = rest.into_iter().map(|submission| submission.outputs);
        for outputs in self.outputs.drain().map(|(_, outputs)| outputs).chain(waiting) {
            let _ = outputs.send(EngineOutput::Failed(cause.to_owned()));
        }
        self.scheduler.abort();
        self.publish_load();
        self.publish_events();
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic without a message")
}
