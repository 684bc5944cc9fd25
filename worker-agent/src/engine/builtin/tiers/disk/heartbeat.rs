//! Signs of life that reach as far as the volume does: a file in a worker's directory, which it touches while it lives.
//!
//! Locks of some file systems do not reach from node to node; what a file says of its time does. Times are compared with each
//! other only, all of them the volume's: a file is touched with the time "now", which a file server puts in by its own clock, and
//! "now" is the time of a file that is touched for that. What clocks of nodes say never matters.

use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use super::{is_at, open};

/// The file's name.
pub(super) const HEARTBEAT: &str = "alive";
/// How often it is touched.
pub(super) const BEAT: Duration = Duration::from_secs(20);
/// How long a worker is silent that is gone: fifteen beats, more than a client of a file server may go on believing an old time
/// (60 s by default), and more than the server may take to come back.
pub(super) const SILENT: Duration = Duration::from_secs(15 * BEAT.as_secs());
/// The file beside the directories that tells the volume's time.
const CLOCK: &str = ".armature-clock";

/// The time of a worker that has said that it goes.
const GONE: SystemTime = SystemTime::UNIX_EPOCH;

/// Sets a file's time to now, by the clock of whoever keeps the file.
fn touch(file: &File) -> Result<(), Error> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Ok(futimens(file, &Timestamps { last_access: now, last_modification: now })?)
}

/// What time it is on the volume of this directory.
pub(super) fn now(parent: &Path) -> Result<SystemTime, Error> {
    let clock = open(&parent.join(CLOCK))?;
    touch(&clock)?;
    clock.metadata()?.modified()
}

/// When the owner of a directory was alive last; `None` where there never was a heartbeat.
pub(super) fn last(dir: &Path) -> Result<Option<SystemTime>, Error> {
    match fs::metadata(dir.join(HEARTBEAT)).and_then(|file| file.modified()) {
        Ok(at) => Ok(Some(at)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Says of a directory that somebody has it, without opening it. Whoever comes next leaves it alone for a while.
pub(super) fn claim(dir: &Path) -> Result<(), Error> {
    touch(&open(&dir.join(HEARTBEAT))?)
}

/// The heartbeat of our own directory. Dropping it says that its worker is gone.
#[derive(Debug)]
pub(super) struct Heartbeat {
    file: File,
    path: PathBuf,
}

impl Heartbeat {
    /// Begins. To be called before there is anything in the directory that others would take for blocks without an owner.
    pub(super) fn begin(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(HEARTBEAT);
        let file = open(&path)?;
        touch(&file)?;
        Ok(Self { file, path })
    }

    /// Beats once. `false` when the directory is ours no more: somebody thought that we were gone, and has taken or deleted it.
    pub(super) fn beat(&self) -> Result<bool, Error> {
        let ours = is_at(&self.file, &self.path)?;
        if ours {
            touch(&self.file)?;
        }
        Ok(ours)
    }

    fn end(&self) -> Result<(), Error> {
        // In a directory that was taken it is somebody else's.
        if is_at(&self.file, &self.path)? { self.file.set_modified(GONE) } else { Ok(()) }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::debug!(%error, "a disk cache is left as if its worker had died");
        }
    }
}
