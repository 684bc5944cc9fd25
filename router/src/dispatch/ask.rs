//! One request on its way to a worker: its prompt as blocks, and where it may go.

use kv_hashing::{BlockHash, BlockSize, HashSpace, sequence_hashes};
use kv_index::{Overlaps, WorkerId, WorkerRank};
use protocol::request_plane::Generate;
use routing::{CostConfig, KvFormat, Mode, Prompt, Request, RequestNames, Role, Roles, Target};

use super::queue::Rank;
use crate::backend::{DispatchError, RouteOptions, RoutingHints};

/// What decisions about a request need to know of it.
pub(crate) struct Ask {
    /// What it is called.
    pub(crate) id: RequestNames,
    pub(crate) model: String,
    lora: String,
    /// Hashes of its full blocks, each alone.
    pub(crate) blocks: Vec<BlockHash>,
    pub(super) prompt: Prompt,
    pinned: Option<Target>,
    /// The header or the field that names that worker.
    pub(super) pinned_by: Option<&'static str>,
    /// Workers of which roles may run it now.
    roles: Roles,
    /// Kinds of KV that theirs has to fit.
    partners: Option<Vec<KvFormat>>,
    /// How the worker is picked, if not as for whole requests.
    pub(super) mode: Option<Mode>,
    /// Its answer has begun, elsewhere.
    begun: bool,
    /// The KV of its prompt is fetched, and not computed.
    pub(super) fetches: bool,
    pub(super) hints: RoutingHints,
    /// Weights of its own.
    cost: Option<CostConfig>,
    /// Workers that it must not go to: those it named itself, and those that failed it.
    excluded: Vec<Target>,
}

impl Ask {
    /// Cost: hashing the prompt.
    pub(super) fn new(
        request: &Generate,
        options: &RouteOptions,
        size: BlockSize,
        cost: &CostConfig,
    ) -> Result<Self, DispatchError> {
        let space = HashSpace::new(Some(&request.lora), Some(&request.cache_namespace));
        let blocks = space.blocks(&request.token_ids, size);
        let prompt =
            Prompt { blocks: sequence_hashes(&blocks).into(), tokens: request.token_ids.len(), block_size: size };
        let ask = Self::of(&request.request_id, &request.model, (blocks, prompt), options, cost)?;
        Ok(Self { lora: request.lora.clone(), ..ask })
    }

    /// From a prompt that has been cut into blocks: the hashes of each alone, and as the load sees them.
    pub(crate) fn of(
        id: &str,
        model: &str,
        (blocks, prompt): (Vec<BlockHash>, Prompt),
        options: &RouteOptions,
        cost: &CostConfig,
    ) -> Result<Self, DispatchError> {
        let hints = options.hints.clone();
        let own_cost = (!hints.cost.is_empty()).then(|| hints.cost.apply(cost)).transpose();
        let pin = |worker| Target { worker: WorkerId(worker), dp_rank: hints.dp_rank };
        Ok(Self {
            id: RequestNames::new(id, options.known_as.clone()),
            model: model.to_owned(),
            lora: String::new(),
            blocks,
            prompt,
            pinned: options.pinned_worker.map(pin),
            pinned_by: options.pinned_by,
            roles: Roles::WHOLE,
            partners: None,
            mode: None,
            begun: false,
            fetches: false,
            cost: own_cost.map_err(|error| DispatchError::Invalid(error.to_string()))?,
            excluded: hints.excluded.iter().map(|worker| Target::worker(WorkerId(*worker))).collect(),
            hints,
        })
    }

    /// Its prompt alone is to be placed now: by `mode`, at a prefill worker whose KV fits one of `partners`.
    pub(super) fn split(&mut self, mode: Option<Mode>, partners: Option<Vec<KvFormat>>) {
        (self.roles, self.mode, self.partners) = (Roles::only(Role::Prefill), mode, partners);
    }

    /// What is left of it is to be placed now; the KV of its prompt is fetched from a worker of this kind, or computed.
    pub(super) fn join(&mut self, fetched_from: Option<&KvFormat>) {
        (self.roles, self.mode, self.fetches) = (Roles::WHOLE, None, fetched_from.is_some());
        self.partners = fetched_from.map(|kv| vec![kv.clone()]);
    }

    /// Takes over what has been generated of it: a worker has to compute that too. It waits no more: it
    /// waited once, and somebody reads its answer. Cost: hashing the prompt.
    pub(super) fn resume(&mut self, request: &Generate) {
        let space = HashSpace::new(Some(&request.lora), Some(&request.cache_namespace));
        self.blocks = space.blocks(&request.token_ids, self.prompt.block_size);
        let generated = request.token_ids.len().saturating_sub(self.prompt.tokens) as u32;
        self.prompt.blocks = sequence_hashes(&self.blocks).into();
        self.prompt.tokens = request.token_ids.len();
        self.begun = true;
        self.hints.expected_output_tokens = self.hints.expected_output_tokens.map(|n| n.saturating_sub(generated));
    }

    /// Tokens per block of its prompt.
    pub(super) fn block_size(&self) -> BlockSize {
        self.prompt.block_size
    }

    /// As a decision sees it.
    pub(crate) fn request(&self) -> Request<'_> {
        Request {
            lora: (!self.lora.is_empty()).then_some(self.lora.as_str()),
            revision: self.hints.revision.as_deref(),
            labels: &self.hints.labels,
            pinned: self.pinned,
            roles: self.roles,
            partners: self.partners.as_deref(),
            mode: self.mode,
            begun: self.begun,
            excluded: &self.excluded,
            cost: self.cost,
            ..Request::new(&self.model, &self.prompt)
        }
    }

    /// Whether it names the worker that is to answer it.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// It is not to go to this worker again.
    pub(crate) fn failed_at(&mut self, worker: WorkerId) {
        self.excluded.push(Target::worker(worker));
    }

    /// It may go to this worker again.
    pub(super) fn forgive(&mut self, worker: WorkerId) {
        self.excluded.retain(|target| *target != Target::worker(worker));
    }

    /// Of the worker that failed it last, only this rank did: others of it may have room.
    pub(super) fn failed_at_rank(&mut self, rank: WorkerRank) {
        if let Some(last) = self.excluded.last_mut().filter(|last| last.worker == rank.worker) {
            last.dp_rank = Some(rank.dp_rank);
        }
    }

    /// What its wait depends on, given what workers hold of its prompt.
    pub(super) fn rank(&self, overlaps: &Overlaps) -> Rank {
        let cached = overlaps.iter().map(|(_, blocks)| blocks.total()).max().unwrap_or(0) as usize;
        Rank {
            strict_priority: self.hints.strict_priority,
            priority: self.hints.priority,
            uncached_tokens: self.prompt.tokens.saturating_sub(cached * self.prompt.block_size.get()),
            constrained: self.request().is_constrained(),
        }
    }
}
