//! An engine that is an HTTP server beside the agent, and stays as it is: vLLM, SGLang, TensorRT-LLM, by their dialect.
//!
//! Tokens go in and come out; what a server calls things is its dialect's business. Its KV events are read as it publishes them
//! and told on as if they had happened here. When the server is lost, so is this engine: its requests end in a way that lets
//! them go on elsewhere, its blocks are cleared, and its event stream ends, by which the agent learns of it. A server that is
//! back is another engine.

mod blocks;
mod dialect;
mod elsewhere;
mod http;
mod load;
pub mod metrics;
mod openai;
mod poll;
mod pulse;
mod ready;
mod request;
mod sampling;
mod sglang;
mod sse;
mod trtllm;
mod vllm;
mod watch;

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use engine_feed::{CollectorCounters, EventSource, Feed};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use protocol::request_plane::Generate;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, SubmitError};
use blocks::{Held, Listener};
use dialect::Dialect;
use http::Server;
use load::Load;
use metrics::RemoteMetrics;
use pulse::Pulse;
pub use ready::{ConnectError, Ready, wait, wait_until_it_computes};
pub use watch::NotReady;

/// What an engine of this kind needs to know beside its dialect.
#[derive(Debug)]
struct RemoteOptions {
    /// Fixed properties.
    info: EngineInfo,
    /// Requests that the server may have at once; more are refused.
    max_requests: usize,
    /// Tokens that end an answer.
    eos_token_ids: Vec<u32>,
    /// Where the server publishes its KV events.
    events: Option<EventSource>,
    /// Where we listen, if the server connects to us.
    events_bind: std::net::IpAddr,
    /// Its rank, where it has several; events of others are left out.
    dp_rank: u32,
    /// Time from a request to its first token.
    first_token_max: Duration,
    /// Time between two tokens.
    token_max: Duration,
    /// Time in which the server has to get somewhere with what it computes.
    stall_max: Duration,
}

/// Why an engine is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// It is not there, or says that it is not well.
    #[error("{0}")]
    Gone(String),
    /// It says that it is well, and computes nothing.
    #[error("it computed nothing for {} s, while {requests} requests waited", limit.as_secs())]
    Hung {
        /// How long that was watched.
        limit: Duration,
        /// How many waited.
        requests: usize,
    },
}

/// The engine. Dropping it stops all that it does.
pub struct Remote {
    shared: Arc<Shared>,
    events: Mutex<Option<UnboundedReceiver<ArenaEvent>>>,
    _stop: DropGuard,
}

/// What the engine's tasks share.
struct Shared {
    server: Server,
    dialect: Box<dyn Dialect>,
    info: EngineInfo,
    eos_token_ids: Vec<u32>,
    places: Arc<Semaphore>,
    max_requests: usize,
    first_token_max: Duration,
    token_max: Duration,
    stall_max: Duration,
    load: Load,
    pulse: Pulse,
    /// Requests so far.
    numbers: AtomicU64,
    held: Mutex<Held>,
    /// Requests whose KV is being fetched from here, by their lease: dropping one gives it up.
    leases: Mutex<HashMap<u64, oneshot::Sender<()>>>,
    /// Those requests, until the server is rid of them.
    lent: TaskTracker,
    metrics: RemoteMetrics,
    /// Somebody has reason to believe that the server is lost.
    suspect: Notify,
    lost: CancellationToken,
    loss: OnceLock<Loss>,
    /// Only [`Shared::lose`] closes it.
    events: Mutex<Option<UnboundedSender<ArenaEvent>>>,
}

impl Remote {
    /// Takes over a server that is ready. Must be called inside a Tokio runtime.
    fn start(server: Server, dialect: Box<dyn Dialect>, options: RemoteOptions, metrics: RemoteMetrics) -> Self {
        let (events, receiver) = unbounded_channel();
        let block_size = options.info.block_size;
        let shared = Arc::new(Shared {
            server,
            dialect,
            info: options.info,
            eos_token_ids: options.eos_token_ids,
            places: Arc::new(Semaphore::new(options.max_requests)),
            max_requests: options.max_requests,
            first_token_max: options.first_token_max,
            token_max: options.token_max,
            stall_max: options.stall_max,
            load: Load::default(),
            pulse: Pulse::new(),
            numbers: AtomicU64::new(0),
            held: Mutex::new(Held::new(block_size)),
            leases: Mutex::default(),
            lent: TaskTracker::new(),
            metrics,
            suspect: Notify::new(),
            lost: CancellationToken::new(),
            loss: OnceLock::new(),
            events: Mutex::new(Some(events)),
        });
        let stop = CancellationToken::new();
        tokio::spawn(stop.clone().run_until_cancelled_owned(watch::run(shared.clone())));
        if let Some(source) = options.events {
            let counters = CollectorCounters {
                peers: shared.metrics.refused("too many peers"),
                large: shared.metrics.refused("too large"),
            };
            let feed = Feed::new(source, counters).bound_at(options.events_bind);
            let listener = Listener::new(shared.clone(), options.dp_rank);
            let until = shared.lost.clone();
            let following = async move {
                until.run_until_cancelled(feed.run(&Notify::new(), listener)).await;
            };
            tokio::spawn(stop.clone().run_until_cancelled_owned(following));
        }
        if let Some(call) = shared.dialect.events_call() {
            let polling = poll::run(shared.clone(), call, options.dp_rank);
            tokio::spawn(stop.clone().run_until_cancelled_owned(polling));
        }
        Self { shared, events: Mutex::new(Some(receiver)), _stop: stop.drop_guard() }
    }

    /// Why the engine is lost, if it is.
    pub fn lost(&self) -> Option<&Loss> {
        self.shared.loss.get()
    }
}

impl Engine for Remote {
    fn info(&self) -> &EngineInfo {
        &self.shared.info
    }

    /// Must be called inside a Tokio runtime.
    fn submit(&self, request: Generate) -> Result<UnboundedReceiver<EngineOutput>, SubmitError> {
        let shared = &self.shared;
        if shared.lost.is_cancelled() {
            return Err(SubmitError::Stopped);
        }
        let request = request::Checked::new(request, &shared.info, shared.dialect.prefill_generates())?;
        let place = shared.places.clone().try_acquire_owned();
        let place = place.map_err(|_| SubmitError::Overloaded(shared.max_requests))?;
        let (outputs, receiver) = unbounded_channel();
        tokio::spawn(request::run(shared.clone(), request, outputs, place));
        Ok(receiver)
    }

    fn load(&self) -> EngineLoad {
        self.shared.load.now(&self.shared.info, self.shared.held.lock().on_device())
    }

    fn take_events(&self) -> Option<UnboundedReceiver<ArenaEvent>> {
        self.events.lock().take()
    }

    fn end_lease(&self, lease: u64) {
        self.shared.leases.lock().remove(&lease);
    }

    fn leases(&self) -> usize {
        self.shared.lent.len()
    }

    fn unleased(&self) -> BoxFuture<'static, ()> {
        let shared = self.shared.clone();
        Box::pin(async move {
            shared.lent.close();
            shared.lent.wait().await;
        })
    }

    fn kv_layout(&self) -> Option<String> {
        // What moves KV compares the rest when two servers meet.
        let (dialect, block_size) = (&self.shared.dialect, self.shared.info.block_size.get());
        Some(format!("{}/{block_size}/{}", dialect.backend(), dialect.model()))
    }

    fn register(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }
}

impl Shared {
    /// Tells an event on. Without a publisher nobody wants it.
    fn tell(&self, event: ArenaEvent) {
        if let Some(events) = &*self.events.lock() {
            let _ = events.send(event);
        }
    }

    /// The server is lost: nothing that was known of it counts any more.
    fn lose(&self, loss: Loss) {
        tracing::error!(server = %self.server, why = %loss, "the engine is lost");
        // The first reason counts.
        let _ = self.loss.set(loss);
        self.held.lock().clear();
        if let Some(events) = self.events.lock().take() {
            let _ = events.send(blocks::cleared());
        }
        self.lost.cancel();
    }

    /// Whether the server is lost; asks now, and waits for the answer, at most [`VERDICT`].
    async fn is_lost(&self) -> bool {
        self.suspect.notify_one();
        tokio::time::timeout(VERDICT, self.lost.cancelled()).await.is_ok()
    }
}

/// Longest time that a request with a broken connection waits to learn whether the whole server is lost.
const VERDICT: Duration = Duration::from_secs(3);
