//! A recorded stream of requests against the router in each of its modes, with mockers behind it: hit rate and latency.
//!
//! `cargo xtask bench trace`. Router and mockers are processes of their own, as they ship; only the model is missing. Both
//! the mockers' steps and the arrivals run faster by the same factor, and times are printed as the trace has them.

pub mod client;
mod machine;
pub mod record;
mod replay;
pub mod request;
mod summary;
mod synthetic;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::json;

use crate::system::{self, MODEL, Router, Workers};
use record::Record;
use replay::Replay;
use summary::{Slo, Summary};

/// Flags of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Trace in Mooncake's format, a JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one for each
    /// 512 tokens). Mooncake publishes its own as FAST25-release/traces/conversation_trace.jsonl. Without it requests of the
    /// same shape are made up
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Requests, from the trace's beginning
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// How many times faster than the trace everything runs
    #[arg(long, default_value_t = 20.0)]
    speedup: f64,
    /// Workers behind the router
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
    /// How the router picks workers [default: all its modes that need no target]
    #[arg(long, alias = "mode", value_delimiter = ',')]
    modes: Vec<String>,
    /// Of the requests that are made up
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Measures no peers; there are none yet
    #[arg(long, value_parser = ["ours"])]
    only: Option<String>,
    /// Most requests at a time; further ones wait, and their waiting counts
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    connections: u32,
    /// Tokens per KV block of the workers
    #[arg(long, default_value_t = 64)]
    block_size: u32,
    /// Whose step times the mockers imitate: see `armature worker --help`
    #[arg(long, default_value = "llama-3-70b")]
    profile: String,
    /// KV tokens that a worker has room for. The default is what 0.9 of eight times 80 GB leave beside a 70B model in bf16:
    /// 435 GB at 320 KiB a token
    #[arg(long, default_value_t = 1_326_000)]
    kv_tokens: u32,
    /// A request counts as good when its first token comes within this time, in ms of the trace
    #[arg(long, default_value_t = 2000.0)]
    slo_ttft_ms: f64,
    /// and when its tokens come within this time of each other on average, in ms of the trace
    #[arg(long, default_value_t = 50.0)]
    slo_itl_ms: f64,
}

/// Most sequences and most tokens of a worker's step: common settings of servers on such accelerators.
const MAX_NUM_SEQS: u32 = 256;
const MAX_NUM_BATCHED_TOKENS: u32 = 2048;

/// Replays the trace in each mode, printing each result as it ends.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    if !(0.01..=10_000.0).contains(&options.speedup) {
        bail!("--speedup must be from 0.01 to 10000");
    }
    let (name, records) = records(options)?;
    let records = Arc::new(records);
    println!("{}", shape(&name, &records, options));
    let known = modes().await?;
    if let Some(unknown) = options.modes.iter().find(|mode| !known.contains(mode)) {
        bail!("--modes {unknown}: the router has {}", known.join(", "));
    }
    let modes = if options.modes.is_empty() { known } else { options.modes.clone() };
    let slo = Slo { ttft_ms: options.slo_ttft_ms, itl_ms: options.slo_itl_ms };
    let mut summaries = Vec::new();
    for mode in modes {
        let summary = one(&mode, options, &records, slo).await.with_context(|| format!("mode {mode}"))?;
        println!("{}", summary.json());
        summaries.push(summary);
    }
    summary::table(&summaries);
    Ok(())
}

fn records(options: &Options) -> anyhow::Result<(String, Vec<Record>)> {
    let limit = options.requests as usize;
    match &options.trace {
        Some(file) => Ok((file.display().to_string(), record::read(file, limit)?)),
        None => Ok((format!("made up, seed {}", options.seed), synthetic::records(limit, options.seed))),
    }
}

/// What is replayed: the line before the results.
fn shape(name: &str, records: &[Record], options: &Options) -> serde_json::Value {
    let count = records.len().max(1);
    let mean = |of: fn(&Record) -> usize| records.iter().map(of).sum::<usize>() / count;
    json!({"trace": name, "requests": records.len(), "speedup": options.speedup, "workers": options.workers, "profile": options.profile,
        "span_s": records.last().map_or(Duration::ZERO, |record| record.at).as_secs(),
        "prompt_tokens_mean": mean(|record| record.prompt_tokens), "answer_tokens_mean": mean(|record| record.answer_tokens),
        "seen_before": summary::rounded(record::seen_before(records)), "slo_ttft_ms": options.slo_ttft_ms,
        "slo_itl_ms": options.slo_itl_ms})
}

/// One mode, with workers that have nothing cached.
async fn one(mode: &str, options: &Options, records: &Arc<Vec<Record>>, slo: Slo) -> anyhow::Result<Summary> {
    let workers = Workers::mockers(options.workers as usize, &arguments(options)).await?;
    let router = Router::start(&workers, mode).await?;
    system::routable(router.address, options.workers as usize).await?;
    let replay = Replay {
        records: records.clone(),
        address: router.address,
        model: MODEL,
        speedup: options.speedup,
        connections: options.connections as usize,
    };
    let (cpu, machine) = (router.cpu()?, machine::Busy::now()?);
    let outcomes = replay.run().await;
    let busy = machine::Busy::now()?.since(machine);
    let cpu = router.cpu()? - cpu;
    Ok(Summary::of(mode, &outcomes, options.speedup, slo).with_cost(cpu, busy))
}

/// The mockers' flags.
fn arguments(options: &Options) -> Vec<String> {
    let flags = [
        ("--mocker-speedup-ratio", options.speedup.to_string()),
        ("--mocker-profile", options.profile.clone()),
        ("--block-size", options.block_size.to_string()),
        ("--kv-blocks", (options.kv_tokens / options.block_size.max(1)).to_string()),
        ("--max-num-seqs", MAX_NUM_SEQS.to_string()),
        ("--max-num-batched-tokens", MAX_NUM_BATCHED_TOKENS.to_string()),
    ];
    flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
}

/// The router's modes, as its help has them; `direct` sends requests where the client says, which no trace does.
async fn modes() -> anyhow::Result<Vec<String>> {
    let help = system::armature()?.args(["router", "-h"]).output().await?;
    let help = String::from_utf8_lossy(&help.stdout);
    listed(&help).context("`armature router -h` lists no modes")
}

fn listed(help: &str) -> Option<Vec<String>> {
    let (_, flag) = help.split_once("--router-mode ")?;
    let (_, values) = flag.split_once("[possible values: ")?;
    let (values, _) = values.split_once(']')?;
    Some(values.split(", ").filter(|mode| *mode != "direct").map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_come_from_the_help() {
        let help = "  --router-mode <MODE>\n      How [env: M=] [default: kv] [possible values: kv, random, direct]\n";
        assert_eq!(listed(help).expect("listed"), ["kv", "random"]);
        assert_eq!(listed("Usage: armature router\n"), None);
    }
}
