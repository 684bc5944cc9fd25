//! One other router's messages: a SUB socket on its publisher, rebuilt whenever it is silent for too long.
//!
//! Losses are expected, as with the workers' events; they show as gaps, which are the hub's business.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use protocol::event_plane::decode_envelope;
use protocol::replica_sync::{
    ACTIVE_SEQUENCES, ActiveSequenceBatch, ActiveSequenceEvent, GROWTH, GrowthBatch, ROUTER_STATUS, RouterStatus,
    Snapshot, decode, snapshot_topic,
};
use routing::{ReplicaEvent, RouterId};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::hub::{Body, Message};
use super::metrics::ReplicaMetrics;
use super::wire;
use zmtp::{PAUSE, Subscriber, ZmtpError};

/// A router says four times a second how it is: after eight missed messages the socket is rebuilt.
const SILENCE: Duration = Duration::from_secs(2);

/// A message, and the address that it came from.
pub(super) type Heard = (Arc<str>, Message);

/// The reading task; dropping it ends the task.
pub(super) struct Link {
    task: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Link {
    /// Reads the router at `address`, which may turn out to be `own`: whoever takes the messages must see to that.
    pub(super) fn start(
        address: Arc<str>,
        own: RouterId,
        out: mpsc::Sender<Heard>,
        metrics: Arc<ReplicaMetrics>,
    ) -> Self {
        Self { task: tokio::spawn(read_for_ever(address, own, out, metrics)) }
    }
}

async fn read_for_ever(address: Arc<str>, own: RouterId, out: mpsc::Sender<Heard>, metrics: Arc<ReplicaMetrics>) {
    let (dialed, snapshots) = (format!("tcp://{address}"), snapshot_topic(own.0));
    let topics = [ACTIVE_SEQUENCES, GROWTH, ROUTER_STATUS, &snapshots];
    loop {
        if let Some(subscriber) = Subscriber::connect(&dialed, &topics, SILENCE).await
            && read(subscriber, &address, &out, &metrics).await.is_err()
        {
            return;
        }
        sleep(PAUSE).await;
    }
}

/// The mesh has ended.
struct Ended;

/// Reads one socket until it is no good any more.
async fn read(
    mut subscriber: Subscriber,
    address: &Arc<str>,
    out: &mpsc::Sender<Heard>,
    metrics: &ReplicaMetrics,
) -> Result<(), Ended> {
    loop {
        match subscriber.next().await {
            Ok(parts) => match message_of(&parts, metrics) {
                Ok(message) => out.send((address.clone(), message)).await.map_err(|_| Ended)?,
                Err(reason) => metrics.refuse(reason),
            },
            Err(error) => {
                if let ZmtpError::TooLarge(_) = error {
                    metrics.refuse("too large");
                }
                tracing::debug!(%address, %error, "the subscription to another router ended");
                return Ok(());
            }
        }
    }
}

/// Reads topic, publisher id, sequence and envelope. The error is the label under which it is counted.
pub(super) fn message_of(parts: &[Bytes], metrics: &ReplicaMetrics) -> Result<Message, &'static str> {
    let [topic, publisher, _sequence, envelope] = parts else { return Err("malformed") };
    let publisher: [u8; 8] = publisher.as_ref().try_into().map_err(|_| "malformed")?;
    let from = RouterId(u64::from_be_bytes(publisher));
    let envelope = decode_envelope(envelope).map_err(|_| "malformed")?;
    let body = if topic.as_ref() == ACTIVE_SEQUENCES.as_bytes() {
        let batch: ActiveSequenceBatch = decode(&envelope.payload).map_err(|_| "malformed")?;
        Body::Events { sequence: envelope.sequence, events: events(batch.events, from, metrics) }
    } else if topic.as_ref() == GROWTH.as_bytes() {
        let batch: GrowthBatch = decode(&envelope.payload).map_err(|_| "malformed")?;
        let grown = batch.requests.into_iter().map(|growth| wire::read_growth(growth, from));
        Body::Growth(readable(grown, metrics))
    } else if topic.as_ref() == ROUTER_STATUS.as_bytes() {
        let status: RouterStatus = decode(&envelope.payload).map_err(|_| "malformed")?;
        Body::Status(status)
    } else {
        let mut snapshot: Snapshot = decode(&envelope.payload).map_err(|_| "malformed")?;
        let told = events(std::mem::take(&mut snapshot.events), from, metrics);
        Body::Snapshot(snapshot, told)
    };
    Ok(Message { from, body })
}

fn events(events: Vec<ActiveSequenceEvent>, from: RouterId, metrics: &ReplicaMetrics) -> Vec<ReplicaEvent> {
    readable(events.into_iter().map(|event| wire::read(event, from)), metrics)
}

fn readable(
    read: impl Iterator<Item = Result<ReplicaEvent, &'static str>>,
    metrics: &ReplicaMetrics,
) -> Vec<ReplicaEvent> {
    read.filter_map(|event| event.map_err(|reason| metrics.refuse(reason)).ok()).collect()
}
