//! The index benchmark: ours and Dynamo's, one process for each structure and size, interleaved, and a table of ratios.
//!
//! The peer's half is a workspace of its own below bench/index/peer: its dependencies stay out of ours.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::process::{cargo, command, quiet, root, run as run_command, target};

/// Both sizes that the goals name.
const SIZES: [u64; 2] = [1 << 14, 1 << 20];

/// The columns of the table: key, heading, whether more is better.
const COLUMNS: [(&str, &str, bool); 11] = [
    ("store_events_per_cpu_s", "store/s", true),
    ("store_steady_events_per_cpu_s", "steady/s", true),
    ("remove_events_per_cpu_s", "remove/s", true),
    ("find_p50_us", "find p50", false),
    ("find_p99_us", "p99", false),
    ("find_beside_writer_p50_us", "writing p50", false),
    ("find_beside_writer_p99_us", "p99", false),
    ("bytes_per_owned_block", "bytes/block", false),
    ("remove_worker_ms", "drop ms", false),
    ("dump_ms_per_m_blocks", "dump ms/M", false),
    // Ours is told sizes, as routers are; the peer cannot be.
    ("load_ms_per_m_blocks", "load ms/M", false),
];

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    /// Blocks of each worker; both sizes of the goals without it. 2^20 on 64 workers takes 4 GB for ours and 13 GB for the peer,
    /// while they are loaded again.
    #[arg(long)]
    blocks_per_worker: Option<u64>,
    /// Workers.
    #[arg(long, default_value_t = 64)]
    workers: u64,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seeds, counted up from the first.
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Measures no peer with `ours`.
    #[arg(long, value_parser = ["ours"])]
    only: Option<String>,
    /// Folder that the peer is built in.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Gives each worker engine hashes of its own for the same content.
    #[arg(long)]
    opaque: bool,
    /// Churns ours for so many seconds instead, and compares memory in the first and the last third of them.
    #[arg(long)]
    soak: Option<u64>,
}

/// Runs it.
pub fn run(args: &Args) -> anyhow::Result<()> {
    run_command(cargo().args(["build", "--release", "--quiet", "-p", "index-bench"]))?;
    let ours = target().join("release/index-bench");
    if let Some(seconds) = args.soak {
        let mut soak = command(ours);
        let blocks = args.blocks_per_worker.unwrap_or(SIZES[0]);
        return run_command(workload(&mut soak, args, blocks, args.seed).args(["--soak", &seconds.to_string()]));
    }
    let peer = if args.only.is_none() { Some(build_peer(args)?) } else { None };
    let sizes = args.blocks_per_worker.map_or_else(|| SIZES.to_vec(), |blocks| vec![blocks]);
    for blocks in sizes {
        let mut results = Vec::new();
        for seed in args.seed..args.seed + args.runs {
            results.push(one(workload(&mut command(&ours), args, blocks, seed))?);
            for structure in peer.iter().flat_map(|_| ["radix", "concurrent"]) {
                let mut peer = command(peer.as_deref().context("the peer is built")?);
                results.push(one(workload(peer.arg(structure), args, blocks, seed))?);
            }
        }
        print!("{}", table(blocks, &results));
    }
    Ok(())
}

fn build_peer(args: &Args) -> anyhow::Result<PathBuf> {
    let folder = args.peers.clone().unwrap_or_else(|| target().join("peers"));
    let manifest = root().join("bench/index/peer/Cargo.toml");
    let mut build = cargo();
    build.args(["build", "--release", "--quiet", "--locked", "--manifest-path"]).arg(manifest);
    run_command(build.env("CARGO_TARGET_DIR", &folder))?;
    Ok(folder.join("release/index-bench-peer"))
}

fn workload<'a>(command: &'a mut Command, args: &Args, blocks: u64, seed: u64) -> &'a mut Command {
    let numbers = [("--blocks-per-worker", blocks), ("--workers", args.workers), ("--seed", seed)];
    for (flag, number) in numbers {
        command.args([flag, &number.to_string()]);
    }
    command.args(args.opaque.then_some("--opaque"))
}

/// One structure, measured; its line is printed at once.
fn one(measurement: &mut Command) -> anyhow::Result<Value> {
    let said = quiet(measurement)?;
    let line = said.lines().last().context("the benchmark printed nothing")?;
    println!("{line}");
    let value: Value = serde_json::from_str(line).context("the benchmark printed no JSON")?;
    if value["structure"].is_null() {
        bail!("the benchmark's line names no structure");
    }
    Ok(value)
}

/// Medians over the seeds, and how many times better ours are than each peer.
fn table(blocks: u64, results: &[Value]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for result in results {
        let name = result["structure"].as_str().unwrap_or_default();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let of = |name: &str, key: &str| {
        let own = results.iter().filter(|result| result["structure"] == *name);
        median(own.filter_map(|result| result[key].as_f64()).collect())
    };
    let mut text = format!("\n{blocks} blocks on each worker, medians; in brackets: ours is so many times better\n");
    text += &format!("{:<56}", "structure");
    COLUMNS.iter().for_each(|(_, heading, _)| text += &format!("{heading:>18}"));
    text.push('\n');
    for name in &names {
        text += &format!("{name:<56}");
        for (key, _, more) in COLUMNS {
            let cell = match (of(name, key), of(names[0], key)) {
                (Some(value), _) if *name == names[0] => shown(value),
                (Some(value), Some(ours)) => {
                    let ratio = if more { ours / value } else { value / ours };
                    format!("{} ({ratio:.1})", shown(value))
                }
                (value, _) => value.map_or_else(|| "-".to_owned(), shown),
            };
            text += &format!("{cell:>18}");
        }
        text.push('\n');
    }
    text
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn shown(value: f64) -> String {
    if value >= 1000.0 { format!("{:.0}k", value / 1000.0) } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_compares_medians_in_the_right_direction() {
        let line = |name: &str, store: u64, find: f64| json!({"structure": name, "store_events_per_cpu_s": store, "find_p50_us": find});
        let results = [
            line("ours", 900_000, 0.5),
            line("peer", 300_000, 2.0),
            line("ours", 800_000, 0.6),
            line("ours", 1_000_000, 0.4),
        ];
        let text = table(16384, &results);
        for part in ["900k", "300k (3.0)", "0.50", "2.00 (4.0)", "-"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
