//! `cargo xtask ptx`: compiles the CUDA kernels ahead of time. Needs neither a device nor a driver, and nothing from NVIDIA but
//! the package with its run-time compiler.

use crate::process::{command, root, run as run_command};
use crate::setup;

/// Old enough that the PTX it writes is understood by every driver of CUDA 12 and later.
const COMPILER: &str = "nvidia-cuda-nvrtc-cu12==12.0.140";

/// Compiles.
pub fn run() -> anyhow::Result<()> {
    let bin = setup::python("nvrtc", &[COMPILER])?;
    let folder = root().join("device/src/cuda");
    let mut python = command(bin.join("python"));
    run_command(python.arg(folder.join("compile.py")).arg(folder.join("blocks.cu")).arg(folder.join("blocks.ptx")))
}
