//! One request onto one worker: match, decide, book, send, and try another worker while nothing has been delivered; after that,
//! go on at another worker when this one is lost (`migration`).
//!
//! The decision is made inline, in the task of the request; where no worker has room the request waits its turn (`queue`). A
//! booking is released by its guard, however the request ends; every attempt books anew.

pub(crate) mod ask;
mod attempts;
pub(crate) mod booking;
pub(crate) mod find;
mod losses;
mod migration;
mod prefill;
mod queue;
mod reply;

use std::sync::Arc;

use kv_hashing::HashSpace;
use kv_index::{Overlaps, TierBlocks, WorkerRank};
use protocol::request_plane::Generate;
use routing::{ConditionalDisagg, CostConfig, Record, Refusal, Worker, WorkerSet};

use crate::backend::{
    Backend, DispatchError, Explained, PrefillChoice, RouteOptions, Routed, ServedModel, Warning, WorkerStatus,
};
use crate::config::Settings;
use crate::proxy::Proxy;
use crate::workers::{Cluster, Trouble};
use ask::Ask;
use attempts::{Attempts, Job};
use booking::Placement;
use losses::Losses;
use migration::Migration;
use prefill::Plan;
pub(crate) use prefill::PrefillPool;
use reply::Reply;

/// Stages, as errors name them.
pub(crate) mod stage {
    pub(crate) const QUEUED: &str = "waiting for a worker with room";
    pub(crate) const FIRST_TOKEN: &str = "waiting for the first token";
    pub(crate) const GENERATING: &str = "generating";
    pub(crate) const MOVING: &str = "moving to another worker";
}

/// Sends requests to workers.
pub struct Dispatcher {
    attempts: Arc<Attempts>,
    /// What requests may change.
    cost: CostConfig,
    /// How often a request that has begun may go on at another worker.
    migration_limit: u32,
    /// Which requests stay whole although they could be split.
    conditional_disagg: Option<ConditionalDisagg>,
    /// In place of workers that take tokens.
    proxy: Option<Arc<Proxy>>,
}

impl Dispatcher {
    pub(crate) fn new(cluster: Arc<Cluster>, settings: &Settings) -> Self {
        let placement = Placement::new(&settings.selection, cluster.own, cluster.metrics.in_flight.clone());
        let (mode, cost) = (settings.selection.selector.mode, settings.selection.selector.cost);
        let (placement, deadlines) = (Arc::new(placement), settings.deadlines);
        let Settings { migration_limit, conditional_disagg, prefill_mode, .. } = *settings;
        let attempts = Arc::new(Attempts { cluster, placement, deadlines, mode, prefill_mode });
        Self { attempts, cost, migration_limit, conditional_disagg, proxy: None }
    }

    /// Puts OpenAI servers in place of workers that take tokens.
    pub(crate) fn set_proxy(&mut self, proxy: Arc<Proxy>) {
        self.proxy = Some(proxy);
    }

    /// What decides, and knows what runs where.
    pub(crate) fn placement(&self) -> &Arc<Placement> {
        &self.attempts.placement
    }

    /// Every rank of every worker whose model is loaded.
    pub fn workers(&self) -> WorkerSet {
        self.attempts.cluster.view.load().set.clone()
    }

    /// Whether requests for a model go to a prefill worker first, unless they say or are something else.
    pub fn splits(&self, model: &str) -> bool {
        self.attempts.cluster.view.load().models.get(model).is_some_and(|model| model.prefill == PrefillPool::Open)
    }

    /// How much of a prompt each worker holds, as the index has it.
    pub fn overlaps(&self, model: &str, tokens: &[u32], space: HashSpace) -> Option<Overlaps> {
        let size = self.attempts.cluster.view.load().models.get(model)?.block_size;
        Some(self.attempts.cluster.index.overlaps(&space.blocks(tokens, size)))
    }

    /// Blocks that the index has of one rank.
    pub fn indexed_blocks(&self, rank: WorkerRank) -> TierBlocks {
        self.attempts.cluster.index.blocks(rank)
    }

    /// Where a request would go now, and why. Changes nothing.
    pub fn explain(&self, request: &Generate, options: &RouteOptions) -> Result<Explained, DispatchError> {
        let attempts = &self.attempts;
        let view = attempts.cluster.view.load_full();
        let model = view.models.get(&request.model);
        let size = model.ok_or_else(|| DispatchError::NoWorker { model: request.model.clone() })?.block_size;
        let mut ask = Ask::new(request, options, size, &self.cost)?;
        let explain = |ask: &Ask| attempts.placement.explain(&view.set, &ask.request(), &attempts.held(ask));
        let prefill = match attempts.plan(&ask, &view, self.conditional_disagg.as_ref())? {
            Plan::Whole(reason) => reason.map(PrefillChoice::Local),
            Plan::Split(partners) => {
                ask.split(attempts.prefill_mode, partners);
                let prompt = explain(&ask);
                let chosen = prompt.outcome.as_ref().ok().and_then(|decision| view.set.get(decision.rank));
                ask.join(chosen.map(|worker| &worker.kv));
                Some(PrefillChoice::Remote(Box::new(prompt)))
            }
        };
        Ok(Explained { answer: explain(&ask), prefill })
    }

    /// The decisions about a request (of this id on the request plane) that are still known: one for each attempt.
    pub fn decisions(&self, request: &str) -> Vec<Record> {
        self.attempts.placement.decisions(request)
    }

    async fn dispatch(&self, request: Generate, options: RouteOptions) -> Result<Routed, DispatchError> {
        let attempts = &self.attempts;
        let view = attempts.cluster.view.load_full();
        let admitted = view.models.get(&request.model);
        let admitted = admitted.ok_or_else(|| DispatchError::NoWorker { model: request.model.clone() })?;
        let tokenizer = options.model.clone().unwrap_or_else(|| admitted.served.model.clone());
        let ask = Ask::new(&request, &options, admitted.block_size, &self.cost)?;
        let plan = attempts.plan(&ask, &view, self.conditional_disagg.as_ref())?;
        drop(view);
        let mut job = Job { ask, request, tokenizer, losses: Losses::new(self.migration_limit), due: None };
        let leg = match plan {
            Plan::Split(partners) => attempts.run_halves(&mut job, partners).await?,
            Plan::Whole(reason) => {
                reason.inspect(|reason| attempts.count(reason));
                attempts.run(&mut job).await?
            }
        };
        let (spec, overlap_blocks) = (leg.life.spec(), leg.overlap_blocks);
        let migration = Migration::new(attempts.clone(), job, self.migration_limit);
        Ok(Routed {
            worker_id: spec.identity.instance_id,
            worker_name: spec.name.clone(),
            overlap_blocks,
            stream: Box::pin(Reply::new(leg, migration, attempts.deadlines)),
        })
    }
}

impl Backend for Dispatcher {
    fn model(&self, name: &str) -> Option<Arc<ServedModel>> {
        Some(self.attempts.cluster.view.load().models.get(name)?.served.clone())
    }

    fn models(&self) -> Vec<Arc<ServedModel>> {
        let view = self.attempts.cluster.view.load();
        let mut models: Vec<_> = view.models.values().map(|model| model.served.clone()).collect();
        models.sort_by(|a, b| a.card.display_name.cmp(&b.card.display_name));
        models
    }

    fn known(&self, name: &str) -> bool {
        self.attempts.cluster.view.load().created.contains_key(name)
    }

    fn synced(&self) -> bool {
        self.attempts.cluster.synced() && self.attempts.placement.counts_others()
    }

    fn proxy(&self) -> Option<&Arc<Proxy>> {
        self.proxy.as_ref()
    }

    fn warnings(&self) -> Vec<Warning> {
        if !self.attempts.cluster.kv_events {
            return Vec::new();
        }
        let view = self.attempts.cluster.view.load();
        let troubles: Vec<(String, Trouble)> = match &self.proxy {
            Some(proxy) => proxy.troubles().collect(),
            None => {
                let once = view.set.iter().filter(|worker| worker.rank.dp_rank == 0);
                let trouble = |worker: &Worker| view.workers.get(&worker.rank.worker)?.trouble();
                once.filter_map(|worker| Some((worker.name.to_string(), trouble(worker)?))).collect()
            }
        };
        let of = |(worker, trouble): (String, Trouble)| Warning { worker: Some(worker), reason: trouble.as_str() };
        let blind = self.attempts.cluster.index.finds_nothing();
        let blind = blind.then_some(Warning { worker: None, reason: "no prompt's blocks are ever known" });
        troubles.into_iter().map(of).chain(blind).collect()
    }

    fn worker_status(&self) -> Vec<WorkerStatus> {
        let view = self.attempts.cluster.view.load();
        let ranks: Vec<Worker> = match &self.proxy {
            Some(_) => view.set.iter().cloned().collect(),
            None => view.workers.values().flat_map(|life| life.routing_workers()).collect(),
        };
        let status = |worker: Worker| WorkerStatus {
            loaded: view.set.get(worker.rank).is_some(),
            load: self.attempts.placement.load(worker.rank),
            held: self.attempts.cluster.index.blocks(worker.rank),
            worker,
        };
        let mut all: Vec<_> = ranks.into_iter().map(status).collect();
        all.sort_by(|a, b| (&a.worker.name, a.worker.rank).cmp(&(&b.worker.name, b.worker.rank)));
        all
    }

    fn workers(&self) -> WorkerSet {
        Dispatcher::workers(self)
    }

    fn explain(&self, request: &Generate, options: &RouteOptions) -> Result<Explained, DispatchError> {
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
pub(crate) fn refused(refusal: Refusal, ask: &Ask) -> Option<DispatchError> {
    match refusal {
        Refusal::UnknownTarget(target) => {
            Some(DispatchError::UnknownWorker { worker: target.worker.0, named_by: ask.pinned_by })
        }
        Refusal::NeedsTarget => Some(DispatchError::NeedsWorker),
        Refusal::Busy => Some(DispatchError::Busy { model: ask.model.clone() }),
        Refusal::NoWorker | Refusal::Unmatched | Refusal::NoPartner | Refusal::AllOut | Refusal::Saturated => None,
    }
}
