//! KV events of one worker into the index: one task for each worker, so that a slow one never delays the others.
//!
//! After the subscription stands, the worker's whole state is fetched over the request plane; from then on its numbered
//! events are applied as they come. `cursor` decides what each event means, `subscription` reads the event plane, `query`
//! asks for what was missed, `compare` looks whether the result is true, `load` takes the workers' reports. Recovery runs beside the live events, which wait for it in a bounded queue.

mod batches;
mod compare;
#[cfg(test)]
mod convergence;
mod cursor;
pub(crate) mod load;
mod query;
mod subscription;
pub(crate) mod wire;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kv_index::{KvEvent, KvEventData, WorkerId, WorkerRank};
use protocol::event_plane::{ActiveLoad, KV_EVENTS, KV_METRICS};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::dispatch::booking::Placement;
use crate::index::{Indexer, Outcome};
use crate::metrics::{CoreMetrics, ReasonLabels};
use crate::request_plane::Client;
use crate::workers::Silence;
pub(crate) use batches::Batches;
use compare::{Check, Repairs, Sample};
use cursor::{Cursor, Verdict, Wish};
use query::{Answer, QueryError};
use subscription::{Message, Subscription};

/// First and longest pause before a failed recovery is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Shortest time between two dumps that orphans ask for: an engine that stores under evicted parents must not cause one each time.
const ORPHAN_DUMPS: Duration = Duration::from_secs(10);

/// Blocks that a rank may hold for each block of device memory it claims, where its card says nothing of the tiers below it.
const TIER_SLACK: u64 = 16;

/// Blocks that a rank may hold for each block that its card gives all of its tiers room for: events of what goes and of what comes
/// need not be in the order of the arena's own books.
const SLACK: u64 = 2;

/// Least limit of blocks a rank; a claim that is too low must not blind the index.
const LEAST_LIMIT: usize = 1 << 16;

/// What the ingest of one worker needs of the router.
pub(crate) struct Feed {
    /// Its instance id.
    pub(crate) worker: WorkerId,
    /// Its name, for people.
    pub(crate) name: String,
    /// Data-parallel ranks behind it.
    pub(crate) ranks: u32,
    /// Blocks of device memory behind each rank, if it says.
    pub(crate) total_blocks: Option<u64>,
    /// Blocks below the device memory of each rank, if it says.
    pub(crate) tier_blocks: Option<u64>,
    /// Whether it answers samples of its blocks.
    pub(crate) samples: bool,
    /// Is told when events come.
    pub(crate) silence: Arc<Silence>,
    /// Set while nothing is known to be missing.
    pub(crate) live: Arc<AtomicBool>,
    /// Address of its publisher.
    pub(crate) events: String,
    /// Its connection.
    pub(crate) client: Arc<Client>,
    /// The index of all workers.
    pub(crate) index: Arc<Indexer>,
    /// Where its load counts.
    pub(crate) placement: Arc<Placement>,
    /// Where things are counted.
    pub(crate) metrics: Arc<CoreMetrics>,
    /// Ends the feed. Whoever cancels it removes the worker from the index afterwards.
    pub(crate) stop: CancellationToken,
}

/// Starts the task.
pub(crate) fn start(feed: Feed) {
    let stop = feed.stop.clone();
    tokio::spawn(async move {
        let ranks = (0..feed.ranks).map(|_| Rank::default()).collect();
        let (recoveries, samples) = (FuturesUnordered::new(), FuturesUnordered::new());
        let mut ingest = Ingest { feed, ranks, recoveries, check: None, samples, turn: 0 };
        let follow = async {
            ingest.limit().await;
            ingest.run().await;
        };
        stop.run_until_cancelled(follow).await;
        ingest.feed.live.store(false, Ordering::Relaxed);
        let held: usize = ingest.ranks.iter().map(|rank| rank.cursor.held()).sum();
        ingest.feed.metrics.events_held.dec_by(held as i64);
    });
}

#[derive(Default)]
struct Rank {
    cursor: Cursor,
    failures: u32,
    orphan_dump: Option<Instant>,
    repairs: Repairs,
    /// Blocks were refused since the last dump: the index has fewer than the worker.
    refused: bool,
}

/// Most blocks of a rank that the index takes in.
fn most_blocks(device: u64, below: Option<u64>) -> usize {
    let most = match below {
        Some(below) => device.saturating_add(below).saturating_mul(SLACK),
        None => device.saturating_mul(TIER_SLACK),
    };
    usize::try_from(most).unwrap_or(usize::MAX).clamp(LEAST_LIMIT, kv_index::MAX_RANK_BLOCKS)
}

type Recovery = Pin<Box<dyn Future<Output = (u32, Result<Answer, QueryError>)> + Send>>;

struct Ingest {
    feed: Feed,
    /// By number.
    ranks: Vec<Rank>,
    recoveries: FuturesUnordered<Recovery>,
    /// The comparison under way, and its question to the worker: at most one.
    check: Option<Check>,
    samples: FuturesUnordered<Sample>,
    /// The rank that is compared next, modulo their number.
    turn: u32,
}

impl Ingest {
    /// Bounds what a broken or hostile engine can make the index hold.
    async fn limit(&mut self) {
        let Feed { worker, total_blocks, tier_blocks, .. } = self.feed;
        let Some(total) = total_blocks else { return };
        let limit = most_blocks(total, tier_blocks);
        let expected = usize::try_from(total).unwrap_or(usize::MAX).min(limit);
        for dp_rank in 0..self.feed.ranks {
            self.feed.index.expect(WorkerRank { worker, dp_rank }, Some(expected), limit, &self.feed.stop).await;
        }
    }

    async fn run(&mut self) {
        let (mut subscription, mut messages) = self.subscribe();
        let every = self.feed.index.check_every();
        // Not all workers at once.
        let mut checks = interval_at(Instant::now() + every.mul_f64(rand::random_range(0.5..1.0)), every);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.compare().await;
            let live = self.ranks.iter().all(|rank| rank.cursor.is_live());
            self.feed.live.store(live, Ordering::Relaxed);
            let due = self.ranks.iter().filter_map(|rank| rank.cursor.due()).min();
            tokio::select! {
                message = messages.recv() => match message {
                    Some(message) => self.take(message).await,
                    // The reader ended, which only a panic in it can cause: start another one.
                    None => (subscription, messages) = self.resubscribe(subscription),
                },
                Some((rank, result)) = self.recoveries.next(), if !self.recoveries.is_empty() => {
                    self.recovered(rank, result).await;
                }
                Some(result) = self.samples.next(), if !self.samples.is_empty() => self.sampled(result),
                _ = checks.tick(), if self.feed.samples => self.begin_check().await,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    let now = Instant::now();
                    for rank in 0..self.feed.ranks {
                        self.ranks[rank as usize].cursor.check(now);
                        self.settle(rank);
                    }
                }
            }
        }
    }

    fn resubscribe(&self, ended: Subscription) -> (Subscription, mpsc::Receiver<Message>) {
        drop(ended);
        tracing::warn!(worker = %self.feed.name, "the reader of KV events ended unexpectedly; starting it again");
        self.subscribe()
    }

    fn subscribe(&self) -> (Subscription, mpsc::Receiver<Message>) {
        let Feed { events, worker, metrics, .. } = &self.feed;
        Subscription::start(events.clone(), worker.0, &[KV_EVENTS, KV_METRICS], metrics.clone())
    }

    async fn take(&mut self, message: Message) {
        match message {
            Message::Connected => {
                for rank in 0..self.feed.ranks {
                    // Only the first connection needs the whole state; after that, gaps show by number.
                    self.ranks[rank as usize].cursor.subscribed();
                    self.settle(rank);
                }
            }
            Message::Events(events) => {
                let mut touched = Vec::new();
                for event in &events {
                    if !touched.contains(&event.dp_rank) {
                        touched.push(event.dp_rank);
                    }
                }
                self.events(events).await;
                for rank in touched {
                    self.settle(rank);
                }
            }
            Message::Load(load) => self.load(&load).await,
        }
    }

    async fn load(&mut self, load: &ActiveLoad) {
        if load.dp_rank < self.feed.ranks {
            if self.ranks[load.dp_rank as usize].cursor.reported(load.last_event_id, Instant::now()) {
                self.restarted(load.dp_rank).await;
            }
            self.settle(load.dp_rank);
        }
        let Feed { worker, ranks, client, placement, stop, .. } = &self.feed;
        load::take(load, *worker, *ranks, client, placement, stop);
    }

    /// Live events. What may be applied is collected, so that a run of small events takes one turn at the index.
    async fn events(&mut self, events: impl IntoIterator<Item = KvEvent>) {
        let mut run: Vec<KvEvent> = Vec::new();
        for event in events {
            let dp_rank = event.dp_rank;
            if run.last().is_some_and(|last| last.dp_rank != dp_rank) {
                self.apply_run(&mut run).await;
            }
            match self.verdict(event) {
                Some(Verdict::Apply(event)) => run.push(event),
                Some(Verdict::Restarted) => {
                    self.apply_run(&mut run).await;
                    self.restarted(dp_rank).await;
                }
                Some(Verdict::Duplicate) => {
                    self.feed.metrics.events_duplicate.inc();
                }
                Some(Verdict::Held | Verdict::Gap) | None => {}
            }
        }
        self.apply_run(&mut run).await;
    }

    /// What a live event means; `None` for one of a rank that the worker does not claim.
    fn verdict(&mut self, event: KvEvent) -> Option<Verdict> {
        let metrics = &self.feed.metrics;
        let Some(rank) = self.ranks.get_mut(event.dp_rank as usize) else {
            metrics.events_refused.get_or_create(&ReasonLabels { reason: "unknown rank" }).inc();
            return None;
        };
        let held = rank.cursor.held();
        let verdict = rank.cursor.live(event, Instant::now());
        metrics.events_held.inc_by(rank.cursor.held() as i64 - held as i64);
        Some(verdict)
    }

    /// Applies events of one rank.
    async fn apply_run(&mut self, run: &mut Vec<KvEvent>) {
        let Some(dp_rank) = run.first().map(|event| event.dp_rank) else { return };
        for batch in Batches::of(std::mem::take(run)) {
            self.apply(dp_rank, batch).await;
        }
    }

    /// The engine's numbering began again: nothing that it held before is there any more.
    async fn restarted(&mut self, dp_rank: u32) {
        tracing::info!(worker = %self.feed.name, dp_rank, "event ids went backwards: the engine restarted");
        self.clear(dp_rank).await;
    }

    /// Applies events to the index, unless the feed has been stopped by then: nothing is added after the worker was removed.
    async fn apply(&mut self, dp_rank: u32, events: Vec<KvEvent>) {
        let rank = WorkerRank { worker: self.feed.worker, dp_rank };
        let count = events.len() as u64;
        if let Some(check) = &mut self.check {
            check.touch(dp_rank, &events);
        }
        if events.iter().any(|event| event.data != KvEventData::Cleared) {
            self.feed.silence.heard();
        }
        let Outcome { orphans, refused } = self.feed.index.apply(rank, events, &self.feed.stop).await;
        let metrics = &self.feed.metrics;
        metrics.events_applied.inc_by(count);
        if refused > 0 {
            metrics.events_refused.get_or_create(&ReasonLabels { reason: "rank is full" }).inc_by(refused);
        }
        let state = &mut self.ranks[dp_rank as usize];
        state.refused |= refused > 0;
        let recent = state.orphan_dump.is_some_and(|last| last.elapsed() < ORPHAN_DUMPS);
        if orphans > 0 && !recent {
            tracing::info!(worker = %self.feed.name, dp_rank, orphans, "events continue blocks that are not known");
            state.orphan_dump = Some(Instant::now());
            state.cursor.wish_dump();
        }
    }

    async fn clear(&mut self, dp_rank: u32) {
        let cleared = KvEvent { id: 0, dp_rank, tier: kv_index::Tier::Device, data: KvEventData::Cleared };
        self.apply(dp_rank, vec![cleared]).await;
    }

    /// Starts the recovery that a rank's cursor asks for, if it does.
    fn settle(&mut self, dp_rank: u32) {
        let Some(rank) = self.ranks.get_mut(dp_rank as usize) else { return };
        let Some(wish) = rank.cursor.take_wish() else { return };
        let (start, end) = match wish {
            Wish::Dump => (None, None),
            Wish::Range { start, end } => {
                if rank.failures == 0 {
                    self.feed.metrics.event_gaps.inc();
                }
                (Some(start), end)
            }
        };
        let pause = match rank.failures {
            0 => Duration::ZERO,
            n => (BACKOFF.0 * 2_u32.saturating_pow(n - 1)).min(BACKOFF.1),
        };
        let (client, metrics) = (self.feed.client.clone(), self.feed.metrics.clone());
        self.recoveries.push(Box::pin(async move {
            sleep(pause).await;
            (dp_rank, query::ask(&client, dp_rank, start, end, &metrics).await)
        }));
    }

    async fn recovered(&mut self, dp_rank: u32, result: Result<Answer, QueryError>) {
        let rank = &mut self.ranks[dp_rank as usize];
        match result {
            Err(error) => {
                rank.failures = rank.failures.saturating_add(1);
                rank.cursor.failed();
                self.feed.metrics.recovery_failures.inc();
                tracing::debug!(worker = %self.feed.name, dp_rank, %error, "recovery of KV events failed; trying again");
            }
            Ok(answer) => {
                rank.failures = 0;
                let reason = if answer.dump { "dump" } else { "range" };
                self.feed.metrics.recoveries.get_or_create(&ReasonLabels { reason }).inc();
                self.adopt(dp_rank, answer).await;
            }
        }
        self.settle(dp_rank);
    }

    /// Applies an answer in pieces, then what was held meanwhile.
    async fn adopt(&mut self, dp_rank: u32, answer: Answer) {
        let Answer { dump, events, last_event_id } = answer;
        let now = Instant::now();
        if dump {
            self.clear(dp_rank).await;
            self.ranks[dp_rank as usize].refused = false;
            for batch in Batches::of(events) {
                self.apply(dp_rank, batch).await;
            }
            self.ranks[dp_rank as usize].cursor.dumped(last_event_id, now);
        } else {
            let fresh = self.ranks[dp_rank as usize].cursor.ranged(events, last_event_id, now);
            for batch in Batches::of(fresh) {
                self.apply(dp_rank, batch).await;
            }
        }
        let cursor = &mut self.ranks[dp_rank as usize].cursor;
        self.feed.metrics.events_held.dec_by(cursor.held() as i64);
        let held = cursor.release();
        self.events(held).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_may_hold_what_it_says_it_has_room_for() {
        // 4096 blocks of 360 KiB in memory, and 1 TB of disk.
        let disk = 1_000_000_000_000 / (360 << 10);
        assert_eq!(most_blocks(4096, None), LEAST_LIMIT);
        assert!(most_blocks(4096, Some(disk)) as u64 > 4096 + disk, "all of it");
        assert_eq!(most_blocks(100_000, None), 1_600_000);
        assert_eq!(most_blocks(100_000, Some(0)), 200_000, "there is nothing below");
        for hostile in [most_blocks(u64::MAX, None), most_blocks(1, Some(u64::MAX))] {
            assert_eq!(hostile, kv_index::MAX_RANK_BLOCKS);
        }
    }
}
