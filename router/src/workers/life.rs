//! One life of a worker: its connection, its event feed, and what is known of its health.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use kv_hashing::BlockSize;
use kv_index::{PrefixIndex, WorkerId, WorkerRank};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::models::ModelKey;
use crate::discovery::WorkerSpec;
use crate::ingest::{self, Feed};
use crate::metrics::CoreMetrics;
use crate::request_plane::{Client, Target};

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
    /// The connection.
    pub(crate) client: Arc<Client>,
    changed: Arc<Notify>,
    /// Ends the life.
    stop: CancellationToken,
    /// Ends the present feed alone; a child of `stop`.
    stop_events: Mutex<CancellationToken>,
    /// Whether the feed has applied all that it knows of.
    events_live: Arc<AtomicBool>,
    unexpected: AtomicU32,
    hash_mismatch: AtomicBool,
}

impl Life {
    /// Starts the connection.
    pub(super) fn start(
        spec: Arc<WorkerSpec>,
        order: u64,
        router_id: Arc<str>,
        connect: Duration,
        changed: Arc<Notify>,
    ) -> Arc<Self> {
        let stop = CancellationToken::new();
        let target = Target { address: spec.address.clone(), identity: spec.identity.clone(), router_id };
        let client = Arc::new(Client::start(target, connect, changed.clone(), stop.clone()));
        Arc::new(Self {
            model_key: ModelKey::of(&spec.card),
            spec: ArcSwap::new(spec),
            order,
            client,
            changed,
            stop_events: Mutex::new(stop.child_token()),
            events_live: Arc::default(),
            stop,
            unexpected: AtomicU32::new(0),
            hash_mismatch: AtomicBool::new(false),
        })
    }

    /// Starts following its KV events, if it publishes any.
    pub(super) fn follow_events(&self, index: &Arc<RwLock<PrefixIndex>>, metrics: &Arc<CoreMetrics>) {
        let spec = self.spec();
        let Some(events) = spec.events.clone() else { return };
        ingest::start(Feed {
            worker: self.worker_id(),
            name: spec.name.clone(),
            ranks: self.ranks(),
            total_blocks: spec.card.runtime_config.total_kv_blocks,
            live: self.events_live.clone(),
            events,
            client: self.client.clone(),
            index: index.clone(),
            metrics: metrics.clone(),
            stop: self.stop_events.lock().clone(),
        });
    }

    /// Starts a fresh feed if the last one was stopped: the events are of use after all.
    pub(super) fn resume_events(&self, index: &Arc<RwLock<PrefixIndex>>, metrics: &Arc<CoreMetrics>) {
        {
            let mut stop_events = self.stop_events.lock();
            if !stop_events.is_cancelled() || self.stop.is_cancelled() {
                return;
            }
            *stop_events = self.stop.child_token();
        }
        self.unexpected.store(0, Ordering::Relaxed);
        self.hash_mismatch.store(false, Ordering::Relaxed);
        self.follow_events(index, metrics);
    }

    /// Nothing new goes there. Open streams may end.
    pub(super) fn retire(&self) {
        self.stop.cancel();
    }

    /// Its events are of no use. False when that was known.
    pub(super) fn stop_events(&self) -> bool {
        let stop_events = self.stop_events.lock();
        let first = !stop_events.is_cancelled();
        stop_events.cancel();
        first
    }

    /// Whether a request's reuse can not be predicted from its events.
    pub(super) fn events_unusable(&self) -> bool {
        self.stop_events.lock().is_cancelled() || self.hash_mismatch.load(Ordering::Relaxed)
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

    fn ranks(&self) -> u32 {
        self.spec.load().card.runtime_config.data_parallel_size.unwrap_or(1).clamp(1, MAX_RANKS)
    }

    /// It as the decision sees it. A prefill worker takes no whole requests: it is none. A request says nothing of ranks, and a
    /// worker gives it to its first one; so that one alone is offered, and the load of the others stays out of sight.
    pub(super) fn routing_worker(&self) -> Option<routing::Worker> {
        let spec = self.spec();
        if spec.card.worker_type.as_deref() == Some("prefill") {
            return None;
        }
        Some(routing::Worker {
            rank: WorkerRank { worker: self.worker_id(), dp_rank: 0 },
            name: spec.name.as_str().into(),
            model: spec.card.display_name.as_str().into(),
            draining: self.is_draining(),
        })
    }
}
