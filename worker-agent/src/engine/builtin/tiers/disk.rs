//! Blocks in files that survive the process: a file of blocks, a file that says what they are, a lock, and a heartbeat.
//!
//! A block is written over an older one only after the index has forgotten that, and is in the index only when it is whole; so
//! a process that dies leaves no half-written block. A machine that loses power may have written in another order: the
//! checksum of a block is compared whenever it is read. Nothing is synced: what is lost is computed again.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kv_hashing::{SequenceHash, chain};
use twox_hash::XxHash3_64;

use super::{CachedBlock, DiskSlot, ReadFault, WriteFault};
use heartbeat::Heartbeat;
use index::{ENTRY, Entry, Header};

mod heartbeat;
mod index;
mod orphans;
#[cfg(test)]
mod tests;
pub mod thread;

/// Longest time for reading the index at the start; blocks that are not found in it are forgotten. 100 MB, which is the index
/// of half a terabyte of the smallest blocks that models have, take less.
const SCAN: Duration = Duration::from_secs(5);

/// Longest wait for a lock that another worker may have for a moment, while it looks for directories without an owner.
const LOOKED_AT: Duration = Duration::from_secs(1);
/// Pause between two tries.
const AGAIN: Duration = Duration::from_millis(20);

/// Names of the files.
const INDEX: &str = "index";
const BLOCKS: &str = "blocks";
const LOCK: &str = "lock";

/// Why there is no disk tier.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another process, or another engine of this one, has the directory.
    #[error("{} is in use by another worker", .0.display())]
    Locked(PathBuf),
    /// It cannot be used.
    #[error("{}: {error}", .path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        error: Error,
    },
}

/// What files must agree on to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFormat {
    /// Names model, layout of a block, and revision.
    pub fingerprint: u64,
    /// Bytes of a block.
    pub block_bytes: usize,
}

impl DiskFormat {
    /// Blocks that `bytes` bytes of disk hold.
    pub fn blocks(&self, bytes: u64) -> usize {
        usize::try_from(bytes / (self.block_bytes as u64 + ENTRY as u64)).unwrap_or(usize::MAX)
    }
}

/// The open files. Whoever has them has the directory for itself.
#[derive(Debug)]
pub struct Disk {
    blocks: File,
    index: File,
    block_bytes: usize,
    /// Ends before the lock does.
    heartbeat: Heartbeat,
    /// Held as long as the files are open.
    _lock: File,
}

impl Disk {
    /// Opens the files of `dir`, makes what is missing, and finds the blocks that are there; of another format or beyond
    /// `capacity` blocks they are deleted. One beside it that has no owner any more may become it; old ones are deleted.
    pub fn open(dir: &Path, format: DiskFormat, capacity: usize) -> Result<(Self, Vec<Found>), DiskError> {
        let at = |path: &Path| {
            let path = path.to_path_buf();
            move |error| DiskError::Io { path, error }
        };
        orphans::settle(dir, format);
        let lock = lock(dir)?;
        let heartbeat = Heartbeat::begin(dir).map_err(at(dir))?;
        let open = |name: &str| {
            let path = dir.join(name);
            open(&path).map_err(at(&path)).map(|file| (file, path))
        };
        let ((index, index_path), (blocks, blocks_path)) = (open(INDEX)?, open(BLOCKS)?);
        let disk = Self { blocks, index, block_bytes: format.block_bytes, heartbeat, _lock: lock };
        let found = disk.adopt(format, capacity).map_err(at(&index_path))?;
        let end = found.last().map_or(0, |(slot, _)| disk.offset(*slot) + format.block_bytes as u64);
        disk.blocks.set_len(end).map_err(at(&blocks_path))?;
        Ok((disk, found))
    }

    /// What is there, in order of place.
    fn adopt(&self, format: DiskFormat, capacity: usize) -> Result<Vec<Found>, Error> {
        let header = Header::of(format).to_bytes();
        let mut there = [0; ENTRY];
        let same = self.index.metadata()?.len() >= ENTRY as u64
            && self.index.read_exact_at(&mut there, 0).is_ok()
            && there == header;
        if !same {
            self.index.set_len(0)?;
            self.index.write_all_at(&header, 0)?;
            return Ok(Vec::new());
        }
        let whole = self.blocks.metadata()?.len() / format.block_bytes as u64;
        let entries = (self.index.metadata()?.len() / ENTRY as u64).saturating_sub(1);
        let entries = entries.min(whole).min(capacity as u64);
        let (mut found, start) = (Vec::new(), Instant::now());
        let mut buffer = vec![0; ENTRY << 14];
        let mut slot = 0;
        while slot < entries && start.elapsed() < SCAN {
            let count = (entries - slot).min(1 << 14);
            let part = &mut buffer[..count as usize * ENTRY];
            self.index.read_exact_at(part, entry_offset(slot))?;
            for (slot, bytes) in (slot..).zip(part.chunks_exact(ENTRY)) {
                found.extend(known_block(slot, bytes));
            }
            slot += count;
        }
        // What was not looked at, or has no room, is no block of this life.
        self.index.set_len(entry_offset(slot))?;
        Ok(found)
    }

    /// Writes a block and then its entry.
    pub fn write(&self, slot: DiskSlot, block: CachedBlock, bytes: &[u8]) -> Result<(), Error> {
        self.erase(slot)?;
        self.blocks.write_all_at(bytes, self.offset(slot))?;
        let entry = Entry { block, sum: checksum(block.hash, bytes) };
        self.index.write_all_at(&entry.to_bytes(slot), entry_offset(slot.0.into()))
    }

    /// Reads the block `hash` into `bytes`, whose content means nothing after a failure.
    pub fn read(&self, slot: DiskSlot, hash: SequenceHash, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let mut entry = [0; ENTRY];
        self.index.read_exact_at(&mut entry, entry_offset(slot.0.into())).map_err(read_fault)?;
        let entry = Entry::from_bytes(slot, &entry).filter(|entry| entry.block.hash == hash);
        let entry = entry.ok_or(ReadFault::Damaged)?;
        self.blocks.read_exact_at(bytes, self.offset(slot)).map_err(read_fault)?;
        if checksum(hash, bytes) == entry.sum { Ok(()) } else { Err(ReadFault::Damaged) }
    }

    /// Forgets what is at a place.
    pub fn erase(&self, slot: DiskSlot) -> Result<(), Error> {
        self.index.write_all_at(&[0; ENTRY], entry_offset(slot.0.into()))
    }

    /// Says that its worker lives. `false` when the directory is ours no more.
    fn beat(&self) -> Result<bool, Error> {
        self.heartbeat.beat()
    }

    fn offset(&self, slot: DiskSlot) -> u64 {
        u64::from(slot.0) * self.block_bytes as u64
    }
}

/// Prompts of users can be told from what is kept here: it is nobody else's to read.
fn open(path: &Path) -> Result<File, Error> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Makes the directory and locks it. Another worker may rename or delete a directory whose lock it has: then it is made anew.
fn lock(dir: &Path) -> Result<File, DiskError> {
    let path = dir.join(LOCK);
    let until = Instant::now() + LOOKED_AT;
    let failed = |error| DiskError::Io { path: path.clone(), error };
    loop {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|error| DiskError::Io { path: dir.to_path_buf(), error })?;
        match open(&path) {
            Ok(file) => match file.try_lock() {
                Ok(()) if is_at(&file, &path).unwrap_or(false) => return Ok(file),
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        if Instant::now() > until {
            return Err(DiskError::Locked(dir.to_path_buf()));
        }
        std::thread::sleep(AGAIN);
    }
}

/// Whether the open file is still the one at this path.
fn is_at(file: &File, path: &Path) -> Result<bool, Error> {
    let there = match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        there => there?,
    };
    let open = file.metadata()?;
    Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
}

/// A block that was on disk before.
pub type Found = (DiskSlot, CachedBlock);

/// The block of an entry, if its hashes agree with each other.
fn known_block(slot: u64, bytes: &[u8]) -> Option<Found> {
    let slot = DiskSlot(u32::try_from(slot).ok()?);
    let block = Entry::from_bytes(slot, bytes.try_into().ok()?)?.block;
    (chain(block.parent, block.local) == block.hash).then_some((slot, block))
}

/// Of a block's bytes, as the block that they are said to be.
fn checksum(hash: SequenceHash, bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(hash.0, bytes)
}

fn entry_offset(slot: u64) -> u64 {
    (slot + 1) * ENTRY as u64
}

/// A file that ends too early was cut.
fn read_fault(error: Error) -> ReadFault {
    if error.kind() == ErrorKind::UnexpectedEof { ReadFault::Damaged } else { ReadFault::Failed }
}

/// Whether there was no space, or something else.
pub fn write_fault(error: &Error) -> WriteFault {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => WriteFault::Full,
        _ => WriteFault::Failed,
    }
}
