//! The project's one helper: tests, generated files, the model, the image, the test cluster, benchmarks.
//!
//! `cargo xtask <command>`. Everything a command needs beyond Rust, Go, Python and root it installs itself, into
//! `$XDG_CACHE_HOME/armature` where that is possible, and says so in one line.

mod bench;
mod cluster;
mod cuda;
mod generate;
mod image;
mod model;
mod nixl;
mod process;
mod ptx;
mod python;
mod setup;
mod test;
mod tidy;
mod vllm;

use clap::Parser;

/// The project's helper.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Command {
    /// Runs the tests, and first installs and builds what they need.
    Test(test::Args),
    /// Checks the rules of the repository: dependency edges, file lengths, names, generated files.
    Tidy,
    /// Writes every generated file.
    Generate {
        /// Writes nothing, and fails when a file is stale.
        #[arg(long)]
        check: bool,
    },
    /// Puts the default model into the cache and prints its path.
    Model,
    /// Builds the Python bindings as a wheel, and tests it.
    Python,
    /// Compiles the CUDA kernels to PTX; needs no device.
    Ptx,
    /// Compiles the worker with its CUDA engine; needs no device.
    Cuda,
    /// Builds the container image as a tar file that docker, podman and containerd load.
    Image(image::Args),
    /// A real Kubernetes of two nodes on this machine, for tests.
    #[command(subcommand)]
    Cluster(cluster::Command),
    /// Benchmarks; prints one JSON object a line.
    #[command(subcommand)]
    Bench(bench::Command),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Test(args) => test::run(&args),
        Command::Tidy => tidy::run(),
        Command::Generate { check } => generate::run(check),
        Command::Model => {
            println!("{}", model::obtain()?.display());
            Ok(())
        }
        Command::Python => python::run(),
        Command::Ptx => ptx::run(),
        Command::Cuda => cuda::run(),
        Command::Image(args) => image::run(&args),
        Command::Cluster(command) => cluster::run(&command),
        Command::Bench(command) => bench::run(&command),
    }
}
