//! File discovery: one JSON file per life of a worker in a shared directory, whose modification time says that it lives.
//!
//! Each life has a file of its own, named after worker and instance id: two workers of one name, be it by mistake or
//! while one replaces the other, never touch, rewrite or remove each other's. The file stays open, so that a process that
//! is out of file descriptors can still say that it lives.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use protocol::metadata::WorkerMetadata;
use serde::Serialize;

use super::RegistrationError;

/// Readers take a file that is 3 s old as gone; two refreshes may be lost.
pub(super) const REFRESH: Duration = Duration::from_secs(1);
/// A file of an earlier life that is so much older than ours was left behind by a process that was killed.
const LEFT_BEHIND: Duration = Duration::from_secs(60);
/// A file of our name that is so fresh has a worker behind it.
const FRESH: Duration = Duration::from_secs(3);

/// The file of one life of a worker.
pub struct FileEntry {
    name: String,
    path: PathBuf,
    /// The file as we wrote it last.
    held: Option<Arc<File>>,
}

#[derive(Serialize)]
struct Content<'a> {
    name: &'a str,
    metadata: &'a WorkerMetadata,
}

impl FileEntry {
    pub(super) fn new(dir: &Path, name: &str, instance_id: u64) -> Self {
        Self { name: name.to_owned(), path: dir.join(format!("{name}.{instance_id:014x}.json")), held: None }
    }

    /// Replaces the file in one step: readers see the old content or the new. One that cannot be replaced stays alive.
    pub(super) async fn write(&mut self, metadata: &WorkerMetadata) -> Result<(), RegistrationError> {
        let content = Content { name: &self.name, metadata };
        let text = serde_json::to_vec(&content).expect("metadata is always serializable");
        let (path, name, first) = (self.path.clone(), self.name.clone(), self.held.is_none());
        let written = blocking(move || {
            let file = replace(&path, &text)?;
            if first {
                look_for_others(&path, &name);
            }
            Ok(file)
        });
        match written.await {
            Ok(file) => self.held = Some(Arc::new(file)),
            Err(source) => {
                // What it says is old, and still better than no word at all.
                let _ = self.touch().await;
                return Err(RegistrationError::File { path: self.path.display().to_string(), source });
            }
        }
        Ok(())
    }

    /// Says that the worker lives; an error means that the file is gone, or another one in its place.
    pub(super) async fn touch(&self) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let file = self.held.clone().ok_or_else(gone)?;
        let path = self.path.clone();
        blocking(move || {
            file.set_modified(SystemTime::now())?;
            let (ours, there) = (file.metadata()?, fs::metadata(&path)?);
            if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) { Ok(()) } else { Err(gone()) }
        })
        .await
    }

    pub(super) async fn remove(&self) {
        match tokio::fs::remove_file(&self.path).await {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "registration not removed; it expires in 3 s")
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panicked| Err(io::Error::other(panicked)))
}

fn replace(path: &Path, text: &[u8]) -> io::Result<File> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let new = path.with_extension("json.new");
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(text)?;
        fs::rename(&new, path)?;
        Ok(file)
    };
    write().inspect_err(|_| {
        // A disk that is full must not fill further; without a file there is none to remove.
        let _ = fs::remove_file(&new);
    })
}

/// Removes what earlier lives left behind when they were killed, and tells of others that live under our name. A worker
/// that was only slow writes its file again. Nothing depends on it, so whatever cannot be read is left as it is.
fn look_for_others(ours: &Path, name: &str) {
    let Some(files) = ours.parent().and_then(|dir| fs::read_dir(dir).ok()) else { return };
    for other in files.flatten() {
        let path = other.path();
        if path == ours || !other.file_name().to_str().is_some_and(|file| is_life_of(name, file)) {
            continue;
        }
        let Ok(touched) = other.metadata().and_then(|stat| stat.modified()) else { continue };
        let age = SystemTime::now().duration_since(touched).unwrap_or_default();
        if age > LEFT_BEHIND {
            tracing::info!(path = %path.display(), "removing what an earlier life of this worker left behind");
            let _ = fs::remove_file(&path);
        } else if age <= FRESH {
            tracing::warn!(name, path = %path.display(), "another worker of this name is registered; both are kept");
        }
    }
}

/// Whether `file` is what a worker called `name` writes.
fn is_life_of(name: &str, file: &str) -> bool {
    let file = file.strip_suffix(".new").unwrap_or(file);
    let id = file.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".json"));
    id.is_some_and(|id| id.len() == 14 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(path: &Path) -> Duration {
        fs::metadata(path).expect("there").modified().expect("known").elapsed().unwrap_or_default()
    }

    fn make_old(path: &Path) {
        let old = SystemTime::now() - LEFT_BEHIND * 2;
        File::options().append(true).open(path).expect("there").set_modified(old).expect("own file");
    }

    #[tokio::test]
    async fn a_file_is_written_touched_and_removed() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut entry = FileEntry::new(&dir.path().join("later"), "pod-0.a", 0x1f);
        entry.write(&WorkerMetadata::default()).await.expect("written");
        let path = dir.path().join("later/pod-0.a.0000000000001f.json");
        let text = fs::read_to_string(&path).expect("there");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&value["name"], value["metadata"].is_object()), (&"pod-0.a".into(), true));

        make_old(&path);
        entry.touch().await.expect("there");
        assert!(age(&path) < LEFT_BEHIND, "{:?}", age(&path));

        let names: Vec<_> = fs::read_dir(path.parent().expect("has one")).expect("there").collect();
        assert_eq!(names.len(), 1, "nothing is left beside it");
        fs::rename(dir.path().join("later"), dir.path().join("elsewhere")).expect("own directory");
        assert!(entry.touch().await.is_err(), "readers do not see it any more");
        entry.write(&WorkerMetadata::default()).await.expect("written again");
        entry.remove().await;
        assert!(!path.exists());
        assert!(entry.touch().await.is_err(), "a removed entry does not come back by touching");
    }

    #[tokio::test]
    async fn two_workers_of_one_name_leave_each_other_alone() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (mut dead, mut old, mut new) = (
            FileEntry::new(dir.path(), "w0", 1),
            FileEntry::new(dir.path(), "w0", 2),
            FileEntry::new(dir.path(), "w0", 3),
        );
        let mut other = FileEntry::new(dir.path(), "w0.b", 1);
        for entry in [&mut dead, &mut other, &mut old] {
            entry.write(&WorkerMetadata::default()).await.expect("written");
        }
        make_old(&dead.path);
        make_old(&other.path);
        new.write(&WorkerMetadata::default()).await.expect("written");
        assert!(!dead.path.exists(), "its process was killed long ago");
        assert!(other.path.exists(), "it is not ours to judge");

        make_old(&new.path);
        old.touch().await.expect("there");
        assert!(age(&new.path) > LEFT_BEHIND, "the one does not keep the other alive");
        let said = fs::read(&new.path).expect("there");
        let mut draining = WorkerMetadata::default();
        draining.event_sources.insert("a/b/c/2".into(), serde_json::json!({}));
        old.write(&draining).await.expect("rewritten");
        old.remove().await;
        assert_eq!(fs::read(&new.path).expect("there"), said);
        new.touch().await.expect("there");
    }

    #[tokio::test]
    async fn a_failed_write_leaves_nothing_and_keeps_the_old_word_alive() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut entry = FileEntry::new(dir.path(), "w0", 1);
        entry.write(&WorkerMetadata::default()).await.expect("written");
        make_old(&entry.path);
        // As a full disk or too many open files would, this fails the write but not the file that is there.
        fs::create_dir(entry.path.with_extension("json.new")).expect("a directory in the way");
        entry.write(&WorkerMetadata::default()).await.expect_err("a directory is in the way");
        assert!(age(&entry.path) < LEFT_BEHIND, "still alive");

        let path = dir.path().join("w1.json");
        fs::create_dir(&path).expect("a directory in the way");
        replace(&path, b"{}").expect_err("a directory cannot be replaced");
        assert!(!dir.path().join("w1.json.new").exists());
    }
}
