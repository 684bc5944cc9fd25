//! Running other programs: where they run, what is shown, and an error that names the command.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The repository's root folder.
pub fn root() -> PathBuf {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    manifest.parent().map_or(manifest.clone(), Path::to_path_buf)
}

/// A command that runs in the repository's root, as if a person had typed it: without what `cargo run` told us of our own package.
/// A build script that watches one of those variables (ring's does) would run again, and all that depends on it be built again.
pub fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    let of_ours = |name: &str| name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_ours)) {
        command.env_remove(name);
    }
    command
}

/// The cargo that runs us.
pub fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds every binary of the workspace in one go, so that tests, image and `cargo run` share what is compiled, and returns
/// the folder they are in.
pub fn binaries() -> anyhow::Result<PathBuf> {
    let built = cargo().args(["build", "--release", "--quiet", "--workspace", "--bins"]).status()?;
    if !built.success() {
        bail!("the workspace does not build");
    }
    Ok(target().join("release"))
}

/// One of our own binaries, freshly built.
pub fn built(name: &str) -> anyhow::Result<Command> {
    Ok(command(binaries()?.join(name)))
}

/// Cargo's target folder.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Prints the command, runs it with our own output, and fails unless it succeeds.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    println!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}`: {status}", shown(command));
    }
    Ok(())
}

/// Runs the command silently; its output appears only in the error.
pub fn quiet(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!("`{}`: {}\n{}", shown(command), output.status, String::from_utf8_lossy(&said).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether the command exists and succeeds.
pub fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// The command as a person would type it.
fn shown(command: &Command) -> String {
    let root = root();
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(|word| {
        let word = word.to_string_lossy();
        word.strip_prefix(&format!("{}/", root.display())).unwrap_or(&word).to_owned()
    });
    words.collect::<Vec<_>>().join(" ")
}
