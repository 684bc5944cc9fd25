//! Several routers before the same workers: do they choose as one would? The same requests, at the same times, through one
//! router, through several that share their load, and through several that do not.
//!
//! `cargo xtask bench replicas`. Requests go to the routers in turn, as a Service would send them. Router and mockers are
//! processes of their own, as they ship; only the model is missing.

mod arrivals;
mod outcome;

use std::sync::Arc;

use anyhow::{Context, bail};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use crate::system::{self, MODEL, Router, Workers};
use crate::trace::client::{self, Answer, Ended};
use crate::trace::record::Record;
use crate::trace::request;
use outcome::Summary;

/// Flags of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Requests of each run
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(8..))]
    requests: u32,
    /// Requests per second
    #[arg(long, default_value_t = 30.0, conflicts_with = "load")]
    rate: f64,
    /// In place of --rate, a share of what the workers can take at most: 0.9 is near saturation. That is measured first, with all
    /// requests at once
    #[arg(long, value_name = "SHARE")]
    load: Option<f64>,
    /// Routers where there are several
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    routers: u32,
    /// Workers behind them
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    workers: u32,
    /// Most requests that a worker computes at a time; further ones wait there
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: u32,
    /// How the routers pick workers
    #[arg(long, default_value = "kv")]
    mode: String,
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

/// Most requests a second.
const MAX_RATE: f64 = 10_000.0;

/// How the routers are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// One router: what the others are compared with.
    One,
    /// The same once more: how much of a difference is chance.
    OneAgain,
    /// Several, which share their load.
    Shared,
    /// Several, each of which counts its own requests only.
    Alone,
}

impl Case {
    const ALL: [Self; 4] = [Self::One, Self::OneAgain, Self::Shared, Self::Alone];

    fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::OneAgain => "one again",
            Self::Shared => "several, sync on",
            Self::Alone => "several, sync off",
        }
    }

    fn routers(self, several: usize) -> usize {
        if matches!(self, Self::One | Self::OneAgain) { 1 } else { several }
    }
}

/// One request, as it went.
struct Outcome {
    sent: Instant,
    ended: anyhow::Result<Answer>,
}

/// Runs every case, printing each result as it ends.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let rate = match options.load {
        Some(share) if (0.05..=2.0).contains(&share) => share * capacity(options).await?,
        Some(_) => bail!("--load must be from 0.05 to 2"),
        None => options.rate,
    };
    if !(0.1..=MAX_RATE).contains(&rate) {
        bail!("--rate must be from 0.1 to {MAX_RATE}");
    }
    let records = Arc::new(arrivals::records(options.requests as usize, rate, options.seed));
    let mut summaries = Vec::new();
    for round in 0..options.rounds {
        let mut reference = None;
        for case in Case::ALL {
            let (outcomes, cpu) = one(case, options, &records).await.with_context(|| case.name())?;
            let reference = reference.get_or_insert_with(|| outcome::choices(&outcomes));
            let summary = Summary::of(&outcomes, reference, options.workers as usize, cpu);
            let routers = case.routers(options.routers as usize);
            let mut line = json!({"case": case.name(), "routers": routers, "round": round, "mode": options.mode,
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
async fn capacity(options: &Options) -> anyhow::Result<f64> {
    let records = Arc::new(arrivals::records(options.requests as usize, MAX_RATE, options.seed));
    let (outcomes, _) = one(Case::One, options, &records).await.context("measuring what the workers can take")?;
    let answered = outcomes.iter().filter_map(|outcome| outcome.ended.as_ref().ok());
    let begun = outcomes.iter().map(|outcome| outcome.sent).min();
    let (count, last) = answered.fold((0_u32, begun), |(count, last), answer| (count + 1, last.max(Some(answer.last))));
    let took = begun.zip(last).map_or(0.0, |(begun, last)| (last - begun).as_secs_f64());
    if took <= 0.0 {
        bail!("no request was answered");
    }
    let rate = f64::from(count) / took;
    println!("{}", json!({"case": "capacity", "req_s": (rate * 10.0).round() / 10.0, "answered": count}));
    Ok(rate)
}

/// One case, with workers that have nothing cached. Outcomes are in the order of the requests; with the routers' CPU time.
async fn one(case: Case, options: &Options, records: &Arc<Vec<Record>>) -> anyhow::Result<(Vec<Outcome>, Duration)> {
    let count = options.workers as usize;
    let workers = Workers::mockers(count, &arguments(options)).await?;
    let mut routers = Vec::new();
    for _ in 0..case.routers(options.routers as usize) {
        let flag = if case == Case::Shared { "--router-replica-sync" } else { "--no-router-replica-sync" };
        routers.push(Router::start_with(&workers, &options.mode, &[flag]).await?);
    }
    for router in &routers {
        system::routable(router.address, count).await?;
        if case == Case::Shared {
            system::shows(router.address, &format!("armature_router_replica_peers {}", routers.len() - 1)).await?;
        }
    }
    let outcomes = replay(&routers, records).await;
    let cpu = routers.iter().map(Router::cpu).sum::<anyhow::Result<Duration>>()?;
    Ok((outcomes, cpu))
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
