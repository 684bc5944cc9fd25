//! A real Kubernetes of two nodes for tests, in namespaces of its own: no docker, no registry, nothing left behind.
//!
//! The scripts in tests/cluster start it; this module builds what they run, and enters, loads and ends the cluster.

mod binaries;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

use anyhow::{Context, bail};

use crate::process::{command, quiet, root, run as run_command};
use crate::setup::{cache, debian, say};

pub use binaries::{binaries, helm, helm_binary};

/// What to do with the cluster.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Starts it, and returns when every node is Ready.
    Up {
        /// How many nodes.
        #[arg(long, default_value_t = 2)]
        nodes: u32,
    },
    /// Runs a command inside, with kubectl and helm set up; traffic to pods and Services must start here.
    In {
        /// The command.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Ends it and everything that runs in it.
    Down,
    /// Imports an image into every node.
    LoadImage {
        /// A docker or OCI archive.
        tar: PathBuf,
    },
}

/// Debian packages the nodes run on.
const PACKAGES: &[&str] = &[
    "containerd",
    "runc",
    "containernetworking-plugins",
    "iptables",
    "conntrack",
    "iproute2",
    "openssl",
    "busybox-static",
    "curl",
];

/// The image every pod's sandbox runs.
const PAUSE: &str = "localhost/pause:test";

/// Runs the command.
pub fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Up { nodes } => up(*nodes),
        // Nothing of ours in between: exit code, signals and the terminal are the command's.
        Command::In { command } => Err(inside()?.args(command).stdin(Stdio::inherit()).exec().into()),
        Command::Down => down(),
        Command::LoadImage { tar } => load_image(tar),
    }
}

/// Where the running cluster keeps its state: certificates, logs, etcd, images. Deleted by [`down`].
pub fn state() -> anyhow::Result<PathBuf> {
    Ok(cache()?.join("cluster"))
}

/// Installs and builds everything the cluster runs on.
pub fn prepare() -> anyhow::Result<()> {
    debian(PACKAGES)?;
    binaries()?;
    crate::model::obtain()?;
    crate::setup::nextest()?;
    Ok(())
}

/// Starts the cluster; builds and installs what it needs first.
pub fn up(nodes: u32) -> anyhow::Result<()> {
    if supervisor().is_ok() {
        bail!("a cluster is running already; end it with `cargo xtask cluster down`");
    }
    debian(PACKAGES)?;
    let (bin, dir) = (binaries()?, state()?);
    if dir.exists() {
        std::fs::remove_dir_all(&dir)?;
    }
    std::fs::create_dir_all(dir.join("images"))?;
    crate::image::pause(Path::new("/bin/busybox"), PAUSE, &dir.join("images/pause.tar"))?;
    say(&format!("cluster of {nodes} nodes, state and logs in {}", dir.display()));
    run_command(command(root().join("tests/cluster/up")).arg(&dir).arg(nodes.to_string()).env("PATH", with_path(&bin)?))
}

/// Ends the cluster, if there is one.
pub fn down() -> anyhow::Result<()> {
    let dir = state()?;
    if dir.join("pid").exists() {
        quiet(command(root().join("tests/cluster/down")).arg(&dir))?;
    }
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot delete {}", dir.display()))?;
    }
    Ok(())
}

/// Imports an image into every node.
pub fn load_image(tar: &Path) -> anyhow::Result<()> {
    let tar = tar.canonicalize().with_context(|| format!("no image {}", tar.display()))?;
    for entry in std::fs::read_dir(state()?)? {
        let socket = entry?.path().join("containerd/sock");
        if socket.exists() {
            let mut import = inside()?;
            import.args(["ctr", "--address"]).arg(socket).args(["--namespace", "k8s.io", "images", "import"]);
            quiet(import.args(["--snapshotter", snapshotter()?]).arg(&tar))?;
        }
    }
    Ok(())
}

/// A command that runs inside the cluster's namespaces; the caller adds program and arguments.
pub fn inside() -> anyhow::Result<Process> {
    let (dir, pid) = (state()?, supervisor()?);
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let init = children.split_whitespace().next().context("the cluster has no first process")?.to_owned();
    let mut enter = command("nsenter");
    enter.args(["--target", &init, "--mount", "--net", "--pid"]).arg(format!("--wd={}", root().display()));
    enter.env("KUBECONFIG", dir.join("admin.conf")).env("PATH", with_path(&binaries()?)?).stdin(Stdio::null());
    Ok(enter)
}

/// Process id of the `unshare` that owns the namespaces.
fn supervisor() -> anyhow::Result<String> {
    let pid =
        std::fs::read_to_string(state()?.join("pid")).context("no cluster; start one with `cargo xtask cluster up`")?;
    let (pid, started) = pid.trim().split_once(' ').context("the cluster's pid file is damaged")?;
    // Field 22 is the start time: another process with this number is not the cluster.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    if stat.split(' ').nth(21) != Some(started) {
        bail!("the cluster has died; see {}", state()?.join("log").display());
    }
    Ok(pid.to_owned())
}

/// overlayfs cannot be stacked: inside a container the plain copying snapshotter has to do.
fn snapshotter() -> anyhow::Result<&'static str> {
    let kind = quiet(command("stat").args(["--file-system", "--format=%T"]).arg(state()?))?;
    Ok(if kind.trim() == "overlayfs" { "native" } else { "overlayfs" })
}

fn with_path(bin: &Path) -> anyhow::Result<std::ffi::OsString> {
    let path = std::env::var_os("PATH").context("PATH is not set")?;
    Ok(std::env::join_paths(std::iter::once(bin.to_path_buf()).chain(std::env::split_paths(&path)))?)
}
