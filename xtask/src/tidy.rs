//! The rules of the repository that no compiler checks.
//!
//! Which crate may use which and under which licences, how long a file may be, which module names are review stops, and
//! that what is generated is fresh. Prints every violation, not just the first.

mod licences;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::process::{cargo, command, quiet, root};

/// What each crate of ours may use of ours (docs: ARCHITECTURE.md). Any edge that is not here is an error.
const EDGES: &[(&str, &[&str])] = &[
    ("kv-hashing", &[]),
    ("kv-index", &["kv-hashing"]),
    ("routing", &["kv-index", "kv-hashing"]),
    ("protocol", &["kv-hashing"]),
    ("crds", &[]),
    ("zmtp", &[]),
    ("engine-feed", &["protocol", "zmtp"]),
    ("device", &[]),
    ("router", &["routing", "kv-index", "kv-hashing", "protocol", "zmtp", "engine-feed", "crds"]),
    ("worker-agent", &["kv-hashing", "kv-index", "protocol", "engine-feed", "device"]),
    ("operator", &["crds", "protocol"]),
    ("armature", &["operator", "router", "worker-agent", "crds", "kv-hashing"]),
    ("armature-python", &["kv-hashing", "kv-index", "protocol"]),
    ("index-bench", &["kv-index", "kv-hashing"]),
    ("integration-tests", &[]),
    ("frontend-bench", &["worker-agent", "routing", "protocol", "kv-index", "kv-hashing"]),
    ("xtask", &[]),
    ("proto-codegen", &[]),
];

/// Crates that decide with plain values: what they must never use from outside.
pub const PURE: &[(&str, &[&str])] = &[
    ("kv-hashing", &["tokio", "kube", "hyper", "axum"]),
    ("kv-index", &["tokio", "kube", "hyper", "axum"]),
    ("routing", &["tokio", "kube", "hyper", "axum"]),
    ("protocol", &["tokio", "kube", "hyper", "axum"]),
    ("crds", &["tokio", "hyper", "axum"]),
];

/// Longest file, in lines.
const MAX_LINES: usize = 800;

/// Names that say nothing about what is inside.
const NAMELESS: &[&str] = &["utils", "util", "common", "helpers", "helper", "manager", "misc", "mod"];

/// What `cargo metadata` says, as far as it is read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    path: Option<PathBuf>,
}

/// Checks everything.
pub fn run() -> anyhow::Result<()> {
    let mut violations = Vec::new();
    edges(&mut violations)?;
    providers(&mut violations)?;
    licences::check(&mut violations)?;
    for file in files()? {
        let text =
            std::fs::read_to_string(root().join(&file)).with_context(|| format!("cannot read {}", file.display()))?;
        source(&file, &text, &mut violations);
    }
    if let Err(stale) = crate::generate::run(true) {
        violations.push(format!("{stale:#}"));
    }
    for violation in &violations {
        println!("tidy: {violation}");
    }
    if !violations.is_empty() {
        bail!("tidy: {} violations", violations.len());
    }
    println!("tidy: ok");
    Ok(())
}

fn edges(violations: &mut Vec<String>) -> anyhow::Result<()> {
    let text = quiet(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--offline"]))?;
    let metadata: Metadata = serde_json::from_str(&text).context("cargo metadata")?;
    let (allowed, pure): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (EDGES.iter().copied().collect(), PURE.iter().copied().collect());
    for package in &metadata.packages {
        let name = package.name.as_str();
        let Some(allowed) = allowed.get(name) else {
            violations.push(format!("crate {name} has no row in the table of dependencies"));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| d.kind.as_deref() != Some("dev")) {
            let other = dependency.name.as_str();
            if dependency.path.is_some() && !allowed.contains(&other) {
                violations.push(format!("crate {name} must not use {other}"));
            }
            if pure.get(name).is_some_and(|never| never.contains(&other)) {
                violations.push(format!("crate {name} is pure and must not use {other}"));
            }
        }
    }
    Ok(())
}

/// Two rustls providers in one binary panic at the first handshake.
fn providers(violations: &mut Vec<String>) -> anyhow::Result<()> {
    let lock = std::fs::read_to_string(root().join("Cargo.lock"))?;
    for name in ["aws-lc-rs", "openssl-sys", "native-tls"] {
        if lock.lines().any(|line| line == format!("name = {name:?}")) {
            violations.push(format!("{name} is in Cargo.lock; rustls with ring is the only TLS provider"));
        }
    }
    Ok(())
}

/// Files that git knows or would add.
fn files() -> anyhow::Result<Vec<PathBuf>> {
    let list = quiet(command("git").args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]))?;
    Ok(list
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        .filter(|p| root().join(p).exists())
        .collect())
}

fn source(path: &Path, text: &str, violations: &mut Vec<String>) {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let shown = path.display();
    if !matches!(extension, "rs" | "py" | "sh" | "proto" | "go")
        || path.components().any(|c| c.as_os_str() == "generated")
    {
        return;
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        violations.push(format!("{shown} has {lines} lines, more than {MAX_LINES}"));
    }
    if extension != "rs" {
        return;
    }
    let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
    if NAMELESS.contains(&stem) {
        violations.push(format!("{shown}: `{stem}` is no name for a module; name what it holds"));
    }
    if !text.starts_with("//!") {
        violations.push(format!("{shown} does not begin with `//!`, saying what it owns"));
    }
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("#[ignore") {
            violations.push(format!("{shown}:{} ignores a test", number + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(path: &str, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        source(Path::new(path), text, &mut found);
        found
    }

    #[test]
    fn a_good_file_has_none() {
        assert!(violations("router/src/dispatch.rs", "//! Dispatch.\nfn f() {}\n").is_empty());
    }

    #[test]
    fn each_rule_is_reported_with_its_place() {
        let text = format!("fn f() {{}}\n#[ignore]\n{}", "\n".repeat(MAX_LINES));
        let found = violations("router/src/utils.rs", &text).join("\n");
        for part in ["802 lines", "`utils`", "does not begin", "utils.rs:2 ignores"] {
            assert!(found.contains(part), "{part} in {found}");
        }
    }

    #[test]
    fn generated_and_other_files_are_left_alone() {
        let long = "\n".repeat(MAX_LINES + 1);
        assert!(violations("crates/protocol/src/generated/a.rs", &long).is_empty());
        assert!(violations("docs/utils.md", &long).is_empty());
    }
}
