//! How busy a worker says that it is: for decisions, beside what routers have booked there.

use std::sync::Arc;

use kv_index::{WorkerId, WorkerRank};
use protocol::event_plane::{ActiveLoad, KV_METRICS};
use routing::Reported;
use tokio_util::sync::CancellationToken;

use super::subscription::{Message, Subscription};
use crate::dispatch::booking::Placement;
use crate::metrics::CoreMetrics;
use crate::request_plane::Client;

/// What following the reports of a worker needs of the router, where its KV events are of no use or not wanted.
pub(crate) struct LoadFeed {
    /// Its instance id.
    pub(crate) worker: WorkerId,
    /// Data-parallel ranks behind it.
    pub(crate) ranks: u32,
    /// Address of its publisher.
    pub(crate) events: String,
    /// Its connection.
    pub(crate) client: Arc<Client>,
    /// Where loads count.
    pub(crate) placement: Arc<Placement>,
    /// Where things are counted.
    pub(crate) metrics: Arc<CoreMetrics>,
    /// Ends it.
    pub(crate) stop: CancellationToken,
}

/// Follows a worker's reports alone.
pub(crate) fn follow(feed: LoadFeed) {
    let LoadFeed { worker, ranks, events, client, placement, metrics, stop } = feed;
    tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
        loop {
            let (_subscription, mut messages) =
                Subscription::start(events.clone(), worker.0, &[KV_METRICS], metrics.clone());
            // The reader ends only by a panic in it: then another one is started.
            while let Some(message) = messages.recv().await {
                if let Message::Load(load) = message {
                    take(&load, worker, ranks, &client, &placement, &stop);
                }
            }
        }
    }));
}

/// Takes note of one report.
pub(super) fn take(
    load: &ActiveLoad,
    worker: WorkerId,
    ranks: u32,
    client: &Client,
    placement: &Placement,
    life: &CancellationToken,
) {
    if load.dp_rank < ranks {
        placement.reported(WorkerRank { worker, dp_rank: load.dp_rank }, reported(load), life);
    }
    if load.draining {
        client.set_draining();
    }
}

fn reported(load: &ActiveLoad) -> Reported {
    let count = |value: Option<u64>| value.map(|value| u32::try_from(value).unwrap_or(u32::MAX));
    Reported {
        active_blocks: count(load.active_decode_blocks),
        prefill_tokens: count(load.active_prefill_tokens),
        kv_used_blocks: count(load.kv_used_blocks),
        running_requests: count(load.running_requests),
        waiting_requests: count(load.waiting_requests),
    }
}
