//! Rust code from the .proto files, by `proto-codegen`.

use super::Generated;
use crate::process::{built, quiet, root};

/// `crates/protocol/src/generated`.
pub fn files() -> anyhow::Result<Vec<Generated>> {
    let content = quiet(built("proto-codegen")?.arg(root().join("crates/protocol/proto")))?;
    Ok(vec![Generated { path: "crates/protocol/src/generated/armature.v1.rs".into(), content }])
}
