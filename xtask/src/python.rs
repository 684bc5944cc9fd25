//! `cargo xtask python`: the Python bindings as a wheel, installed into an environment of its own and tested there.
//!
//! What does not change is not done again: cargo sees whether to compile, and only a wheel that differs is installed.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::process::{command, quiet, root, run as run_command, target};
use crate::setup;

/// The crate, under the repository's root.
const CRATE: &str = "bindings/python";

/// Builds, installs and tests.
pub fn run() -> anyhow::Result<()> {
    let bin = environment()?;
    install(&bin, &wheel(&bin)?)?;
    let mut tests = command(bin.join("python"));
    tests.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]).arg(format!("{CRATE}/tests"));
    run_command(tests.env("PYTHONDONTWRITEBYTECODE", "1"))
}

/// The environment with maturin and what the tests need; returns its `bin` folder.
pub fn environment() -> anyhow::Result<PathBuf> {
    let list = std::fs::read_to_string(root().join(CRATE).join("tests/requirements.txt"))?;
    setup::python("python-bindings", &list.lines().filter(|line| !line.trim().is_empty()).collect::<Vec<_>>())
}

/// A wheel of the working tree, compiled in the workspace's target folder with the workspace's settings.
fn wheel(bin: &Path) -> anyhow::Result<PathBuf> {
    let out = target().join("python-wheel");
    if out.exists() {
        std::fs::remove_dir_all(&out)?;
    }
    let mut maturin = command(bin.join("maturin"));
    maturin.args(["build", "--release", "--locked", "--quiet", "--compatibility", "linux"]);
    maturin.arg("--manifest-path").arg(root().join(CRATE).join("Cargo.toml"));
    maturin.arg("--interpreter").arg(bin.join("python")).arg("--out").arg(&out);
    // The same as in .cargo/config.toml; without it maturin writes one of its own, and PyO3 compiles again.
    run_command(maturin.env("PYO3_CONFIG_FILE", root().join(CRATE).join("pyo3.config")))?;
    let mut wheels = std::fs::read_dir(&out)?.collect::<Result<Vec<_>, _>>()?;
    match (wheels.pop(), wheels.pop()) {
        (Some(wheel), None) => Ok(wheel.path()),
        _ => bail!("maturin left not one wheel in {}", out.display()),
    }
}

/// Installs the wheel, unless the very same one is installed.
fn install(bin: &Path, wheel: &Path) -> anyhow::Result<()> {
    let stamp = bin.parent().context("the environment has no root")?.join("installed.whl");
    let built = std::fs::read(wheel)?;
    if std::fs::read(&stamp).is_ok_and(|installed| installed == built) {
        return Ok(());
    }
    let mut pip = command(bin.join("python"));
    quiet(pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]).arg(wheel))?;
    std::fs::write(stamp, built)?;
    Ok(())
}
