//! Discovery through a directory: one JSON file for each worker, touched once a second while the worker lives.
//!
//! Polled, not watched: no notification tells that a file has *stopped* changing. A file that is missing or has not been
//! touched for [`LEASE`] means that the worker is gone. That time is measured by our own clock, from when we saw the last
//! touch: a step of the wall clock here, or another clock on the worker's machine, makes nobody disappear.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use protocol::metadata::WorkerMetadata;
use serde::Deserialize;
use tokio::time::{MissedTickBehavior, interval};

use super::{Announced, Sink};

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
type Cache = HashMap<PathBuf, Seen>;

/// What is known of one file.
#[derive(Debug)]
struct Seen {
    touched: SystemTime,
    size: u64,
    /// When we saw it touched last; `None` for one that was left behind before we looked, until it is touched.
    at: Option<Instant>,
    since: SystemTime,
    entry: Option<Entry>,
}

impl Seen {
    fn live(&self, now: Instant) -> Option<Announced<'_>> {
        let fresh = self.at.is_some_and(|at| now.duration_since(at) <= LEASE);
        let entry = self.entry.as_ref().filter(|_| fresh)?;
        Some(Announced { name: &entry.name, metadata: &entry.metadata, since: self.since })
    }
}

/// Publishes views for ever.
pub(super) async fn run(directory: PathBuf, mut sink: Sink) {
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut cache = Cache::new();
    let mut failing = false;
    loop {
        ticks.tick().await;
        let path = directory.clone();
        let known = std::mem::take(&mut cache);
        let now = Instant::now();
        let read = tokio::task::spawn_blocking(move || read(&path, known, now, SystemTime::now()));
        match tokio::time::timeout(READ, read).await {
            Ok(Ok(Ok(entries))) => {
                cache = entries;
                failing = false;
                sink.publish(cache.values().filter_map(|seen| seen.live(now)));
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
fn read(directory: &Path, mut known: Cache, now: Instant, wall: SystemTime) -> std::io::Result<Cache> {
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
        let before = known.remove(&path);
        let at = match &before {
            Some(seen) if seen.touched == touched => seen.at,
            Some(_) => Some(now),
            // The only time that the two clocks are compared; a live worker that it takes for dead is back with the next touch.
            None => wall.duration_since(touched).map_or(true, |age| age <= LEASE).then_some(now),
        };
        let since = stat.created().ok().or_else(|| before.as_ref().map(|seen| seen.since)).unwrap_or(touched);
        let entry = match before {
            // A touch changes the time only; a rewrite within one life changes the text, and is caught by its size or by reading.
            Some(seen) if seen.touched == touched && seen.size == size => seen.entry,
            before => at.and_then(|_| parse(&path, before.and_then(|seen| seen.entry))),
        };
        cache.insert(path, Seen { touched, size, at, since, entry });
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

    fn names(cache: &Cache, now: Instant) -> Vec<&str> {
        let mut names: Vec<&str> = cache.values().filter_map(|seen| Some(seen.live(now)?.name)).collect();
        names.sort_unstable();
        names
    }

    fn touch(directory: &Path, name: &str, time: SystemTime) {
        let file = std::fs::File::options().append(true).open(directory.join(name)).expect("it exists");
        file.set_modified(time).expect("it can be touched");
    }

    #[test]
    fn live_files_are_workers_and_everything_else_is_not() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), "a.json", r#"{"name":"a","metadata":{}}"#);
        write(directory.path(), "b.json", "{broken");
        write(directory.path(), "c.json.tmp", r#"{"name":"c","metadata":{}}"#);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let cache = read(directory.path(), Cache::new(), now, wall).expect("readable");
        assert_eq!(names(&cache, now), ["a"]);
        let later = now + LEASE * 2;
        let cache = read(directory.path(), cache, later, wall).expect("readable");
        assert_eq!(names(&cache, later), [""; 0], "not touched for too long");
        touch(directory.path(), "a.json", wall + LEASE);
        let cache = read(directory.path(), cache, later, wall).expect("readable");
        assert_eq!(names(&cache, later), ["a"], "it was only slow");
    }

    #[test]
    fn a_step_of_the_wall_clock_makes_nobody_disappear() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), "a.json", r#"{"name":"a","metadata":{}}"#);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let cache = read(directory.path(), Cache::new(), now, wall).expect("readable");
        let hour = Duration::from_secs(3600);
        let cache = read(directory.path(), cache, now + LEASE / 2, wall + hour).expect("readable");
        assert_eq!(names(&cache, now + LEASE / 2), ["a"]);
    }

    #[test]
    fn a_file_left_behind_counts_once_it_is_touched() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), "a.json", r#"{"name":"a","metadata":{}}"#);
        let (now, wall) = (Instant::now(), SystemTime::now());
        touch(directory.path(), "a.json", wall - LEASE * 2);
        let cache = read(directory.path(), Cache::new(), now, wall).expect("readable");
        assert_eq!(names(&cache, now), [""; 0]);
        touch(directory.path(), "a.json", wall - LEASE * 2 + Duration::from_secs(1));
        let cache = read(directory.path(), cache, now, wall).expect("readable");
        assert_eq!(names(&cache, now), ["a"], "a machine whose clock is late is still alive");
    }

    #[test]
    fn a_rewritten_file_is_read_again_and_a_missing_directory_is_empty() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), "a.json", r#"{"name":"a","metadata":{}}"#);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let cache = read(directory.path(), Cache::new(), now, wall).expect("readable");
        write(directory.path(), "a.json", r#"{"name":"a2","metadata":{}}"#);
        let cache = read(directory.path(), cache, now, wall).expect("readable");
        assert_eq!(names(&cache, now), ["a2"]);
        let gone = directory.path().join("nowhere");
        assert!(read(&gone, cache, now, wall).expect("empty").is_empty());
    }
}
