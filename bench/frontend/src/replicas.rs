//! Several routers before the same workers: do they choose as one would? The same requests, at the same times, through one
//! router, through several that share their load, and through several that do not.
//!
//! `cargo xtask bench replicas`. Requests go to the routers in turn, as a Service would send them. Router and mockers are
//! processes of their own, as they ship; only the model is missing. Two runs never choose the same workers, not even with one
//! router: times differ, ties are broken at random, and one other choice changes all that follow. So each run is judged by
//! itself: of every decision, what somebody who saw the load of all routers would have thought of it (`whole`).

mod arrivals;
mod outcome;
mod ring;
mod whole;

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use kv_hashing::{HashSpace, sequence_hashes};
use routing::Prompt;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use crate::system::{self, MODEL, Router, Workers};
use crate::trace::client::{self, Answer, Ended};
use crate::trace::record::Record;
use crate::trace::request;
use arrivals::Workload;
use outcome::Summary;
use whole::Life;

/// Flags of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Requests of each run
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(8..=100_000))]
    requests: u32,
    /// How many of the requests come that the workers can take at most: 0.9 is near saturation. That is measured first, with all
    /// requests at once
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    load: f64,
    /// Routers where there are several
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    routers: u32,
    /// Workers behind them
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    workers: u32,
    /// Most requests that a worker computes at a time; further ones wait there
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: u32,
    /// Of the requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Times that everything is run, in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measures no peers; there are none yet
    #[arg(long, value_parser = ["ours"])]
    only: Option<String>,
}

/// Longest time that one request may take: far more than any takes that does not hang.
const REQUEST: Duration = Duration::from_secs(120);

/// Requests a second that come at once.
const AT_ONCE: f64 = 10_000.0;

/// How the routers are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// One router, whose decisions differ from the best only by what the measurement cannot tell apart.
    One,
    /// Several, which share their load.
    Shared,
    /// Several, each of which counts its own requests only.
    Alone,
}

impl Case {
    const ALL: [Self; 3] = [Self::One, Self::Shared, Self::Alone];

    fn routers(self, several: u32) -> usize {
        if self == Self::One { 1 } else { several as usize }
    }

    fn name(self, several: u32) -> String {
        match self {
            Self::One => "1".to_owned(),
            Self::Shared => format!("{several}, sync on"),
            Self::Alone => format!("{several}, sync off"),
        }
    }
}

/// One request, as it went.
struct Outcome {
    sent: Instant,
    ended: anyhow::Result<Answer>,
}

/// One run: what came of the requests, in their order, where the routers are, and the CPU time that they took.
struct Run {
    routers: Vec<Router>,
    outcomes: Vec<Outcome>,
    cpu: Duration,
    _workers: Workers,
}

/// Runs every case with every workload, printing each result as it ends.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    ensure!((0.05..=2.0).contains(&options.load), "--load must be from 0.05 to 2");
    let mut summaries = Vec::new();
    for workload in Workload::ALL {
        let rate = options.load * capacity(workload, options).await?;
        let records = Arc::new(workload.records(options.requests as usize, rate, options.seed));
        for (round, case) in (0..options.rounds).flat_map(|round| Case::ALL.map(|case| (round, case))) {
            let name = case.name(options.routers);
            let summary = judged(case, options, &records).await.with_context(|| name.clone())?;
            let mut line = json!({"workload": workload.name(), "case": name, "round": round,
                "rate": (rate * 10.0).round() / 10.0, "load": options.load});
            summary.add_to(&mut line);
            println!("{line}");
            summaries.push(line);
        }
    }
    outcome::table(&summaries);
    Ok(())
}

/// Requests that the workers answer in a second when all come at once, through one router.
async fn capacity(workload: Workload, options: &Options) -> anyhow::Result<f64> {
    let records = Arc::new(workload.records(options.requests as usize, AT_ONCE, options.seed));
    let Run { outcomes, .. } =
        one(Case::One, options, &records).await.context("measuring what the workers can take")?;
    let answered = outcomes.iter().filter_map(|outcome| outcome.ended.as_ref().ok());
    let begun = outcomes.iter().map(|outcome| outcome.sent).min();
    let (count, last) = answered.fold((0_u32, begun), |(count, last), answer| (count + 1, last.max(Some(answer.last))));
    let took = begun.zip(last).map_or(0.0, |(begun, last)| (last - begun).as_secs_f64());
    if took <= 0.0 {
        bail!("no request was answered");
    }
    let rate = f64::from(count) / took;
    println!(
        "{}",
        json!({"workload": workload.name(), "case": "capacity", "req_s": (rate * 10.0).round() / 10.0, "answered": count})
    );
    Ok(rate)
}

/// One case, judged while its routers still know what they decided.
async fn judged(case: Case, options: &Options, records: &Arc<Vec<Record>>) -> anyhow::Result<Summary> {
    let run = one(case, options, records).await?;
    let addresses: Vec<_> = run.routers.iter().map(|router| router.address).collect();
    let decided = ring::read(&addresses, &run.outcomes).await?;
    let lives = records.iter().zip(&run.outcomes).zip(decided).filter_map(|((record, outcome), decided)| {
        let (answer, decided) = (outcome.ended.as_ref().ok()?, decided?);
        let size = decided.1.block_size;
        let tokens: Vec<u32> = request::tokens(record).collect();
        let blocks = sequence_hashes(&HashSpace::default().blocks(&tokens, size));
        let prompt = Prompt { blocks: blocks.into(), tokens: tokens.len(), block_size: size };
        let (first, last, answer_tokens) = (answer.first, answer.last, record.answer_tokens);
        Some(Life { prompt, decided, first, last, answer_tokens })
    });
    let judgements = whole::judge(&lives.collect::<Vec<_>>());
    Ok(Summary::of(&run.outcomes, &judgements, options.workers as usize, run.cpu))
}

/// One case, with workers that have nothing cached.
async fn one(case: Case, options: &Options, records: &Arc<Vec<Record>>) -> anyhow::Result<Run> {
    let count = options.workers as usize;
    let workers = Workers::mockers(count, &arguments(options)).await?;
    let sync = if case == Case::Shared { "--router-replica-sync" } else { "--no-router-replica-sync" };
    let kept = options.requests.to_string();
    let mut routers = Vec::new();
    for _ in 0..case.routers(options.routers) {
        routers.push(Router::start_with(&workers, "kv", None, &[sync, "--router-decisions", &kept]).await?);
    }
    for router in &routers {
        system::routable(router.address, count).await?;
        if case == Case::Shared {
            system::shows(router.address, &format!("armature_router_replica_peers {}", routers.len() - 1)).await?;
        }
    }
    let before = cpu(&routers)?;
    let outcomes = replay(&routers, records).await;
    let cpu = cpu(&routers)?.saturating_sub(before);
    Ok(Run { routers, outcomes, cpu, _workers: workers })
}

fn cpu(routers: &[Router]) -> anyhow::Result<Duration> {
    routers.iter().map(Router::cpu).sum()
}

/// Sends each request at its time, whether or not earlier ones have been answered, to the routers in turn.
async fn replay(routers: &[Router], records: &Arc<Vec<Record>>) -> Vec<Outcome> {
    let (start, mut requests) = (Instant::now(), JoinSet::new());
    for index in 0..records.len() {
        sleep_until(start + records[index].at).await;
        let (address, records) = (routers[index % routers.len()].address, records.clone());
        requests.spawn(async move {
            let text = request::bytes(&records[index], MODEL, address);
            let sent = Instant::now();
            let ended = match timeout(REQUEST, client::ask(address, &text)).await {
                Ok(Ok(Ended::Answered(answer))) => Ok(answer),
                Ok(Ok(Ended::Rejected)) => Err(anyhow::anyhow!("rejected")),
                Ok(Err(error)) => Err(error),
                Err(_) => Err(anyhow::anyhow!("no answer within {} s", REQUEST.as_secs())),
            };
            (index, Outcome { sent, ended })
        });
    }
    let mut outcomes = requests.join_all().await;
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

/// The mockers' flags.
fn arguments(options: &Options) -> Vec<String> {
    ["--max-num-seqs".to_owned(), options.max_num_seqs.to_string()].into()
}
