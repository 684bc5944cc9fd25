//! The event plane over ZeroMQ: a SUB socket on one worker's publisher, rebuilt whenever it is silent for too long.
//!
//! Losses are expected: before the subscription has arrived, while reconnecting, at the publisher's high-water mark. They
//! show only as gaps of ids, which is the cursor's business.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_index::KvEvent;
use protocol::event_plane::{ActiveLoad, KV_EVENTS, KV_METRICS, decode_envelope, decode_events, decode_load};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::wire;
use crate::metrics::{CoreMetrics, ReasonLabels};
use zmtp::{PAUSE, Subscriber, ZmtpError};

/// A publisher sends a heartbeat every second: after five missed ones the socket is rebuilt.
const SILENCE: Duration = Duration::from_secs(5);

/// Messages waiting for the ingest task. When it is full the socket is not read, and the publisher drops: a gap.
const QUEUE: usize = 256;

/// What the event plane brings.
#[derive(Debug)]
pub(super) enum Message {
    /// A socket is connected and has subscribed.
    Connected,
    /// KV events, in the publisher's order.
    Events(Vec<KvEvent>),
    /// A heartbeat.
    Load(ActiveLoad),
}

/// The reading task; dropping it ends the task.
pub(super) struct Subscription {
    task: JoinHandle<()>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Subscription {
    /// Subscribes to `topics` of the publisher at `address`, which must say that it is `worker`.
    pub(super) fn start(
        address: String,
        worker: u64,
        topics: &'static [&'static str],
        metrics: Arc<CoreMetrics>,
    ) -> (Self, mpsc::Receiver<Message>) {
        let (out, messages) = mpsc::channel(QUEUE);
        (Self { task: tokio::spawn(read_for_ever(address, worker, topics, metrics, out)) }, messages)
    }
}

async fn read_for_ever(
    address: String,
    worker: u64,
    topics: &[&str],
    metrics: Arc<CoreMetrics>,
    out: mpsc::Sender<Message>,
) {
    loop {
        if let Some(subscriber) = Subscriber::connect(&address, topics, SILENCE).await {
            if out.send(Message::Connected).await.is_err() {
                return;
            }
            if read(subscriber, worker, &metrics, &out).await.is_err() {
                return;
            }
        }
        sleep(PAUSE).await;
    }
}

/// The ingest task has ended.
struct Ended;

/// Reads one socket until it is no good any more.
async fn read(
    mut subscriber: Subscriber,
    worker: u64,
    metrics: &CoreMetrics,
    out: &mpsc::Sender<Message>,
) -> Result<(), Ended> {
    let refuse = |reason| _ = metrics.events_refused.get_or_create(&ReasonLabels { reason }).inc();
    loop {
        match subscriber.next().await {
            Ok(parts) => match decode(&parts, worker, metrics) {
                Ok(message) => out.send(message).await.map_err(|_| Ended)?,
                Err(reason) => refuse(reason),
            },
            Err(error) => {
                if let ZmtpError::TooLarge(_) = error {
                    refuse("too large");
                }
                tracing::debug!(worker, %error, "the subscription to KV events ended");
                return Ok(());
            }
        }
    }
}

/// Reads topic, publisher id, sequence and envelope. The error is the label under which it is counted.
fn decode(parts: &[Bytes], worker: u64, metrics: &CoreMetrics) -> Result<Message, &'static str> {
    let [topic, publisher, _sequence, envelope] = parts else { return Err("malformed") };
    if **publisher != worker.to_be_bytes() {
        return Err("another worker");
    }
    let envelope = decode_envelope(envelope).map_err(|_| "malformed")?;
    if topic.as_ref() == KV_EVENTS.as_bytes() {
        let events = decode_events(&envelope.payload).map_err(|_| "malformed")?;
        let ours = events.into_iter().filter(|event| event.worker_id == worker);
        Ok(Message::Events(ours.map(|event| wire::event(event, metrics)).collect()))
    } else if topic.as_ref() == KV_METRICS.as_bytes() {
        let load = decode_load(&envelope.payload).map_err(|_| "malformed")?;
        if load.worker_id == worker { Ok(Message::Load(load)) } else { Err("another worker") }
    } else {
        Err("unknown topic")
    }
}
