//! The seam between the HTTP frontend and the cluster behind it: models that can be served, and a way to run one request.
//!
//! The frontend knows only this module; `dispatch` implements it over real workers, tests implement it in a few lines.

use std::future::Future;
use std::sync::Arc;

use kv_index::TierBlocks;
use protocol::metadata::ModelCard;
use protocol::request_plane::{Finished, Generate, Output};
use routing::{CostOverrides, Explanation, RankView, Record, Worker, WorkerSet};

use crate::model::Model;
use crate::proxy::Proxy;

/// A model that at least one worker serves.
pub struct ServedModel {
    /// The card of the newest worker that serves it.
    pub card: ModelCard,
    /// Tokenizer and chat template.
    pub model: Arc<Model>,
    /// Seconds since 1970 at which it was first seen.
    pub created_s: u64,
}

/// Per-request routing wishes, from headers or the request body.
#[derive(Clone, Default)]
pub struct RouteOptions {
    /// What tokenized the prompt: the request goes only to workers that this model serves, however long it waits. Without it, to
    /// those of the model that is served when it comes.
    pub model: Option<Arc<Model>>,
    /// Send the request to this worker or refuse it (`x-armature-worker`).
    pub pinned_worker: Option<u64>,
    /// The header or the field that names it.
    pub pinned_by: Option<&'static str>,
    /// Names, beside its id, under which the client may ask for the request afterwards.
    pub known_as: Arc<[Box<str>]>,
    /// Everything else.
    pub hints: RoutingHints,
}

/// What a request says about where and when it should run; ranges have been checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingHints {
    /// Of the worker that it is pinned to, only this rank.
    pub dp_rank: Option<u32>,
    /// Never to these workers.
    pub excluded: Vec<u64>,
    /// Only to workers with these labels, as (name, value).
    pub labels: Vec<(String, String)>,
    /// Only to workers of this revision.
    pub revision: Option<String>,
    /// Weights of the cost in place of the configured ones.
    pub cost: CostOverrides,
    /// Its weight among those that wait.
    pub priority: f64,
    /// Before all that have less of it, among those that wait.
    pub strict_priority: i32,
    /// How long its answer is expected to be.
    pub expected_output_tokens: Option<u32>,
}

/// A running request.
pub struct Routed {
    /// Instance id of the worker that serves it.
    pub worker_id: u64,
    /// Name of that worker: its pod or process.
    pub worker_name: String,
    /// Prompt blocks the router expected the worker to reuse.
    pub overlap_blocks: u32,
    /// Tokens as they come. Dropping it cancels the request at the worker.
    pub stream: OutputStream,
}

/// One thing a worker says about a request.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamItem {
    /// Tokens.
    Output(Output),
    /// The end; nothing follows.
    Finished(Finished),
}

/// Tokens of one request, in order; ends after `Finished` or an error. Dropping it cancels the request.
pub type OutputStream = std::pin::Pin<Box<dyn futures::Stream<Item = Result<StreamItem, DispatchError>> + Send>>;

/// Why a request could not be served, before or while it ran.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum DispatchError {
    /// No worker serves the model now: 503.
    #[error("no worker is ready for model {model:?}")]
    NoWorker {
        /// The model asked for.
        model: String,
    },
    /// The pinned worker is unknown or does not serve the model: 400.
    #[error("worker {worker} does not serve this model")]
    UnknownWorker {
        /// Its instance id.
        worker: u64,
        /// The header or the field that names it.
        named_by: Option<&'static str>,
    },
    /// Every request is to name its worker, and this one does not: 400.
    #[error("the router mode is direct: the request must name its worker")]
    NeedsWorker,
    /// Workers serve the model, but each is over a threshold of `--active-…`: 503.
    #[error("every worker of model {model:?} is busy")]
    Busy {
        /// The model asked for.
        model: String,
    },
    /// As many workers as one request may try, or all there are, refused it for now: 429.
    #[error("all workers are at their limit: {0}")]
    Overloaded(String),
    /// The worker refused the request as invalid: 400.
    #[error("{0}")]
    Invalid(String),
    /// The worker was lost or failed, and no other could take over: 502, or an error event inside a stream.
    #[error("worker {worker} failed while {stage}: {message}")]
    Worker {
        /// Its name.
        worker: String,
        /// `waiting for the first token`, `generating`, …
        stage: &'static str,
        /// What it said.
        message: String,
    },
    /// The worker ended before the request did: 503, or an error event inside a stream. Sent again, it goes elsewhere.
    #[error("{0}; send the request again")]
    ShuttingDown(String),
    /// A deadline passed: 504.
    #[error("deadline of {seconds} s passed while {stage}")]
    Deadline {
        /// Which part of the work took too long.
        stage: &'static str,
        /// The limit.
        seconds: u64,
    },
}

/// Where a request would go, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// All of it; what is left after its prompt, where that goes elsewhere.
    pub answer: Explanation,
    /// What becomes of its prompt, where prefill workers serve the model.
    pub prefill: Option<PrefillChoice>,
}

/// What becomes of a prompt that prefill workers are there for.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillChoice {
    /// One of them computes it.
    Remote(Box<Explanation>),
    /// The worker that answers computes it; why.
    Local(&'static str),
}

/// A rank of a worker, as people look at it.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    /// It.
    pub worker: Worker,
    /// Its model is loaded here: requests can go to it.
    pub loaded: bool,
    /// What runs there, as routers count it.
    pub load: RankView,
    /// Blocks that it is taken to hold.
    pub held: TierBlocks,
}

/// Something that a person should look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The worker it is about; `None` when it is about all of them.
    pub worker: Option<String>,
    /// What is wrong with its KV events.
    pub reason: &'static str,
}

/// What the frontend needs of the cluster.
pub trait Backend: Send + Sync + 'static {
    /// The model of this name. Cost: one hash lookup.
    fn model(&self, name: &str) -> Option<Arc<ServedModel>>;

    /// Every model, by name.
    fn models(&self) -> Vec<Arc<ServedModel>>;

    /// Whether a worker announces this model now or did earlier in this process's life: a model that is known and has no worker
    /// is unavailable (503), not unknown (404). Bounded: of very many names the oldest are forgotten. Cost: one hash lookup.
    fn known(&self, name: &str) -> bool;

    /// Whether discovery has delivered its first view: what `/ready` answers.
    fn synced(&self) -> bool;

    /// Workers that speak OpenAI's API themselves: requests go to them as they came, and none to `generate`.
    fn proxy(&self) -> Option<&Arc<Proxy>> {
        None
    }

    /// What keeps the router from choosing as well as it should, although requests are served.
    fn warnings(&self) -> Vec<Warning> {
        Vec::new()
    }

    /// Every worker that is known, also where no request can go, by name.
    fn worker_status(&self) -> Vec<WorkerStatus> {
        Vec::new()
    }

    /// The workers a decision chooses among.
    fn workers(&self) -> WorkerSet {
        WorkerSet::default()
    }

    /// Where a request would go now, and why. Changes nothing.
    fn explain(&self, request: &Generate, _options: &RouteOptions) -> Result<Explained, DispatchError> {
        Err(DispatchError::NoWorker { model: request.model.clone() })
    }

    /// The decisions about a request that are still known, oldest first: one for each attempt.
    fn decisions(&self, _request: &str) -> Vec<Record> {
        Vec::new()
    }

    /// Chooses a worker and starts the request there; retries on other workers while no token has been delivered.
    fn generate(
        &self,
        request: Generate,
        options: RouteOptions,
    ) -> impl Future<Output = Result<Routed, DispatchError>> + Send;
}
