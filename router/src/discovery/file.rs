//! Discovery through a directory: one JSON file for each worker, touched once a second while the worker lives.
//!
//! Polled, not watched: no notification tells that a file has *stopped* changing. A file that is missing or has not been
//! touched for [`LEASE`] means that the worker is gone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use protocol::metadata::WorkerMetadata;
use serde::Deserialize;
use tokio::time::{MissedTickBehavior, interval};

use super::Sink;

/// How often the directory is read.
const POLL: Duration = Duration::from_millis(250);

/// A worker is gone when its file is older: three missed touches.
const LEASE: Duration = Duration::from_secs(3);

/// Deadline of one read of the directory; it can hang on a network file system.
const READ: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Deserialize)]
struct Entry {
    name: String,
    metadata: WorkerMetadata,
}

/// Files by path, parsed once for each modification time.
type Cache = HashMap<PathBuf, (SystemTime, u64, Option<Entry>)>;

/// Publishes views for ever.
pub(super) async fn run(directory: PathBuf, sink: Sink) {
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut cache = Cache::new();
    let mut failing = false;
    loop {
        ticks.tick().await;
        let path = directory.clone();
        let known = std::mem::take(&mut cache);
        let read = tokio::task::spawn_blocking(move || read(&path, known, SystemTime::now()));
        match tokio::time::timeout(READ, read).await {
            Ok(Ok(Ok(entries))) => {
                cache = entries;
                failing = false;
                let live = cache.values().filter_map(|(_, _, entry)| entry.as_ref());
                sink.publish(live.map(|entry| (entry.name.as_str(), &entry.metadata)));
            }
            // The last good view stays, and the next read starts from nothing.
            failed if !failing => {
                failing = true;
                let reason = match failed {
                    Ok(Ok(Err(error))) => error.to_string(),
                    Ok(Err(error)) => error.to_string(),
                    _ => format!("no answer in {} s", READ.as_secs()),
                };
                tracing::warn!(directory = %directory.display(), reason, "discovery: cannot read the directory");
            }
            _ => {}
        }
    }
}

/// Reads what changed. A directory that does not exist is empty: the first worker makes it.
fn read(directory: &Path, mut known: Cache, now: SystemTime) -> std::io::Result<Cache> {
    let listing = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Cache::new()),
        listing => listing?,
    };
    let mut cache = Cache::new();
    for file in listing {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        // A file may go away between the listing and here.
        let Ok(stat) = std::fs::metadata(&path) else { continue };
        let (touched, size) = (stat.modified()?, stat.len());
        if now.duration_since(touched).is_ok_and(|age| age > LEASE) {
            continue;
        }
        let entry = match known.remove(&path) {
            // A touch changes the time only; a rewrite within one life changes the text, and is caught by its size or by reading.
            Some((then, len, entry)) if then == touched && len == size => entry,
            before => parse(&path, before.and_then(|(_, _, entry)| entry)),
        };
        cache.insert(path, (touched, size, entry));
    }
    Ok(cache)
}

/// A file that cannot be read keeps what it said before.
fn parse(path: &Path, before: Option<Entry>) -> Option<Entry> {
    let parsed = std::fs::read(path).map_err(|e| e.to_string());
    match parsed.and_then(|text| serde_json::from_slice::<Entry>(&text).map_err(|e| e.to_string())) {
        Ok(entry) => Some(entry),
        Err(reason) => {
            tracing::warn!(file = %path.display(), reason, "discovery: unreadable worker file");
            before
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, text: &str) {
        std::fs::write(directory.join(name), text).expect("a writable directory");
    }

    fn names(cache: &Cache) -> Vec<&str> {
        let mut names: Vec<&str> = cache.values().filter_map(|(_, _, e)| e.as_ref().map(|e| e.name.as_str())).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn live_files_are_workers_and_everything_else_is_not() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), "a.json", r#"{"name":"a","metadata":{}}"#);
        write(directory.path(), "b.json", "{broken");
        write(directory.path(), "c.json.tmp", r#"{"name":"c","metadata":{}}"#);
        let now = SystemTime::now();
        let cache = read(directory.path(), Cache::new(), now).expect("readable");
        assert_eq!(names(&cache), ["a"]);
        let cache = read(directory.path(), cache, now + LEASE * 2).expect("readable");
        assert_eq!(names(&cache), [""; 0], "not touched for too long");
    }

    #[test]
    fn a_rewritten_file_is_read_again_and_a_missing_directory_is_empty() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), "a.json", r#"{"name":"a","metadata":{}}"#);
        let cache = read(directory.path(), Cache::new(), SystemTime::now()).expect("readable");
        write(directory.path(), "a.json", r#"{"name":"a2","metadata":{}}"#);
        let cache = read(directory.path(), cache, SystemTime::now()).expect("readable");
        assert_eq!(names(&cache), ["a2"]);
        let gone = directory.path().join("nowhere");
        assert!(read(&gone, cache, SystemTime::now()).expect("empty").is_empty());
    }
}
