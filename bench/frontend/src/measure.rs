//! The plan: rounds over modes, sets and concurrencies, interleaved so that a change in the machine's load touches all.

use std::time::Duration;

use serde_json::{Value, json};

use crate::load::{self, Run};
use crate::prompts::Set;
use crate::report;
use crate::system::{MODEL, Router, Workers};

/// Flags of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Prompts are made from it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Measures no peers; there are none yet.
    #[arg(long, value_parser = ["ours"])]
    only: Option<String>,
    /// Connections of each run.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    concurrency: Vec<usize>,
    /// Kinds of traffic.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Set::Short, Set::Long, Set::MultiTurn])]
    prompt: Vec<Set>,
    /// How the router picks workers.
    #[arg(long, value_delimiter = ',', default_values = ["kv", "round-robin"])]
    mode: Vec<String>,
    /// Workers behind the router.
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Seconds of each run.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Rounds over all runs.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// How long a router does nothing before its memory counts as idle.
const IDLE: Duration = Duration::from_secs(1);

/// Measures, printing each run as it ends.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let workers = Workers::start(options.workers).await?;
    let mut results = Vec::new();
    for _ in 0..options.rounds {
        for mode in &options.mode {
            let router = Router::start(&workers, mode).await?;
            tokio::time::sleep(IDLE).await;
            let ms = |time: Duration| rounded(time.as_secs_f64() * 1e3);
            let start = json!({"server": "armature", "mode": mode, "start_to_ready_ms": ms(router.ready),
                "start_to_model_ms": ms(router.model), "idle_rss_mb": rounded(router.rss_mb()?)});
            println!("{start}");
            results.push(start);
            for &prompt in &options.prompt {
                for &concurrency in &options.concurrency {
                    // A long prompt costs the client more than the router; many at once measure nothing new.
                    for stream in [true, false].into_iter().filter(|stream| *stream || prompt == Set::Short) {
                        let time = Duration::from_secs_f64(options.seconds);
                        let result =
                            one(&router, mode, Run { set: prompt, concurrency, stream, time, seed: options.seed })
                                .await?;
                        println!("{result}");
                        results.push(result);
                    }
                }
            }
        }
    }
    report::table(&results);
    Ok(())
}

async fn one(router: &Router, mode: &str, run: Run) -> anyhow::Result<Value> {
    let warm = Run { time: Duration::from_millis(300).min(run.time), ..run };
    load::run(router.address, MODEL, warm).await;
    let before = router.cpu()?;
    let mut seen = load::run(router.address, MODEL, run).await;
    let cpu_ms = (router.cpu()? - before).as_secs_f64() * 1e3;
    seen.first_ms.sort_by(f64::total_cmp);
    let requests = seen.first_ms.len();
    let at =
        |share: f64| seen.first_ms.get(((requests as f64 * share) as usize).min(requests.saturating_sub(1))).copied();
    let mut result = json!({"server": "armature", "mode": mode, "prompt": name(run.set), "concurrency": run.concurrency,
        "stream": run.stream, "req_s": rounded(requests as f64 / seen.wall.as_secs_f64()), "ttft_p50_ms": at(0.5).map(rounded),
        "ttft_p99_ms": at(0.99).map(rounded), "cpu_ms_per_req": rounded(cpu_ms / requests.max(1) as f64),
        "rss_mb": rounded(router.rss_mb()?), "errors": seen.errors});
    if let Some(error) = seen.first_error {
        result["first_error"] = error.into();
    }
    Ok(result)
}

fn name(set: Set) -> &'static str {
    match set {
        Set::Short => "short",
        Set::Long => "long",
        Set::MultiTurn => "multi_turn",
    }
}

/// Three significant decimals are more than the measurement has.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
