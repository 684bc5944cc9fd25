//! Who lives, by a directory: one JSON file for each process, touched once a second while the process lives.
//!
//! Polled, not watched: no notification tells that a file has *stopped* changing. A file that is missing means that its
//! process is gone, and one that has not been touched for [`LEASE`] that it probably is. That time is measured by our own
//! clock, between our looks at the file: neither a step of the wall clock here, nor another clock on the other machine, nor
//! a read that takes long makes anybody disappear. Whatever else lies in the directory is left alone.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt;
use rustix::fs::OFlags;
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// How often the directory is read.
const POLL: Duration = Duration::from_millis(250);

/// The time after which a file that nobody touched has lapsed: three missed touches.
const LEASE: Duration = Duration::from_secs(3);

/// Listing the directory should not take longer; it can hang on a network file system.
const LISTING: Duration = Duration::from_secs(5);

/// Longest wait for files that changed; one that takes longer is taken up when it has been read.
const READING: Duration = Duration::from_secs(1);

/// Files read at a time.
const READERS: usize = 8;

/// Largest file: a worker's has a few KB.
const MAX_BYTES: u64 = 1 << 20;

/// Files by path, parsed once for each version.
type Cache<E> = HashMap<PathBuf, Seen<E>>;

/// A change of either means that the text may be another one.
type Version = (SystemTime, u64);

/// A process whose file is there, and has been touched in our time.
pub(crate) struct Live<'a, E> {
    /// What its file says.
    pub(crate) entry: &'a E,
    /// When the file was made.
    pub(crate) since: SystemTime,
    /// It has not been touched for longer than it should.
    pub(crate) lapsed: bool,
}

/// A file as the directory shows it.
struct Found {
    path: PathBuf,
    version: Version,
    created: Option<SystemTime>,
    /// When we looked at it, by both clocks.
    looked: (Instant, SystemTime),
}

/// What is known of one file.
#[derive(Debug)]
struct Seen<E> {
    version: Version,
    /// When we looked at it last.
    looked: Instant,
    /// When we saw it touched last; `None` for one that was left behind before we looked, until it is touched.
    at: Option<Instant>,
    since: SystemTime,
    entry: Option<E>,
    /// What has been read; not always successfully.
    read: Option<Version>,
    /// What is being read, for longer than we wait.
    reading: Option<(Version, JoinHandle<Result<E, String>>)>,
}

impl<E: DeserializeOwned + Send + 'static> Seen<E> {
    fn new(found: &Found, before: Option<Seen<E>>) -> Seen<E> {
        let (touched, _) = found.version;
        let (looked, wall) = found.looked;
        let at = match &before {
            Some(seen) if seen.version.0 == touched => seen.at,
            Some(_) => Some(looked),
            // The only time that the two clocks are compared; a live process that it takes for dead is back with the next touch.
            None => wall.duration_since(touched).map_or(true, |age| age <= LEASE).then_some(looked),
        };
        let since = found.created.or_else(|| before.as_ref().map(|seen| seen.since)).unwrap_or(touched);
        let (entry, read, reading) = before.map(|seen| (seen.entry, seen.read, seen.reading)).unwrap_or_default();
        Seen { version: found.version, looked, at, since, entry, read, reading }
    }

    fn live(&self) -> Option<Live<'_, E>> {
        let lapsed = self.looked.duration_since(self.at?) > LEASE;
        Some(Live { entry: self.entry.as_ref()?, since: self.since, lapsed })
    }

    /// Reads the file on a blocking thread, and goes on without the result after `until`. A file that cannot be read keeps what
    /// it said before.
    async fn read(&mut self, path: &Path, until: tokio::time::Instant) {
        let begun = self.reading.take().or_else(|| {
            let path = path.to_path_buf();
            let in_time = tokio::time::Instant::now() < until;
            in_time.then(|| (self.version, tokio::task::spawn_blocking(move || parse(&path))))
        });
        let Some((version, mut reading)) = begun else { return };
        let Ok(parsed) = tokio::time::timeout_at(until, &mut reading).await else {
            self.reading = Some((version, reading));
            return;
        };
        self.read = Some(version);
        match parsed.unwrap_or_else(|panicked| Err(panicked.to_string())) {
            Ok(entry) => self.entry = Some(entry),
            Err(reason) => tracing::warn!(file = %path.display(), reason, "discovery: unreadable file"),
        }
    }
}

/// Hands over all that live, after each read, for ever. While the directory cannot be read, the last good list stays.
pub(crate) async fn follow<E: DeserializeOwned + Send + 'static>(
    directory: PathBuf,
    mut publish: impl FnMut(Vec<Live<'_, E>>),
) {
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut cache = Cache::new();
    let mut failing = false;
    loop {
        ticks.tick().await;
        let path = directory.clone();
        let mut listing = tokio::task::spawn_blocking(move || list(&path, &|| (Instant::now(), SystemTime::now())));
        let mut fail = |reason: String| {
            if !std::mem::replace(&mut failing, true) {
                tracing::warn!(directory = %directory.display(), reason, "discovery: cannot read the directory");
            }
        };
        let listed = match timeout(LISTING, &mut listing).await {
            Ok(listed) => listed,
            // Not another one beside it.
            Err(_) => {
                fail(format!("no answer in {} s", LISTING.as_secs()));
                listing.await
            }
        };
        match listed {
            Ok(Ok(found)) => {
                failing = false;
                cache = update(cache, found).await;
                publish(cache.values().filter_map(Seen::live).collect());
            }
            Ok(Err(error)) => fail(error.to_string()),
            Err(error) => fail(error.to_string()),
        }
    }
}

/// The files there are. A directory that does not exist is empty: the first process makes it.
fn list(directory: &Path, clocks: &dyn Fn() -> (Instant, SystemTime)) -> std::io::Result<Vec<Found>> {
    let listing = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        listing => listing?,
    };
    let mut found = Vec::new();
    for file in listing {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        // A file may go away between the listing and here.
        let Ok(stat) = std::fs::metadata(&path) else { continue };
        if stat.is_file() {
            let version = (stat.modified()?, stat.len());
            found.push(Found { path, version, created: stat.created().ok(), looked: clocks() });
        }
    }
    Ok(found)
}

/// Takes over what was found, and reads what changed.
async fn update<E: DeserializeOwned + Send + 'static>(mut known: Cache<E>, found: Vec<Found>) -> Cache<E> {
    let seen = found.into_iter().map(|found| {
        let before = known.remove(&found.path);
        let seen = Seen::new(&found, before);
        (found.path, seen)
    });
    let mut cache: Cache<E> = seen.collect();
    let until = tokio::time::Instant::now() + READING;
    let changed = cache.iter_mut().filter(|(_, seen)| seen.at.is_some() && seen.read != Some(seen.version));
    let reads = futures::stream::iter(changed);
    reads.for_each_concurrent(READERS, |(path, seen)| seen.read(path, until)).await;
    cache
}

fn parse<E: DeserializeOwned>(path: &Path) -> Result<E, String> {
    // Whatever has taken the file's place since it was listed: opening it does not wait.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(|e| e.to_string())?;
    let stat = file.metadata().map_err(|e| e.to_string())?;
    if !stat.is_file() {
        return Err("no regular file".into());
    }
    if stat.len() > MAX_BYTES {
        return Err(format!("{} bytes are more than the {MAX_BYTES} that such a file may have", stat.len()));
    }
    let mut text = Vec::with_capacity(stat.len() as usize);
    file.take(MAX_BYTES).read_to_end(&mut text).map_err(|e| e.to_string())?;
    serde_json::from_slice(&text).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Entry {
        name: String,
    }

    /// A directory, and clocks that stand still.
    struct Fixture {
        directory: tempfile::TempDir,
        now: Instant,
        wall: SystemTime,
        cache: Cache<Entry>,
    }

    impl Fixture {
        fn new() -> Self {
            let directory = tempfile::tempdir().expect("a temporary directory");
            Self { directory, now: Instant::now(), wall: SystemTime::now(), cache: Cache::new() }
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.directory.path().join(name), text).expect("a writable directory");
        }

        fn touch(&self, name: &str, time: SystemTime) {
            let file = File::options().append(true).open(self.directory.path().join(name)).expect("it exists");
            file.set_modified(time).expect("it can be touched");
        }

        async fn read(&mut self) -> Vec<(&str, bool)> {
            let found = list(self.directory.path(), &|| (self.now, self.wall)).expect("readable");
            self.cache = update(std::mem::take(&mut self.cache), found).await;
            let live = self.cache.values().filter_map(Seen::live);
            let mut names: Vec<_> = live.map(|live| (live.entry.name.as_str(), live.lapsed)).collect();
            names.sort_unstable();
            names
        }
    }

    #[tokio::test]
    async fn files_that_are_touched_count_and_everything_else_is_not() {
        let mut fixture = Fixture::new();
        fixture.write("a.json", r#"{"name":"a"}"#);
        fixture.write("b.json", "{broken");
        fixture.write("c.json.tmp", r#"{"name":"c"}"#);
        std::fs::create_dir(fixture.directory.path().join("d.json")).expect("a writable directory");
        assert_eq!(fixture.read().await, [("a", false)]);
        fixture.now += LEASE * 2;
        assert_eq!(fixture.read().await, [("a", true)], "not touched for too long");
        fixture.touch("a.json", fixture.wall + LEASE);
        assert_eq!(fixture.read().await, [("a", false)], "it was only slow");
        std::fs::remove_file(fixture.directory.path().join("a.json")).expect("it exists");
        assert_eq!(fixture.read().await, []);
    }

    #[tokio::test]
    async fn what_is_no_file_of_ours_keeps_nobody_waiting() {
        let mut fixture = Fixture::new();
        let path = |name: &str| fixture.directory.path().join(name);
        let made = std::process::Command::new("mkfifo").args([path("fifo.json"), path("late.fifo")]).status();
        assert!(made.expect("mkfifo is there").success());
        let large = File::create(path("large.json")).expect("a writable directory");
        large.set_len(3 << 30).expect("a file with a hole");
        let error = parse::<Entry>(&path("late.fifo")).expect_err("no file");
        assert_eq!(error, "no regular file", "it came after the listing");
        let error = parse::<Entry>(&path("large.json")).expect_err("too large");
        assert!(error.starts_with("3221225472 bytes are more"), "{error}");
        fixture.write("a.json", r#"{"name":"a"}"#);
        assert_eq!(fixture.read().await, [("a", false)]);
        assert!(fixture.cache.values().all(|seen| seen.reading.is_none()));
    }

    #[tokio::test]
    async fn a_step_of_the_wall_clock_or_a_late_look_makes_nobody_disappear() {
        let mut fixture = Fixture::new();
        fixture.write("a.json", r#"{"name":"a"}"#);
        assert_eq!(fixture.read().await, [("a", false)]);
        fixture.now += LEASE / 2;
        fixture.wall += Duration::from_secs(3600);
        assert_eq!(fixture.read().await, [("a", false)]);
        // Touched while nobody looked for a long time.
        fixture.touch("a.json", fixture.wall);
        fixture.now += LEASE * 10;
        assert_eq!(fixture.read().await, [("a", false)]);
        fixture.now += LEASE;
        assert_eq!(fixture.read().await, [("a", false)], "the time counts from that look");
    }

    #[tokio::test]
    async fn a_file_left_behind_counts_once_it_is_touched() {
        let mut fixture = Fixture::new();
        fixture.write("a.json", r#"{"name":"a"}"#);
        fixture.touch("a.json", fixture.wall - LEASE * 2);
        assert_eq!(fixture.read().await, []);
        fixture.touch("a.json", fixture.wall - LEASE * 2 + Duration::from_secs(1));
        assert_eq!(fixture.read().await, [("a", false)], "a machine whose clock is late is still alive");
    }

    #[tokio::test]
    async fn a_rewritten_file_is_read_again_and_a_broken_one_keeps_what_it_said() {
        let mut fixture = Fixture::new();
        fixture.write("a.json", r#"{"name":"a"}"#);
        assert_eq!(fixture.read().await, [("a", false)]);
        fixture.write("a.json", r#"{"name":"a2"}"#);
        assert_eq!(fixture.read().await, [("a2", false)]);
        fixture.write("a.json", r#"{"name":"#);
        assert_eq!(fixture.read().await, [("a2", false)]);
        let gone = fixture.directory.path().join("nowhere");
        assert!(list(&gone, &|| (fixture.now, fixture.wall)).expect("empty").is_empty());
    }

    #[tokio::test]
    async fn a_file_that_takes_long_is_waited_for_beside_the_others() {
        let mut fixture = Fixture::new();
        fixture.write("a.json", r#"{"name":"a"}"#);
        assert_eq!(fixture.read().await, [("a", false)]);
        // As if the read of its next version hung.
        let (answer, hung) = std::sync::mpsc::channel::<Result<Entry, String>>();
        let reading = tokio::task::spawn_blocking(move || hung.recv().expect("an answer"));
        let version = (fixture.wall + LEASE, 12);
        fixture.touch("a.json", version.0);
        let path = fixture.directory.path().join("a.json");
        fixture.cache.get_mut(&path).expect("known").reading = Some((version, reading));
        fixture.write("b.json", r#"{"name":"b"}"#);
        assert_eq!(fixture.read().await, [("a", false), ("b", false)]);
        answer.send(Ok(Entry { name: "a2".into() })).expect("it waits");
        assert_eq!(fixture.read().await, [("a2", false), ("b", false)]);
    }
}
