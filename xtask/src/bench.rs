//! Benchmarks. Each is a program of its own below bench/; this finds it, and gives it what it needs.

mod frontend;
mod index;

use crate::model;
use crate::process::{cargo, command, root, run as run_command, target};

/// Which benchmark.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Prefill and decode speed of the built-in engine, beside llama.cpp's.
    Engine(Rest),
    /// The prefix index beside Dynamo's: rates, latencies, memory.
    Index(index::Args),
    /// What the router costs beside its peers: latency it adds, CPU per request, memory.
    Frontend(Rest),
    /// Hit rate and latency of every routing mode over a recorded trace.
    Trace(Rest),
    /// KV transfer between two workers, beside what loopback TCP and copying do, and what it costs running streams.
    Transfer(Rest),
    /// Copies of KV blocks between the host and every accelerator of this machine, checked and timed.
    Device,
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
        Command::Frontend(rest) => frontend::beside_peers(rest),
        Command::Transfer(rest) => run_command(example("transfer_bench")?.arg(model::obtain()?).args(&rest.arguments)),
        Command::Device => run_command(&mut example("device_check")?),
        Command::Trace(rest) => frontend::alone("trace", rest),
        Command::Replicas(rest) => frontend::alone("replicas", rest),
    }
}

/// Builds the program of this name among the examples.
fn example(name: &str) -> anyhow::Result<std::process::Command> {
    run_command(cargo().args(["build", "--release", "--quiet", "--workspace", "--example", name]))?;
    Ok(command(target().join("release/examples").join(name)))
}
