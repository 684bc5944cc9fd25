//! What the router costs, measured against workers that answer at once: latency it adds, throughput, CPU per request, memory.
//!
//! `cargo xtask bench frontend`; and `trace` and `replicas`, where the workers take their time. Router and workers are processes of their
//! own; the load comes from this one.

mod engine;
mod load;
mod measure;
mod prompts;
mod replicas;
mod report;
mod system;
mod trace;

use clap::Parser;

/// The benchmark, and the worker it uses.
#[derive(Parser)]
enum Command {
    /// Measures; prints one JSON object a run, then a table.
    Run(measure::Options),
    /// Replays a trace in each routing mode; prints one JSON object a mode, then a table.
    Trace(trace::Options),
    /// Compares several routers with one; prints one JSON object a run, then a table.
    Replicas(replicas::Options),
    /// A real worker agent around an engine that answers at once.
    #[command(hide = true)]
    Worker(Box<engine::Options>),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Run(options) => measure::run(&options).await,
        Command::Trace(options) => trace::run(&options).await,
        Command::Replicas(options) => replicas::run(&options).await,
        Command::Worker(options) => engine::serve(*options).await,
    }
}
