//! The benchmarks of a router with workers behind it, and for one of them the peers: Python packages in environments of
//! their own.
//!
//! Versions are pinned: a table says what it was measured beside.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::model;
use crate::process::{binaries, command, quiet, run as run_command};
use crate::setup;

use super::Rest;

/// Environments and what is in them. Their names are those of the folders that `frontend-bench run --peers` looks for.
const PEERS: [(&str, &[&str]); 3] = [
    ("vllm-router", &["vllm-router==0.1.17"]),
    ("sglang-router", &["sglang-router==0.3.2"]),
    // The frontend's imports; its package itself comes afterwards.
    ("dynamo", &["ai-dynamo-runtime==1.6.1", "msgspec==0.23.0", "packaging", "PyYAML==6.0.4"]),
];
/// Dynamo's Python code. Without what it requires: most of that is for engines, and some of it is on no index.
const DYNAMO: &str = "ai-dynamo==1.6.1";

/// Flags with which no peer is installed: they say where the peers are, that there are none, or ask for help.
const WITHOUT: [&str; 4] = ["--peers", "--only", "--help", "-h"];

/// Our router beside its peers.
pub fn beside_peers(rest: &Rest) -> anyhow::Result<()> {
    let mut arguments = rest.arguments.clone();
    if wants_peers(&arguments) {
        arguments.extend(["--peers".to_owned(), install()?.display().to_string()]);
    }
    run("run", &arguments)
}

/// Our router alone, by this benchmark.
pub fn alone(which: &str, rest: &Rest) -> anyhow::Result<()> {
    run(which, &rest.arguments)
}

fn run(which: &str, arguments: &[String]) -> anyhow::Result<()> {
    let binaries = binaries()?;
    let mut bench = command(binaries.join("frontend-bench"));
    bench.arg(which).args(arguments).env("ARMATURE_MODEL", model::obtain()?);
    run_command(bench.env("ARMATURE_BIN", binaries.join("armature")))
}

fn wants_peers(arguments: &[String]) -> bool {
    let name = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    !arguments.iter().any(|argument| WITHOUT.contains(&name(argument).as_str()))
}

/// Makes the environments that are missing; returns the folder they are in.
fn install() -> anyhow::Result<PathBuf> {
    let mut folder = None;
    for (name, requirements) in PEERS {
        let bin = setup::python(name, requirements)?;
        if name == "dynamo" {
            without_requirements(&bin)?;
        }
        folder = bin.ancestors().nth(2).map(Path::to_path_buf);
    }
    folder.context("an environment lies in no folder")
}

/// Does nothing, and asks no index, where this very version is installed.
fn without_requirements(bin: &Path) -> anyhow::Result<()> {
    quiet(command(bin.join("python")).args(["-m", "pip", "install", "--quiet", "--no-deps", DYNAMO])).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_installed_unless_a_flag_says_otherwise() {
        let wants = |text: &str| wants_peers(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert!(wants("") && wants("--rounds 1 --prompt short"));
        for flags in ["--only ours", "--only=ours", "--rounds 1 --peers x", "--peers=x", "-h"] {
            assert!(!wants(flags), "{flags}");
        }
    }
}
