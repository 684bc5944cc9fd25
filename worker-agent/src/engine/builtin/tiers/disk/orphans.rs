//! Directories that workers have left beside ours: a worker with a new name takes one over, and old ones are deleted.
//!
//! Pods have names of their own, and so have their directories: without this a volume would fill with blocks that nobody reads.
//! Who lives holds the lock of its directory, and nothing is done to a directory without its lock. A worker that is just being
//! restarted may lose its directory to one with a new name; what it loses is a cache.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::index::{self, ENTRY, Header};
use super::{BLOCKS, DiskFormat, INDEX, LOCK};

/// What nobody has written to for so long is deleted: workers that are switched off for the night find theirs again.
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
    /// `None` where the path is no directory of ours, or is somebody's.
    fn at(path: PathBuf) -> Option<Self> {
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
        Some(Self { path, used, header, lock })
    }

    /// Deletes what is ours in it, the lock last, and the directory if that was all.
    fn delete(self) -> io::Result<()> {
        for name in [BLOCKS, INDEX, LOCK] {
            match fs::remove_file(self.path.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::remove_dir(&self.path)
    }
}

/// Makes `dir`, if it is not there, out of the directory beside it that has blocks of this format and no owner, the one that was
/// used last; deletes others that are old.
pub(super) fn settle(dir: &Path, format: DiskFormat, now: SystemTime) {
    let Some(entries) = dir.parent().and_then(|parent| fs::read_dir(parent).ok()) else { return };
    let beside = entries.flatten().map(|entry| entry.path()).filter(|path| path != dir).take(MOST);
    let mut orphans: Vec<Orphan> = beside.filter_map(Orphan::at).collect();
    orphans.sort_by_key(|orphan| orphan.used);
    let header = Header::of(format).to_bytes();
    if !dir.exists()
        && let Some(last) = orphans.iter().rposition(|orphan| orphan.header == header)
    {
        let last = orphans.remove(last);
        match fs::rename(&last.path, dir) {
            Ok(()) => tracing::info!(from = %last.path.display(), "took over the disk cache of a worker that is gone"),
            Err(error) => tracing::warn!(%error, from = %last.path.display(), "cannot take over a disk cache"),
        }
        // Its lock is free now, for us or for whoever comes first.
        drop(last.lock);
    }
    let old = |orphan: &Orphan| now.duration_since(orphan.used).is_ok_and(|age| age > OLD);
    // The others are free again, before what may take long.
    orphans.retain(old);
    for orphan in orphans {
        let path = orphan.path.display().to_string();
        match orphan.delete() {
            Ok(()) => tracing::info!(path, "deleted the disk cache of a worker that is gone"),
            Err(error) => tracing::warn!(path, %error, "cannot delete the disk cache of a worker that is gone"),
        }
    }
}
