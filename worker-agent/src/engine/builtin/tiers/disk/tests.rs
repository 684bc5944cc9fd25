//! Files as they are after crashes, cuts, damage and other settings.

use std::sync::{Arc, mpsc};

use kv_hashing::BlockHash;

use super::thread::DiskThread;
use super::*;
use crate::engine::builtin::tiers::slab::Slab;
use crate::engine::builtin::tiers::{Done, Slot};

const FORMAT: DiskFormat = DiskFormat { fingerprint: 7, block_bytes: 4096 };

fn block(parent: Option<CachedBlock>, local: u64) -> CachedBlock {
    let (parent, local) = (parent.map(|block| block.hash), BlockHash(local));
    CachedBlock { hash: chain(parent, local), parent, local }
}

fn content(fill: u8) -> Vec<u8> {
    (0..FORMAT.block_bytes).map(|at| fill.wrapping_add(at as u8)).collect()
}

fn open(dir: &Path, format: DiskFormat, capacity: usize) -> (Disk, Vec<Found>) {
    Disk::open(dir, format, capacity).expect("opens")
}

fn read(disk: &Disk, (slot, block): Found) -> Result<Vec<u8>, ReadFault> {
    let mut bytes = vec![0; FORMAT.block_bytes];
    disk.read(slot, block.hash, &mut bytes).map(|()| bytes)
}

/// Three blocks at the first three places.
fn filled(dir: &Path) -> [Found; 3] {
    let (disk, found) = open(dir, FORMAT, 8);
    assert!(found.is_empty());
    let first = block(None, 1);
    let blocks = [(DiskSlot(0), first), (DiskSlot(1), block(Some(first), 2)), (DiskSlot(2), block(None, 3))];
    for (slot, block) in blocks {
        disk.write(slot, block, &content(slot.0 as u8)).expect("writes");
    }
    blocks
}

#[test]
fn blocks_survive_their_process() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let blocks = filled(dir.path());
    let (disk, found) = open(dir.path(), FORMAT, 8);
    assert_eq!(found, blocks);
    for (slot, block) in blocks {
        assert_eq!(read(&disk, (slot, block)), Ok(content(slot.0 as u8)));
    }
    disk.erase(DiskSlot(1)).expect("erases");
    assert_eq!(read(&disk, blocks[1]), Err(ReadFault::Damaged));
    drop(disk);
    assert_eq!(open(dir.path(), FORMAT, 8).1, [blocks[0], blocks[2]]);
}

#[test]
fn one_directory_has_one_owner() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (disk, _) = open(dir.path(), FORMAT, 8);
    let refused = Disk::open(dir.path(), FORMAT, 8).expect_err("it is in use");
    assert!(matches!(refused, DiskError::Locked(_)), "{refused}");
    assert!(refused.to_string().ends_with("is in use by another worker"));
    drop(disk);
    open(dir.path(), FORMAT, 8);
}

/// Directories of workers beside each other.
struct Volume(tempfile::TempDir);

impl Volume {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A directory that is there already, so that nobody's is taken over.
    fn own(&self, name: &str) -> PathBuf {
        std::fs::create_dir(self.at(name)).expect("is new");
        self.at(name)
    }

    /// Nobody has written there for so many hours.
    fn age(&self, name: &str, hours: u64) {
        let then = SystemTime::now() - Duration::from_secs(hours * 3600);
        for file in [INDEX, BLOCKS] {
            let file = OpenOptions::new().write(true).open(self.at(name).join(file)).expect("there");
            file.set_modified(then).expect("settable");
        }
    }
}

#[test]
fn a_worker_with_a_new_name_takes_over_what_the_last_one_to_go_has_left() {
    let volume = Volume::new();
    let (_living, _) = open(&volume.at("living"), FORMAT, 8);
    filled(&volume.own("first"));
    volume.age("first", 2);
    let blocks = filled(&volume.own("last"));
    std::fs::write(volume.own("other").join(INDEX), b"something else").expect("writes");
    let (disk, found) = open(&volume.at("new"), FORMAT, 8);
    assert_eq!(found, blocks);
    assert_eq!(read(&disk, blocks[0]), Ok(content(0)));
    assert!(!volume.at("last").exists() && volume.at("first").exists());
    assert!(matches!(Disk::open(&volume.at("new"), FORMAT, 8), Err(DiskError::Locked(_))), "it is its own now");
    let (_second, found) = open(&volume.at("second"), FORMAT, 8);
    assert_eq!(found, blocks, "the next one is left to the next");
    assert!(open(&volume.at("third"), FORMAT, 8).1.is_empty());
    assert!(volume.at("living").exists() && volume.at("other").join(INDEX).exists());
}

#[test]
fn a_cache_of_another_model_is_left_to_its_workers() {
    let volume = Volume::new();
    let blocks = filled(&volume.own("mine"));
    let other = DiskFormat { fingerprint: 8, ..FORMAT };
    assert!(open(&volume.at("other"), other, 8).1.is_empty());
    assert!(volume.at("mine").exists());
    assert_eq!(open(&volume.at("new"), FORMAT, 8).1, blocks);
}

#[test]
fn what_nobody_has_used_for_a_day_is_deleted_and_nothing_else() {
    let volume = Volume::new();
    for name in ["old", "young", "mixed"] {
        filled(&volume.own(name));
    }
    std::fs::write(volume.at("mixed").join("mine"), b"somebody's").expect("writes");
    let (_living, _) = open(&volume.own("living"), FORMAT, 8);
    for (name, hours) in [("old", 25), ("young", 23), ("mixed", 25), ("living", 25)] {
        volume.age(name, hours);
    }
    open(&volume.own("new"), FORMAT, 8);
    assert!(!volume.at("old").exists());
    assert!(volume.at("young").join(BLOCKS).exists() && volume.at("living").join(BLOCKS).exists());
    assert!(volume.at("mixed").join("mine").exists());
}

#[test]
fn a_thread_that_fails_says_so_and_leaves_the_directory_free() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (slot, block) = filled(dir.path())[0];
    let (disk, _) = open(dir.path(), FORMAT, 8);
    let slab = Arc::new(Slab::new(FORMAT.block_bytes, 1).expect("memory"));
    let (told, hears) = mpsc::channel();
    let thread = DiskThread::start(disk, slab, move |done| {
        assert!(!matches!(done, Done::Read { .. }), "the test wants it to fail");
        told.send(done).expect("the test listens");
    });
    let thread = thread.expect("starts");
    thread.read(slot, Slot(0), block.hash);
    assert_eq!(hears.recv_timeout(Duration::from_secs(20)), Ok(Done::Stopped));
    thread.read(slot, Slot(0), block.hash);
    drop(thread);
    assert!(hears.try_recv().is_err(), "nothing follows");
    open(dir.path(), FORMAT, 8);
}

#[test]
fn a_directory_that_cannot_be_is_one_line() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("file");
    std::fs::write(&file, b"no directory").expect("writes");
    let text = Disk::open(&file, FORMAT, 8).expect_err("a file is no directory").to_string();
    assert!(text.contains("file") && !text.contains('\n'), "{text}");
}

#[test]
fn blocks_of_another_format_are_deleted() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for other in [DiskFormat { fingerprint: 8, ..FORMAT }, DiskFormat { block_bytes: 2048, ..FORMAT }] {
        filled(dir.path());
        assert!(open(dir.path(), other, 8).1.is_empty());
        assert_eq!(std::fs::metadata(dir.path().join("blocks")).expect("there").len(), 0);
        assert!(open(dir.path(), FORMAT, 8).1.is_empty(), "they do not come back");
    }
}

#[test]
fn a_smaller_tier_keeps_what_fits() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let blocks = filled(dir.path());
    assert_eq!(open(dir.path(), FORMAT, 2).1, blocks[..2]);
    assert_eq!(open(dir.path(), FORMAT, 8).1, blocks[..2], "the others are gone");
}

/// What a process leaves that dies in the middle of [`Disk::write`], after each of its system calls.
#[test]
fn a_write_that_was_cut_short_leaves_no_block() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let blocks = filled(dir.path());
    let (index, data) = (dir.path().join("index"), dir.path().join("blocks"));
    let file = |path: &Path| OpenOptions::new().write(true).open(path).expect("there");
    let new = block(Some(blocks[0].1), 9);
    // The entry is erased; then half of the new block is written; then all of it.
    file(&index).write_all_at(&[0; ENTRY], 2 * ENTRY as u64).expect("writes");
    assert_eq!(open(dir.path(), FORMAT, 8).1, [blocks[0], blocks[2]]);
    for half in [2048, 4096] {
        file(&data).write_all_at(&content(50)[..half], 4096).expect("writes");
        let (disk, found) = open(dir.path(), FORMAT, 8);
        assert_eq!(found, [blocks[0], blocks[2]]);
        assert_eq!(read(&disk, (DiskSlot(1), new)), Err(ReadFault::Damaged));
    }
    // Half of the new entry.
    let entry = Entry { block: new, sum: checksum(new.hash, &content(50)) }.to_bytes(DiskSlot(1));
    file(&index).write_all_at(&entry[..40], 2 * ENTRY as u64).expect("writes");
    assert_eq!(open(dir.path(), FORMAT, 8).1, [blocks[0], blocks[2]]);
    file(&index).write_all_at(&entry, 2 * ENTRY as u64).expect("writes");
    let (disk, found) = open(dir.path(), FORMAT, 8);
    assert_eq!(found[1], (DiskSlot(1), new));
    assert_eq!(read(&disk, found[1]), Ok(content(50)));
}

/// After a loss of power the index may say more than the blocks hold.
#[test]
fn damage_is_noticed_when_a_block_is_read() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let blocks = filled(dir.path());
    let data = OpenOptions::new().write(true).open(dir.path().join("blocks")).expect("there");
    data.write_all_at(&[1], 4096 + 1000).expect("writes");
    let (disk, found) = open(dir.path(), FORMAT, 8);
    assert_eq!(found, blocks);
    assert_eq!(read(&disk, blocks[1]), Err(ReadFault::Damaged));
    assert!(read(&disk, blocks[0]).is_ok() && read(&disk, blocks[2]).is_ok());
    assert_eq!(read(&disk, (DiskSlot(0), blocks[2].1)), Err(ReadFault::Damaged), "another block is there");
    drop(disk);
    data.set_len(2 * 4096 + 17).expect("cuts");
    assert_eq!(open(dir.path(), FORMAT, 8).1, blocks[..2], "a block that is not whole");
    let index = OpenOptions::new().write(true).open(dir.path().join("index")).expect("there");
    index.write_all_at(&[1], ENTRY as u64 + 3).expect("writes");
    assert_eq!(open(dir.path(), FORMAT, 8).1, blocks[1..2], "a damaged entry");
    index.set_len(30).expect("cuts");
    assert!(open(dir.path(), FORMAT, 8).1.is_empty());
}

#[test]
fn no_space_is_told_from_other_failures() {
    let fault = |kind: ErrorKind| write_fault(&Error::from(kind));
    assert_eq!(fault(ErrorKind::StorageFull), WriteFault::Full);
    assert_eq!(fault(ErrorKind::QuotaExceeded), WriteFault::Full);
    assert_eq!(fault(ErrorKind::PermissionDenied), WriteFault::Failed);
}
