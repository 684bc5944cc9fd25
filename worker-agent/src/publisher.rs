//! Publishes what happens in the KV arena, and how busy the engine is, over ZeroMQ.
//!
//! One task owns the socket, the engine's event stream and the numbering. A PUB socket drops messages for a subscriber that
//! is 100,000 of them behind; it never waits, so neither the engine nor this task is ever held up by a router. Whoever
//! missed events sees the gap in their ids and asks the local indexer over the request plane.

mod batch;
pub(crate) mod wire;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kv_index::local::LocalIndexer;
use protocol::event_plane::{self, ActiveLoad, Envelope, KV_EVENTS, KV_METRICS, MAX_BATCH_EVENTS};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{Instant, MissedTickBehavior, Sleep, sleep};
use zeromq::{Endpoint, PubSocket, Socket, SocketSend, ZmqError, ZmqMessage};

use crate::drain::Drain;
use crate::engine::{ArenaEvent, Engine};
use crate::metrics::Metrics;

/// How often the load is looked at, and so the least time between two reports of it.
const LOAD_CHECK: Duration = Duration::from_millis(100);
/// A report is sent at least this often: routers measure silence by it.
const LOAD_HEARTBEAT: Duration = Duration::from_secs(1);
/// Pause after a message of events that was not full: what an engine says in it goes together. Each message wakes two tasks and
/// a thread of every router, whatever is in it.
const GATHER: Duration = Duration::from_millis(5);

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum PublisherError {
    /// The socket could not be set up.
    #[error("event socket: {0}")]
    Socket(#[from] ZmqError),
    /// The listener does not say where it listens.
    #[error("event socket: unexpected address {0}")]
    Address(Endpoint),
    /// The engine closed its event stream.
    #[error("the engine has stopped")]
    EngineStopped,
}

/// What a publisher reads.
pub struct Source {
    /// Instance id of this worker.
    pub instance_id: u64,
    /// The engine, for its load.
    pub engine: Arc<dyn Engine>,
    /// Numbers the events, and is shared with whoever answers queries about them.
    pub indexer: Arc<Mutex<LocalIndexer>>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Is reported, and ends the publisher when it stops.
    pub drain: Arc<Drain>,
}

/// The bound socket.
pub struct Publisher {
    socket: PubSocket,
    port: u16,
    events: Topic,
    load: Topic,
}

/// The engine's events, as they go into messages: one that comes [`GATHER`] or more after the last message goes at once; those
/// that come sooner go together at the end of that time.
struct Gathered {
    events: mpsc::UnboundedReceiver<ArenaEvent>,
    pause: Pin<Box<Sleep>>,
}

impl Gathered {
    fn new(events: mpsc::UnboundedReceiver<ArenaEvent>) -> Self {
        Self { events, pause: Box::pin(sleep(Duration::ZERO)) }
    }

    /// Appends the events of the next message; returns how many, 0 when the engine has stopped. May be dropped at any time.
    async fn next(&mut self, taken: &mut Vec<ArenaEvent>) -> usize {
        if !self.pause.is_elapsed() {
            self.pause.as_mut().await;
        }
        let count = self.events.recv_many(taken, MAX_BATCH_EVENTS).await;
        // More of them than go into one message have waited long enough.
        if count < MAX_BATCH_EVENTS {
            self.pause.as_mut().reset(Instant::now() + GATHER);
        }
        count
    }
}

/// What the publisher knows of its indexer without asking: nobody else adds events.
#[derive(Clone, Copy)]
struct Cursor {
    dp_rank: u32,
    last_event_id: Option<u64>,
}

/// A topic and the sequence number of its next message.
struct Topic {
    name: &'static str,
    sequence: u64,
}

impl Publisher {
    /// Takes over a bound listener.
    pub async fn bind(listener: std::net::TcpListener) -> Result<Self, PublisherError> {
        let mut socket = PubSocket::new();
        let port = match socket.bind_listener(listener).await? {
            Endpoint::Tcp(_, port) => port,
            other => return Err(PublisherError::Address(other)),
        };
        let topic = |name| Topic { name, sequence: 0 };
        Ok(Self { socket, port, events: topic(KV_EVENTS), load: topic(KV_METRICS) })
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Publishes until the drain stops.
    pub async fn run(
        mut self,
        source: Source,
        events: mpsc::UnboundedReceiver<ArenaEvent>,
    ) -> Result<(), PublisherError> {
        let (drain, mut events) = (source.drain.clone(), Gathered::new(events));
        let mut check = tokio::time::interval(LOAD_CHECK);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut taken = Vec::with_capacity(MAX_BATCH_EVENTS);
        let mut cursor = {
            let indexer = source.indexer.lock().await;
            Cursor { dp_rank: indexer.dp_rank(), last_event_id: indexer.last_id() }
        };
        let mut reported: Option<(ActiveLoad, Instant)> = None;
        loop {
            tokio::select! {
                count = events.next(&mut taken) => {
                    if count == 0 {
                        return Err(PublisherError::EngineStopped);
                    }
                    self.publish_events(&mut taken, &mut cursor, &source).await;
                }
                now = check.tick() => {
                    let load = load_report(&source, cursor);
                    let due = reported.as_ref().is_none_or(|(last, at)| *last != load || now - *at >= LOAD_HEARTBEAT);
                    if due {
                        let payload = event_plane::encode_load(&load);
                        send(&mut self.socket, &mut self.load, source.instance_id, payload).await;
                        reported = Some((load, now));
                    }
                }
                () = drain.stopped() => return Ok(()),
            }
        }
    }

    async fn publish_events(&mut self, taken: &mut Vec<ArenaEvent>, cursor: &mut Cursor, source: &Source) {
        let numbered: Vec<_> = {
            let mut indexer = source.indexer.lock().await;
            let numbered = taken.drain(..).flat_map(|event| indexer.apply(event.tier, event.data)).collect();
            cursor.last_event_id = indexer.last_id();
            numbered
        };
        for batch in batch::batches(&numbered) {
            let events: Vec<_> = batch.iter().map(|event| wire::router_event(source.instance_id, event)).collect();
            let payload = event_plane::encode_events(&events);
            send(&mut self.socket, &mut self.events, source.instance_id, payload).await;
            source.metrics.events_published.inc_by(events.len() as u64);
        }
    }
}

/// Sends one message of four parts. It never waits for a subscriber; without any, the message is dropped.
async fn send(socket: &mut PubSocket, topic: &mut Topic, publisher_id: u64, payload: Vec<u8>) {
    let published_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
    let sequence = topic.sequence;
    topic.sequence += 1;
    let envelope = Envelope { publisher_id, sequence, published_at, topic: topic.name.to_owned(), payload };
    let mut message = ZmqMessage::from(Bytes::from_static(topic.name.as_bytes()));
    message.push_back(Bytes::copy_from_slice(&publisher_id.to_be_bytes()));
    message.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
    message.push_back(event_plane::encode_envelope(&envelope).into());
    if let Err(error) = socket.send(message).await {
        tracing::warn!(topic = topic.name, sequence, %error, "event message not sent");
    }
}

fn load_report(source: &Source, cursor: Cursor) -> ActiveLoad {
    let load = source.engine.load();
    ActiveLoad {
        worker_id: source.instance_id,
        dp_rank: cursor.dp_rank,
        active_decode_blocks: Some(load.active_blocks as u64),
        active_prefill_tokens: Some(load.pending_prefill_tokens as u64),
        kv_used_blocks: Some(load.used_blocks as u64),
        running_requests: Some(load.running as u64),
        waiting_requests: Some(load.waiting as u64),
        last_event_id: cursor.last_event_id,
        draining: source.drain.is_draining(),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use kv_index::{KvEventData, Tier};

    use super::*;

    #[tokio::test]
    async fn events_that_come_soon_after_a_message_go_together() {
        let (engine, events) = mpsc::unbounded_channel();
        let emit = move |count: usize| {
            let event = || ArenaEvent { tier: Tier::Device, data: KvEventData::Cleared };
            (0..count).for_each(|_| engine.send(event()).expect("the receiver is there"));
        };
        let mut events = Gathered::new(events);
        let mut next = async || events.next(&mut Vec::new()).await;
        for _ in 0..100 {
            emit(1);
            assert_eq!(next().await, 1);
            emit(1);
            if next().now_or_never().is_some() {
                // The machine stood still for longer than events are gathered.
                continue;
            }
            emit(2);
            assert_eq!(next().await, 3);
            // What does not go into one message waits no longer.
            emit(MAX_BATCH_EVENTS + 1);
            assert_eq!(next().await, MAX_BATCH_EVENTS);
            assert_eq!(next().now_or_never(), Some(1));
            return;
        }
        panic!("no event waits for another");
    }
}
