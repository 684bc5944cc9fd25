//! The programs of a Kubernetes cluster, compiled from their Go modules: about eight minutes on two cores, once.
//!
//! `ARMATURE_KUBE_BIN` names a folder that has them already.

use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::process::{command, root, run, succeeds};
use crate::setup::{cache, say};

/// Release of Kubernetes; the module list is in tests/cluster/tools/kube.
const KUBERNETES: &str = "1.34.9";

/// What is built from the Kubernetes module.
const PROGRAMS: &[&str] =
    &["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];

/// Commands that are modules of their own, with the version.
const MODULES: &[(&str, &str)] =
    &[("helm", "helm.sh/helm/v3/cmd/helm@v3.18.6"), ("coredns", "github.com/coredns/coredns@v1.12.4")];

/// The folder with all of them, after building those that are missing.
pub fn binaries() -> anyhow::Result<PathBuf> {
    let bin = folder()?;
    std::fs::create_dir_all(&bin)?;
    let missing: Vec<_> = PROGRAMS.iter().filter(|name| !bin.join(name).exists()).collect();
    if !missing.is_empty() {
        say(&format!("Kubernetes {KUBERNETES} from source ({} programs, minutes)", missing.len()));
        let version = "k8s.io/component-base/version";
        let (major, minor) = ("1", "34");
        let flags = format!(
            "-s -w -X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
        );
        let packages = missing.iter().map(|name| format!("k8s.io/kubernetes/cmd/{name}"));
        run(go("kube")?.args(["-ldflags", &flags, "-o"]).arg(slashed(&bin)).args(packages))?;
    }
    if !bin.join("etcd").exists() {
        say("etcd from source");
        run(go("etcd")?.args(["-ldflags", "-s -w", "-o"]).arg(bin.join("etcd")).arg("go.etcd.io/etcd/server/v3"))?;
    }
    for (name, module) in MODULES {
        install(&bin, name, module)?;
    }
    Ok(bin)
}

/// helm alone, which the check of generated files needs too.
pub fn helm_binary() -> anyhow::Result<PathBuf> {
    let bin = folder()?;
    std::fs::create_dir_all(&bin)?;
    let (name, module) = MODULES[0];
    install(&bin, name, module)?;
    Ok(bin.join(name))
}

fn install(bin: &Path, name: &str, module: &str) -> anyhow::Result<()> {
    if bin.join(name).exists() {
        return Ok(());
    }
    say(&format!("{name} from source"));
    run(command("go")
        .args(["install", "-trimpath", "-ldflags=-s -w", module])
        .env("GOBIN", bin)
        .env("CGO_ENABLED", "0"))
}

/// helm, where it has been built or is installed.
pub fn helm() -> anyhow::Result<Option<PathBuf>> {
    let built = folder()?.join("helm");
    if built.exists() {
        return Ok(Some(built));
    }
    Ok(succeeds(command("helm").arg("version")).then(|| "helm".into()))
}

fn folder() -> anyhow::Result<PathBuf> {
    match std::env::var_os("ARMATURE_KUBE_BIN") {
        Some(dir) => Ok(dir.into()),
        None => Ok(cache()?.join("kube").join(KUBERNETES)),
    }
}

/// `go build` in the folder of a pinned module list.
fn go(tool: &str) -> anyhow::Result<std::process::Command> {
    if !succeeds(command("go").arg("version")) {
        bail!("the test cluster is built with Go, and there is no `go` here");
    }
    let mut build = command("go");
    build.current_dir(root().join("tests/cluster/tools").join(tool)).args(["build", "-trimpath", "-mod=readonly"]);
    Ok(build)
}

/// `go build -o` writes several programs only into a path that ends with a slash.
fn slashed(dir: &Path) -> PathBuf {
    dir.join("")
}
