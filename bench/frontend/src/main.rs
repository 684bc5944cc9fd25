//! What the router costs, measured against workers that answer at once: latency it adds, throughput, CPU per request, memory.
//!
//! `cargo xtask bench frontend`, beside the peers; and `trace` and `replicas`, where the workers take their time. Routers
//! and workers are processes of their own; the load comes from this one.

mod engine;
mod load;
mod measure;
mod openai_worker;
mod peers;
mod process;
mod prompts;
mod replicas;
mod report;
mod servers;
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
    /// An OpenAI server that answers at once.
    #[command(hide = true)]
    OpenaiWorker(openai_worker::Options),
}

fn main() -> anyhow::Result<()> {
    let command = Command::parse();
    // One thread for each process here: what is measured needs the cores, and threads that look for work take them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Unwinding ends the processes that were started.
        tokio::select! {
            result = run(command) => result,
            result = stopped() => result.and_then(|()| anyhow::bail!("stopped")),
        }
    })
}

async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(options) => measure::run(&options).await,
        Command::Trace(options) => trace::run(&options).await,
        Command::Replicas(options) => replicas::run(&options).await,
        Command::Worker(options) => engine::serve(*options).await,
        Command::OpenaiWorker(options) => openai_worker::serve(options).await,
    }
}

/// Until somebody wants this to end.
async fn stopped() -> anyhow::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        result = tokio::signal::ctrl_c() => Ok(result?),
    }
}
