//! The thread that runs the built-in engine: requests in by a bounded queue, outputs and events out by channels.
//!
//! The thread owns scheduler and forward pass; callers share only the inbox and a few counters with it. It is parked while
//! there is nothing to do. Whatever ends it, every request gets its last message: nobody waits for a dead engine.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use protocol::request_plane::Generate;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Forward;
use super::exchange::queue::Queue;
use super::exchange::{Exchange, Granted};
use super::scheduler::{Handover, InvalidConfig, RequestId, Scheduler, SchedulerConfig};
use super::stop::Vocabulary;
use super::tiers::TierOptions;
use super::tiers::catalog::{Catalog, TierUsage};
use super::tiers::metrics::TierMetrics;
use super::tiers::mover::{Mover, Opened, TierError};
use crate::engine::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, SubmitError};
use inbox::{Errand, Inbox, Shared, Submission};

pub(super) mod inbox;
#[cfg(test)]
mod tests;

/// How soon requests that wait for blocks are looked at again, if nobody gives blocks back: some may have been cancelled.
const STALL: Duration = Duration::from_millis(10);

/// Why the engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The sizes cannot work.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// No thread could be had.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The tiers below the arena.
    #[error(transparent)]
    Tiers(#[from] TierError),
}

/// The built-in engine. Dropping it stops its thread.
pub struct BuiltIn {
    info: EngineInfo,
    shared: Arc<Shared>,
    exchange: Option<Arc<Exchange>>,
    tiers: Option<TierMetrics>,
    /// In all tiers below the arena.
    tier_blocks: usize,
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
        Self::start_with_tiers(forward, config, vocabulary, &TierOptions::default())
    }

    /// As [`Self::start`], with tiers below the arena.
    pub fn start_with_tiers(
        forward: impl Forward + 'static,
        config: SchedulerConfig,
        vocabulary: impl Into<Arc<Vocabulary>>,
        tiers: &TierOptions,
    ) -> Result<Self, StartError> {
        let max_waiting = config.max_waiting;
        let mut scheduler = match forward.next_token() {
            None => Scheduler::new(config, forward.vocab())?,
            Some(next_token) => Scheduler::without_logits(config, forward.vocab(), next_token)?,
        };
        let (events, events_receiver) = unbounded_channel();
        let (info, limits) = (scheduler.info().clone(), scheduler.limits(vocabulary.into()));
        let shared = Arc::new(Shared::new(limits, max_waiting));
        let exchange = forward.kv().map(|kv| Arc::new(Exchange::new(kv, shared.clone())));
        let mut tier_blocks = 0;
        let tiers = match Tiers::start(tiers, exchange.as_deref(), &forward, &shared)? {
            Some((catalog, tiers)) => {
                tier_blocks = catalog.sizes().host + catalog.sizes().disk;
                scheduler = scheduler.with_tiers(catalog);
                Some(tiers)
            }
            None => None,
        };
        let metrics = tiers.as_ref().map(|tiers| tiers.metrics.clone());
        let mut runner = Runner {
            scheduler,
            forward,
            shared: shared.clone(),
            exchange: exchange.clone(),
            reserving: Queue::default(),
            outputs: HashMap::new(),
            events,
            logits: Vec::new(),
            stalled: false,
            gave_up: false,
            started: Instant::now(),
            tiers,
        };
        // What a disk had from an earlier life is known before the first request.
        runner.make_moves();
        runner.publish_events();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || runner.run())?;
        let (events, thread) = (Mutex::new(Some(events_receiver)), Mutex::new(Some(thread)));
        Ok(Self { info, shared, exchange, tiers: metrics, tier_blocks, events, thread })
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

    /// What it counts of the tiers below the arena; `None` where it has none.
    pub fn tier_metrics(&self) -> Option<&TierMetrics> {
        self.tiers.as_ref()
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
        let (place, receiver) = self.shared.place(request)?;
        if let Some(place) = place {
            place.enter(None);
        }
        Ok(receiver)
    }

    fn load(&self) -> EngineLoad {
        self.shared.load()
    }

    fn take_events(&self) -> Option<UnboundedReceiver<ArenaEvent>> {
        self.events.lock().take()
    }

    fn exchange(&self) -> Option<Arc<Exchange>> {
        self.exchange.clone()
    }

    fn tier_blocks(&self) -> Option<usize> {
        Some(self.tier_blocks)
    }

    fn register(&self, registry: &mut Registry) {
        self.tiers.iter().for_each(|tiers| tiers.register(registry));
    }
}

/// What the engine's thread has of the tiers below the arena.
struct Tiers {
    mover: Mover,
    metrics: TierMetrics,
    /// What the metrics say.
    told: TierUsage,
    block_bytes: usize,
}

impl Tiers {
    /// `None` when there are to be none.
    fn start(
        options: &TierOptions,
        exchange: Option<&Exchange>,
        forward: &impl Forward,
        shared: &Arc<Shared>,
    ) -> Result<Option<(Catalog, Self)>, TierError> {
        let Some((exchange, kv)) = exchange.zip(forward.kv()) else {
            return if options.any() { Err(TierError::Immovable) } else { Ok(None) };
        };
        let Some(opened) = Opened::new(options, exchange.layout())? else { return Ok(None) };
        let (shared, block_bytes) = (shared.clone(), kv.arena.shape().block_bytes());
        let (catalog, mover) = opened.start(kv.arena, move |done| shared.send(Errand::Done(done)))?;
        let metrics = TierMetrics::default();
        metrics.set_limits(catalog.sizes(), block_bytes);
        let told = TierUsage::default();
        // Every series is there from the beginning.
        metrics.update(&told, &told, block_bytes);
        Ok(Some((catalog, Self { mover, metrics, told, block_bytes })))
    }
}

/// Steps of fewer tokens end by themselves soon enough.
const WORTH_A_LOOK: usize = 32;

/// Tokens that a step computes, and who waits for them.
struct Step<'a>(Vec<(Option<&'a UnboundedSender<EngineOutput>>, usize)>);

impl Step<'_> {
    fn tokens(&self) -> usize {
        self.0.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Those that somebody waits for.
    fn wanted(&self) -> usize {
        let wanted = self.0.iter().filter(|(outputs, _)| outputs.is_some_and(|outputs| !outputs.is_closed()));
        wanted.map(|(_, tokens)| tokens).sum()
    }

    /// A long step is given up where that costs the others less than its end: they compute again what is done of theirs, and need
    /// not wait for what is left of the tokens that nobody waits for.
    fn is_worth_its_end(&self, done: f64) -> bool {
        let (all, wanted) = (self.tokens(), self.wanted());
        all < WORTH_A_LOOK || (all - wanted) as f64 * (1.0 - done) <= wanted as f64 * done
    }
}

/// The engine's thread.
struct Runner<F> {
    scheduler: Scheduler,
    forward: F,
    shared: Arc<Shared>,
    exchange: Option<Arc<Exchange>>,
    /// Fetches that wait for room.
    reserving: Queue,
    /// Of the requests that have not ended.
    outputs: HashMap<RequestId, UnboundedSender<EngineOutput>>,
    events: UnboundedSender<ArenaEvent>,
    /// Kept between steps, to allocate once.
    logits: Vec<f32>,
    /// There are requests, but the last step could compute nothing: they wait for blocks that others hold.
    stalled: bool,
    /// The last step was given up. The next one is not while somebody waits for it: the engine gets on, whoever comes and goes.
    gave_up: bool,
    /// The scheduler's clock begins here.
    started: Instant,
    tiers: Option<Tiers>,
}

impl<F: Forward> Runner<F> {
    fn run(mut self) {
        let cause = loop {
            let turn = AssertUnwindSafe(|| {
                self.take_requests() && {
                    self.step();
                    true
                }
            });
            match catch_unwind(turn) {
                Ok(true) => {}
                Ok(false) => break "the engine was shut down".to_owned(),
                Err(panic) => {
                    let cause = format!("the engine failed: {}", message(&*panic));
                    tracing::error!(unfinished = self.outputs.len(), "{cause}");
                    break cause;
                }
            }
        };
        self.stop(&cause);
    }

    /// Does what was left in the inbox; parked while there is nothing at all to do. False when the engine shall stop.
    fn take_requests(&mut self) -> bool {
        let idle = self.scheduler.is_idle();
        let shared = self.shared.clone();
        let errands = {
            let mut inbox = shared.inbox.lock();
            while idle && inbox.is_empty() && self.reserving.is_empty() {
                shared.wake.wait(&mut inbox);
            }
            if (self.stalled || idle) && inbox.is_empty() {
                shared.wake.wait_for(&mut inbox, STALL);
            }
            std::mem::take(&mut inbox.errands)
        };
        // What is given back makes room for what is reserved.
        let (releases, others): (Vec<_>, Vec<_>) =
            errands.into_iter().partition(|errand| matches!(errand, Errand::Release(_)));
        releases.into_iter().for_each(|errand| self.run_errand(errand));
        self.drop_cancelled();
        if let Some(exchange) = &self.exchange {
            self.reserving.serve(exchange, &mut self.scheduler, Instant::now());
        }
        others.into_iter().for_each(|errand| self.run_errand(errand));
        // Whoever gets a reservation writes to it.
        self.make_moves();
        self.publish_events();
        self.reserving.answer();
        let mut inbox = shared.inbox.lock();
        if inbox.closed {
            return false;
        }
        for submission in inbox.requests.drain(..) {
            self.enqueue(submission);
        }
        self.note_not_started(&mut inbox);
        self.publish_load();
        if idle {
            self.forward.resume();
        }
        true
    }

    fn enqueue(&mut self, Submission { request, outputs, import }: Submission) {
        if let Some(import) = import {
            self.scheduler.import(import);
        }
        if outputs.is_closed() {
            return;
        }
        match self.scheduler.enqueue(request) {
            Ok(id) => drop(self.outputs.insert(id, outputs)),
            // Inbox and queue share one bound, so this is no path of normal work; the caller learns of it anyway.
            Err(refused) => drop(outputs.send(EngineOutput::Failed(refused.to_string()))),
        }
    }

    fn run_errand(&mut self, errand: Errand) {
        match errand {
            Errand::Release(table) => self.scheduler.release(&table),
            Errand::Reserve(ask) => {
                if let Some(exchange) = &self.exchange {
                    self.reserving.ask(ask, exchange, &mut self.scheduler, Instant::now());
                }
            }
            Errand::Done(done) => self.scheduler.done(done),
        }
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
        self.scheduler.tick(self.started.elapsed());
        self.scheduler.plan();
        let moved = self.make_moves();
        self.note_not_started(&mut self.shared.inbox.lock());
        self.publish_load();
        self.publish_events();
        self.logits.clear();
        let chunks = self.scheduler.chunks();
        self.stalled = chunks.is_empty() && !moved;
        if !chunks.is_empty() {
            let planned = self.scheduler.planned().map(|(id, tokens)| (self.outputs.get(&id), tokens)).collect();
            let (step, again) = (Step(planned), self.gave_up);
            let worth = |done| step.is_worth_its_end(done) || again && step.wanted() > 0;
            self.gave_up = !self.forward.forward_while(&chunks, &mut self.logits, &worth);
            if self.gave_up {
                // Who left is dropped before the next one.
                return self.scheduler.give_up_step();
            }
        }
        let mut outputs = self.scheduler.apply(&mut self.logits);
        let leases = self.hand_over(&mut outputs);
        self.publish_load();
        self.publish_events();
        for (id, output) in outputs {
            let last = !matches!(output, EngineOutput::First { .. } | EngineOutput::Token { .. });
            // A receiver that is gone is a cancellation, which the next step sees.
            let told = self.outputs.get(&id).is_some_and(|outputs| outputs.send(output).is_ok());
            if last
                && !told
                && let (Some(exchange), Some(lease)) = (&self.exchange, leases.get(&id))
            {
                exchange.end_lease(*lease);
            }
            if last {
                self.outputs.remove(&id);
            }
        }
    }

    /// Makes what moves the scheduler has left, and says whether there were any.
    fn make_moves(&mut self) -> bool {
        let Some(tiers) = &mut self.tiers else { return false };
        let moves = self.scheduler.take_moves();
        moves.iter().for_each(|a_move| tiers.mover.make(*a_move));
        let now = self.started.elapsed();
        for loaded in self.scheduler.take_loaded() {
            tiers.metrics.onboarded(now.saturating_sub(loaded.since).as_secs_f64());
        }
        let usage = self.scheduler.tiers();
        if usage != tiers.told {
            tiers.metrics.update(&tiers.told, &usage, tiers.block_bytes);
            tiers.told = usage;
        }
        !moves.is_empty()
    }

    /// Leases the blocks of prompts computed for others, and adds to their last outputs how they are fetched; returns the leases.
    fn hand_over(&mut self, outputs: &mut [(RequestId, EngineOutput)]) -> HashMap<RequestId, u64> {
        let mut leases = HashMap::new();
        for Handover { id, hashes, table } in self.scheduler.take_handovers() {
            let wanted = self.outputs.get(&id).is_some_and(|outputs| !outputs.is_closed());
            let granted = match &self.exchange {
                Some(exchange) if wanted => exchange.grant(hashes, table),
                _ => Err(table),
            };
            let params = match granted {
                Ok(Granted { lease, params }) => {
                    leases.insert(id, lease);
                    Some(params)
                }
                Err(table) => {
                    self.scheduler.release(&table);
                    None
                }
            };
            for (_, output) in outputs.iter_mut().filter(|output| output.0 == id) {
                if let EngineOutput::Prefilled(prefilled) = output {
                    prefilled.disaggregated_params = params.clone();
                }
            }
        }
        leases
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
            // Whoever waits for an answer sees that there will be none.
            inbox.errands.clear();
            inbox.requests.drain(..).collect()
        };
        let waiting = rest.into_iter().map(|submission| submission.outputs);
        for outputs in self.outputs.drain().map(|(_, outputs)| outputs).chain(waiting) {
            let _ = outputs.send(EngineOutput::Failed(cause.to_owned()));
        }
        if let Some(exchange) = &self.exchange {
            exchange.close();
        }
        self.shared.stopped.cancel();
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
