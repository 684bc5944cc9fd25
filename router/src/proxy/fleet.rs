//! All servers together: what can be routed now, published as one view whenever something changes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kv_hashing::BlockSize;
use protocol::metadata::ModelCard;
use routing::{Worker, WorkerSet};
use tokio::time::{Instant, sleep_until};

use super::Proxy;
use super::server::{Health, ListedModel, Server, Status};
use crate::backend::ServedModel;
use crate::dispatch::PrefillPool;
use crate::model::Model;
use crate::workers::{ClusterView, ModelView, Trouble, now_s, remember};

/// Longest wait for the first checks: a router is ready when each server has answered, or had the time to.
const FIRST: Duration = Duration::from_secs(2);

/// Where requests for one model name can go.
pub(crate) struct Route {
    /// What the frontend knows of the model.
    pub(super) served: Arc<ServedModel>,
    /// The servers that list it, well or not.
    pub(super) set: Arc<WorkerSet>,
    /// It is this LoRA adapter.
    pub(super) adapter: Option<String>,
    /// Prompts are tokenized as the servers do it.
    pub(super) exact: bool,
    /// Tokens per block.
    pub(super) block_size: BlockSize,
}

/// The routes, by model name.
pub(super) type Routes = HashMap<String, Arc<Route>>;

/// A server that lists a model.
struct Lister<'a> {
    server: &'a Server,
    status: &'a Status,
    model: &'a ListedModel,
}

/// The tokenizer that was given, and whose it is.
pub(super) struct Tokenizer {
    pub(super) model: Arc<Model>,
    /// The one model name that it belongs to.
    pub(super) name: Option<String>,
}

/// Publishes views for ever.
pub(super) async fn run(proxy: &Proxy) {
    let started = Instant::now();
    loop {
        let settled = publish(proxy).await || started.elapsed() >= FIRST;
        if settled {
            proxy.cluster.set_synced();
        }
        tokio::select! {
            () = proxy.changed.notified() => {}
            () = sleep_until(started + FIRST), if !settled => {}
        }
    }
}

/// Publishes what is known now. False while a server has not been asked.
async fn publish(proxy: &Proxy) -> bool {
    let statuses: Vec<(&Arc<Server>, Status)> =
        proxy.servers.values().map(|server| (server, server.status())).collect();
    for (server, status) in &statuses {
        if matches!(status.health, Health::Down { gone: true, .. }) {
            // What came to it is gone.
            let index = &proxy.cluster.index;
            index.remove_worker(server.id).await;
            index.expect_worker(server.id, 1, proxy.settings.total_blocks.map(u64::from), &proxy.life).await;
        }
    }
    let mut listed: BTreeMap<&str, Vec<Lister<'_>>> = BTreeMap::new();
    for (server, status) in &statuses {
        for model in status.models.iter() {
            listed.entry(&model.name).or_default().push(Lister { server, status, model });
        }
    }
    let mut created = proxy.cluster.view.load().created.clone();
    let names: HashSet<String> = listed.keys().map(|name| (*name).to_owned()).collect();
    remember(&mut created, &names, now_s());
    let route = |(name, listers): (&&str, &Vec<Lister<'_>>)| {
        let created_s = created.get(*name).copied().unwrap_or_else(now_s);
        ((*name).to_owned(), Arc::new(proxy.route(name, listers, created_s)))
    };
    let routes: Routes = listed.iter().map(route).collect();
    let well = statuses.iter().filter(|(_, status)| status.health == Health::Up).count();
    let set: WorkerSet =
        statuses.iter().filter_map(|(server, status)| Some(proxy.worker(server, status, base(status)?))).collect();
    let metrics = &proxy.cluster.metrics;
    metrics.workers_known.set(statuses.len() as i64);
    metrics.workers_routable.set(well as i64);
    let troubles: Vec<Trouble> = proxy.troubles().map(|(_, trouble)| trouble).collect();
    Trouble::show(&troubles, metrics);
    let models = routes.iter().map(|(name, route)| {
        let (served, block_size) = (route.served.clone(), route.block_size);
        let view = ModelView { served, block_size, prefill: PrefillPool::None };
        (name.clone(), view)
    });
    let view = ClusterView { workers: HashMap::new(), models: models.collect(), set, created };
    proxy.routes.store(Arc::new(routes));
    proxy.cluster.view.store(Arc::new(view));
    proxy.cluster.published.notify_waiters();
    statuses.iter().all(|(_, status)| status.health != Health::Unknown)
}

/// The model that a server is shown with: its adapters come with it.
fn base(status: &Status) -> Option<&str> {
    let base = status.models.iter().find(|model| !model.is_adapter).or(status.models.first());
    base.map(|model| model.name.as_str())
}

impl Proxy {
    fn worker(&self, server: &Server, status: &Status, model: &str) -> Worker {
        Worker {
            unreachable: status.health != Health::Up,
            total_blocks: self.settings.total_blocks,
            max_batched_tokens: self.settings.max_batched_tokens,
            ..Worker::new(server.rank(), server.name.clone(), model)
        }
    }

    fn route(&self, name: &str, listers: &[Lister<'_>], created_s: u64) -> Route {
        let is_adapter = listers.iter().any(|lister| lister.model.is_adapter);
        let tokenizer = self.tokenizer.as_ref().filter(|tokenizer| {
            let own = tokenizer.name.as_deref();
            own.is_none_or(|own| own == name || is_adapter)
        });
        let contexts = listers.iter().map(|lister| lister.model.context_length).filter(|context| *context > 0);
        let card = ModelCard {
            display_name: name.to_owned(),
            // What fits everywhere.
            context_length: contexts.min().unwrap_or(0),
            kv_cache_block_size: self.settings.block_size.get() as u32,
            ..ModelCard::default()
        };
        let model = tokenizer.map_or_else(|| self.plain.clone(), |tokenizer| tokenizer.model.clone());
        Route {
            served: Arc::new(ServedModel { card, model, created_s }),
            set: Arc::new(listers.iter().map(|lister| self.worker(lister.server, lister.status, name)).collect()),
            adapter: is_adapter.then(|| name.to_owned()),
            exact: tokenizer.is_some(),
            block_size: self.settings.block_size,
        }
    }
}
