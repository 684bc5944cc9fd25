//! Licences of what we build on: a binary under Apache-2.0 may contain it all.

use anyhow::Context;
use serde::Deserialize;

use crate::process::{cargo, quiet};

/// Licences that ask for no more than a notice.
const ALLOWED: &[&str] = &[
    "MIT",
    "MIT-0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    license: Option<String>,
}

/// Every package of the lock file, those of other platforms too.
pub(super) fn check(violations: &mut Vec<String>) -> anyhow::Result<()> {
    let text = quiet(cargo().args(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Metadata = serde_json::from_str(&text).context("cargo metadata")?;
    for package in metadata.packages {
        let licence = package.license.unwrap_or_default();
        if !allowed(&licence) {
            violations
                .push(format!("crate {} is under {licence:?}, which tidy does not know to be allowed", package.name));
        }
    }
    Ok(())
}

/// An SPDX expression as far as crates use it: parts joined by AND, of which each offers a choice by OR (`/` in old ones).
fn allowed(expression: &str) -> bool {
    expression.split(" AND ").all(|part| {
        let choices = part.trim_matches(['(', ')']).replace('/', " OR ");
        choices.split(" OR ").any(|choice| ALLOWED.contains(&choice.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_needs_one_choice_that_is_allowed() {
        for good in ["MIT", "MIT/Apache-2.0", "(MIT OR GPL-3.0) AND ISC", "Apache-2.0 WITH LLVM-exception OR MIT"] {
            assert!(allowed(good), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "LGPL-2.1-or-later", "(GPL-3.0 OR AGPL-3.0) AND MIT"] {
            assert!(!allowed(bad), "{bad}");
        }
    }
}
