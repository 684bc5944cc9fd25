//! KV events of one server's engine into the index, as vLLM publishes them over ZeroMQ: one task for each server.
//!
//! There is no agent beside the engine, so nothing tells the whole state and no heartbeat shows a loss at the end of a stream.
//! Messages are numbered; what is missing is asked for at the engine's replay socket, where it has one. What cannot be had
//! again makes everything known of the server void: the index then knows less than the server holds, never more.

mod cursor;
mod replay;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_hashing::BlockSize;
use kv_index::{KvEvent, WorkerRank};
use protocol::kv_event::{KvCacheEvent, RouterEvent};
use protocol::vllm_events::{EventBatch, Refused, Translator, decode_batch, decode_sequence};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::Proxy;
use super::server::Server;
use crate::discovery::static_servers::EventSource;
use crate::index::Outcome;
use crate::ingest::{Batches, wire};
use crate::metrics::ReasonLabels;
use crate::workers::Cluster;
use crate::zmtp::{Collector, PAUSE, Subscriber, ZmtpError};
use cursor::{Cursor, Step};

/// An idle engine publishes nothing, and so does a connection that is dead: after this long a new one is made.
const SILENCE: Duration = Duration::from_secs(30);

/// Most data-parallel ranks that are told apart.
const RANKS: u32 = 1024;

/// Starts to follow a server's events, if they are published.
pub(super) fn start(proxy: &Proxy, server: &Arc<Server>, stop: &CancellationToken) {
    let Some(source) = server.events.clone() else { return };
    let feed = Feed {
        server: server.clone(),
        source,
        cluster: proxy.cluster.clone(),
        block_size: proxy.settings.block_size,
        cursor: Cursor::default(),
        ranks: BTreeMap::new(),
        warned: false,
        unbound: false,
        stop: stop.clone(),
    };
    tokio::spawn(stop.clone().run_until_cancelled_owned(feed.run()));
}

/// Where messages come from.
enum Socket {
    /// We connected to the engine.
    Connected(Subscriber),
    /// It connects to us, and again by itself.
    Bound(Collector),
}

impl Socket {
    async fn next(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        match self {
            Self::Connected(subscriber) => subscriber.next().await,
            Self::Bound(collector) => collector.next().await,
        }
    }
}

struct Feed {
    server: Arc<Server>,
    source: EventSource,
    cluster: Arc<Cluster>,
    block_size: BlockSize,
    cursor: Cursor,
    /// By data-parallel rank.
    ranks: BTreeMap<u32, Translator>,
    /// Somebody has been told that the events are of no use.
    warned: bool,
    /// Somebody has been told that the port is taken.
    unbound: bool,
    stop: CancellationToken,
}

impl Feed {
    async fn run(mut self) {
        loop {
            if let Some(socket) = self.open().await {
                // What was published before, and while there was no socket.
                self.recover(self.cursor.next()).await;
                self.read(socket).await;
            }
            sleep(PAUSE).await;
        }
    }

    /// A socket that has subscribed, or that the engine can connect to.
    async fn open(&mut self) -> Option<Socket> {
        let address = &self.source.address;
        let Some(port) = address.strip_prefix("tcp://*:") else {
            // Engines choose their topics.
            return Subscriber::connect(address, &[""], SILENCE).await.map(Socket::Connected);
        };
        // Its parser has seen a number there.
        let bound = Collector::bind((Ipv4Addr::UNSPECIFIED, port.parse().ok()?).into(), self.cluster.metrics.clone());
        match bound.await {
            Ok(collector) => Some(Socket::Bound(collector)),
            Err(error) => {
                if !std::mem::replace(&mut self.unbound, true) {
                    tracing::warn!(worker = %self.server.name, address, %error, "cannot listen for KV events; trying again");
                }
                None
            }
        }
    }

    /// Reads one socket until it is no good any more.
    async fn read(&mut self, mut socket: Socket) {
        let server = self.server.clone();
        loop {
            let received = tokio::select! {
                received = socket.next() => received,
                // It is another process now, or the same one that could not be reached.
                () = server.revived.notified() => match socket {
                    Socket::Bound(_) => {
                        self.recover(self.cursor.next()).await;
                        continue;
                    }
                    Socket::Connected(_) => return,
                },
            };
            match received {
                Ok(parts) => self.live(&parts).await,
                Err(error) => {
                    if let ZmtpError::TooLarge(_) = error {
                        self.refuse("too large");
                    }
                    return tracing::debug!(worker = %self.server.name, %error, "the subscription to KV events ended");
                }
            }
        }
    }

    /// Takes a message: topic, sequence, batch.
    async fn live(&mut self, parts: &[Bytes]) {
        let [_, sequence, payload] = parts else { return self.refuse("malformed") };
        let Some(sequence) = decode_sequence(sequence) else { return self.refuse("malformed") };
        match self.cursor.look(sequence, payload) {
            Step::Gap => {
                self.cluster.metrics.event_gaps.inc();
                self.recover(self.cursor.next()).await;
            }
            Step::Restarted => {
                tracing::info!(worker = %self.server.name, "the numbers of events went backwards: the engine restarted");
                self.forget().await;
                self.recover(0).await;
            }
            Step::Next | Step::Duplicate => {}
        }
        self.take(sequence, payload).await;
    }

    /// Asks for the messages from `start` on, where the engine keeps them.
    async fn recover(&mut self, start: u64) {
        let Some(address) = self.source.replay.clone() else { return };
        let metrics = self.cluster.metrics.clone();
        match replay::ask(&address, start).await {
            Ok(messages) => {
                metrics.recoveries.get_or_create(&ReasonLabels { reason: "replay" }).inc();
                for (sequence, payload) in messages {
                    self.take(sequence, &payload).await;
                }
            }
            Err(error) => {
                metrics.recovery_failures.inc();
                tracing::debug!(worker = %self.server.name, %error, "KV events could not be replayed");
            }
        }
    }

    /// Takes what may be applied now, whatever is missing before it.
    async fn take(&mut self, sequence: u64, payload: &Bytes) {
        match self.cursor.look(sequence, payload) {
            Step::Duplicate => {
                self.cluster.metrics.events_duplicate.inc();
                return;
            }
            Step::Next => {}
            Step::Gap | Step::Restarted => self.forget().await,
        }
        self.cursor.advance(sequence, payload);
        match decode_batch(payload) {
            Ok(batch) => self.apply(sequence, &batch).await,
            Err(error) => {
                tracing::debug!(worker = %self.server.name, %error, "KV events are unreadable");
                self.refuse("malformed");
                self.forget().await;
            }
        }
    }

    async fn apply(&mut self, sequence: u64, batch: &EventBatch) {
        let dp_rank = batch.dp_rank.unwrap_or(0);
        if dp_rank >= RANKS {
            return self.refuse("unknown rank");
        }
        let translator = self.ranks.entry(dp_rank).or_insert_with(|| Translator::new(self.block_size));
        let mut events: Vec<KvEvent> = Vec::with_capacity(batch.events.len());
        let mut refused = Vec::new();
        for event in &batch.events {
            match translator.translate(event) {
                Ok(Some(translated)) => {
                    let event = RouterEvent {
                        worker_id: self.server.id.0,
                        storage_tier: translated.tier,
                        residency_domain: None,
                        event: KvCacheEvent { event_id: sequence, data: translated.data, dp_rank },
                    };
                    events.push(wire::event(event, &self.cluster.metrics));
                }
                Ok(None) => {}
                Err(reason) => refused.push(reason),
            }
        }
        refused.iter().for_each(|reason| self.warn(reason));
        let rank = WorkerRank { worker: self.server.id, dp_rank };
        let metrics = &self.cluster.metrics;
        metrics.events_applied.inc_by(events.len() as u64);
        for run in Batches::of(events) {
            let Outcome { orphans, refused } = self.cluster.index.apply(rank, run, &self.stop).await;
            for (blocks, reason) in [(refused, "rank is full"), (orphans as u64, "unknown parent")] {
                if blocks > 0 {
                    metrics.events_refused.get_or_create(&ReasonLabels { reason }).inc();
                }
            }
        }
    }

    /// Everything known of the server is void.
    async fn forget(&mut self) {
        self.ranks.clear();
        self.cluster.index.remove_worker(self.server.id).await;
    }

    fn refuse(&self, reason: &'static str) {
        self.cluster.metrics.events_refused.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Counts an event that is of no use, and says so once when none of them can be.
    fn warn(&mut self, refused: &Refused) {
        self.refuse(refused.label());
        let Refused::BlockSize(theirs) = refused else { return };
        if !std::mem::replace(&mut self.warned, true) {
            self.cluster.metrics.workers_event_mismatch.inc();
            let ours = self.block_size.get();
            tracing::warn!(
                worker = %self.server.name, theirs, ours,
                "the server's KV blocks are of another size, and its events of no use: set --kv-cache-block-size"
            );
        }
    }
}
