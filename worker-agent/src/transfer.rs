//! KV blocks from one worker to another: disaggregated serving, as seen by the worker.
//!
//! A prefill worker leases a prompt's blocks and tells in `disaggregated_params` how they are fetched; [`serve`] hands them
//! out. A decode worker's engine is wrapped in [`Transfers`], which fetches the blocks that are missing here before the engine
//! sees the request: it then finds them cached. Fetching happens in tasks of its own, never on the engine's thread. It is an
//! optimisation only: whatever goes wrong, the engine computes what has not come, and the client sees nothing but latency.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use kv_hashing::{BlockHash, SequenceHash};
use prometheus_client::registry::Registry;
use protocol::request_plane::Generate;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use crate::engine::builtin::exchange::{Exchange, Import, KvLayout, Lease, NoRoom, Place, Reservation, Terms};
use crate::engine::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, SubmitError};
use crate::metrics::observe;

mod client;
mod error;
mod lane;
pub mod metrics;
mod nixl;
mod serve;
mod shm;
mod source;
mod tcp;
#[cfg(test)]
mod tests;
mod wire;

pub use error::{Stage, TransferError};
pub use lane::Lane;
use metrics::TransferMetrics;
pub use nixl::Nixl;
use serve::Desk;
pub use serve::{Server, serve};
pub use shm::Shm;
pub use source::{Offer, Source};
pub use tcp::Tcp;
use wire::LONGEST_PULL;
pub use wire::Refusal;

/// Bytes that are moved in one go: they stay in a core's cache until they are hashed.
const PIECE: usize = 64 << 10;

/// Most fetches at once; others wait for their turn. More would only share the same wire.
const MAX_FETCHES: usize = 8;
/// Longest wait for a turn, if the lease lasts.
const TURN: Duration = Duration::from_secs(10);
/// The part of a lease's life that may pass before anything is fetched: once for room and once for a turn. So a fetch whose
/// turn comes late still has a third of it.
const WAIT: u32 = 3;

/// The part of the time for a first token that fetching may take: the rest is for computing the prompt, should it fail.
const FETCH: u32 = 2;
/// Pauses after which a worker that was too busy is told again that its blocks are not wanted: within half of a lease's life.
const RELEASE: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9)];

/// A way for blocks to come here.
pub trait KvTransport: Send + Sync + 'static {
    /// What [`Offer::backend`] calls it.
    fn backend(&self) -> &'static str;

    /// Fetches the blocks that `into` is missing, in order, verifies each, and then ends the lease; not beyond `until`. What has
    /// come when it fails, or is dropped, is complete in `into`.
    fn pull<'a>(
        &'a self,
        source: &'a Source,
        address: &'a str,
        into: &'a mut Reservation,
        until: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>>;

    /// Ends the lease of blocks that will not be fetched.
    fn release<'a>(&'a self, source: &'a Source, address: &'a str) -> BoxFuture<'a, Result<(), TransferError>>;
}

/// Which transports a worker uses, in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Transports {
    /// Shared memory between workers of one host, and TCP otherwise.
    #[default]
    Auto,
    /// TCP alone.
    Tcp,
    /// Shared memory alone.
    Shm,
    /// NIXL alone, in a build that has it.
    Nixl,
}

impl Transports {
    /// As the flag has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Nixl => "nixl",
        }
    }

    /// What this build, on this machine, does not have for it.
    pub(crate) fn check(self) -> Result<(), &'static str> {
        if self.take(nixl::BACKEND) { nixl::available() } else { Ok(()) }
    }

    fn take(self, backend: &str) -> bool {
        match self {
            Self::Auto => [shm::BACKEND, tcp::BACKEND].contains(&backend),
            Self::Tcp => backend == tcp::BACKEND,
            Self::Shm => backend == shm::BACKEND,
            Self::Nixl => backend == nixl::BACKEND,
        }
    }
}

/// What a worker says of itself to those that fetch from it, and wants of those it fetches from.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the listener is, as other workers reach it: `host:port`.
    pub address: String,
    /// Which ways blocks go.
    pub transports: Transports,
    /// This life of the worker.
    pub boot_epoch: String,
    /// Blocks move only between workers with the same one.
    pub revision: String,
    /// How long a lease lasts from its last progress.
    pub lease: Duration,
    /// Time for a fetch beside that for its bytes.
    pub timeout: Duration,
}

/// An engine that fetches blocks before it begins a request, where the request says how.
pub struct Transfers {
    engine: Arc<dyn Engine>,
    fetcher: Arc<Fetcher>,
}

/// Wraps `engine`, whose blocks `exchange` moves, and lets it lease blocks under `options` to those that come to `listener`.
pub fn open(
    engine: Arc<dyn Engine>,
    exchange: Arc<Exchange>,
    options: Options,
    listener: TcpListener,
    metrics: TransferMetrics,
) -> io::Result<(Transfers, Server)> {
    let Options { transports: ways, timeout, lease: lifetime, .. } = options;
    let lane = Arc::new(Lane::start()?);
    let nixl = ways.take(nixl::BACKEND).then(|| Nixl::start(&exchange, timeout)).transpose()?;
    let shm = if ways.take(shm::BACKEND) { shared_memory(&exchange) } else { None };
    // NIXL's questions come there, too.
    let tcp = (ways != Transports::Shm).then_some(listener);
    let mut transports: Vec<Arc<dyn KvTransport>> = Vec::new();
    let mut offers = Vec::new();
    if ways.take(shm::BACKEND) {
        transports.push(Arc::new(Shm::new(timeout)));
        offers.extend(shm.iter().map(|shm| Offer { backend: shm::BACKEND.into(), address: shm.address.clone() }));
    }
    if let Some(nixl) = &nixl {
        transports.push(Arc::new(nixl.clone()));
        offers.push(Offer { backend: nixl::BACKEND.into(), address: options.address.clone() });
    }
    if ways.take(tcp::BACKEND) {
        transports.push(Arc::new(Tcp::new(timeout)));
        offers.push(Offer { backend: tcp::BACKEND.into(), address: options.address.clone() });
    }
    let (boot_epoch, revision) = (options.boot_epoch.clone(), options.revision.clone());
    let describe = Box::new(describe(offers, options, exchange.layout(), lane.clone()));
    exchange.open(Terms { lifetime, describe });
    let agent = nixl.map(|nixl| nixl.agent);
    let (blocks, counts) = (exchange.clone(), metrics.clone());
    let desk = Desk { exchange: blocks, boot_epoch, revision: revision.clone(), agent, metrics: counts };
    let server = Server { tcp, shm, lane: lane.clone(), desk: Arc::new(desk) };
    let turns = Semaphore::new(MAX_FETCHES);
    let fetcher = Fetcher { exchange, transports, lane, turns, revision, timeout, metrics };
    Ok((Transfers { engine, fetcher: Arc::new(fetcher) }, server))
}

/// Where workers of this host can come to, if the blocks are in memory that can be shared.
fn shared_memory(exchange: &Exchange) -> Option<shm::Listener> {
    exchange.memory()?;
    let listener = shm::Listener::bind();
    listener.inspect_err(|error| tracing::warn!(%error, "KV blocks are not shared with workers of this host")).ok()
}

/// What says where a lease's blocks are. Their checksums are computed meanwhile: until somebody asks for the blocks, a router
/// has to find out who.
fn describe(offers: Vec<Offer>, options: Options, layout: KvLayout, lane: Arc<Lane>) -> impl Fn(&Arc<Lease>) -> String {
    let source = Source {
        offers,
        boot_epoch: options.boot_epoch,
        revision: options.revision,
        lease: 0,
        lease_ms: options.lease.as_millis() as u64,
        layout,
        blocks: Vec::new(),
    };
    move |lease| {
        let checked = Arc::downgrade(lease);
        lane.handle().spawn(async move {
            let mut index = 0;
            while let Some(lease) = checked.upgrade().filter(|lease| index < lease.blocks().len()) {
                lease.checksum(index);
                index += 1;
                drop(lease);
                tokio::task::yield_now().await;
            }
        });
        Source { lease: lease.id(), blocks: lease.blocks().collect(), ..source.clone() }.to_json()
    }
}

impl Engine for Transfers {
    fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    /// As the engine's own; must be called inside a Tokio runtime.
    fn submit(&self, mut request: Generate) -> Result<UnboundedReceiver<EngineOutput>, SubmitError> {
        let params = std::mem::take(&mut request.disaggregated_params);
        if params.is_empty() {
            return self.engine.submit(request);
        }
        let request_id = request.request_id.clone();
        let until = fetched_by(&request);
        let (place, receiver) = self.fetcher.exchange.place(request)?;
        let fetcher = self.fetcher.clone();
        match place {
            Some(place) => tokio::spawn(fetcher.bring(place, params, request_id, until)),
            // Nothing is left to compute.
            None => tokio::spawn(async move {
                if let Ok(source) = Source::parse(&params) {
                    fetcher.release(&source, &request_id).await;
                }
            }),
        };
        Ok(receiver)
    }

    fn load(&self) -> EngineLoad {
        self.engine.load()
    }

    fn take_events(&self) -> Option<UnboundedReceiver<ArenaEvent>> {
        self.engine.take_events()
    }

    fn exchange(&self) -> Option<Arc<Exchange>> {
        Some(self.fetcher.exchange.clone())
    }

    fn tier_blocks(&self) -> Option<usize> {
        self.engine.tier_blocks()
    }

    fn register(&self, registry: &mut Registry) {
        self.engine.register(registry);
    }
}

/// What fetches of one engine share.
struct Fetcher {
    exchange: Arc<Exchange>,
    /// Best first.
    transports: Vec<Arc<dyn KvTransport>>,
    lane: Arc<Lane>,
    turns: Semaphore,
    revision: String,
    timeout: Duration,
    metrics: TransferMetrics,
}

impl Fetcher {
    /// Fetches what the request's prompt is missing, as far as that works, and lets the request begin. A request that nobody
    /// waits for any more is dropped with all it holds.
    async fn bring(self: Arc<Self>, place: Place, params: String, request_id: String, until: Instant) {
        let source = match Source::parse(&params) {
            Ok(source) => Arc::new(source),
            Err(error) => {
                self.failed(&error, &request_id, 0);
                return place.enter(None);
            }
        };
        let started = Instant::now();
        let fetched = tokio::select! {
            biased;
            () = place.cancelled() => None,
            // It fails the request at once.
            () = place.stopped() => Some((Err(NoRoom::Stopped.into()), None)),
            fetched = self.fetch(&source, place.reusable(), until) => Some(fetched),
        };
        let outcome = match fetched {
            Some((outcome, import)) => {
                observe(&self.metrics.seconds, started.elapsed());
                if let Err(error) = &outcome {
                    self.failed(error, &request_id, import.as_ref().map_or(0, Import::received));
                }
                place.enter(import);
                outcome
            }
            None => {
                drop(place);
                self.metrics.cancelled.inc();
                Err(TransferError::Cancelled)
            }
        };
        self.metrics.reserved_blocks.set(self.exchange.reserved() as i64);
        match outcome {
            Ok(Fetched::Missing) => {}
            Err(error) if !error.leaves_lease() => {}
            Ok(Fetched::Nothing) | Err(_) => self.release(&source, &request_id).await,
        }
    }

    /// Fetches; also after a failure, what had come is good.
    async fn fetch(
        &self,
        source: &Arc<Source>,
        wanted: &[(BlockHash, SequenceHash)],
        until: Instant,
    ) -> (Result<Fetched, TransferError>, Option<Import>) {
        let reservation = match self.reserve(source, wanted, until).await {
            Ok(reservation) => reservation,
            Err(error) => return (Err(error), None),
        };
        self.metrics.reserved_blocks.set(self.exchange.reserved() as i64);
        if reservation.missing().len() == 0 {
            return (Ok(Fetched::Nothing), Some(reservation.finish()));
        }
        let (outcome, reservation) = self.pull(source, reservation, until).await;
        (outcome.map(|()| Fetched::Missing), reservation.map(Reservation::finish))
    }

    /// Room for those of the wanted blocks that the source has, from the first on.
    async fn reserve(
        &self,
        source: &Source,
        wanted: &[(BlockHash, SequenceHash)],
        until: Instant,
    ) -> Result<Reservation, TransferError> {
        self.first_way(source)?;
        if source.layout != self.exchange.layout() || source.revision != self.revision {
            return Err(TransferError::Layout);
        }
        let offered = wanted.iter().zip(&source.blocks).take_while(|(wanted, offered)| wanted.1 == **offered).count();
        if offered == 0 && !wanted.is_empty() {
            return Err(TransferError::OtherPrompt);
        }
        let patience = self.timeout.min(source.lifetime() / WAIT).min(left(until));
        Ok(self.exchange.reserve(wanted[..offered].to_vec(), patience).await?)
    }

    /// Waits for a turn, and then for the blocks; they come by the first way that leads to the other worker.
    async fn pull(
        &self,
        source: &Arc<Source>,
        mut reservation: Reservation,
        until: Instant,
    ) -> (Result<(), TransferError>, Option<Reservation>) {
        let limit = TURN.min(source.lifetime() / WAIT).min(left(until));
        let Ok(_turn) = tokio::time::timeout(limit, self.turns.acquire()).await else {
            return (Err(TransferError::Timeout { stage: Stage::Turn, limit }), Some(reservation));
        };
        let mut outcome = self.first_way(source).map(|_| ());
        for (transport, address) in self.ways(source) {
            let (backend, source, address) = (transport.backend(), source.clone(), address.to_owned());
            let moved = self.lane.run(async move {
                let outcome = transport.pull(&source, &address, &mut reservation, until).await;
                (outcome, reservation)
            });
            let Ok(moved) = moved.await else { return (Err(TransferError::Ended), None) };
            (outcome, reservation) = moved;
            let received = reservation.received();
            self.metrics.received_blocks.inc_by(received as u64);
            self.metrics.received_bytes(backend).inc_by((received * reservation.block_bytes()) as u64);
            match &outcome {
                Err(error) if error.is_no_way() => tracing::debug!(backend, %error, "no way to the other worker"),
                _ => break,
            }
        }
        (outcome, Some(reservation))
    }

    /// Tells the other worker that its blocks will not be fetched.
    async fn release(&self, source: &Source, request_id: &str) {
        for pause in std::iter::once(Duration::ZERO).chain(RELEASE) {
            tokio::time::sleep(pause).await;
            let mut busy = false;
            for (transport, address) in self.ways(source) {
                match transport.release(source, address).await {
                    Ok(()) => return,
                    Err(error) => {
                        busy |= error.is_busy();
                        tracing::debug!(request_id, %error, "the lease was not ended this way");
                    }
                }
            }
            if !busy {
                return;
            }
        }
    }

    /// The ways that both workers know, the best first, and where they lead.
    fn ways<'a>(&self, source: &'a Source) -> impl Iterator<Item = (Arc<dyn KvTransport>, &'a str)> {
        let address = |way: &Arc<dyn KvTransport>| Some((way.clone(), source.address(way.backend())?));
        self.transports.iter().filter_map(address)
    }

    fn first_way(&self, source: &Source) -> Result<(), TransferError> {
        let backends = || source.offers.iter().map(|offer| offer.backend.clone()).collect();
        self.ways(source).next().map(drop).ok_or_else(|| TransferError::Backend(backends()))
    }

    fn failed(&self, error: &TransferError, request_id: &str, received: usize) {
        self.metrics.failed(error.reason());
        tracing::warn!(request_id, received, %error, "KV transfer failed; the rest of the prompt is computed here");
    }
}

/// When the fetch of a request's blocks is to be over, however slow they come.
fn fetched_by(request: &Generate) -> Instant {
    let limit = match request.first_token_ms {
        0 => LONGEST_PULL,
        ms => Duration::from_millis(ms.into()) / FETCH,
    };
    Instant::now() + limit
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// How a fetch went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetched {
    /// What was missing has come, and the lease has ended with it.
    Missing,
    /// Nothing was missing.
    Nothing,
}
