//! Everything that is generated and committed; each producer returns files, this module writes or compares them.

mod manifests;
mod proto;
mod reference;

use std::path::PathBuf;

use anyhow::{Context, bail};

use crate::process::root;

/// One generated file.
pub struct Generated {
    /// Path below the root.
    pub path: PathBuf,
    /// Its whole content.
    pub content: String,
}

/// Writes every generated file, or with `check` only compares and fails with the list of stale ones.
pub fn run(check: bool) -> anyhow::Result<()> {
    let mut stale = Vec::new();
    // One after the other: the chart is rendered with the CRDs that were written before.
    for produce in [proto::files, manifests::crds, manifests::rendered, reference::files] {
        for file in produce()? {
            let path = root().join(&file.path);
            if std::fs::read_to_string(&path).is_ok_and(|have| have == file.content) {
                continue;
            }
            stale.push(file.path.display().to_string());
            if !check {
                std::fs::create_dir_all(path.parent().context("a file has a folder")?)?;
                std::fs::write(&path, file.content).with_context(|| format!("cannot write {}", path.display()))?;
                println!("wrote {}", file.path.display());
            }
        }
    }
    if check && !stale.is_empty() {
        bail!("stale, run `cargo xtask generate`: {}", stale.join(", "));
    }
    Ok(())
}
