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
use worker_agent::transfer::{KvTransport, Shm, Tcp};

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
    let mut parsed = Arguments { model: args.next().ok_or(usage)?, tokens: 1024, reps: 20, rounds: 4 };
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

/// Two workers, and what travels between them.
struct Pair {
    from: Node,
    to: Node,
    prompt: Vec<u32>,
    blocks: Vec<(BlockHash, SequenceHash)>,
}

impl Pair {
    /// Blocks move on any core, or each worker has one for that.
    async fn start(arguments: &Arguments, threads: usize, cores: [Option<usize>; 2]) -> Result<Self, Failure> {
        let node = |core| Node::start(&arguments.model, arguments.tokens, threads, core);
        let (from, to, prompt) = (node(cores[0]).await?, node(cores[1]).await?, prompt(arguments.tokens, 1));
        let local = HashSpace::default().blocks(&prompt, to.engine.info().block_size);
        let blocks = local.iter().copied().zip(sequence_hashes(&local)).collect();
        Ok(Self { from, to, prompt, blocks })
    }

    fn block_bytes(&self) -> usize {
        self.to.exchange.layout().shape.block_bytes()
    }

    fn bytes(&self) -> usize {
        self.blocks.len() * self.block_bytes()
    }
}

fn transports() -> [Arc<dyn KvTransport>; 2] {
    [Arc::new(Tcp::new(TIMEOUT)), Arc::new(Shm::new(TIMEOUT))]
}

/// Bytes per second of each transport and of what limits it.
async fn throughput(pair: &Pair, reps: usize) -> Result<Vec<Value>, Failure> {
    let mut memory = limits::Memory::new(pair.bytes(), pair.block_bytes());
    let mut times: [Vec<f64>; 4] = Default::default();
    // Those of a worker live as long as it does.
    let [tcp, shm] = transports();
    for transport in [&tcp, &shm] {
        fetch(pair, transport).await?;
    }
    for _ in 0..reps {
        // By turns, so that whatever else the machine does meets all.
        times[0].push(fetch(pair, &tcp).await?);
        times[1].push(memory.loopback()?);
        times[2].push(fetch(pair, &shm).await?);
        times[3].push(memory.copy());
    }
    let gb = pair.bytes() as f64 / 1e9;
    let [tcp, loopback, shm, memcpy] = times.map(|times| gb / median(&times));
    let line = |transport: &str, gb_s: f64, limit: &str, limit_gb_s: f64| {
        json!({
            "transport": transport, "mb": 1e3 * gb, "gb_s": gb_s, "limit": limit, "limit_gb_s": limit_gb_s,
            "of_limit_pct": 100.0 * gb_s / limit_gb_s,
        })
    };
    Ok(vec![line("tcp", tcp, "loopback TCP", loopback), line("shm", shm, "memcpy", memcpy)])
}

/// How running streams fare beside transfers, with so many threads for each engine.
async fn beside_streams(pair: &Pair, threads: usize, rounds: usize) -> Result<Vec<Value>, Failure> {
    let mut lines = Vec::new();
    for transport in transports() {
        let beside = streams::beside(pair, &transport, rounds).await?;
        let gb = pair.bytes() as f64 / 1e9;
        lines.push(json!({
            "transport": transport.backend(),
            "engine_threads": threads,
            "streams": streams::STREAMS,
            "decode_ms": 1e3 * beside.calm.mean(),
            "decode_beside_transfers_ms": 1e3 * beside.busy.mean(),
            "decode_slowdown_pct": 100.0 * (beside.busy.mean() / beside.calm.mean() - 1.0),
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
            cell(line, "decode_slowdown_pct", " %"),
        );
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    let cores = std::thread::available_parallelism()?.get();
    let pair = Pair::start(&arguments, cores, [Some(0), Some(1)]).await?;
    let mut lines = throughput(&pair, arguments.reps).await?;
    drop(pair);
    for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
        if arguments.rounds > 0 {
            let pair = Pair::start(&arguments, threads, [None; 2]).await?;
            lines.extend(beside_streams(&pair, threads, arguments.rounds).await?);
        }
    }
    lines.iter().for_each(|line| println!("{line}"));
    table(&lines);
    Ok(())
}
