//! KV events of one server's engine into the index, as vLLM publishes them over ZeroMQ: one task for each server.
//!
//! There is no agent beside the engine: what cannot be had again makes everything known of the server void (`engine_feed`).

use std::collections::BTreeMap;
use std::sync::Arc;

use engine_feed::{CollectorCounters, Feed, Note, Sink};
use kv_hashing::BlockSize;
use kv_index::{KvEvent, WorkerRank};
use protocol::kv_event::{KvCacheEvent, RouterEvent};
use protocol::vllm_events::{EngineEvent, EventBatch, Refused, Translator};
use tokio_util::sync::CancellationToken;

use super::Proxy;
use super::server::Server;
use crate::index::Outcome;
use crate::ingest::{Batches, wire};
use crate::metrics::{CoreMetrics, ReasonLabels};
use crate::workers::Cluster;

/// Most data-parallel ranks that are told apart.
const RANKS: u32 = 1024;

/// Starts to follow a server's events, if they are published.
pub(super) fn start(proxy: &Proxy, server: &Arc<Server>, stop: &CancellationToken) {
    let Some(source) = server.events.clone() else { return };
    let feed = Feed::new(source, counters(&proxy.cluster.metrics));
    let indexed = Indexed {
        server: server.clone(),
        cluster: proxy.cluster.clone(),
        block_size: proxy.settings.block_size,
        total_blocks: proxy.settings.total_blocks.map(u64::from),
        ranks: BTreeMap::new(),
        unbound: false,
        stop: stop.clone(),
    };
    let (server, stop) = (server.clone(), stop.clone());
    tokio::spawn(stop.run_until_cancelled_owned(async move { feed.run(&server.revived, indexed).await }));
}

fn counters(metrics: &CoreMetrics) -> CollectorCounters {
    let refused = |reason| metrics.events_refused.get_or_create(&ReasonLabels { reason }).clone();
    CollectorCounters { peers: refused("too many peers"), large: refused("too large") }
}

/// What the index is told of one server.
struct Indexed {
    server: Arc<Server>,
    cluster: Arc<Cluster>,
    block_size: BlockSize,
    /// What the engine has room for, where that is said.
    total_blocks: Option<u64>,
    /// By data-parallel rank.
    ranks: BTreeMap<u32, Translator>,
    /// Somebody has been told that the port is taken.
    unbound: bool,
    stop: CancellationToken,
}

impl Sink for Indexed {
    async fn take(&mut self, sequence: u64, batch: EventBatch) {
        let dp_rank = batch.dp_rank.unwrap_or(0);
        if dp_rank >= RANKS {
            return self.refuse("unknown rank");
        }
        let translator = self.ranks.entry(dp_rank).or_insert_with(|| Translator::new(self.block_size));
        let mut events: Vec<KvEvent> = Vec::with_capacity(batch.events.len());
        let (mut refused, mut stored) = (Vec::new(), false);
        for event in &batch.events {
            if let EngineEvent::Stored(_) | EngineEvent::Removed(_) = event {
                self.server.watch.heard();
            }
            match translator.translate(event) {
                Ok(Some(translated)) => {
                    stored |= matches!(event, EngineEvent::Stored(_));
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
        self.judge(&refused, stored);
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

    async fn forget(&mut self) {
        self.ranks.clear();
        self.server.watch.forget_size();
        let index = &self.cluster.index;
        index.remove_worker(self.server.id).await;
        index.expect_worker(self.server.id, 1, self.total_blocks, &self.stop).await;
    }

    fn note(&mut self, note: Note) {
        let (metrics, worker) = (&self.cluster.metrics, &self.server.name);
        match note {
            Note::Gap => _ = metrics.event_gaps.inc(),
            Note::Restarted => tracing::info!(%worker, "the numbers of events went backwards: the engine restarted"),
            Note::Replayed => _ = metrics.recoveries.get_or_create(&ReasonLabels { reason: "replay" }).inc(),
            Note::NotReplayed(error) => {
                metrics.recovery_failures.inc();
                tracing::debug!(%worker, %error, "KV events could not be replayed");
            }
            Note::Duplicate => _ = metrics.events_duplicate.inc(),
            Note::Refused(reason) => self.refuse(reason),
            Note::Unbound(error) => {
                if !std::mem::replace(&mut self.unbound, true) {
                    tracing::warn!(%worker, %error, "cannot listen for KV events; trying again");
                }
            }
            Note::Ended(error) => tracing::debug!(%worker, %error, "the subscription to KV events ended"),
        }
    }
}

impl Indexed {
    fn refuse(&self, reason: &'static str) {
        self.cluster.metrics.events_refused.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Counts the events of a batch that are of no use, and says so where none of them can be. `stored`: blocks of our size came.
    fn judge(&self, refused: &[Refused], stored: bool) {
        refused.iter().for_each(|refused| self.refuse(refused.label()));
        let other_size = refused.iter().find_map(|refused| match refused {
            // Some tiers say nothing of theirs.
            Refused::BlockSize(theirs) if *theirs > 0 => Some(*theirs),
            _ => None,
        });
        let (Some(theirs), false) = (other_size, stored) else {
            if stored {
                self.server.watch.note_size(false);
            }
            return;
        };
        if self.server.watch.note_size(true) {
            let ours = self.block_size.get();
            tracing::warn!(
                worker = %self.server.name, theirs, ours,
                "the server's KV blocks are of another size, and its events of no use: set --kv-cache-block-size"
            );
        }
    }
}
