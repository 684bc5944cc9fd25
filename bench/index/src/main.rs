//! Measures the prefix index: one structure, one size, one JSON line. `cargo xtask bench index` runs it beside the peer's.

mod measure;
mod ours;
mod soak;
mod workload;

use std::time::Duration;

use clap::Parser;

/// Measures the prefix index.
#[derive(Parser)]
struct Args {
    /// Blocks of each worker, system prompts apart.
    #[arg(long, default_value_t = 1 << 14)]
    blocks_per_worker: u64,
    /// Workers.
    #[arg(long, default_value_t = 64)]
    workers: u64,
    /// Seed of all hashes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Gives each worker engine hashes of its own.
    #[arg(long)]
    opaque: bool,
    /// Announces no worker's size.
    #[arg(long)]
    no_hint: bool,
    /// Churns for so many seconds instead, and shows memory.
    #[arg(long)]
    soak: Option<u64>,
    /// Byte budget of the index, in MiB.
    #[arg(long, default_value_t = 4096)]
    budget_mib: usize,
}

fn main() {
    let args = Args::parse();
    let workload = workload::Workload {
        workers: args.workers.max(1),
        blocks: args.blocks_per_worker,
        seed: args.seed,
        opaque: args.opaque,
        sequence: ours::sequence,
    };
    match args.soak {
        Some(seconds) => soak::soak(&workload, Duration::from_secs(seconds), args.budget_mib << 20),
        None => {
            let tree = ours::Tree::new(!args.no_hint, args.budget_mib << 20);
            println!("{}", measure::measure(tree, &workload));
        }
    }
}
