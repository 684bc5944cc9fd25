//! The plan: rounds over servers, sets and concurrencies, interleaved so that a change in the machine's load touches all.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use serde_json::{Value, json};

use crate::load::{self, Run, Seen};
use crate::peers::Peers;
use crate::prompts::Set;
use crate::report;
use crate::servers::{Behind, Row, Running, Server, Shared, rows};
use crate::system::MODEL;

/// Flags of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Prompts are made from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Measures no peers
    #[arg(long, value_parser = ["ours"])]
    only: Option<String>,
    /// Folder of the peers' Python environments: vllm-router, sglang-router, dynamo [default: they are installed]
    #[arg(long, value_name = "DIR")]
    peers: Option<PathBuf>,
    /// Who is measured [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    server: Vec<Server>,
    /// Connections of each run
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    concurrency: Vec<usize>,
    /// Kinds of traffic
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Set::Short, Set::Long, Set::MultiTurn])]
    prompt: Vec<Set>,
    /// How our router picks workers
    #[arg(long, value_delimiter = ',', default_values = ["kv", "round-robin"])]
    mode: Vec<String>,
    /// Only servers in front of these [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    behind: Vec<Behind>,
    /// Workers behind each router
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Seconds of each run
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Rounds over all runs
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Another build of our router, measured beside this one; a path from the repository's root
    #[arg(long, value_name = "FILE")]
    other_build: Option<PathBuf>,
    /// Starts all servers at the begin of each round, and gives each run to one after the other: to compare what differs by less
    /// than the machine's speed does from minute to minute, and one process from the next
    #[arg(long)]
    together: bool,
}

/// How long a router does nothing before its memory counts as idle.
const IDLE: Duration = Duration::from_secs(1);
/// Load before each run that is not measured.
const WARM: Duration = Duration::from_millis(300);

impl Options {
    fn servers(&self) -> anyhow::Result<Vec<Server>> {
        let named = if self.server.is_empty() { Server::value_variants() } else { &self.server };
        let servers: Vec<_> = named.iter().copied().filter(|server| self.only.is_none() || !server.is_peer()).collect();
        if servers.is_empty() {
            bail!("--only and --server leave nobody to be measured");
        }
        if self.peers.is_none() && servers.iter().any(|server| server.is_peer()) {
            bail!(
                "where are the peers? `cargo xtask bench frontend` installs them; else give --peers DIR or --only ours"
            );
        }
        Ok(servers)
    }

    /// The runs against each server.
    fn runs(&self) -> anyhow::Result<Vec<Run>> {
        let time = Duration::try_from_secs_f64(self.seconds).context("--seconds")?;
        let mut runs = Vec::new();
        for &set in &self.prompt {
            for &concurrency in &self.concurrency {
                // A long prompt costs the client more than the router; whole answers to it measure nothing new.
                for stream in [true, false].into_iter().filter(|stream| *stream || set == Set::Short) {
                    // The odd ones are for warming up.
                    let series = 2 * runs.len() as u64;
                    runs.push(Run { set, concurrency, stream, time, seed: self.seed, series });
                }
            }
        }
        Ok(runs)
    }
}

/// Measures, printing each run as it ends.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let (servers, runs) = (options.servers()?, options.runs()?);
    let mut rows = rows(&servers, &options.mode, options.other_build.is_some());
    rows.retain(|row| options.behind.is_empty() || options.behind.contains(&row.behind));
    if rows.is_empty() {
        bail!("--behind leaves nobody to be measured");
    }
    let other_build = options.other_build.as_ref().map(|file| {
        let file = file.canonicalize().with_context(|| format!("--other-build {}", file.display()))?;
        if !rows.iter().any(|row| row.other_build) {
            bail!("--other-build is of ours, which --server leaves out");
        }
        Ok(file)
    });
    let peers = options.peers.clone().map(Peers);
    let shared = Shared::start(options.workers, peers, other_build.transpose()?).await?;
    let mut results = Results::default();
    for _ in 0..options.rounds {
        for rows in rows.chunks(if options.together { rows.len() } else { 1 }) {
            let mut servers = Vec::new();
            for row in rows {
                servers.push((row, results.start(&shared, row).await?));
            }
            for run in &runs {
                for (row, server) in &servers {
                    results.measure(server, row, *run).await?;
                }
            }
        }
        // The next round begins with another: whoever comes first finds the machine as the run before left it.
        rows.rotate_left(1);
    }
    print!("{}", report::tables(&results.0));
    Ok(())
}

/// What was measured, each printed as it comes.
#[derive(Default)]
struct Results(Vec<Value>);

impl Results {
    fn add(&mut self, row: &Row, result: Value) {
        let result = of_row(row, result);
        println!("{result}");
        self.0.push(result);
    }

    /// Starts the row's server.
    async fn start(&mut self, shared: &Shared, row: &Row) -> anyhow::Result<Running> {
        let started = async {
            let server = shared.serve(row).await?;
            load::probe(server.address(), MODEL).await.context("its first answer")?;
            let result = start(&server).await?;
            anyhow::Ok((server, result))
        };
        let (server, result) = started.await.with_context(|| row.to_string())?;
        result.into_iter().for_each(|result| self.add(row, result));
        Ok(server)
    }

    /// Loads it with a run.
    async fn measure(&mut self, server: &Running, row: &Row, run: Run) -> anyhow::Result<()> {
        self.add(row, one(server, run).await.with_context(|| row.to_string())?);
        Ok(())
    }
}

/// The result with its row's name before it.
fn of_row(row: &Row, result: Value) -> Value {
    let mut line = json!({"server": row.server.name(), "mode": row.mode, "workers": row.behind.name()});
    if row.other_build {
        line["build"] = "other".into();
    }
    if let (Value::Object(line), Value::Object(result)) = (&mut line, result) {
        line.extend(result);
    }
    line
}

/// How long the router took to start, and its memory once it rests.
async fn start(server: &Running) -> anyhow::Result<Option<Value>> {
    let Some(router) = server.router() else { return Ok(None) };
    tokio::time::sleep(IDLE).await;
    let ms = |time: Duration| rounded(time.as_secs_f64() * 1e3);
    Ok(Some(json!({"start_to_ready_ms": router.ready.map(ms), "start_to_model_ms": ms(router.model),
        "idle_rss_mb": rounded(router.usage()?.rss_mb)})))
}

async fn one(server: &Running, run: Run) -> anyhow::Result<Value> {
    load::run(server.address(), MODEL, Run { time: WARM.min(run.time), series: run.series + 1, ..run }).await;
    let before = server.usage()?;
    let seen = load::run(server.address(), MODEL, run).await;
    let after = server.usage()?;
    let mut result = timed(run, seen);
    let requests = result["requests"].as_u64().unwrap_or(0).max(1);
    if let Some((before, after)) = before.zip(after) {
        let cpu_ms = after.cpu.saturating_sub(before.cpu).as_secs_f64() * 1e3;
        result["cpu_ms_per_req"] = rounded(cpu_ms / requests as f64).into();
        result["rss_mb"] = rounded(after.rss_mb).into();
    }
    Ok(result)
}

/// What the client saw.
fn timed(run: Run, mut seen: Seen) -> Value {
    seen.first_ms.sort_by(f64::total_cmp);
    let requests = seen.first_ms.len();
    let at = |share: f64| {
        let place = ((requests as f64 * share) as usize).min(requests.saturating_sub(1));
        seen.first_ms.get(place).copied().map(rounded)
    };
    let mut result = json!({"prompt": run.set.name(), "concurrency": run.concurrency, "stream": run.stream,
        "req_s": rounded(requests as f64 / seen.wall.as_secs_f64()), "ttft_p50_ms": at(0.5), "ttft_p99_ms": at(0.99),
        "cpu_ms_per_req": null, "rss_mb": null, "errors": seen.errors, "requests": requests});
    if let Some(error) = seen.first_error {
        result["first_error"] = error.into();
    }
    result
}

/// Three decimals are more than the measurement has.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        options: Options,
    }

    fn options(flags: &str) -> Options {
        Flags::try_parse_from(std::iter::once("bench").chain(flags.split_whitespace())).expect("flags").options
    }

    #[test]
    fn peers_are_measured_where_they_are_and_not_with_only_ours() {
        assert_eq!(options("--only ours").servers().expect("two"), [Server::Direct, Server::Armature]);
        assert_eq!(options("--peers x").servers().expect("all").len(), Server::value_variants().len());
        assert_eq!(options("--server direct,armature").servers().expect("no peer").len(), 2);
        let error = options("").servers().expect_err("no folder").to_string();
        assert!(error.contains("--peers DIR"), "{error}");
        assert!(options("--only ours --server dynamo").servers().is_err());
    }

    #[test]
    fn no_run_asks_what_another_or_its_warming_up_did() {
        let runs = options("--prompt short,long --concurrency 1,2").runs().expect("runs");
        let series: std::collections::BTreeSet<_> = runs.iter().flat_map(|run| [run.series, run.series + 1]).collect();
        assert_eq!((runs.len(), series.len()), (6, 12));
    }

    #[test]
    fn a_result_has_percentiles_of_what_was_seen() {
        let run = options("--prompt short --concurrency 2 --seconds 1").runs().expect("runs")[0];
        let seen = Seen {
            first_ms: (1..=100).rev().map(f64::from).collect(),
            errors: 1,
            first_error: Some("late".into()),
            wall: Duration::from_secs(2),
        };
        let result = timed(run, seen);
        assert_eq!((&result["ttft_p50_ms"], &result["ttft_p99_ms"]), (&json!(51.0), &json!(100.0)));
        assert_eq!(
            (&result["req_s"], &result["errors"], &result["first_error"]),
            (&json!(50.0), &json!(1), &json!("late"))
        );
        assert!(timed(run, Seen { wall: Duration::from_secs(1), ..Seen::default() })["ttft_p50_ms"].is_null());
    }
}
