//! Measures KV transfer between two workers of this process: bytes per second of each transport beside the machine's own limits
//! in the same run, and how much longer a step of running streams takes meanwhile. Prints JSON lines, then a table.
//!
//! `transfer_bench MODEL [--tokens N] [--reps N] [--rounds N]`. Blocks are those of a real prompt of N tokens; without rounds no
//! streams run.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use kv_hashing::{BlockHash, HashSpace, SequenceHash, sequence_hashes};
use serde_json::{Value, json};
use worker_agent::engine::Engine;
use worker_agent::transfer::{KvTransport, Nixl, Shm, Tcp, Transports};

mod cores;
mod limits;
mod node;
mod streams;

use node::{Node, fetch};

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Blocks = [(BlockHash, SequenceHash)];

/// Longest time for anything.
const TIMEOUT: Duration = Duration::from_secs(60);

struct Arguments {
    model: String,
    tokens: usize,
    reps: usize,
    rounds: usize,
}

fn arguments() -> Result<Arguments, Failure> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: transfer_bench MODEL [--tokens N] [--reps N] [--rounds N]";
    let mut parsed = Arguments { model: args.next().ok_or(usage)?, tokens: 1024, reps: 20, rounds: 9 };
    while let Some(option) = args.next() {
        let value = args.next().ok_or(usage)?;
        match option.as_str() {
            "--tokens" => parsed.tokens = value.parse::<NonZeroUsize>()?.get(),
            "--reps" => parsed.reps = value.parse::<NonZeroUsize>()?.get(),
            "--rounds" => parsed.rounds = value.parse()?,
            _ => return Err(usage.into()),
        }
    }
    Ok(parsed)
}

/// Anything but repetitive.
fn prompt(tokens: usize, seed: usize) -> Vec<u32> {
    (0..tokens).map(|position| ((position * 7919 + seed * 104_729 + 17) % 40_000) as u32).collect()
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Two workers, what travels between them, and how.
struct Pair {
    from: Node,
    to: Node,
    prompt: Vec<u32>,
    blocks: Vec<(BlockHash, SequenceHash)>,
    transports: Vec<Arc<dyn KvTransport>>,
}

impl Pair {
    /// Blocks move on any core, or each worker has one for that.
    async fn start(
        arguments: &Arguments,
        threads: usize,
        offered: Transports,
        cores: [Option<usize>; 2],
    ) -> Result<Self, Failure> {
        let node = |core| Node::start(&arguments.model, arguments.tokens, threads, offered, core);
        let (from, to, prompt) = (node(cores[0]).await?, node(cores[1]).await?, prompt(arguments.tokens, 1));
        let local = HashSpace::default().blocks(&prompt, to.engine.info().block_size);
        let blocks = local.iter().copied().zip(sequence_hashes(&local)).collect();
        let transports: Vec<Arc<dyn KvTransport>> = match offered {
            Transports::Nixl => vec![Arc::new(Nixl::start(&to.exchange, TIMEOUT)?)],
            _ => vec![Arc::new(Tcp::new(TIMEOUT)), Arc::new(Shm::new(TIMEOUT))],
        };
        Ok(Self { from, to, prompt, blocks, transports })
    }

    /// A pair for those transports that a worker chooses by itself, and one for NIXL if the build has it.
    async fn all(arguments: &Arguments, threads: usize, cores: [Option<usize>; 2]) -> Result<Vec<Self>, Failure> {
        let mut pairs = vec![Self::start(arguments, threads, Transports::Auto, cores).await?];
        if cfg!(feature = "nixl") {
            pairs.push(Self::start(arguments, threads, Transports::Nixl, cores).await?);
        }
        Ok(pairs)
    }

    fn block_bytes(&self) -> usize {
        self.to.exchange.layout().shape.block_bytes()
    }

    fn bytes(&self) -> usize {
        self.blocks.len() * self.block_bytes()
    }
}

/// Every transport, and between whom.
fn ways(pairs: &[Pair]) -> impl Iterator<Item = (&Pair, &Arc<dyn KvTransport>)> {
    pairs.iter().flat_map(|pair| pair.transports.iter().map(move |transport| (pair, transport)))
}

/// Bytes per second of each transport and of what limits it.
async fn throughput(pairs: &[Pair], reps: usize) -> Result<Vec<Value>, Failure> {
    let (bytes, block_bytes) = (pairs[0].bytes(), pairs[0].block_bytes());
    let mut memory = limits::Memory::new(bytes, block_bytes);
    let (mut loopback, mut memcpy) = (Vec::new(), Vec::new());
    let mut fetches = vec![Vec::new(); ways(pairs).count()];
    for (pair, transport) in ways(pairs) {
        fetch(pair, transport).await?;
    }
    for _ in 0..reps {
        // By turns, so that whatever else the machine does meets all.
        for (times, (pair, transport)) in fetches.iter_mut().zip(ways(pairs)) {
            times.push(fetch(pair, transport).await?);
        }
        loopback.push(memory.loopback()?);
        memcpy.push(memory.copy());
    }
    let gb = bytes as f64 / 1e9;
    let line = |(transport, times): (&str, &Vec<f64>)| {
        let (limit, limits) = if transport == "tcp" { ("loopback TCP", &loopback) } else { ("memcpy", &memcpy) };
        let (gb_s, limit_gb_s) = (gb / median(times), gb / median(limits));
        json!({
            "transport": transport, "mb": 1e3 * gb, "gb_s": gb_s, "limit": limit, "limit_gb_s": limit_gb_s,
            "of_limit_pct": 100.0 * gb_s / limit_gb_s,
        })
    };
    Ok(ways(pairs).map(|(_, transport)| transport.backend()).zip(&fetches).map(line).collect())
}

/// How running streams fare beside transfers, with so many threads for each engine.
async fn beside_streams(pairs: &[Pair], threads: usize, rounds: usize) -> Result<Vec<Value>, Failure> {
    let mut lines = Vec::new();
    for (pair, transport) in ways(pairs) {
        let beside = streams::beside(pair, transport, rounds).await?;
        let gb = pair.bytes() as f64 / 1e9;
        lines.push(json!({
            "transport": transport.backend(),
            "engine_threads": threads,
            "streams": streams::STREAMS,
            "decode_ms": 1e3 * beside.calm.mean(),
            "decode_beside_transfers_ms": 1e3 * beside.busy.mean(),
            "decode_slowdown_pct": median(&beside.slowdowns),
            "decode_slowdown_pct_rounds": beside.slowdowns,
            "decode_slowdown_p95_pct": 100.0 * (beside.busy.p95() / beside.calm.p95() - 1.0),
            "steps_beside_transfers": beside.busy.count(),
            "gb_s_beside_streams": gb / median(&beside.fetches),
        }));
    }
    Ok(lines)
}

fn table(lines: &[Value]) {
    println!(
        "\n| transport | engine threads | GB/s | limit GB/s | of limit | decode step | beside transfers | slowdown |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let cell = |line: &Value, key: &str, unit: &str| {
        line[key].as_f64().map_or(String::new(), |value| format!("{value:.2}{unit}"))
    };
    for line in lines {
        let transport = line["transport"].as_str().unwrap_or_default();
        let threads = line["engine_threads"].as_u64().map_or(String::new(), |threads| threads.to_string());
        let speed = if threads.is_empty() { "gb_s" } else { "gb_s_beside_streams" };
        let limit = line["limit"].as_str().map_or(String::new(), |limit| format!(" ({limit})"));
        println!(
            "| {transport} | {threads} | {} | {}{limit} | {} | {} | {} | {} |",
            cell(line, speed, ""),
            cell(line, "limit_gb_s", ""),
            cell(line, "of_limit_pct", " %"),
            cell(line, "decode_ms", " ms"),
            cell(line, "decode_beside_transfers_ms", " ms"),
            slowdown(line),
        );
    }
}

/// The median of all rounds, and the middle half of them.
fn slowdown(line: &Value) -> String {
    let rounds = line["decode_slowdown_pct_rounds"].as_array().into_iter().flatten();
    let mut rounds: Vec<f64> = rounds.filter_map(Value::as_f64).collect();
    rounds.sort_by(f64::total_cmp);
    let [Some(low), Some(high)] = [rounds.get(rounds.len() / 4), rounds.get(rounds.len() * 3 / 4)] else {
        return String::new();
    };
    format!("{:.1} % ({low:.1} to {high:.1})", median(&rounds))
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    let cores = std::thread::available_parallelism()?.get();
    let pairs = Pair::all(&arguments, cores, [Some(0), Some(1)]).await?;
    let mut lines = throughput(&pairs, arguments.reps).await?;
    drop(pairs);
    for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
        if arguments.rounds > 0 {
            let pairs = Pair::all(&arguments, threads, [None; 2]).await?;
            lines.extend(beside_streams(&pairs, threads, arguments.rounds).await?);
        }
    }
    lines.iter().for_each(|line| println!("{line}"));
    table(&lines);
    Ok(())
}
