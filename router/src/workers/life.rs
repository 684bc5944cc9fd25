//! One life of a worker: its connection, its event feed, and what is known of its health.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use kv_hashing::BlockSize;
use kv_index::{WorkerId, WorkerRank};
use parking_lot::Mutex;
use protocol::metadata;
use protocol::request_plane::Output;
use routing::{KvFormat, Role};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::models::ModelKey;
use super::trouble::{Silence, Trouble};
use crate::discovery::WorkerSpec;
use crate::dispatch::booking::Placement;
use crate::index::Indexer;
use crate::ingest::load::LoadFeed;
use crate::ingest::{self, Feed};
use crate::metrics::CoreMetrics;
use crate::request_plane::{Caller, Client, Target};

/// Requests in a row that reused blocks of which the index knows none, before the worker's hashes are taken to differ from ours.
const UNEXPECTED: u32 = 3;

/// Most data-parallel ranks a card may claim.
const MAX_RANKS: u32 = 1024;

/// One life of a worker.
pub(crate) struct Life {
    spec: ArcSwap<WorkerSpec>,
    model_key: ModelKey,
    /// Rises with each life.
    order: u64,
    since: Instant,
    /// The connection.
    pub(crate) client: Arc<Client>,
    changed: Arc<Notify>,
    /// Ends the life.
    stop: CancellationToken,
    following: Mutex<Option<Following>>,
    /// Whether the feed has applied all that it knows of.
    events_live: Arc<AtomicBool>,
    unexpected: AtomicU32,
    hash_mismatch: AtomicBool,
    /// Its card says that it hashes blocks otherwise than we do.
    hashes_differ: bool,
    silence: Arc<Silence>,
}

/// What is read of its publisher at present.
struct Following {
    /// Its KV events and its load; if not, its load alone.
    events: bool,
    /// Ends the feed alone; a child of the life's.
    stop: CancellationToken,
}

impl Life {
    /// Starts the connection. Events may be on their way for as long as `patience`.
    pub(super) fn start(
        spec: Arc<WorkerSpec>,
        order: u64,
        caller: Arc<Caller>,
        connect: Duration,
        patience: Duration,
        changed: Arc<Notify>,
    ) -> Arc<Self> {
        let stop = CancellationToken::new();
        let hashes_differ = hashes_differ(&spec);
        let target = Target { address: spec.address.clone(), identity: spec.identity.clone(), caller };
        let client = Arc::new(Client::start(target, connect, changed.clone(), stop.clone()));
        Arc::new(Self {
            model_key: ModelKey::of(&spec.card),
            spec: ArcSwap::new(spec),
            order,
            since: Instant::now(),
            client,
            silence: Arc::new(Silence::new(patience, changed.clone())),
            hashes_differ,
            changed,
            following: Mutex::default(),
            events_live: Arc::default(),
            stop,
            unexpected: AtomicU32::new(0),
            hash_mismatch: AtomicBool::new(false),
        })
    }

    /// From now on follows its KV events, if it publishes any, and its load: with a fresh feed, unless it did already.
    pub(super) fn follow_events(&self, index: &Arc<Indexer>, placement: &Arc<Placement>, metrics: &Arc<CoreMetrics>) {
        let Some(stop) = self.follow(true) else { return };
        self.unexpected.store(0, Ordering::Relaxed);
        self.hash_mismatch.store(false, Ordering::Relaxed);
        let spec = self.spec();
        let Some(events) = spec.events.clone() else { return };
        ingest::start(Feed {
            worker: self.worker_id(),
            name: spec.name.clone(),
            ranks: self.ranks(),
            total_blocks: spec.card.runtime_config.total_kv_blocks,
            tier_blocks: spec.card.armature.as_ref().and_then(|card| card.tier_blocks),
            samples: spec.card.armature.as_ref().is_some_and(|card| card.answers_samples),
            silence: self.silence.clone(),
            live: self.events_live.clone(),
            events,
            client: self.client.clone(),
            index: index.clone(),
            placement: placement.clone(),
            metrics: metrics.clone(),
            stop,
        });
    }

    /// From now on follows what it says of its load, and no KV events; false if that was so before. Whoever calls it removes from
    /// the index what events told.
    pub(super) fn follow_load(&self, placement: &Arc<Placement>, metrics: &Arc<CoreMetrics>) -> bool {
        let Some(stop) = self.follow(false) else { return false };
        let Some(events) = self.spec().events.clone() else { return true };
        ingest::load::follow(LoadFeed {
            worker: self.worker_id(),
            ranks: self.ranks(),
            events,
            client: self.client.clone(),
            placement: placement.clone(),
            metrics: metrics.clone(),
            stop,
        });
        true
    }

    /// Ends the present feed, and returns what ends the next one. `None`: nothing changes, or the life has ended.
    fn follow(&self, events: bool) -> Option<CancellationToken> {
        let mut following = self.following.lock();
        if self.stop.is_cancelled() || following.as_ref().is_some_and(|present| present.events == events) {
            return None;
        }
        let stop = self.stop.child_token();
        if let Some(before) = following.replace(Following { events, stop: stop.clone() }) {
            before.stop.cancel();
        }
        Some(stop)
    }

    fn follows_events(&self) -> bool {
        self.following.lock().as_ref().is_some_and(|following| following.events)
    }

    /// Without events, what is guessed of it is bounded by what it says it has room for.
    pub(super) async fn tell_capacity(&self, index: &Indexer) {
        let total = self.spec().card.runtime_config.total_kv_blocks;
        index.expect_worker(self.worker_id(), self.ranks(), total, &self.stop).await;
    }

    /// Nothing new goes there. Open streams may end.
    pub(super) fn retire(&self) {
        self.stop.cancel();
    }

    /// Why a request's reuse can not be predicted from its events, if it can not.
    pub(crate) fn trouble(&self) -> Option<Trouble> {
        if self.hashes_differ {
            Some(Trouble::Hashes)
        } else if !self.follows_events() {
            Some(Trouble::BlockSize)
        } else if self.hash_mismatch.load(Ordering::Relaxed) {
            Some(Trouble::Reuse)
        } else {
            self.silence.is_silent().then_some(Trouble::Silence)
        }
    }

    /// Whether its card says that it hashes blocks otherwise than we do.
    pub(super) fn hashes_differ(&self) -> bool {
        self.hashes_differ
    }

    /// Takes note of a request's prefill: where it computed new blocks, an event should tell of them. The last block is computed
    /// again even if it is held, and whoever wants the prompt's log-probabilities has all of them computed again.
    pub(crate) fn prefilled(&self, output: &Output) {
        let fresh = output.prompt_blocks > output.reused_blocks.saturating_add(1) && output.prompt_logprobs.is_empty();
        let spec = self.spec();
        let Some(events) = spec.events.as_ref().filter(|_| fresh && self.follows_events()) else { return };
        if self.silence.computed() {
            tracing::warn!(worker = %spec.name, events, "the worker announces KV events and computes blocks, but no event comes");
        }
    }

    /// Takes note of a request that reused blocks, and of whether the index knows any of them. Reuse of which it never does means
    /// that the worker hashes otherwise than we do: then the index is blind for it, which somebody should know.
    pub(crate) fn compare_reuse(&self, known: bool) {
        if known {
            self.unexpected.store(0, Ordering::Relaxed);
            if self.hash_mismatch.swap(false, Ordering::Relaxed) {
                self.changed.notify_one();
            }
        } else if self.events_live.load(Ordering::Relaxed)
            && self.unexpected.fetch_add(1, Ordering::Relaxed) + 1 >= UNEXPECTED
            && !self.hash_mismatch.swap(true, Ordering::Relaxed)
        {
            let worker = &self.spec().name;
            tracing::warn!(
                worker,
                "the worker reuses blocks that its KV events never announced: are its block hashes ours?"
            );
            self.changed.notify_one();
        }
    }

    /// What discovery says of it now.
    pub(crate) fn spec(&self) -> Arc<WorkerSpec> {
        self.spec.load_full()
    }

    pub(super) fn update(&self, spec: &Arc<WorkerSpec>) {
        self.spec.store(spec.clone());
    }

    /// Whether connection and feed still lead to the right places, and the model is the same.
    pub(super) fn same_addresses(&self, spec: &WorkerSpec) -> bool {
        let own = self.spec();
        own.address == spec.address && own.events == spec.events && self.model_key == ModelKey::of(&spec.card)
    }

    pub(crate) fn worker_id(&self) -> WorkerId {
        WorkerId(self.spec.load().identity.instance_id)
    }

    pub(super) fn model_key(&self) -> &ModelKey {
        &self.model_key
    }

    pub(super) fn order(&self) -> u64 {
        self.order
    }

    pub(super) fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.spec.load().card.kv_cache_block_size)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.client.is_draining() || self.spec.load().card.armature.as_ref().is_some_and(|card| card.draining)
    }

    /// When it began.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Whether a request could go to it now.
    pub(super) fn is_routable(&self) -> bool {
        !self.is_draining() && !self.client.is_down()
    }

    /// Whether there was a connection to it at any time.
    pub(super) fn was_reached(&self) -> bool {
        self.client.was_up()
    }

    fn ranks(&self) -> u32 {
        self.spec.load().card.runtime_config.data_parallel_size.unwrap_or(1).clamp(1, MAX_RANKS)
    }

    /// Which part of requests it runs.
    pub(super) fn role(&self) -> Role {
        self.spec.load().card.worker_type.as_deref().and_then(Role::from_name).unwrap_or_default()
    }

    /// The KV that it makes.
    pub(crate) fn kv_format(&self) -> KvFormat {
        let spec = self.spec.load();
        let card = spec.card.armature.as_ref();
        card.map_or_else(KvFormat::default, |card| KvFormat {
            revision: card.kv_revision.as_deref().map(Arc::from),
            layout: card.kv_layout.as_deref().map(Arc::from),
        })
    }

    /// It as decisions see it: each of its ranks, which have a cache and a load of their own.
    pub(crate) fn routing_workers(&self) -> impl Iterator<Item = routing::Worker> {
        let (first, ranks) = (self.first_rank(), self.ranks());
        (0..ranks).map(move |dp_rank| routing::Worker { rank: WorkerRank { dp_rank, ..first.rank }, ..first.clone() })
    }

    fn first_rank(&self) -> routing::Worker {
        let spec = self.spec();
        let card = &spec.card;
        let capacity =
            |count: Option<u64>| count.and_then(|count| u32::try_from(count).ok()).filter(|count| *count > 0);
        let rank = WorkerRank { worker: self.worker_id(), dp_rank: 0 };
        let mut worker = routing::Worker::new(rank, spec.name.as_str(), card.display_name.as_str());
        worker.role = self.role();
        worker.kv = self.kv_format();
        worker.total_blocks = capacity(card.runtime_config.total_kv_blocks);
        worker.max_batched_tokens = capacity(card.runtime_config.max_num_batched_tokens);
        worker.draining = self.is_draining();
        worker.unreachable = self.client.is_down();
        worker.adapters = card.adapter().map(Arc::from).into_iter().collect();
        if let Some(own) = &card.armature {
            worker.revision = own.revision.as_str().into();
            worker.labels =
                own.labels.iter().map(|(name, value)| (name.as_str().into(), value.as_str().into())).collect();
        }
        worker
    }
}

/// Whether a card's probe says that the worker hashes blocks otherwise than we do. Without one, requests will tell.
fn hashes_differ(spec: &WorkerSpec) -> bool {
    let Some(card) = spec.card.armature.as_ref().filter(|card| !card.block_hash_probe.is_empty()) else { return false };
    let size = BlockSize::new(spec.card.kv_cache_block_size);
    size.is_some_and(|size| card.block_hash_probe != metadata::block_hash_probe(size))
}
