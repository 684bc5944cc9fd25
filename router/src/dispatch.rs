//! One request onto one worker: match, decide, book, send, and try another worker while nothing has been delivered.
//!
//! The decision is made inline, in the task of the request; where no worker has room the request waits its turn (`queue`). A
//! booking is released by its guard, however the request ends; every attempt books anew.

pub(crate) mod ask;
pub(crate) mod booking;
pub(crate) mod find;
mod queue;
mod reply;

use std::sync::Arc;

use kv_hashing::{BlockHash, HashSpace};
use kv_index::{Overlaps, TierBlocks, WorkerRank};
use protocol::request_plane::{ClientFrame, ErrorCode, Failed, Generate, client_frame, server_frame};
use routing::{CostConfig, Decision, Explanation, Mode, Record, Refusal, WorkerSet};
use tokio::time::{Instant, timeout_at};

use crate::backend::{Backend, DispatchError, RouteOptions, Routed, ServedModel, Warning};
use crate::config::{Deadlines, Settings};
use crate::metrics::{DecisionLabels, ReasonLabels};
use crate::model::Model;
use crate::proxy::Proxy;
use crate::request_plane::Stream;
use crate::workers::{Cluster, ClusterView, Life};
use ask::Ask;
use booking::{Booking, Placement};
use find::Found;
use reply::{Expected, Reply};

/// Most workers tried for one request.
const ATTEMPTS: usize = 4;

/// Stages, as errors name them.
pub(crate) mod stage {
    pub(crate) const QUEUED: &str = "waiting for a worker with room";
    pub(crate) const FIRST_TOKEN: &str = "waiting for the first token";
    pub(crate) const GENERATING: &str = "generating";
}

/// Sends requests to workers.
pub struct Dispatcher {
    cluster: Arc<Cluster>,
    placement: Arc<Placement>,
    deadlines: Deadlines,
    match_prefixes: bool,
    mode: Mode,
    /// What requests may change.
    cost: CostConfig,
    /// In place of workers that take tokens.
    proxy: Option<Arc<Proxy>>,
}

/// Why an attempt failed.
enum Failure {
    /// Another worker may do. Without an error the worker is just not there for this request: if none is, none is ready.
    Retry { reason: &'static str, error: Option<DispatchError> },
    /// No worker would do.
    Final(DispatchError),
}

impl Dispatcher {
    pub(crate) fn new(cluster: Arc<Cluster>, settings: &Settings) -> Self {
        let placement = Placement::new(&settings.selection, cluster.own, cluster.metrics.in_flight.clone());
        let (mode, cost) = (settings.selection.selector.mode, settings.selection.selector.cost);
        // The other modes do not look at what workers hold.
        let match_prefixes = mode == Mode::Kv;
        let (placement, deadlines) = (Arc::new(placement), settings.deadlines);
        Self { cluster, placement, deadlines, match_prefixes, mode, cost, proxy: None }
    }

    /// Puts OpenAI servers in place of workers that take tokens.
    pub(crate) fn set_proxy(&mut self, proxy: Arc<Proxy>) {
        self.proxy = Some(proxy);
    }

    /// What decides, and knows what runs where.
    pub(crate) fn placement(&self) -> &Arc<Placement> {
        &self.placement
    }

    /// Every rank of every worker whose model is loaded.
    pub fn workers(&self) -> WorkerSet {
        self.cluster.view.load().set.clone()
    }

    /// How much of a prompt each worker holds, as the index has it.
    pub fn overlaps(&self, model: &str, tokens: &[u32], space: HashSpace) -> Option<Overlaps> {
        let size = self.cluster.view.load().models.get(model)?.block_size;
        Some(self.cluster.index.overlaps(&space.blocks(tokens, size)))
    }

    /// Blocks that the index has of one rank.
    pub fn indexed_blocks(&self, rank: WorkerRank) -> TierBlocks {
        self.cluster.index.blocks(rank)
    }

    /// Where a request would go now, and why. Changes nothing.
    pub fn explain(&self, request: &Generate, options: &RouteOptions) -> Result<Explanation, DispatchError> {
        let view = self.cluster.view.load_full();
        let model = view.models.get(&request.model);
        let size = model.ok_or_else(|| DispatchError::NoWorker { model: request.model.clone() })?.block_size;
        let ask = Ask::new(request, options, size, &self.cost)?;
        Ok(self.placement.explain(&view.set, &ask.request(), &self.held(&ask.blocks)))
    }

    /// The decisions about a request (of this id on the request plane) that are still known: one for each attempt.
    pub fn decisions(&self, request: &str) -> Vec<Record> {
        self.placement.decisions(request)
    }

    /// What each worker holds of a request's prompt.
    fn held(&self, blocks: &[BlockHash]) -> Overlaps {
        if self.match_prefixes { self.cluster.index.overlaps(blocks) } else { Overlaps::default() }
    }

    /// Finds a worker, after a wait if none has room. `None`: there is none for this request, or those that there are would
    /// misread its tokens, since the model's name went over to other files after it was tokenized.
    async fn place(&self, ask: &Ask, tokenizer: &Arc<Model>) -> Result<Option<Found<Arc<ClusterView>>>, DispatchError> {
        let view = || {
            let view = self.cluster.view.load_full();
            let same = view.models.get(&ask.model).is_some_and(|now| Arc::ptr_eq(&now.served.model, tokenizer));
            same.then_some(view)
        };
        let held = |blocks: &[BlockHash]| self.held(blocks);
        let found = self.placement.find(&self.cluster, ask, view, |view| &view.set, held).await?;
        if let Some(Found { held, decision, .. }) = &found {
            self.note(ask, decision);
            if self.match_prefixes {
                self.cluster.index.matched(&ask.blocks, held);
            }
            self.cluster.index.routed(decision.rank, &ask.blocks);
        }
        Ok(found)
    }

    fn note(&self, ask: &Ask, decision: &Decision) {
        let metrics = &self.cluster.metrics;
        metrics.decisions.get_or_create(&DecisionLabels { mode: self.mode.as_str() }).inc();
        if self.match_prefixes {
            metrics.overlap_blocks.observe(f64::from(decision.terms.overlap.total()));
        }
        tracing::debug!(
            request = %ask.id, worker = decision.rank.worker.0, overlap = decision.terms.overlap.total(),
            cost = decision.terms.cost, "routed"
        );
    }

    /// Sends the request and waits for its first frame.
    async fn attempt(
        &self,
        life: &Arc<Life>,
        frame: &mut ClientFrame,
    ) -> Result<(Stream, server_frame::Body), Failure> {
        let spec = life.spec();
        let lost = |stage, message| DispatchError::Worker { worker: spec.name.clone(), stage, message };
        let mut stream = life.client.open(frame).await.map_err(|error| {
            tracing::debug!(worker = %spec.name, %error, "cannot open a stream");
            Failure::Retry { reason: "unreachable", error: None }
        })?;
        let limit = self.deadlines.first_token;
        match timeout_at(Instant::now() + limit, stream.next()).await {
            Ok(Some(server_frame::Body::Failed(failed))) => Err(self.refused(life, failed)),
            Ok(Some(first)) => Ok((stream, first)),
            Ok(None) => {
                Err(Failure::Retry { reason: "lost", error: Some(lost(stage::FIRST_TOKEN, stream.lost_reason())) })
            }
            Err(_) => {
                Err(Failure::Final(DispatchError::Deadline { stage: stage::FIRST_TOKEN, seconds: limit.as_secs() }))
            }
        }
    }

    fn refused(&self, life: &Life, failed: Failed) -> Failure {
        let code = failed.code();
        if code == ErrorCode::Draining {
            life.client.set_draining();
            self.cluster.changed.notify_one();
        }
        let worker = life.spec().name.clone();
        let error = failure(&worker, stage::FIRST_TOKEN, failed, &self.deadlines);
        match code {
            ErrorCode::InvalidRequest | ErrorCode::Deadline => Failure::Final(error),
            ErrorCode::Draining => Failure::Retry { reason: "draining", error: None },
            ErrorCode::WrongWorker => Failure::Retry { reason: "wrong worker", error: None },
            ErrorCode::Overloaded => Failure::Retry { reason: "overloaded", error: Some(error) },
            _ => Failure::Retry { reason: "failed", error: Some(error) },
        }
    }

    async fn dispatch(&self, request: Generate, options: RouteOptions) -> Result<Routed, DispatchError> {
        let no_worker = || DispatchError::NoWorker { model: request.model.clone() };
        let view = self.cluster.view.load_full();
        let admitted = view.models.get(&request.model).ok_or_else(no_worker)?;
        let tokenizer = options.model.clone().unwrap_or_else(|| admitted.served.model.clone());
        let mut ask = Ask::new(&request, &options, admitted.block_size, &self.cost)?;
        drop(view);
        let mut frame = ClientFrame { stream_id: 0, body: Some(client_frame::Body::Generate(request)) };
        let mut last_error = None;
        for _ in 0..ATTEMPTS {
            let Some(placed) = self.place(&ask, &tokenizer).await? else { break };
            let Found { view, decision, booking, .. } = placed;
            let worker = decision.rank.worker;
            ask.failed_at(worker);
            let Some(life) = view.workers.get(&worker) else { continue };
            match self.attempt(life, &mut frame).await {
                Ok(answer) => return Ok(self.routed(life.clone(), &decision, booking, answer, &ask)),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Retry { reason, error }) => {
                    self.cluster.metrics.retries.get_or_create(&ReasonLabels { reason }).inc();
                    tracing::debug!(reason, worker = %life.spec().name, "trying another worker");
                    last_error = error.or(last_error);
                }
            }
        }
        Err(last_error.unwrap_or(DispatchError::NoWorker { model: ask.model }))
    }

    fn routed(
        &self,
        life: Arc<Life>,
        decision: &Decision,
        mut booking: Booking,
        (stream, first): (Stream, server_frame::Body),
        ask: &Ask,
    ) -> Routed {
        // The prompt is computed, even if nobody reads the first token for a while.
        booking.generated(0);
        let (spec, overlap_blocks) = (life.spec(), decision.terms.overlap.total());
        let first_block = ask.blocks.first().filter(|_| self.match_prefixes && self.cluster.kv_events);
        let expected = first_block.map(|&first_block| Expected {
            rank: decision.rank,
            blocks: overlap_blocks,
            first_block,
            index: self.cluster.index.clone(),
        });
        let reply = Reply::new(stream, first, booking, life, expected, self.deadlines);
        Routed {
            worker_id: spec.identity.instance_id,
            worker_name: spec.name.clone(),
            overlap_blocks,
            stream: Box::pin(reply),
        }
    }
}

impl Backend for Dispatcher {
    fn model(&self, name: &str) -> Option<Arc<ServedModel>> {
        Some(self.cluster.view.load().models.get(name)?.served.clone())
    }

    fn models(&self) -> Vec<Arc<ServedModel>> {
        let view = self.cluster.view.load();
        let mut models: Vec<_> = view.models.values().map(|model| model.served.clone()).collect();
        models.sort_by(|a, b| a.card.display_name.cmp(&b.card.display_name));
        models
    }

    fn known(&self, name: &str) -> bool {
        self.cluster.view.load().created.contains_key(name)
    }

    fn synced(&self) -> bool {
        self.cluster.synced() && self.placement.counts_others()
    }

    fn proxy(&self) -> Option<&Arc<Proxy>> {
        self.proxy.as_ref()
    }

    fn warnings(&self) -> Vec<Warning> {
        if !self.cluster.kv_events {
            return Vec::new();
        }
        let view = self.cluster.view.load();
        let troubles = view.set.iter().filter_map(|worker| {
            let trouble = view.workers.get(&worker.rank.worker)?.trouble()?;
            Some(Warning { worker: Some(worker.name.to_string()), reason: trouble.as_str() })
        });
        let blind = self.cluster.index.finds_nothing();
        let blind = blind.then_some(Warning { worker: None, reason: "no prompt's blocks are ever known" });
        troubles.chain(blind).collect()
    }

    fn workers(&self) -> WorkerSet {
        Dispatcher::workers(self)
    }

    fn explain(&self, request: &Generate, options: &RouteOptions) -> Result<Explanation, DispatchError> {
        Dispatcher::explain(self, request, options)
    }

    fn decisions(&self, request: &str) -> Vec<Record> {
        Dispatcher::decisions(self, request)
    }

    fn generate(
        &self,
        request: Generate,
        options: RouteOptions,
    ) -> impl Future<Output = Result<Routed, DispatchError>> + Send {
        self.dispatch(request, options)
    }
}

/// What it means to a client that nobody was chosen; `None`: nobody is there.
pub(crate) fn refused(refusal: Refusal, model: &str) -> Option<DispatchError> {
    match refusal {
        Refusal::UnknownTarget(target) => Some(DispatchError::UnknownWorker(target.worker.0)),
        Refusal::NeedsTarget => Some(DispatchError::Invalid(refusal.to_string())),
        Refusal::Busy => Some(DispatchError::Busy { model: model.to_owned() }),
        Refusal::NoWorker | Refusal::Unmatched | Refusal::AllOut | Refusal::Saturated => None,
    }
}

/// What a worker's refusal or failure means to a client.
fn failure(worker: &str, stage: &'static str, failed: Failed, deadlines: &Deadlines) -> DispatchError {
    let code = failed.code();
    match code {
        ErrorCode::InvalidRequest => DispatchError::Invalid(failed.message),
        ErrorCode::Overloaded => DispatchError::Overloaded(failed.message),
        ErrorCode::Draining => DispatchError::ShuttingDown(failed.message),
        ErrorCode::Deadline => DispatchError::Deadline { stage, seconds: deadlines.first_token.as_secs() },
        _ => DispatchError::Worker { worker: worker.to_owned(), stage, message: failed.message },
    }
}
