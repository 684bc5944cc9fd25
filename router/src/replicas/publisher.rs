//! The socket that other routers read from: sends own events as they come, growth ten times a second, a status four times,
//! and snapshots.
//!
//! The socket never waits for a reader: what does not fit into the bytes that may wait for one is dropped, and shows as a gap.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use protocol::event_plane::{Envelope, encode_envelope};
use protocol::replica_sync::{MAX_BATCH_EVENTS, SnapshotRequest};
use routing::{ReplicaEvent, RouterId};
use socket2::{Domain, Protocol, Socket as TcpSocket, Type};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use super::feed::{Feed, Outgoing};
use super::hub::Ask;
use super::metrics::ReplicaMetrics;
use super::options::ReplicaSettings;
use super::{Load, ReplicaError, outbox};
use crate::metrics::ReasonLabels;

/// How often the status is sent at least: readers measure silence by it.
const STATUS: Duration = Duration::from_millis(250);

/// How often it is told how far requests have grown. An answer of 100 tokens a second opens a block of 16 six times.
const GROWTH: Duration = Duration::from_millis(100);

/// Least time between two messages of events: below it a message costs more than the event is worth. After a pause the first
/// event goes at once, since decisions elsewhere are blind until it is there.
const SPACING: Duration = Duration::from_millis(1);

/// Connections waiting to be accepted.
const BACKLOG: i32 = 128;

/// What is to be told.
pub(super) struct Inbox {
    /// Own events.
    pub(super) outbox: outbox::Receiver,
    /// Snapshots that others asked for.
    pub(super) asks: mpsc::Receiver<Ask>,
    /// Snapshots that this router asks for.
    pub(super) wants: watch::Receiver<Vec<SnapshotRequest>>,
}

/// The bound socket.
pub(super) struct Publisher {
    socket: zmtp::Publisher,
    port: u16,
    own: RouterId,
    metrics: Arc<ReplicaMetrics>,
}

impl Publisher {
    pub(super) async fn bind(
        settings: &ReplicaSettings,
        own: RouterId,
        metrics: Arc<ReplicaMetrics>,
    ) -> Result<Self, ReplicaError> {
        let address = settings.bind;
        let refused = |reason: String| ReplicaError::Listen { address: address.to_string(), reason };
        let listener = listen(address).map_err(|error| refused(error.to_string()))?;
        let port = listener.local_addr().map_err(|error| refused(error.to_string()))?.port();
        let socket = zmtp::Publisher::new(listener, metrics.socket.clone());
        Ok(Self { socket, port, own, metrics })
    }

    /// The port it listens on.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Publishes until the outbox is closed.
    pub(super) async fn run(mut self, mut feed: Feed, mut inbox: Inbox, load: Arc<dyn Load>) {
        let mut status = interval(STATUS);
        status.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut growth = interval(GROWTH);
        growth.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut due = Instant::now();
        let mut batch = Vec::with_capacity(MAX_BATCH_EVENTS);
        loop {
            tokio::select! {
                count = inbox.outbox.recv_many(&mut batch, MAX_BATCH_EVENTS) => {
                    if count == 0 {
                        return;
                    }
                    self.linger(due, &mut batch, &mut inbox.outbox).await;
                    if inbox.outbox.lost() {
                        feed.lost();
                    }
                    self.metrics.sent.inc_by(batch.len() as u64);
                    self.send_all(feed.events(batch.drain(..))).await;
                    due = Instant::now() + SPACING;
                }
                Some(ask) = inbox.asks.recv() => {
                    self.metrics.snapshots.get_or_create(&ReasonLabels { reason: "sent" }).inc();
                    self.send_all(feed.snapshot(ask.asker, ask.nonce, &load.own_bookings())).await;
                }
                Ok(()) = inbox.wants.changed() => self.status(&mut feed, &mut inbox.wants).await,
                _ = status.tick() => self.status(&mut feed, &mut inbox.wants).await,
                _ = growth.tick(), if inbox.outbox.listened() => self.send_all(feed.growth(load.own_growth())).await,
            }
        }
    }

    /// Waits for more events to share a message with, until one is `due`.
    async fn linger(&self, due: Instant, batch: &mut Vec<ReplicaEvent>, outbox: &mut outbox::Receiver) {
        self.metrics.queue.set(outbox.len() as f64 / outbox::CAPACITY as f64);
        while Instant::now() < due && batch.len() < MAX_BATCH_EVENTS {
            let room = MAX_BATCH_EVENTS - batch.len();
            match timeout_at(due, outbox.recv_many(batch, room)).await {
                Ok(count) if count > 0 => {}
                _ => return,
            }
        }
    }

    async fn status(&mut self, feed: &mut Feed, wants: &mut watch::Receiver<Vec<SnapshotRequest>>) {
        let wants = wants.borrow_and_update().clone();
        let message = feed.status(wants);
        self.send(message);
    }

    async fn send_all(&mut self, messages: Vec<Outgoing>) {
        for message in messages {
            self.send(message);
            // Readers' tasks empty the queues that this fills.
            tokio::task::yield_now().await;
        }
    }

    fn send(&self, message: Outgoing) {
        let published_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        self.socket.send(&frames(self.own, published_at, message));
    }
}

/// A message as the event plane has it: topic, publisher, sequence, envelope.
pub(super) fn frames(own: RouterId, published_at: u64, message: Outgoing) -> [Bytes; 4] {
    let (publisher_id, Outgoing { topic, sequence, payload }) = (own.0, message);
    let head = Bytes::copy_from_slice(topic.as_bytes());
    let envelope = Envelope { publisher_id, sequence, published_at, topic, payload };
    [
        head,
        Bytes::copy_from_slice(&publisher_id.to_be_bytes()),
        Bytes::copy_from_slice(&sequence.to_be_bytes()),
        encode_envelope(&envelope).into(),
    ]
}

/// A listener at an address that a router before may have had a moment ago.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}
