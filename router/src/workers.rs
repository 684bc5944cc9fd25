//! The workers this router knows: one connection and one event feed for each life of a worker, and the view that requests
//! are routed by.
//!
//! One task owns all of it: it takes whole views from discovery, starts and retires lives, loads models, and publishes what
//! follows as one immutable [`ClusterView`]. Requests read the view without locks. A worker is routable once its card is
//! known and its model loaded; its event state may still be on its way.

mod life;
mod models;
mod trouble;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use kv_hashing::BlockSize;
use kv_index::WorkerId;
use routing::{Role, RouterId, WorkerSet};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::backend::ServedModel;
use crate::config::Deadlines;
use crate::discovery::{Identity, View, WorkerSpec};
use crate::dispatch::PrefillPool;
use crate::dispatch::booking::Placement;
use crate::index::Indexer;
use crate::index::config::IndexSettings;
use crate::metrics::CoreMetrics;
use crate::request_plane::Caller;
pub(crate) use life::Life;
use models::{ModelKey, Models};
pub(crate) use trouble::{Silence, Trouble};

/// Tokens per block where a card does not say; only the load is counted in them then.
const DEFAULT_BLOCK_SIZE: BlockSize = BlockSize::new(16).expect("not zero");

/// How long prefill workers that cannot be reached count as starting.
const STARTING: Duration = Duration::from_secs(10);

/// Most model names remembered, those that are announced now apart: enough for years of rollouts.
const NAMES: usize = 1024;

/// What every part of the core shares.
pub(crate) struct Cluster {
    /// What requests are routed by; replaced as a whole.
    pub(crate) view: ArcSwap<ClusterView>,
    /// Which worker holds which prefix.
    pub(crate) index: Arc<Indexer>,
    /// Counters.
    pub(crate) metrics: Arc<CoreMetrics>,
    /// Notified when a worker becomes reachable, unreachable or draining, or its events become unusable.
    pub(crate) changed: Arc<Notify>,
    /// Notified when a new view is published.
    pub(crate) published: Notify,
    /// This router among its peers.
    pub(crate) own: RouterId,
    synced: AtomicBool,
    /// Whether KV events are followed.
    pub(crate) kv_events: bool,
    deadlines: Deadlines,
    caller: Arc<Caller>,
}

impl Cluster {
    /// An empty cluster.
    pub(crate) fn new(index: &IndexSettings, deadlines: Deadlines, metrics: Arc<CoreMetrics>) -> Self {
        let own = RouterId(rand::random());
        Self {
            view: ArcSwap::default(),
            index: Arc::new(Indexer::start(index, metrics.clone())),
            metrics,
            changed: Arc::default(),
            published: Notify::new(),
            own,
            synced: AtomicBool::new(false),
            kv_events: index.events,
            deadlines,
            caller: Caller::new(format!("{:016x}", own.0)),
        }
    }

    /// Whether discovery has delivered a view.
    pub(crate) fn synced(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    /// Discovery has delivered a view.
    pub(crate) fn set_synced(&self) {
        self.synced.store(true, Ordering::Release);
    }
}

/// A snapshot of what can be routed.
#[derive(Default)]
pub(crate) struct ClusterView {
    /// By instance id.
    pub(crate) workers: HashMap<WorkerId, Arc<Life>>,
    /// By name.
    pub(crate) models: HashMap<String, ModelView>,
    /// Workers with a loaded model, for the decision.
    pub(crate) set: WorkerSet,
    /// When each model name was first seen, in seconds since 1970; also of models that no worker announces any more.
    pub(crate) created: Arc<HashMap<String, u64>>,
}

/// A model with workers.
pub(crate) struct ModelView {
    /// What the frontend sees.
    pub(crate) served: Arc<ServedModel>,
    /// What prompts are cut by.
    pub(crate) block_size: BlockSize,
    /// Those of them that compute prompts for others.
    pub(crate) prefill: PrefillPool,
}

/// Keeps the cluster's view until `shutdown`.
pub(crate) async fn run(
    cluster: Arc<Cluster>,
    placement: Arc<Placement>,
    mut discovery: watch::Receiver<Option<View>>,
    shutdown: CancellationToken,
) {
    let (lives, models, created) = Default::default();
    let mut workers = Workers { cluster, placement, lives, models, seen: 0, created };
    let mut discovering = true;
    loop {
        let retry = workers.models.retry_at();
        tokio::select! {
            () = shutdown.cancelled() => break,
            changed = discovery.changed(), if discovering => {
                let view = discovery.borrow_and_update().clone();
                if let Some(view) = view {
                    workers.reconcile(&view).await;
                }
                // Discovery ends only with the process; what is known stays.
                discovering = changed.is_ok();
            }
            () = workers.cluster.changed.notified() => {}
            () = workers.models.loaded() => {}
            () = sleep_until(retry.unwrap_or_else(Instant::now)), if retry.is_some() => {}
        }
        workers.end_lapsed().await;
        workers.models.load_missing(workers.lives.values());
        workers.publish().await;
    }
    workers.lives.values().for_each(|life| life.retire());
}

struct Workers {
    cluster: Arc<Cluster>,
    placement: Arc<Placement>,
    lives: BTreeMap<Identity, Arc<Life>>,
    models: Models,
    /// Lives started so far.
    seen: u64,
    /// See [`ClusterView::created`].
    created: Arc<HashMap<String, u64>>,
}

impl Workers {
    /// Makes the lives those of `view`.
    async fn reconcile(&mut self, view: &View) {
        let specs: BTreeMap<&Identity, &Arc<WorkerSpec>> = view.iter().map(|spec| (&spec.identity, spec)).collect();
        let gone: Vec<Identity> = self
            .lives
            .iter()
            .filter(|(identity, life)| specs.get(identity).is_none_or(|spec| !life.same_addresses(spec)))
            .map(|(identity, _)| identity.clone())
            .collect();
        for identity in gone {
            if let Some(life) = self.lives.remove(&identity) {
                tracing::info!(worker = %life.spec().name, "worker left");
                self.end(&life).await;
            }
        }
        for (identity, spec) in specs {
            match self.lives.get(identity) {
                Some(life) => life.update(spec),
                // Left behind, or of a life that ended.
                None if spec.lapsed => {}
                None => {
                    tracing::info!(worker = %spec.name, address = %spec.address, model = %spec.card.display_name, "worker found");
                    self.seen += 1;
                    let life = self.start(spec.clone()).await;
                    self.lives.insert(identity.clone(), life);
                }
            }
        }
        self.cluster.set_synced();
    }

    /// Ends the lives that nobody vouches for any more: the worker has not renewed what it says of itself, and its connection is
    /// lost. While that lives the worker does, whatever keeps it from writing.
    async fn end_lapsed(&mut self) {
        let lost = |life: &Arc<Life>| life.spec().lapsed && life.client.is_down();
        let lost: Vec<Arc<Life>> = self.lives.extract_if(.., |_, life| lost(life)).map(|(_, life)| life).collect();
        for life in lost {
            tracing::info!(worker = %life.spec().name, "worker left: it is neither announced nor connected any more");
            self.end(&life).await;
        }
    }

    async fn start(&self, spec: Arc<WorkerSpec>) -> Arc<Life> {
        let Cluster { caller, deadlines, changed, .. } = &*self.cluster;
        let patience = self.cluster.index.check_every();
        let life = Life::start(spec, self.seen, caller.clone(), deadlines.connect, patience, changed.clone());
        let Cluster { index, metrics, kv_events, .. } = &*self.cluster;
        if !kv_events {
            life.follow_load(&self.placement, metrics);
            life.tell_capacity(index).await;
        } else if life.hashes_differ() {
            tracing::warn!(worker = %life.spec().name, "the worker hashes blocks otherwise than this router: its KV events are ignored");
            life.follow_load(&self.placement, metrics);
        } else {
            life.follow_events(index, &self.placement, metrics);
        }
        life
    }

    /// Retires a life, and drops what it held. Its feed adds nothing after it has been retired.
    async fn end(&self, life: &Life) {
        life.retire();
        self.placement.remove_worker(life.worker_id());
        self.cluster.index.remove_worker(life.worker_id()).await;
    }

    /// Publishes a view of the present state.
    async fn publish(&mut self) {
        let announced = self.lives.values().map(|life| life.spec().card.display_name.clone()).collect();
        remember(&mut self.created, &announced, now_s());
        let mut models = HashMap::new();
        let mut routable = Vec::new();
        let mut troubles = Vec::new();
        for (name, key) in self.served_variants() {
            let Some(model) = self.models.get(&key) else { continue };
            let mut lives: Vec<&Arc<Life>> = self
                .lives
                .values()
                .filter(|life| life.spec().card.display_name == name && *life.model_key() == key)
                .collect();
            lives.sort_by_key(|life| life.order());
            // Nothing sends requests to prefill workers by themselves: a model that has no others cannot be served.
            if lives.iter().all(|life| life.role() == Role::Prefill) {
                continue;
            }
            // The oldest life decides the block size, so that a newcomer cannot void the events of all the others.
            let Some((oldest, newest)) = lives.first().zip(lives.last()) else { continue };
            let block_size = oldest.block_size();
            for life in &lives {
                if self.cluster.kv_events {
                    self.measure(life, block_size).await;
                    troubles.extend(life.trouble());
                }
                routable.extend(life.routing_workers());
            }
            let created_s = self.created.get(&name).copied().unwrap_or_else(now_s);
            let mut card = newest.spec().card.clone();
            // A request must fit into whichever worker it comes to, also in its middle.
            let contexts = lives.iter().map(|life| life.spec().card.context_length).filter(|context| *context > 0);
            card.context_length = contexts.min().unwrap_or(0);
            let served = Arc::new(ServedModel { card, model: model.clone(), created_s });
            let (block_size, prefill) = (block_size.unwrap_or(DEFAULT_BLOCK_SIZE), prefill_pool(&lives));
            models.insert(name, ModelView { served, block_size, prefill });
        }
        let set: WorkerSet = routable.into_iter().collect();
        let open = |worker: &&routing::Worker| worker.rank.dp_rank == 0 && !worker.draining && !worker.unreachable;
        let open = set.iter().filter(open).count();
        let metrics = &self.cluster.metrics;
        metrics.workers_known.set(self.lives.len() as i64);
        metrics.workers_routable.set(open as i64);
        Trouble::show(&troubles, metrics);
        let workers = self.lives.values().map(|life| (life.worker_id(), life.clone())).collect();
        self.cluster.view.store(Arc::new(ClusterView { workers, models, set, created: self.created.clone() }));
        self.cluster.published.notify_waiters();
    }

    /// Of each model name, the variant (set of files) that most workers serve. Prompts are tokenized by one variant, so workers
    /// of another one, as in the middle of a rollout, must not get them.
    fn served_variants(&self) -> BTreeMap<String, ModelKey> {
        let mut counts: BTreeMap<(String, ModelKey), (usize, u64)> = BTreeMap::new();
        for life in self.lives.values() {
            let spec = life.spec();
            if self.models.get(life.model_key()).is_some() {
                let count = counts.entry((spec.card.display_name.clone(), life.model_key().clone())).or_default();
                *count = (count.0 + usize::from(!life.is_draining()), count.1.max(life.order()));
            }
        }
        let mut best: BTreeMap<String, (ModelKey, (usize, u64))> = BTreeMap::new();
        for ((name, key), count) in counts {
            match best.get(&name) {
                Some((_, other)) if *other >= count => {}
                _ => {
                    best.insert(name, (key, count));
                }
            }
        }
        best.into_iter().map(|(name, (key, _))| (name, key)).collect()
    }

    /// Follows a worker's events if its blocks are of the size that its model is served with, and its load in any case. The size
    /// changes when the oldest worker leaves.
    async fn measure(&self, life: &Life, served: Option<BlockSize>) {
        let Cluster { index, metrics, .. } = &*self.cluster;
        if life.hashes_differ() {
            return;
        }
        if served.is_some_and(|size| life.block_size() == Some(size)) {
            life.follow_events(index, &self.placement, metrics);
            return;
        }
        if !life.follow_load(&self.placement, metrics) {
            return;
        }
        let (own, served) = (life.block_size().map(BlockSize::get), served.map(BlockSize::get));
        tracing::warn!(worker = %life.spec().name, ?own, ?served, "the worker's block size differs from its model's: its KV events are ignored");
        index.remove_worker(life.worker_id()).await;
    }
}

/// What there is of prefill workers among those of a model. Those that leave take nothing new, and are as good as gone.
fn prefill_pool(lives: &[&Arc<Life>]) -> PrefillPool {
    let (own, others): (Vec<&Arc<Life>>, Vec<&Arc<Life>>) = lives.iter().partition(|life| life.role() == Role::Prefill);
    if !others.iter().any(|life| life.is_routable()) {
        return PrefillPool::None;
    }
    let stay: Vec<_> = own.into_iter().filter(|life| !life.is_draining()).collect();
    // A request waits while the first connection is being made.
    if stay.iter().any(|life| life.was_reached() || life.is_routable()) {
        return PrefillPool::Open;
    }
    let newest = stay.iter().map(|life| life.since()).max();
    newest.map_or(PrefillPool::None, |since| PrefillPool::Starting(since + STARTING))
}

/// Adds the names that are new; of too many, the oldest that nobody announces are forgotten.
pub(crate) fn remember(created: &mut Arc<HashMap<String, u64>>, announced: &HashSet<String>, now_s: u64) {
    if announced.iter().all(|name| created.contains_key(name)) {
        return;
    }
    let created = Arc::make_mut(created);
    for name in announced {
        created.entry(name.clone()).or_insert(now_s);
    }
    while created.len() > NAMES {
        let past = created.iter().filter(|(name, _)| !announced.contains(*name));
        let Some(oldest) = past.min_by_key(|(_, first_s)| **first_s).map(|(name, _)| name.clone()) else { break };
        created.remove(&oldest);
    }
}

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_remembered_and_of_too_many_the_oldest_go() {
        let mut created = Arc::default();
        let stays = HashSet::from(["stays".to_owned()]);
        remember(&mut created, &stays, 0);
        for n in 1..NAMES as u64 + 10 {
            let announced = HashSet::from(["stays".to_owned(), format!("m{n}")]);
            remember(&mut created, &announced, n);
            assert_eq!(created.get("stays"), Some(&0), "announced all the time");
        }
        assert_eq!(created.len(), NAMES);
        assert!(!created.contains_key("m1") && created.contains_key(&format!("m{NAMES}")));
        let before = created.clone();
        remember(&mut created, &stays, 5000);
        assert!(Arc::ptr_eq(&before, &created), "nothing new, nothing copied");
    }
}
