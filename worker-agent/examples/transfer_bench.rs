//! Measures KV transfer between two workers of this process: bytes per second of each transport beside what the machine's
//! loopback TCP does in the same run, and how much longer a step of running streams takes meanwhile. Prints JSON lines.
//!
//! `transfer_bench MODEL [--tokens N] [--reps N] [--threads N]`. Blocks are those of a real prompt of N tokens.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_hashing::{BlockHash, HashSpace, SequenceHash, sequence_hashes};
use prometheus_client::registry::Registry;
use protocol::request_plane::{Generate, Stop};
use tokio::sync::mpsc::UnboundedReceiver;
use worker_agent::drain::Drain;
use worker_agent::engine::builtin::exchange::Exchange;
use worker_agent::engine::builtin::open::{OpenOptions, open};
use worker_agent::engine::{Engine, EngineOutput};
use worker_agent::transfer::metrics::TransferMetrics;
use worker_agent::transfer::{KvTransport, Options, Server, Source, Tcp, Transfers, serve};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Streams that decode while blocks come.
const STREAMS: usize = 4;
/// Tokens of the streams' prompts.
const STREAM_PROMPT: usize = 64;
/// Tokens that each stream generates at most.
const STREAM_TOKENS: u32 = 240;
/// Fetches that follow each other beside the streams.
const FETCHES: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(30);

struct Arguments {
    model: String,
    tokens: usize,
    reps: usize,
    threads: usize,
}

fn arguments() -> Result<Arguments, Failure> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: transfer_bench MODEL [--tokens N] [--reps N] [--threads N]";
    let mut parsed = Arguments { model: args.next().ok_or(usage)?, tokens: 1024, reps: 20, threads: 1 };
    while let Some(option) = args.next() {
        let value: NonZeroUsize = args.next().ok_or(usage)?.parse()?;
        match option.as_str() {
            "--tokens" => parsed.tokens = value.get(),
            "--reps" => parsed.reps = value.get(),
            "--threads" => parsed.threads = value.get(),
            _ => return Err(usage.into()),
        }
    }
    Ok(parsed)
}

/// A worker without its request plane.
struct Node {
    engine: Transfers,
    exchange: Arc<Exchange>,
}

impl Node {
    async fn start(arguments: &Arguments) -> Result<Self, Failure> {
        let threads = NonZeroUsize::new(arguments.threads);
        // Leases may take half of the arena.
        let total_blocks = 2 * (FETCHES + 1) * arguments.tokens.div_ceil(16) + 32 * STREAMS;
        let options = OpenOptions { threads, total_blocks, ..OpenOptions::default() };
        let (engine, ..) = open(Path::new(&arguments.model), options)?;
        let exchange = engine.exchange().ok_or("the engine's blocks cannot be moved")?;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let (boot_epoch, revision) = (address.clone(), String::new());
        let metrics = TransferMetrics::new(&mut Registry::default());
        let server = Server {
            exchange: exchange.clone(),
            boot_epoch: boot_epoch.clone(),
            revision: revision.clone(),
            metrics: metrics.clone(),
        };
        tokio::spawn(serve(listener, Arc::new(server), Arc::new(Drain::default())));
        let options = Options { address, boot_epoch, revision, lease: TIMEOUT, timeout: TIMEOUT };
        let engine = Transfers::new(Arc::new(engine), exchange.clone(), options, metrics);
        Ok(Self { engine, exchange })
    }

    /// Leases the prompt's blocks; computes those that are not cached.
    async fn lease(&self, prompt: &[u32]) -> Result<Source, Failure> {
        let mut outputs = self.engine.submit(Generate { prefill_only: true, ..generate(prompt, 2) })?;
        while let Some(output) = outputs.recv().await {
            if let EngineOutput::Prefilled(prefilled) = output {
                return Ok(Source::parse(&prefilled.disaggregated_params.ok_or("no room for a lease")?)?);
            }
        }
        Err("the prompt was not computed".into())
    }
}

fn generate(prompt: &[u32], max_tokens: u32) -> Generate {
    let stop = Stop { max_tokens, ignore_eos: true, ..Default::default() };
    Generate { token_ids: prompt.to_vec(), stop: Some(stop), ..Default::default() }
}

/// Anything but repetitive.
fn prompt(tokens: usize, seed: usize) -> Vec<u32> {
    (0..tokens).map(|position| ((position * 7919 + seed * 104_729 + 17) % 40_000) as u32).collect()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Time that the threads of this process have run, in seconds.
fn cpu() -> Result<f64, Failure> {
    let mut ns = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        // A thread may have ended since.
        let text = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        ns += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(ns as f64 / 1e9)
}

/// What moving some bytes took, in seconds.
#[derive(Clone, Copy)]
struct Took {
    wall: f64,
    /// Of all threads.
    cpu: f64,
}

/// Between two threads over loopback TCP, with large writes: what no transport over TCP can pass.
fn loopback(bytes: usize) -> Result<Took, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    // Both buffers are in memory before the clock starts, as an arena is.
    let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
    let (sent, all_sent) = std::sync::mpsc::channel();
    let (received, all_received) = std::sync::mpsc::channel();
    let (started, before) = (Instant::now(), cpu()?);
    let sender = std::thread::spawn(move || -> Result<(), Failure> {
        TcpStream::connect(address)?.write_all(&from)?;
        sent.send(())?;
        // Its time counts only while it lives.
        Ok(all_received.recv()?)
    });
    let (mut socket, _) = listener.accept()?;
    socket.read_exact(&mut to)?;
    let wall = started.elapsed().as_secs_f64();
    all_sent.recv()?;
    let took = Took { wall, cpu: cpu()? - before };
    received.send(())?;
    sender.join().map_err(|_| "the sender panicked")??;
    Ok(took)
}

/// Times between tokens of the first stream, in seconds, until `done` or the stream's end.
async fn gaps(streams: &mut [UnboundedReceiver<EngineOutput>], mut done: impl FnMut(usize) -> bool) -> Vec<f64> {
    let (mut gaps, mut last) = (Vec::new(), None);
    while !done(gaps.len()) {
        for stream in streams.iter_mut().skip(1) {
            while stream.try_recv().is_ok() {}
        }
        let Some(EngineOutput::First { .. } | EngineOutput::Token { .. }) = streams[0].recv().await else { break };
        let now = Instant::now();
        gaps.extend(last.replace(now).map(|last: Instant| (now - last).as_secs_f64()));
    }
    gaps
}

/// How long steps of running streams take, in seconds: before transfers, and while one follows the other. The prompts are
/// leased and the room is reserved before, so that only bytes move.
async fn beside_streams(
    from: &Node,
    to: &Node,
    prompt_tokens: &[u32],
    blocks: &[(BlockHash, SequenceHash)],
    round: usize,
) -> Result<(Vec<f64>, Vec<f64>), Failure> {
    let mut fetches = Vec::new();
    for _ in 0..FETCHES {
        fetches.push((from.lease(prompt_tokens).await?, to.exchange.reserve(blocks.to_vec(), TIMEOUT).await?));
    }
    let submit = |seed| to.engine.submit(generate(&prompt(STREAM_PROMPT, 100 * round + seed), STREAM_TOKENS));
    let mut streams = (0..STREAMS).map(submit).collect::<Result<Vec<_>, _>>()?;
    // Until all of them decode.
    gaps(&mut streams, |gaps| gaps >= 8).await;
    let calm = gaps(&mut streams, |gaps| gaps >= 40).await;
    let fetching = tokio::spawn(async move {
        for (source, reservation) in &mut fetches {
            Tcp::new(TIMEOUT).pull(source, source.address("tcp").ok_or("no TCP")?, reservation).await?;
        }
        Ok::<(), Failure>(())
    });
    let busy = gaps(&mut streams, |_| fetching.is_finished()).await;
    fetching.await??;
    Ok((calm, busy))
}

/// One fetch of all blocks of the prompt.
async fn fetch(from: &Node, to: &Node, prompt: &[u32], blocks: &[(BlockHash, SequenceHash)]) -> Result<Took, Failure> {
    let source = from.lease(prompt).await?;
    // Dropped at the end: the next fetch finds nothing here.
    let mut reservation = to.exchange.reserve(blocks.to_vec(), TIMEOUT).await?;
    let (started, before) = (Instant::now(), cpu()?);
    Tcp::new(TIMEOUT).pull(&source, source.address("tcp").ok_or("no TCP")?, &mut reservation).await?;
    Ok(Took { wall: started.elapsed().as_secs_f64(), cpu: cpu()? - before })
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    let (from, to) = (Node::start(&arguments).await?, Node::start(&arguments).await?);
    let prompt_tokens = prompt(arguments.tokens, 1);
    let local = HashSpace::default().blocks(&prompt_tokens, to.engine.info().block_size);
    let blocks: Vec<_> = local.iter().copied().zip(sequence_hashes(&local)).collect();
    let bytes = blocks.len() * to.exchange.layout().shape.block_bytes();

    let (mut fetches, mut limits) = (Vec::new(), Vec::new());
    fetch(&from, &to, &prompt_tokens, &blocks).await?;
    for _ in 0..arguments.reps {
        // By turns, so that whatever else the machine does meets both.
        limits.push(loopback(bytes)?);
        fetches.push(fetch(&from, &to, &prompt_tokens, &blocks).await?);
    }

    let (mut calm, mut busy) = (Vec::new(), Vec::new());
    for round in 0..arguments.reps.div_ceil(4) {
        let (before, beside) = beside_streams(&from, &to, &prompt_tokens, &blocks, round).await?;
        calm.extend(before);
        busy.extend(beside);
    }
    let steps = busy.len();
    let gb = bytes as f64 / 1e9;
    let gb_s = |took: &[Took]| gb / median(took.iter().map(|took| took.wall));
    let cpu_ms = |took: &[Took]| 1e3 * median(took.iter().map(|took| took.cpu)) / gb;
    let (calm, busy) = (median(calm.into_iter()), median(busy.into_iter()));
    println!(
        "{}",
        serde_json::json!({
            "transport": "tcp",
            "mb": 1e3 * gb,
            "gb_s": gb_s(&fetches),
            "limit_gb_s": gb_s(&limits),
            "of_limit_pct": 100.0 * gb_s(&fetches) / gb_s(&limits),
            "cpu_ms_per_gb": cpu_ms(&fetches),
            "limit_cpu_ms_per_gb": cpu_ms(&limits),
            "streams": STREAMS,
            "decode_ms": 1e3 * calm,
            "decode_beside_transfers_ms": 1e3 * busy,
            "steps_beside_transfers": steps,
            "decode_slowdown_pct": 100.0 * (busy / calm - 1.0),
        })
    );
    Ok(())
}
