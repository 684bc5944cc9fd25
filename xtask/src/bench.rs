//! Benchmarks. Each is a program of its own below bench/; this finds it, and gives it what it needs.

use crate::model;
use crate::process::{binaries, built, command, root, run as run_command};

/// Which benchmark.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Prefill and decode speed of the built-in engine, beside llama.cpp's.
    Engine(Rest),
    /// What the router costs: latency it adds, CPU per request, memory.
    Frontend(Rest),
    /// Hit rate and latency of every routing mode over a recorded trace.
    Trace(Rest),
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
        Command::Frontend(rest) => frontend("run", rest),
        Command::Trace(rest) => frontend("trace", rest),
    }
}

/// The benchmarks of a router with workers behind it.
fn frontend(which: &str, rest: &Rest) -> anyhow::Result<()> {
    let mut bench = built("frontend-bench")?;
    bench.arg(which).args(&rest.arguments).env("ARMATURE_MODEL", model::obtain()?);
    run_command(bench.env("ARMATURE_BIN", binaries()?.join("armature")))
}
