//! What routers recorded of their decisions, read from them afterwards and put on one clock.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use kv_hashing::BlockSize;
use kv_index::{TierBlocks, WorkerId, WorkerRank};
use routing::CostConfig;
use serde::Deserialize;
use tokio::time::{Duration, Instant};

use super::Outcome;
use crate::system;

/// A decision, and all of what its router knew then that others might not have known.
#[derive(Clone, Debug)]
pub struct Decided {
    /// When, by the clock of its router.
    pub since_start: Duration,
    pub block_size: BlockSize,
    pub weights: CostConfig,
    pub chosen: WorkerRank,
    /// Every worker.
    pub rows: Vec<Row>,
}

/// One worker, as the router saw it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub rank: WorkerRank,
    /// What it held of the prompt.
    pub overlap: TierBlocks,
    pub shared_beyond: u32,
    /// Blocks in use there, as far as the router knew.
    pub seen_blocks: u32,
}

/// The decision about each answered request and when it was made; request `n` went to router `n` modulo their number.
pub async fn read(routers: &[SocketAddr], outcomes: &[Outcome]) -> anyhow::Result<Vec<Option<(Instant, Decided)>>> {
    let mut decided = Vec::with_capacity(outcomes.len());
    for (index, outcome) in outcomes.iter().enumerate() {
        decided.push(match &outcome.ended {
            Ok(answer) => Some(one(routers[index % routers.len()], &answer.id).await?),
            Err(_) => None,
        });
    }
    let starts = starts(routers.len(), &decided, outcomes);
    let timed = decided.into_iter().enumerate().map(|(index, decided)| {
        let (decided, start) = (decided?, starts[index % routers.len()]?);
        Some((start + decided.since_start, decided))
    });
    Ok(timed.collect())
}

/// When each router's clock began. No decision precedes its request, so it is not before the latest of the times that this
/// allows; and as the fastest request was decided about some 100 µs after it was sent, it is not much after.
fn starts(routers: usize, decided: &[Option<Decided>], outcomes: &[Outcome]) -> Vec<Option<Instant>> {
    let mut starts = vec![None; routers];
    for (index, (decided, outcome)) in decided.iter().zip(outcomes).enumerate() {
        let start = decided.as_ref().and_then(|decided| outcome.sent.checked_sub(decided.since_start));
        starts[index % routers] = starts[index % routers].max(start);
    }
    starts
}

async fn one(router: SocketAddr, id: &str) -> anyhow::Result<Decided> {
    let answer = system::get(router, &format!("/debug/decisions/{id}")).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "the decision about {id}: {body}");
    parse(body).with_context(|| format!("the decision about {id}"))
}

#[derive(Deserialize)]
struct Shown {
    attempts: Vec<Attempt>,
}

#[derive(Deserialize)]
struct Attempt {
    seconds_since_start: f64,
    block_size: u32,
    weights: Weights,
    outcome: Rank,
    workers: Vec<ShownRow>,
}

#[derive(Deserialize)]
struct Weights {
    overlap_score_credit: f64,
    host_cache_hit_weight: f64,
    disk_cache_hit_weight: f64,
    shared_cache_multiplier: f64,
    prefill_load_scale: f64,
    temperature: f64,
}

#[derive(Deserialize)]
struct Rank {
    worker_id: u64,
    dp_rank: u32,
}

#[derive(Deserialize)]
struct ShownRow {
    #[serde(flatten)]
    rank: Rank,
    overlap: Overlap,
    load: Load,
}

#[derive(Deserialize)]
struct Overlap {
    device: u32,
    host: u32,
    disk: u32,
    shared: u32,
    shared_beyond: u32,
}

#[derive(Deserialize)]
struct Load {
    active_blocks: u32,
}

impl From<&Rank> for WorkerRank {
    fn from(rank: &Rank) -> Self {
        Self { worker: WorkerId(rank.worker_id), dp_rank: rank.dp_rank }
    }
}

/// The last attempt: the one that was answered.
fn parse(body: &str) -> anyhow::Result<Decided> {
    let last = serde_json::from_str::<Shown>(body)?.attempts.pop().context("no attempt")?;
    let weights = CostConfig {
        overlap_score_credit: last.weights.overlap_score_credit,
        host_cache_hit_weight: last.weights.host_cache_hit_weight,
        disk_cache_hit_weight: last.weights.disk_cache_hit_weight,
        shared_cache_multiplier: last.weights.shared_cache_multiplier,
        prefill_load_scale: last.weights.prefill_load_scale,
        temperature: last.weights.temperature,
    };
    let rows = last.workers.iter().map(|ShownRow { rank, overlap, load }| Row {
        rank: rank.into(),
        overlap: TierBlocks { device: overlap.device, host: overlap.host, disk: overlap.disk, shared: overlap.shared },
        shared_beyond: overlap.shared_beyond,
        seen_blocks: load.active_blocks,
    });
    Ok(Decided {
        since_start: Duration::try_from_secs_f64(last.seconds_since_start)?,
        block_size: BlockSize::new(last.block_size).context("blocks of no tokens")?,
        weights,
        chosen: (&last.outcome).into(),
        rows: rows.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = r#"{"id":"cmpl-1","attempts":[{"mode":"kv","prompt_tokens":17,"block_size":16,
        "weights":{"overlap_score_credit":1.0,"host_cache_hit_weight":0.75,"disk_cache_hit_weight":0.25,
            "shared_cache_multiplier":0.0,"prefill_load_scale":2.0,"temperature":0.0},
        "outcome":{"worker":"w-1","worker_id":8,"dp_rank":0,"cost":3.0,"eligible":2,"pick":{"how":"lowest cost","ties":1}},
        "workers":[
            {"worker":"w-0","worker_id":7,"dp_rank":0,"verdict":"eligible","overlap":{"device":0,"host":0,"disk":0,"shared":0,
                "shared_beyond":0},"load":{"active_blocks":5,"prefill_tokens":9,"requests":1,"unbooked_requests":0}},
            {"worker":"w-1","worker_id":8,"dp_rank":0,"verdict":"chosen","overlap":{"device":1,"host":0,"disk":0,"shared":0,
                "shared_beyond":0},"load":{"active_blocks":0,"prefill_tokens":0,"requests":0,"unbooked_requests":0}}],
        "model":"tiny","seconds_since_start":1.5,"workers_omitted":0}]}"#;

    #[test]
    fn a_decision_is_read_as_the_router_shows_it() {
        let decided = parse(SHOWN).expect("good");
        assert_eq!((decided.since_start, decided.block_size.get()), (Duration::from_millis(1500), 16));
        assert_eq!((decided.chosen.worker, decided.weights.prefill_load_scale), (WorkerId(8), 2.0));
        let rows: Vec<_> = decided.rows.iter().map(|r| (r.rank.worker.0, r.overlap.device, r.seen_blocks)).collect();
        assert_eq!(rows, [(7, 0, 5), (8, 1, 0)]);
        assert!(parse(r#"{"id":"cmpl-1","attempts":[]}"#).is_err());
    }

    #[test]
    fn a_router_s_clock_begins_where_no_decision_precedes_its_request() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let decided = |ms| Some(Decided { since_start: Duration::from_millis(ms), ..parse(SHOWN).expect("good") });
        let sent = |ms| Outcome { sent: at(ms), ended: Err(anyhow::anyhow!("of no interest")) };
        // The first router began at 100 ms and took 3 ms, then 1 ms; the second is not heard of.
        let outcomes = [sent(150), sent(160), sent(250), sent(260)];
        assert_eq!(starts(2, &[decided(53), None, decided(151), None], &outcomes), [Some(at(99)), None]);
    }
}
