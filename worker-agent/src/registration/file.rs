//! File discovery: one JSON file per worker in a shared directory, whose modification time says that the worker lives.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use protocol::metadata::WorkerMetadata;
use serde::Serialize;

use super::RegistrationError;

/// Readers take a file that is 3 s old as gone; two refreshes may be lost.
pub(super) const REFRESH: Duration = Duration::from_secs(1);

/// The file of one worker.
pub struct FileEntry {
    name: String,
    path: PathBuf,
}

#[derive(Serialize)]
struct Content<'a> {
    name: &'a str,
    metadata: &'a WorkerMetadata,
}

impl FileEntry {
    pub(super) fn new(dir: &Path, name: &str) -> Self {
        Self { name: name.to_owned(), path: dir.join(format!("{name}.json")) }
    }

    /// Replaces the file in one step: readers see the old content or the new.
    pub(super) async fn write(&self, metadata: &WorkerMetadata) -> Result<(), RegistrationError> {
        let content = Content { name: &self.name, metadata };
        let text = serde_json::to_vec(&content).expect("metadata is always serializable");
        let new = self.path.with_extension(format!("json.{}.new", std::process::id()));
        let write = async {
            if let Some(dir) = self.path.parent() {
                tokio::fs::create_dir_all(dir).await?;
            }
            tokio::fs::write(&new, text).await?;
            tokio::fs::rename(&new, &self.path).await
        };
        write.await.map_err(|source| RegistrationError::File { path: self.path.display().to_string(), source })
    }

    /// Says that the worker lives; an error means that the file is gone.
    pub(super) async fn touch(&self) -> std::io::Result<()> {
        let file = tokio::fs::OpenOptions::new().append(true).open(&self.path).await?;
        file.into_std().await.set_modified(SystemTime::now())
    }

    pub(super) async fn remove(&self) {
        match tokio::fs::remove_file(&self.path).await {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "registration not removed; it expires in 3 s")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_is_written_touched_and_removed() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let entry = FileEntry::new(&dir.path().join("later"), "pod-0.a");
        entry.write(&WorkerMetadata::default()).await.expect("written");
        let path = dir.path().join("later/pod-0.a.json");
        let text = std::fs::read_to_string(&path).expect("there");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&value["name"], value["metadata"].is_object()), (&"pod-0.a".into(), true));

        let old = SystemTime::now() - Duration::from_secs(60);
        std::fs::File::options().append(true).open(&path).expect("there").set_modified(old).expect("own file");
        entry.touch().await.expect("there");
        let age = std::fs::metadata(&path).expect("there").modified().expect("known").elapsed().unwrap_or_default();
        assert!(age < Duration::from_secs(30), "{age:?}");

        let names: Vec<_> = std::fs::read_dir(path.parent().expect("has one")).expect("there").collect();
        assert_eq!(names.len(), 1, "nothing is left beside it");
        entry.remove().await;
        assert!(!path.exists());
        assert!(entry.touch().await.is_err(), "a removed entry does not come back by touching");
    }
}
