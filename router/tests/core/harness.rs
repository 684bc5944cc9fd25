//! A router core over a directory of workers, and waiting with a deadline.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kv_hashing::HashSpace;
use kv_index::{TierBlocks, WorkerId, WorkerRank};
use prometheus_client::registry::Registry;
use protocol::request_plane::{Generate, Stop};
use router::backend::{Backend, DispatchError, RouteOptions, Routed, StreamItem};
use router::config::{Deadlines, Settings};
use router::discovery::Source;
use router::dispatch::Dispatcher;
use router::replicas::options::{PeerSource, ReplicaSettings};
use router::service::Core;
use routing::{Mode, SelectorConfig};
use tempfile::TempDir;

use crate::worker::{Life, Worker};

pub const MODEL: &str = "tiny";
pub const BLOCK: u32 = 4;

/// Longest wait for anything here, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Cluster {
    pub directory: Arc<TempDir>,
    pub core: Core,
    settings: Settings,
    registry: Registry,
}

impl Cluster {
    pub async fn start(mode: Mode) -> Self {
        Self::with_deadlines(mode, Deadlines::default()).await
    }

    pub async fn with_deadlines(mode: Mode, deadlines: Deadlines) -> Self {
        let selector = SelectorConfig { mode, ..SelectorConfig::default() };
        Self::with(|settings| {
            settings.selection.selector = selector;
            settings.deadlines = deadlines;
        })
        .await
    }

    /// With settings other than the defaults.
    pub async fn with(change: impl FnOnce(&mut Settings)) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a temporary directory"));
        let mut settings = Settings::new(Source::File { directory: directory.path().to_owned() });
        change(&mut settings);
        Self::over(directory, settings).await
    }

    /// A router that shares its load with those beside it.
    pub async fn sharing() -> Self {
        Self::with(|settings| {
            let Source::File { directory } = &settings.source else { panic!("{:?}", settings.source) };
            settings.replicas = Some(ReplicaSettings {
                peers: PeerSource::Directory(directory.clone()),
                bind: "127.0.0.1:0".parse().expect("an address"),
                host: "127.0.0.1".into(),
                expiry: Duration::from_secs(300),
            });
        })
        .await
    }

    /// Another router with the same settings, over the same workers.
    pub async fn beside(&self) -> Self {
        Self::over(self.directory.clone(), self.settings.clone()).await
    }

    async fn over(directory: Arc<TempDir>, settings: Settings) -> Self {
        let mut registry = Registry::default();
        let core = Core::start(&settings, &mut registry).await.expect("file discovery starts");
        Self { directory, core, settings, registry }
    }

    /// A registered worker that the router can use.
    pub async fn worker(&self, name: &str) -> Worker {
        self.worker_of(Life::new(name)).await
    }

    /// The same, of a certain kind.
    pub async fn worker_of(&self, life: Life) -> Worker {
        let worker = Worker::start(life).await;
        worker.register(self.directory.path());
        self.until_routable(&worker).await;
        worker
    }

    pub async fn until_routable(&self, worker: &Worker) {
        self.until("the worker is routable", || self.backend().workers().get(rank(worker)).is_some()).await;
    }

    pub fn backend(&self) -> &Arc<Dispatcher> {
        self.core.backend()
    }

    /// Blocks of a prompt that the index gives a worker.
    pub fn overlap(&self, worker: &Worker, tokens: &[u32]) -> u32 {
        let overlaps = self.backend().overlaps(MODEL, tokens, HashSpace::default());
        overlaps.map_or(0, |overlaps| overlaps.get(rank(worker)).total())
    }

    pub fn indexed(&self, worker: &Worker) -> TierBlocks {
        self.backend().indexed_blocks(rank(worker))
    }

    /// Waits until the index holds exactly what the worker holds, block by block.
    pub async fn until_equal(&self, worker: &Worker) {
        self.until("the index equals the worker's own set", || {
            let held = worker.held_prefixes();
            self.indexed(worker).total() as usize == held.len()
                && held.iter().all(|tokens| self.overlap(worker, tokens) as usize == tokens.len() / BLOCK as usize)
        })
        .await;
    }

    /// Waits for a condition that other tasks bring about.
    pub async fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let poll = async {
            let mut ticks = tokio::time::interval(Duration::from_millis(10));
            while !condition() {
                ticks.tick().await;
            }
        };
        if tokio::time::timeout(PATIENCE, poll).await.is_err() {
            panic!("waited {PATIENCE:?} in vain until {what}\n{}", self.metrics());
        }
    }

    pub fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a String takes it");
        text
    }

    /// Value of a series without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.metrics();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap_or("0");
        line.parse().expect("a number")
    }

    pub async fn generate(&self, tokens: &[u32]) -> Result<Routed, DispatchError> {
        self.generate_with(tokens, RouteOptions::default()).await
    }

    pub async fn generate_pinned(&self, tokens: &[u32], worker: u64) -> Result<Routed, DispatchError> {
        self.generate_with(tokens, RouteOptions { pinned_worker: Some(worker), ..RouteOptions::default() }).await
    }

    pub async fn generate_with(&self, tokens: &[u32], options: RouteOptions) -> Result<Routed, DispatchError> {
        let stop = Some(Stop { max_tokens: 3, ..Stop::default() });
        let request = Generate {
            request_id: "r".into(),
            model: MODEL.into(),
            token_ids: tokens.to_vec(),
            stop,
            ..Generate::default()
        };
        tokio::time::timeout(PATIENCE, self.backend().generate(request, options)).await.expect("an answer in time")
    }
}

/// Reads a reply to its end: the tokens, and how it ended.
pub async fn drain(mut routed: Routed) -> (Vec<u32>, Result<(), DispatchError>) {
    let mut tokens = Vec::new();
    loop {
        match tokio::time::timeout(PATIENCE, routed.stream.next()).await.expect("an item in time") {
            Some(Ok(StreamItem::Output(output))) => tokens.extend(output.token_ids),
            Some(Ok(StreamItem::Finished(_))) => {
                assert!(routed.stream.next().await.is_none(), "nothing follows the end");
                assert!(routed.stream.next().await.is_none(), "polling after the end is harmless");
                return (tokens, Ok(()));
            }
            Some(Err(error)) => return (tokens, Err(error)),
            None => panic!("a stream ended without saying how"),
        }
    }
}

/// What a request gets that names this worker, and the worker is not there for it.
pub fn unknown(worker: u64) -> DispatchError {
    DispatchError::UnknownWorker { worker, named_by: None }
}

pub fn rank(worker: &Worker) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker.life.instance_id), dp_rank: 0 }
}

/// A prompt of `blocks` full blocks; `seed` makes it different from others.
pub fn prompt(seed: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK).map(|at| (seed * 31 + at) % 200).collect()
}
