//! Directories that workers have left beside ours: a worker with a new name takes one over, and old ones are deleted.
//!
//! Pods have names of their own, and so have their directories: without this a volume would fill with blocks that nobody reads.
//! Who lives holds the lock of its directory and touches the heartbeat in it. Nothing is done to a directory without its lock, nor
//! before its heartbeat has been silent for long or has said that its worker went, which is what counts where locks do not reach
//! from node to node. Whoever takes a directory touches its heartbeat first, so that a third one leaves it alone.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::heartbeat::{self, HEARTBEAT, SILENT};
use super::index::{self, ENTRY, Header};
use super::{BLOCKS, DiskFormat, INDEX, LOCK};

/// What nobody has written to for so long is deleted: workers that are switched off for the night find theirs again. It is also
/// how long a directory without a heartbeat, which an older version of this program has made, is left to its worker.
const OLD: Duration = Duration::from_secs(24 * 60 * 60);
/// Most directories that are looked at.
const MOST: usize = 1024;

/// A directory without an owner, locked.
struct Orphan {
    path: PathBuf,
    /// When it was written to last.
    used: SystemTime,
    /// How the index begins.
    header: [u8; ENTRY],
    lock: File,
}

impl Orphan {
    /// `None` where the path is no directory of ours, or is somebody's. A directory that is just being made has no index yet, and
    /// has a heartbeat before it has one.
    fn at(path: PathBuf, now: SystemTime) -> Option<Self> {
        if !fs::symlink_metadata(&path).ok()?.is_dir() {
            return None;
        }
        let mut header = [0; ENTRY];
        File::open(path.join(INDEX)).ok()?.read_exact_at(&mut header, 0).ok()?;
        if !index::is_ours(&header) {
            return None;
        }
        let lock = File::options().read(true).write(true).open(path.join(LOCK)).ok()?;
        lock.try_lock().ok()?;
        let written = |name: &str| fs::metadata(path.join(name)).and_then(|meta| meta.modified()).ok();
        let used = [INDEX, BLOCKS].into_iter().filter_map(written).max()?;
        is_silent(&path, used, now).then_some(Self { path, used, header, lock })
    }

    /// Makes it ours, or nobody's to take; unless its worker, or another one, has been faster.
    fn claim(&self, now: SystemTime) -> io::Result<bool> {
        let free = is_silent(&self.path, self.used, now);
        if free {
            heartbeat::claim(&self.path)?;
        }
        Ok(free)
    }

    /// Deletes what is ours in it, the lock last, and the directory if that was all.
    fn delete(self) -> io::Result<()> {
        for name in [BLOCKS, INDEX, HEARTBEAT, LOCK] {
            match fs::remove_file(self.path.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::remove_dir(&self.path)
    }
}

/// Whether the owner of a directory has been silent for so long that there is none.
fn is_silent(dir: &Path, used: SystemTime, now: SystemTime) -> bool {
    let silent = |since: SystemTime, limit| now.duration_since(since).is_ok_and(|silent| silent > limit);
    match heartbeat::last(dir) {
        Ok(Some(beat)) => silent(beat, SILENT),
        Ok(None) => silent(used, OLD),
        // Nothing is known of it.
        Err(_) => false,
    }
}

/// Makes `dir`, if it is not there, out of the directory beside it that has blocks of this format and no owner, the one that was
/// used last; deletes others that are old.
pub(super) fn settle(dir: &Path, format: DiskFormat) {
    let Some(parent) = dir.parent() else { return };
    let Ok(entries) = fs::read_dir(parent) else { return };
    let beside: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path != dir).take(MOST).collect();
    let now = match heartbeat::now(parent) {
        Ok(now) => now,
        Err(error) => {
            return tracing::warn!(%error, "what time it is on the disk cache's volume is not known: nothing there is taken over");
        }
    };
    let mut orphans: Vec<Orphan> = beside.into_iter().filter_map(|path| Orphan::at(path, now)).collect();
    orphans.sort_by_key(|orphan| orphan.used);
    let header = Header::of(format).to_bytes();
    if !dir.exists()
        && let Some(last) = orphans.iter().rposition(|orphan| orphan.header == header)
    {
        take_over(orphans.remove(last), dir, now);
    }
    let old = |orphan: &Orphan| now.duration_since(orphan.used).is_ok_and(|age| age > OLD);
    // The others are free again, before what may take long.
    orphans.retain(old);
    for orphan in orphans {
        let path = orphan.path.display().to_string();
        match orphan.claim(now).and_then(|free| if free { orphan.delete().map(|()| true) } else { Ok(false) }) {
            Ok(true) => tracing::info!(path, "deleted the disk cache of a worker that is gone"),
            Ok(false) => {}
            Err(error) => tracing::warn!(path, %error, "cannot delete the disk cache of a worker that is gone"),
        }
    }
}

/// Renames it to `dir`. Its lock is free after that, for us or for whoever comes first.
fn take_over(orphan: Orphan, dir: &Path, now: SystemTime) {
    let from = orphan.path.display().to_string();
    match orphan.claim(now).and_then(|free| if free { fs::rename(&orphan.path, dir).map(|()| true) } else { Ok(false) })
    {
        Ok(true) => tracing::info!(from, "took over the disk cache of a worker that is gone"),
        Ok(false) => {}
        Err(error) => tracing::warn!(%error, from, "cannot take over a disk cache"),
    }
    drop(orphan.lock);
}
