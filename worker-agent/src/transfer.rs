//! KV blocks from one worker to another: disaggregated serving, as seen by the worker.
//!
//! A prefill worker leases a prompt's blocks and tells in `disaggregated_params` how they are fetched; [`serve`] hands them
//! out. A decode worker's engine is wrapped in [`Transfers`], which fetches the blocks that are missing here before the engine
//! sees the request: it then finds them cached. Fetching happens in tasks of its own, never on the engine's thread. It is an
//! optimisation only: whatever goes wrong, the engine computes what has not come, and the client sees nothing but latency.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use kv_hashing::{BlockHash, SequenceHash};
use protocol::request_plane::Generate;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::builtin::exchange::{Exchange, Import, Lease, Place, Reservation, Terms};
use crate::engine::builtin::tiers::metrics::TierMetrics;
use crate::engine::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, SubmitError};
use crate::metrics::observe;

mod error;
pub mod metrics;
mod serve;
mod source;
mod tcp;
#[cfg(test)]
mod tests;
mod wire;

pub use error::{Stage, TransferError};
use metrics::TransferMetrics;
pub use serve::{Server, serve};
pub use source::Source;
pub use tcp::Tcp;
pub use wire::Refusal;

/// Most fetches at once; others wait for their turn. More would only share the same wire.
const MAX_FETCHES: usize = 8;
/// Longest wait for a turn.
const TURN: Duration = Duration::from_secs(30);

/// A way for blocks to come here.
pub trait KvTransport: Send + Sync + 'static {
    /// What [`Source::backend`] calls it.
    fn backend(&self) -> &'static str;

    /// Fetches the blocks that `into` is missing, in order, verifies each, and then ends the lease. What has come when it
    /// fails, or is dropped, is complete in `into`.
    fn pull<'a>(&'a self, source: &'a Source, into: &'a mut Reservation) -> BoxFuture<'a, Result<(), TransferError>>;

    /// Ends the lease of blocks that will not be fetched.
    fn release<'a>(&'a self, source: &'a Source) -> BoxFuture<'a, Result<(), TransferError>>;
}

/// What a worker says of itself to those that fetch from it, and wants of those it fetches from.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where [`serve`] listens, as other workers reach it: `host:port`.
    pub address: String,
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

impl Transfers {
    /// Wraps `engine`, whose blocks `exchange` moves, and lets it lease blocks under `options`.
    pub fn new(engine: Arc<dyn Engine>, exchange: Arc<Exchange>, options: Options, metrics: TransferMetrics) -> Self {
        let transports: Vec<Box<dyn KvTransport>> = vec![Box::new(Tcp::new(options.timeout))];
        let (revision, layout, lifetime) = (options.revision.clone(), exchange.layout(), options.lease);
        let describe = move |lease: &Lease| {
            let (address, boot_epoch, revision) = (&options.address, &options.boot_epoch, &options.revision);
            Source {
                backend: tcp::BACKEND.to_owned(),
                address: address.clone(),
                boot_epoch: boot_epoch.clone(),
                revision: revision.clone(),
                lease: lease.id(),
                layout,
                blocks: lease.blocks().collect(),
            }
            .to_json()
        };
        exchange.open(Terms { lifetime, describe: Box::new(describe) });
        let turns = Semaphore::new(MAX_FETCHES);
        Self { engine, fetcher: Arc::new(Fetcher { exchange, transports, turns, revision, metrics }) }
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
        let (place, receiver) = self.fetcher.exchange.place(request)?;
        if let Some(place) = place {
            tokio::spawn(self.fetcher.clone().bring(place, params, request_id));
        }
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

    fn tier_metrics(&self) -> Option<TierMetrics> {
        self.engine.tier_metrics()
    }
}

/// What fetches of one engine share.
struct Fetcher {
    exchange: Arc<Exchange>,
    transports: Vec<Box<dyn KvTransport>>,
    turns: Semaphore,
    revision: String,
    metrics: TransferMetrics,
}

impl Fetcher {
    /// Fetches what the request's prompt is missing, as far as that works, and lets the request begin. A request that nobody
    /// waits for any more is dropped with all it holds.
    async fn bring(self: Arc<Self>, place: Place, params: String, request_id: String) {
        let source = match Source::parse(&params) {
            Ok(source) => source,
            Err(error) => {
                self.failed(&error, &request_id, 0);
                return place.enter(None);
            }
        };
        let started = Instant::now();
        let fetched = tokio::select! {
            biased;
            () = place.cancelled() => None,
            fetched = self.fetch(&source, place.reusable()) => Some(fetched),
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
        if outcome.is_err_and(|error| error.leaves_lease())
            && let Ok(transport) = self.transport(&source)
            && let Err(error) = transport.release(&source).await
        {
            tracing::debug!(request_id, %error, "the lease was not ended; it expires");
        }
    }

    /// Fetches; also after a failure, what had come is good.
    async fn fetch(
        &self,
        source: &Source,
        wanted: &[(BlockHash, SequenceHash)],
    ) -> (Result<(), TransferError>, Option<Import>) {
        let turn = tokio::time::timeout(TURN, self.turns.acquire()).await;
        let Ok(_turn) = turn else {
            return (Err(TransferError::Timeout { stage: Stage::Turn, limit: TURN }), None);
        };
        let mut reservation = match self.reserve(source, wanted).await {
            Ok(reservation) => reservation,
            Err(error) => return (Err(error), None),
        };
        let outcome = match self.transport(source) {
            Ok(transport) => transport.pull(source, &mut reservation).await,
            Err(error) => Err(error),
        };
        let received = reservation.received();
        self.metrics.received_blocks.inc_by(received as u64);
        self.metrics.received_bytes.inc_by((received * reservation.block_bytes()) as u64);
        (outcome, Some(reservation.finish()))
    }

    /// Room for those of the wanted blocks that the source has, from the first on.
    async fn reserve(
        &self,
        source: &Source,
        wanted: &[(BlockHash, SequenceHash)],
    ) -> Result<Reservation, TransferError> {
        self.transport(source)?;
        if source.layout != self.exchange.layout() || source.revision != self.revision {
            return Err(TransferError::Layout);
        }
        let offered = wanted.iter().zip(&source.blocks).take_while(|(wanted, offered)| wanted.1 == **offered).count();
        if offered == 0 && !wanted.is_empty() {
            return Err(TransferError::OtherPrompt);
        }
        Ok(self.exchange.reserve(wanted[..offered].to_vec()).await?)
    }

    fn transport(&self, source: &Source) -> Result<&dyn KvTransport, TransferError> {
        let found = self.transports.iter().find(|transport| transport.backend() == source.backend);
        found.map(|transport| &**transport).ok_or_else(|| TransferError::Backend(source.backend.clone()))
    }

    fn failed(&self, error: &TransferError, request_id: &str, received: usize) {
        self.metrics.failed(error.reason());
        tracing::warn!(request_id, received, %error, "KV transfer failed; the rest of the prompt is computed here");
    }
}
