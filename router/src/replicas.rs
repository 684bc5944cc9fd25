//! Several routers, one load: each tells the others what it books, and counts what they tell.
//!
//! Everything travels over the event plane. `outbox` takes what happens to own requests, `feed` puts it into messages and
//! `publisher` sends them; `peers` finds the other routers, a `link` reads each of them, and `hub` applies what it says. A
//! router that joins, or that sees a gap in the numbers of a peer's messages, asks by its own status message for a snapshot
//! of that peer's running requests. Nothing here is on the way of a request: a full queue loses events, which snapshots heal.

mod feed;
mod hub;
mod link;
mod mesh;
pub mod metrics;
pub mod options;
mod outbox;
mod peer;
mod peers;
mod publisher;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use routing::{ReplicaEvent, RouterId};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::discovery::DiscoveryError;
use feed::Feed;
use mesh::Mesh;
use metrics::ReplicaMetrics;
use options::ReplicaSettings;
pub(crate) use outbox::Outbox;
use publisher::{Inbox, Publisher};

/// The load of this router, in which the requests of all routers count.
pub(crate) trait Load: Send + Sync + 'static {
    /// Applies what other routers did, in order, under one lock: few at a time.
    fn apply(&self, events: &[ReplicaEvent]) -> Tally;
    /// Forgets what another router had booked.
    fn remove_router(&self, router: RouterId) -> Tally;
    /// Forgets bookings of other routers that made no progress for `after`.
    fn expire(&self, after: Duration) -> Tally;
    /// An addition for each own booking.
    fn own_bookings(&self) -> Vec<ReplicaEvent>;
    /// Own bookings that have generated anything: their names, and how many tokens.
    fn own_growth(&self) -> Vec<(Arc<str>, usize)>;
}

/// What a change of the load did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Events that did not fit into a bound.
    pub(crate) refused: u64,
    /// Events of bookings that should be known and are not.
    pub(crate) unknown: u64,
    /// Bookings that were dropped without being freed.
    pub(crate) dropped: u64,
    /// Bookings of other routers now.
    pub(crate) replicated: usize,
}

/// Why a router cannot take part.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The port is taken, or not allowed.
    #[error("cannot listen on {address} for other routers (--sync-port): {reason}")]
    Listen {
        /// Where.
        address: String,
        /// Why not.
        reason: String,
    },
    /// The other routers cannot be looked for.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
}

/// A bound socket that nobody serves yet: the load which it speaks of is made with its [`Outbox`].
pub(crate) struct Replicas {
    own: RouterId,
    settings: ReplicaSettings,
    publisher: Publisher,
    outbox: outbox::Receiver,
    metrics: Arc<ReplicaMetrics>,
}

impl Replicas {
    /// Binds the port that the other routers read from.
    pub(crate) async fn bind(
        own: RouterId,
        settings: ReplicaSettings,
        registry: &mut Registry,
    ) -> Result<(Outbox, Self), ReplicaError> {
        let metrics = Arc::new(ReplicaMetrics::register(registry));
        let publisher = Publisher::bind(&settings, own, metrics.clone()).await?;
        let (sender, outbox) = outbox::channel(own, metrics.clone());
        Ok((sender, Self { own, settings, publisher, outbox, metrics }))
    }

    /// Starts telling and listening, until `stop`.
    pub(crate) async fn start(self, load: Arc<dyn Load>, stop: CancellationToken) -> Result<Running, ReplicaError> {
        let Self { own, settings, publisher, outbox, metrics } = self;
        let address = settings.advertised(publisher.port());
        let (view, announced) = peers::start(settings.peers, own, address, stop.clone()).await?;
        let (hub, wants, asks) = hub::Hub::new(own, load.clone(), metrics.clone(), settings.expiry);
        let standing = outbox.standing();
        let inbox = Inbox { outbox, asks, wants };
        let mesh = Mesh::new(own, hub, standing, metrics);
        let told = stop.clone().run_until_cancelled_owned(publisher.run(Feed::new(), inbox, load));
        let heard = stop.run_until_cancelled_owned(mesh.run(view));
        // How they end does not matter.
        let told = tokio::spawn(async { _ = told.await });
        let heard = tokio::spawn(async { _ = heard.await });
        Ok(Running { tasks: [told, heard].into_iter().chain(announced).collect() })
    }
}

/// The tasks, which end by the token that they were started with.
pub(crate) struct Running {
    tasks: Vec<JoinHandle<()>>,
}

impl Running {
    /// Waits for the tasks, once their token is cancelled.
    pub(crate) async fn ended(self) {
        for task in self.tasks {
            // A panic in it has been reported already.
            let _ = task.await;
        }
    }
}

/// Not more than this many other routers are listened to.
const MAX_ROUTERS: usize = 256;

#[cfg(test)]
mod tests;
