//! Benchmarks. Each is a program of its own below bench/; this finds it, and gives it what it needs.

mod index;

use crate::model;
use crate::process::{binaries, built, command, root, run as run_command};

/// Which benchmark.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Prefill and decode speed of the built-in engine, beside llama.cpp's.
    Engine(Rest),
    /// The prefix index beside Dynamo's: rates, latencies, memory.
    Index(index::Args),
    /// What the router costs: latency it adds, CPU per request, memory.
    Frontend(Rest),
    /// Hit rate and latency of every routing mode over a recorded trace.
    Trace(Rest),
    /// Several routers beside one: how evenly they load the workers, and how often they choose the same.
    Replicas(Rest),
}

/// Arguments for the benchmark itself.
#[derive(clap::Args)]
pub struct Rest {
    /// Passed on; `--help` shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs it.
pub fn run(bench: &Command) -> anyhow::Result<()> {
    match bench {
        Command::Engine(rest) => {
            let mut engine = command(root().join("bench/engine/run"));
            run_command(engine.args(&rest.arguments).env("ARMATURE_MODEL", model::obtain()?))
        }
        Command::Index(args) => index::run(args),
        Command::Frontend(rest) => frontend("run", rest),
        Command::Trace(rest) => frontend("trace", rest),
        Command::Replicas(rest) => frontend("replicas", rest),
    }
}

/// The benchmarks of a router with workers behind it.
fn frontend(which: &str, rest: &Rest) -> anyhow::Result<()> {
    let mut bench = built("frontend-bench")?;
    bench.arg(which).args(&rest.arguments).env("ARMATURE_MODEL", model::obtain()?);
    run_command(bench.env("ARMATURE_BIN", binaries()?.join("armature")))
}
