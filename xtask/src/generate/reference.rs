//! docs/reference: flags and metrics, as the product's binary describes itself.

use super::Generated;
use crate::process::{built, quiet};

/// `docs/reference/flags.md` and `docs/reference/metrics.md`.
pub fn files() -> anyhow::Result<Vec<Generated>> {
    ["flags", "metrics"]
        .into_iter()
        .map(|what| {
            let content = quiet(built("armature")?.args(["reference", what]))?;
            Ok(Generated { path: format!("docs/reference/{what}.md").into(), content })
        })
        .collect()
}
