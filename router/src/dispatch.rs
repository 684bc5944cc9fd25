//! One request onto one worker: match, decide, book, send, and try another worker while nothing has been delivered.
//!
//! The decision is made inline, in the task of the request. A booking is released by its guard, however the request ends;
//! every attempt books anew.

mod booking;
mod reply;

use std::sync::Arc;

use kv_hashing::{BlockSize, HashSpace, sequence_hashes};
use kv_index::{Overlaps, TierBlocks, WorkerId, WorkerRank};
use protocol::request_plane::{ClientFrame, ErrorCode, Failed, Generate, client_frame, server_frame};
use routing::{Decision, Mode, Prompt, Refusal, Request, WorkerSet};
use tokio::time::{Instant, timeout_at};

use crate::backend::{Backend, DispatchError, RouteOptions, Routed, ServedModel};
use crate::config::{Deadlines, Settings};
use crate::metrics::{DecisionLabels, ReasonLabels};
use crate::request_plane::Stream;
use crate::workers::{Cluster, ClusterView, Life};
use booking::{Booking, Placement};
use reply::{Expected, Reply};

/// Most workers tried for one request.
const ATTEMPTS: usize = 4;

/// Stages, as errors name them.
pub(crate) mod stage {
    pub(crate) const FIRST_TOKEN: &str = "waiting for the first token";
    pub(crate) const GENERATING: &str = "generating";
}

/// Sends requests to workers.
pub struct Dispatcher {
    cluster: Arc<Cluster>,
    placement: Arc<Placement>,
    deadlines: Deadlines,
    match_prefixes: bool,
    mode: &'static str,
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
        let placement = Arc::new(Placement::new(settings.mode, settings.cost, cluster.metrics.in_flight.clone()));
        let mode = match settings.mode {
            Mode::Kv => "kv",
            Mode::RoundRobin => "round-robin",
            Mode::Random => "random",
        };
        // The other modes do not look at what workers hold.
        let match_prefixes = settings.kv_events && settings.mode == Mode::Kv;
        Self { cluster, placement, deadlines: settings.deadlines, match_prefixes, mode }
    }

    /// Every rank of every worker whose model is loaded.
    pub fn workers(&self) -> WorkerSet {
        self.cluster.view.load().set.clone()
    }

    /// How much of a prompt each worker holds, as the index has it.
    pub fn overlaps(&self, model: &str, tokens: &[u32], space: HashSpace) -> Option<Overlaps> {
        let size = self.cluster.view.load().models.get(model)?.block_size;
        Some(self.cluster.index.read().find_matches_for_request(tokens, size, space))
    }

    /// Blocks that the index has of one rank.
    pub fn indexed_blocks(&self, rank: WorkerRank) -> TierBlocks {
        self.cluster.index.read().blocks(rank)
    }

    fn prompt(&self, request: &Generate, size: BlockSize) -> (Prompt, Overlaps) {
        let space = HashSpace::new(Some(&request.lora), Some(&request.cache_namespace));
        let blocks = space.blocks(&request.token_ids, size);
        let overlaps =
            if self.match_prefixes { self.cluster.index.read().find_matches(&blocks) } else { Overlaps::default() };
        let prompt =
            Prompt { blocks: sequence_hashes(&blocks).into(), tokens: request.token_ids.len(), block_size: size };
        (prompt, overlaps)
    }

    /// Decides and books in one step, so that requests that come together see each other.
    fn place(
        &self,
        view: &ClusterView,
        request: &Generate,
        prompt: &Prompt,
        overlaps: &Overlaps,
        pinned: Option<WorkerId>,
        tried: &[WorkerId],
    ) -> Result<(Decision, Booking), Refusal> {
        let excluded = [&view.down[..], tried].concat();
        let wanted = Request { model: &request.model, prompt, pinned, excluded: &excluded };
        let (decision, booking) = self.placement.decide(&view.set, &wanted, overlaps)?;
        let metrics = &self.cluster.metrics;
        metrics.decisions.get_or_create(&DecisionLabels { mode: self.mode }).inc();
        if self.match_prefixes {
            metrics.overlap_blocks.observe(f64::from(decision.terms.overlap.total()));
        }
        tracing::debug!(
            request = %request.request_id, worker = decision.rank.worker.0, overlap = decision.terms.overlap.total(),
            cost = decision.terms.cost, "routed"
        );
        Ok((decision, booking))
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
        let tokenizer = options.model.unwrap_or_else(|| admitted.served.model.clone());
        let (prompt, overlaps) = self.prompt(&request, admitted.block_size);
        let pinned = options.pinned_worker.map(WorkerId);
        let model = request.model.clone();
        let mut frame = ClientFrame { stream_id: 0, body: Some(client_frame::Body::Generate(request)) };
        let (mut tried, mut last_error) = (Vec::new(), None);
        while tried.len() < ATTEMPTS {
            // A new view each time: a failure may have changed it.
            let view = self.cluster.view.load_full();
            let Some(client_frame::Body::Generate(request)) = &frame.body else { break };
            // Since the prompt was tokenized the name may have gone over to other files, whose workers would misread the tokens.
            if !view.models.get(&model).is_some_and(|now| Arc::ptr_eq(&now.served.model, &tokenizer)) {
                break;
            }
            let (decision, booking) = match self.place(&view, request, &prompt, &overlaps, pinned, &tried) {
                Ok(placed) => placed,
                Err(Refusal::UnknownPin(worker)) => return Err(DispatchError::UnknownWorker(worker.0)),
                Err(Refusal::NoWorker | Refusal::AllOut) => break,
            };
            let worker = decision.rank.worker;
            tried.push(worker);
            let Some(life) = view.workers.get(&worker) else { continue };
            match self.attempt(life, &mut frame).await {
                Ok(answer) => return Ok(self.routed(life.clone(), &decision, booking, answer, &prompt)),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Retry { reason, error }) => {
                    self.cluster.metrics.retries.get_or_create(&ReasonLabels { reason }).inc();
                    tracing::debug!(reason, worker = %life.spec().name, "trying another worker");
                    last_error = error.or(last_error);
                }
            }
        }
        Err(last_error.unwrap_or(DispatchError::NoWorker { model }))
    }

    fn routed(
        &self,
        life: Arc<Life>,
        decision: &Decision,
        booking: Booking,
        (stream, first): (Stream, server_frame::Body),
        prompt: &Prompt,
    ) -> Routed {
        let (spec, overlap_blocks) = (life.spec(), decision.terms.overlap.total());
        let first_block = prompt.blocks.first().filter(|_| self.match_prefixes);
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
        self.cluster.synced()
    }

    fn generate(
        &self,
        request: Generate,
        options: RouteOptions,
    ) -> impl Future<Output = Result<Routed, DispatchError>> + Send {
        self.dispatch(request, options)
    }
}

/// What a worker's refusal or failure means to a client.
fn failure(worker: &str, stage: &'static str, failed: Failed, deadlines: &Deadlines) -> DispatchError {
    let code = failed.code();
    match code {
        ErrorCode::InvalidRequest => DispatchError::Invalid(failed.message),
        ErrorCode::Overloaded => DispatchError::Overloaded(failed.message),
        ErrorCode::Deadline => DispatchError::Deadline { stage, seconds: deadlines.first_token.as_secs() },
        _ => DispatchError::Worker { worker: worker.to_owned(), stage, message: failed.message },
    }
}
