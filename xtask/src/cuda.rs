//! `cargo xtask cuda`: compiles the worker for NVIDIA GPUs, kernels and all. Needs no GPU, and no CUDA on the machine: the
//! compiler comes as Python packages.
//!
//! Nothing is linked: for that the driver's library and cuBLAS are needed, which machines with a GPU have.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{JoinHandle, spawn};

use anyhow::anyhow;

use crate::process::{cargo, command, quiet, run as run_command, target};
use crate::setup;

/// nvcc with what it runs and includes. Of the oldest series that is packaged whole: code that it makes runs on more drivers.
const TOOLKIT: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// What kernels are compiled for unless `CUDA_COMPUTE_CAP` says otherwise: Ampere, and what came after it can run that.
const CAPABILITY: &str = "80";

/// Kernels that nobody will run need not be fast: half of the time.
const UNOPTIMIZED: &str = "-Xcicc -O0 -Xptxas -O0";

/// A CUDA toolkit.
pub struct Toolkit {
    root: PathBuf,
    /// Of the machine: with all libraries.
    whole: bool,
}

impl Toolkit {
    /// The machine's own, or one with the compiler alone.
    pub fn obtain() -> anyhow::Result<Self> {
        let named = std::env::var_os("CUDA_HOME").map(PathBuf::from);
        let usual = named.unwrap_or_else(|| "/usr/local/cuda".into());
        if usual.join("bin/nvcc").is_file() {
            return Ok(Self { root: usual, whole: true });
        }
        // nvcc gives the host's part of each file to the host's compiler.
        setup::debian(&["g++"])?;
        let bin = setup::python("nvcc", &TOOLKIT)?;
        let mut python = command(bin.join("python"));
        let packages = quiet(python.args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))?;
        Ok(Self { root: Path::new(packages.trim()).join("nvidia/cu13"), whole: false })
    }

    /// Whether tests can be linked, and have a GPU to run on.
    pub fn can_run(&self) -> bool {
        self.whole && Path::new("/dev/nvidiactl").exists()
    }

    /// A command that compiles with this toolkit. In a folder of its own: crates that look for CUDA would be built again, here
    /// and there, whenever it comes and goes.
    pub fn uses(&self, mut command: Command) -> anyhow::Result<Command> {
        let bin = self.root.join("bin");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(bin.clone()).chain(std::env::split_paths(&path)))?;
        command.env("CUDA_HOME", &self.root).env("NVCC", bin.join("nvcc")).env("PATH", path);
        if std::env::var_os("CUDA_COMPUTE_CAP").is_none() {
            command.env("CUDA_COMPUTE_CAP", CAPABILITY);
        }
        command.env("CARGO_TARGET_DIR", target().join("cuda"));
        Ok(command)
    }
}

/// The worker's library and the kernels, being compiled for CUDA beside something else.
pub struct Check(JoinHandle<anyhow::Result<String>>);

impl Check {
    /// Starts to, at a low priority: nvcc keeps half of the cores busy for minutes. In a folder of its own, so that no program ever gets
    /// these kernels.
    pub fn start() -> anyhow::Result<Self> {
        let mut clippy = command("nice");
        clippy.args(["-n", "19"]).arg(cargo().get_program()).args(["clippy", "--release", "--quiet"]);
        clippy.args(["--package", "worker-agent", "--lib", "--features", "cuda", "--", "--deny", "warnings"]);
        let mut clippy = Toolkit::obtain()?.uses(clippy)?;
        clippy.env("CARGO_TARGET_DIR", target().join("cuda-check")).env("NVCC_APPEND_FLAGS", UNOPTIMIZED);
        Ok(Self(spawn(move || quiet(&mut clippy))))
    }

    /// Waits for the end.
    pub fn finish(self) -> anyhow::Result<()> {
        self.0.join().map_err(|_| anyhow!("the thread that compiles for CUDA panicked"))?.map(drop)
    }
}

/// Compiles kernels, worker and program, and all tests of the worker.
pub fn run() -> anyhow::Result<()> {
    let mut clippy = Toolkit::obtain()?.uses(cargo())?;
    clippy.args(["clippy", "--release", "--quiet", "--package", "worker-agent", "--package", "armature"]);
    run_command(clippy.args(["--all-targets", "--features", "armature/cuda", "--", "--deny", "warnings"]))
}
