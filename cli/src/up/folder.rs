//! The folder through which the router and the workers of one `armature up` find each other.
//!
//! It goes away with its [`Folder`]. A process that is killed leaves it behind, for the next one to remove: the name tells
//! whose it is, and a lock that the kernel takes back tells whether that process still lives, wherever its id is counted.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::process::{Pid, test_kill_process};
use tempfile::TempDir;

use crate::outcome::Failure;

const PREFIX: &str = "armature-up-";

/// A folder of our own.
pub struct Folder {
    /// Held for as long as the folder is.
    _lock: File,
    dir: TempDir,
}

impl Folder {
    /// Makes it where temporary files belong, and removes there what killed processes left behind.
    pub fn create() -> Result<Self, Failure> {
        let place = std::env::temp_dir();
        remove_left_behind(&place);
        Self::create_in(&place).map_err(|error| {
            Failure::settings(format!(
                "cannot make a folder in {}: {error}; set TMPDIR to another place",
                place.display()
            ))
        })
    }

    fn create_in(place: &Path) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir_in(place)?;
        let lock = File::open(dir.path())?;
        lock.lock()?;
        Ok(Self { _lock: lock, dir })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes what can be removed; the rest is another user's, or harms nobody.
fn remove_left_behind(place: &Path) {
    for path in fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if owner(&path).is_some_and(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH)) && unlocked(&path) {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Who made the folder, by its name.
fn owner(path: &Path) -> Option<Pid> {
    let (pid, _) = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split_once('-')?;
    Pid::from_raw(pid.parse().ok().filter(|pid| *pid > 0)?)
}

fn unlocked(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|stat| stat.is_dir())
        && File::open(path).is_ok_and(|dir| dir.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_processes_are_removed() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let mut child = std::process::Command::new("true").spawn().expect("it can be started");
        let dead = child.id();
        child.wait().expect("it ends");
        let make = |name: String| {
            let path = place.path().join(name);
            fs::create_dir(&path).expect("a writable directory");
            path
        };
        let (left, locked) = (make(format!("{PREFIX}{dead}-aaaaaa")), make(format!("{PREFIX}{dead}-bbbbbb")));
        let foreign = [make("armature-x".into()), make(format!("{PREFIX}x-aaaaaa")), make(format!("{PREFIX}0-aaaaaa"))];
        fs::write(left.join("worker-1.json"), "{}").expect("a writable directory");
        let lock = File::open(&locked).expect("there");
        lock.lock().expect("nobody else has it");
        let ours = Folder::create_in(place.path()).expect("a writable directory");

        remove_left_behind(place.path());
        assert!(!left.exists());
        assert!(locked.exists(), "whose process has that id elsewhere");
        assert!(ours.path().exists() && foreign.iter().all(|path| path.exists()));
        let path = ours.path().to_owned();
        drop(ours);
        assert!(!path.exists());
    }
}
