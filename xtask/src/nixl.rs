//! NIXL from the Python packages that carry it: its libraries, and libclang, which reads its header when we are built with it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::process::{command, quiet};
use crate::setup::{debian, python_packages};

/// NIXL with the UCX that it goes through, and libclang. Not what they are packages for: NIXL's would want torch.
const PACKAGES: [&str; 2] = ["nixl-cu12==1.5.1", "libclang==18.1.1"];

/// The features that switch NIXL on, wherever that makes a difference.
pub const FEATURES: &str = "armature/nixl,worker-agent/nixl,integration-tests/nixl";

/// What builds and processes with NIXL are told.
pub struct Nixl(Vec<(&'static str, OsString)>);

impl Nixl {
    /// Installs what is missing.
    pub fn obtain() -> anyhow::Result<Self> {
        if quiet(command("g++").arg("--version")).is_err() {
            debian(&["g++"])?;
        }
        let bin = python_packages("nixl", &PACKAGES)?;
        let packages = bin.parent().context("a folder in the environment")?.join("lib");
        // The package of libclang has none of the headers that a compiler brings.
        let headers = quiet(command("g++").arg("-print-file-name=include"))?;
        let plugins = folder(&packages, "nixl/libplugin_UCX.so")?;
        let libraries = plugins.parent().context("a folder beside the plugins")?.to_path_buf();
        let api = folder(&packages, "libnixl_capi.so")?;
        let path = std::env::join_paths([api, libraries.clone()])?;
        Ok(Self(vec![
            ("LIBCLANG_PATH", folder(&packages, "libclang.so")?.into()),
            ("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{}", headers.trim()).into()),
            ("LD_LIBRARY_PATH", path),
            ("NIXL_PLUGIN_DIR", plugins.into()),
            ("UCX_MODULE_DIR", libraries.join("ucx").into()),
        ]))
    }

    /// Tells a command.
    pub fn to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.0.iter().map(|(name, value)| (name, value)))
    }
}

fn folder(packages: &Path, file: &str) -> anyhow::Result<PathBuf> {
    Ok(find(packages, file)?.parent().context("a folder")?.to_path_buf())
}

/// The first file under `folder` whose path ends so.
fn find(folder: &Path, end: &str) -> anyhow::Result<PathBuf> {
    let mut folders = vec![folder.to_path_buf()];
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
    bail!("no *{end} in {}", folder.display())
}
