//! Benchmarks. Each is a program of its own below bench/; this finds it, and gives it what it needs.

mod frontend;
mod index;

use std::path::PathBuf;

use crate::model;
use crate::nixl::{self, Nixl};
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
    Transfer(Transfer),
    /// Copies of KV blocks between the host and every accelerator of this machine, checked and timed.
    Device(Device),
    /// Several routers, in sync or not: how often they choose as one router that sees all would, and how evenly.
    Replicas(Rest),
}

/// Arguments for the benchmark itself.
#[derive(clap::Args)]
pub struct Rest {
    /// Passed on; `--help` shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Where accelerators are.
#[derive(clap::Args)]
pub struct Device {
    /// Runs nothing: puts the program into this folder, to be carried to a machine with an accelerator. It needs the driver there,
    /// and nothing else
    #[arg(long, value_name = "DIR")]
    carry: Option<PathBuf>,
}

impl Device {
    fn run(&self) -> anyhow::Result<()> {
        const NAME: &str = "device_check";
        let mut check = example(NAME, None)?;
        let Some(folder) = &self.carry else { return run_command(&mut check) };
        std::fs::create_dir_all(folder)?;
        let bytes = std::fs::copy(check.get_program(), folder.join(NAME))?;
        println!("{}: {:.1} MB", folder.join(NAME).display(), bytes as f64 / 1e6);
        Ok(())
    }
}

/// How blocks are moved.
#[derive(clap::Args)]
pub struct Transfer {
    /// With NIXL, too, which is installed from its Python package (95 MB, with libclang)
    #[arg(long)]
    nixl: bool,
    #[command(flatten)]
    rest: Rest,
}

impl Transfer {
    fn run(&self) -> anyhow::Result<()> {
        let nixl = self.nixl.then(Nixl::obtain).transpose()?;
        let mut bench = example("transfer_bench", nixl.as_ref())?;
        run_command(bench.arg(model::obtain()?).args(&self.rest.arguments))
    }
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
        Command::Transfer(transfer) => transfer.run(),
        Command::Device(device) => device.run(),
        Command::Trace(rest) => frontend::alone("trace", rest),
        Command::Replicas(rest) => frontend::alone("replicas", rest),
    }
}

/// Builds the program of this name among the examples, perhaps with NIXL.
fn example(name: &str, nixl: Option<&Nixl>) -> anyhow::Result<std::process::Command> {
    let (mut build, mut program) = (cargo(), command(target().join("release/examples").join(name)));
    build.args(["build", "--release", "--quiet", "--workspace", "--example", name]);
    if let Some(nixl) = nixl {
        nixl.to(build.args(["--features", nixl::FEATURES]));
        nixl.to(&mut program);
    }
    run_command(&mut build)?;
    Ok(program)
}
