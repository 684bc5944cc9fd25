//! Workers that are OpenAI servers themselves: vLLM, SGLang, llama.cpp or anything else that speaks the API.
//!
//! They are listed, not discovered, and have no agent: `health` asks each how it is and what it serves. A request is checked
//! and placed as for any worker, by the same selector and load (`key`, `forward`); then its body goes on as it came, and the
//! answer comes back as it is (`answer`). What a server holds is told by its engine's own KV events (`kv_events`), or
//! predicted from what was sent there.

pub(crate) mod answer;
pub mod config;
mod event_watch;
mod events;
mod fleet;
mod forward;
mod health;
mod key;
mod kv_events;
mod line;
mod model_files;
mod predict;
mod server;
mod socket;

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use kv_index::WorkerId;
use routing::{CostConfig, Explanation, Mode, WorkerSet};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::backend::{DispatchError, RouteOptions};
use crate::config::{Deadlines, Settings};
use crate::discovery::static_servers::StaticServer;
use crate::dispatch::ask::Ask;
use crate::dispatch::booking::Placement;
use crate::model::Model;
use crate::openai::Endpoint;
use crate::openai::error::ApiError;
use crate::workers::{Cluster, Trouble};
use config::ProxySettings;
use event_watch::EventWatch;
use fleet::{Route, Routes, Tokenizer};
pub(crate) use forward::{Body, Incoming, Outgoing, Served};
use health::Checks;
pub(crate) use key::Key;
pub use model_files::ModelFilesError;
use server::Server;
use socket::Trust;
pub use socket::TrustError;

/// Why there is no way to the servers.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The model's files cannot be used.
    #[error(transparent)]
    Model(#[from] ModelFilesError),
    /// No server can be trusted.
    #[error(transparent)]
    Trust(#[from] TrustError),
}

/// The servers, and the way to them.
pub struct Proxy {
    settings: Arc<ProxySettings>,
    deadlines: Deadlines,
    mode: Mode,
    /// What requests may change.
    cost: CostConfig,
    cluster: Arc<Cluster>,
    placement: Arc<Placement>,
    servers: BTreeMap<WorkerId, Arc<Server>>,
    /// Every server publishes KV events.
    all_tell: bool,
    routes: ArcSwap<Routes>,
    /// Stands in where there is no tokenizer.
    plain: Arc<Model>,
    tokenizer: Option<Tokenizer>,
    /// Notified when the health of a server or its list of models changes.
    changed: Arc<Notify>,
    /// Ends with the router.
    life: CancellationToken,
}

impl Proxy {
    /// Begins to look after the servers, until `stop`. Returns when the model's files are loaded; no server may have answered
    /// by then.
    pub(crate) async fn start(
        cluster: Arc<Cluster>,
        placement: Arc<Placement>,
        router: &Settings,
        settings: Arc<ProxySettings>,
        stop: &CancellationToken,
    ) -> Result<Arc<Self>, ProxyError> {
        let (deadlines, selector) = (router.deadlines, router.selection.selector);
        let changed = Arc::<Notify>::default();
        let any_tls = settings.servers.iter().any(|listed| listed.url.is_tls());
        let trust = any_tls.then(|| Trust::load(settings.ca_file.as_deref())).transpose()?;
        let server = |listed: &StaticServer| {
            let trust = trust.clone().filter(|_| listed.url.is_tls());
            let watch = EventWatch::new(cluster.index.check_every(), changed.clone());
            let server = Server::new(listed, trust, deadlines.connect, watch, changed.clone());
            (server.id, Arc::new(server))
        };
        let servers: BTreeMap<WorkerId, Arc<Server>> = settings.servers.iter().map(server).collect();
        let checks = Checks {
            interval: settings.check_interval,
            timeout: settings.check_timeout,
            key: settings.api_key.clone(),
        };
        for server in servers.values() {
            let checking = health::run(server.clone(), checks.clone());
            tokio::spawn(stop.clone().run_until_cancelled_owned(checking));
        }
        // The servers answer meanwhile.
        let tokenizer = load(&settings).await?;
        let proxy = Arc::new(Self {
            plain: Arc::new(Model::untokenized()),
            routes: ArcSwap::default(),
            settings,
            deadlines,
            mode: selector.mode,
            cost: selector.cost,
            cluster,
            placement,
            all_tell: servers.values().all(|server| server.events.is_some()),
            servers,
            tokenizer,
            changed,
            life: stop.clone(),
        });
        for server in proxy.servers.values() {
            let total = proxy.settings.total_blocks.map(u64::from);
            proxy.cluster.index.expect_worker(server.id, 1, total, stop).await;
            kv_events::start(&proxy, server, stop);
        }
        Ok(proxy)
    }

    /// Publishes what can be routed, until `stop`.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        tokio::select! {
            () = fleet::run(&self) => {}
            () = stop.cancelled() => {}
        }
    }

    /// Reads and checks a request's body. Cost: a few µs, and with a tokenizer what tokenizing costs.
    pub(crate) fn read(&self, body: &[u8], endpoint: Endpoint, max_choices: usize) -> Result<Key, ApiError> {
        key::read(body, endpoint, max_choices, &self.plain, |name| self.find_route(name))
    }

    /// Where a request would go now, and among which servers. Changes nothing.
    pub(crate) fn explain(
        &self,
        key: &Key,
        options: &RouteOptions,
    ) -> Result<(Explanation, Arc<WorkerSet>), DispatchError> {
        let prompt = (key.blocks.clone(), key.prompt.clone());
        let ask = Ask::of("explain", key.model(), prompt, options, &self.cost)?;
        let model = || key.model().to_owned();
        let workers = self.workers(key.model()).ok_or_else(|| DispatchError::NoWorker { model: model() })?;
        let explanation = self.placement.explain(&workers, &ask.request(), &self.overlaps(&ask.blocks));
        Ok((explanation, workers))
    }

    fn find_route(&self, name: &str) -> Result<Arc<Route>, ApiError> {
        let routes = self.routes.load();
        if let Some(route) = routes.get(name) {
            return Ok(route.clone());
        }
        // A model that was there before, or a router that knows none yet, is no mistake of the client's.
        match routes.is_empty() || self.cluster.view.load().created.contains_key(name) {
            true => Err(DispatchError::NoWorker { model: name.to_owned() }.into()),
            false => Err(ApiError::model_not_found(name)),
        }
    }

    /// Servers whose KV events are of no use, by name, and why.
    pub(crate) fn troubles(&self) -> impl Iterator<Item = (String, Trouble)> {
        self.servers.values().filter_map(|server| Some((server.name.to_string(), server.trouble()?)))
    }

    /// The servers of a model.
    fn workers(&self, model: &str) -> Option<Arc<WorkerSet>> {
        self.routes.load().get(model).map(|route| route.set.clone())
    }

    /// Sends a request to the server that is chosen for it; to another one while nothing has come back.
    pub(crate) async fn forward(&self, outgoing: &Outgoing) -> Result<Incoming, DispatchError> {
        forward::run(self, outgoing).await
    }
}

async fn load(settings: &Arc<ProxySettings>) -> Result<Option<Tokenizer>, ModelFilesError> {
    let Some(source) = settings.model.clone() else { return Ok(None) };
    let name = source.name.clone();
    let path = source.path.clone();
    match tokio::task::spawn_blocking(move || model_files::load(&source)).await {
        Ok(model) => Ok(Some(Tokenizer { model: Arc::new(model?), name })),
        Err(panicked) => Err(ModelFilesError::File(path, panicked.to_string())),
    }
}
