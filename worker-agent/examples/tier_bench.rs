//! Measures how long a prompt takes to its first token when its KV is computed, comes back from host memory, and comes back
//! from disk (that is, from files that were just written: from the page cache, unless memory is short), as JSON lines.
//!
//! `tier_bench MODEL [--threads N] [--tokens N] [--reps N]`

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{Duration, Instant};

use protocol::request_plane::{Generate, Stop};
use worker_agent::engine::builtin::open::{OpenOptions, open};
use worker_agent::engine::builtin::service::BuiltIn;
use worker_agent::engine::builtin::tiers::metrics::TierName;
use worker_agent::engine::builtin::tiers::{DiskOptions, TierOptions};
use worker_agent::engine::{Engine, EngineOutput};

/// Longest wait for a token.
const TIMEOUT: Duration = Duration::from_secs(120);

type Error = Box<dyn std::error::Error>;

struct Arguments {
    model: String,
    threads: usize,
    tokens: usize,
    reps: usize,
}

fn arguments() -> Result<Arguments, Error> {
    let usage = "usage: tier_bench MODEL [--threads N] [--tokens N] [--reps N]";
    let mut args = std::env::args().skip(1);
    let mut parsed = Arguments { model: args.next().ok_or(usage)?, threads: 2, tokens: 512, reps: 5 };
    while let Some(option) = args.next() {
        let value = args.next().ok_or(usage)?.parse::<NonZeroUsize>()?.get();
        match option.as_str() {
            "--threads" => parsed.threads = value,
            "--tokens" => parsed.tokens = value,
            "--reps" => parsed.reps = value,
            _ => return Err(usage.into()),
        }
    }
    Ok(parsed)
}

/// Time to the first token of prompt `number`, and how many of its blocks were reused.
async fn first_token(engine: &BuiltIn, tokens: usize, number: usize) -> Result<(Duration, usize), Error> {
    let token_ids = (0..tokens).map(|at| ((at * 7919 + number * 104_729 + 17) % 49_000) as u32).collect();
    let stop = Some(Stop { max_tokens: 1, ..Default::default() });
    let start = Instant::now();
    let mut outputs = engine.submit(Generate { token_ids, stop, ..Default::default() })?;
    match tokio::time::timeout(TIMEOUT, outputs.recv()).await? {
        Some(EngineOutput::First { reused_blocks, .. }) => Ok((start.elapsed(), reused_blocks)),
        other => Err(format!("no first token: {other:?}").into()),
    }
}

/// The median over the repetitions of a prompt that two others have pushed out of the arena.
async fn measure(arguments: &Arguments, tiers: TierOptions, tier: Option<TierName>) -> Result<(), Error> {
    let tokens = arguments.tokens;
    let options = OpenOptions {
        threads: NonZeroUsize::new(arguments.threads),
        // One prompt and a half.
        total_blocks: (tokens * 3 / 2).div_ceil(16),
        tiers,
        ..OpenOptions::default()
    };
    let (engine, ..) = open(Path::new(&arguments.model), options)?;
    let (mut times, mut blocks) = (Vec::new(), 0);
    first_token(&engine, tokens, 0).await?;
    for number in 0..arguments.reps {
        for other in [1, 2] {
            first_token(&engine, tokens, 1000 + 2 * number + other).await?;
        }
        let wanted = (tokens - 1) / 16;
        let (time, reused) = first_token(&engine, tokens, 0).await?;
        if tier.is_none() || reused + 1 >= wanted {
            times.push(time.as_secs_f64() * 1e3);
            blocks = reused;
        }
    }
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).ok_or("nothing came back from the tier")?;
    let name = tier.map_or("computed", |tier| if tier == TierName::host { "host" } else { "disk" });
    let line = format!(
        r#"{{"from":"{name}","tokens":{tokens},"threads":{},"blocks":{blocks},"first_token_ms":{median:.1},"reps":{}}}"#,
        arguments.threads,
        times.len()
    );
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments = arguments()?;
    measure(&arguments, TierOptions::default(), None).await?;
    let host = TierOptions { host_bytes: 1 << 30, ..TierOptions::default() };
    measure(&arguments, host, Some(TierName::host)).await?;
    let dir = std::env::temp_dir().join(format!("tier-bench-{}", std::process::id()));
    let disk = DiskOptions { dir: dir.clone(), bytes: 1 << 30, revision: String::new() };
    let measured =
        measure(&arguments, TierOptions { disk: Some(disk), ..TierOptions::default() }, Some(TierName::disk));
    let outcome = measured.await;
    std::fs::remove_dir_all(dir)?;
    outcome
}
