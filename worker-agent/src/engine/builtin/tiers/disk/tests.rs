//! Files as they are after crashes, cuts, damage and other settings.

use std::sync::{Arc, mpsc};
use std::time::SystemTime;

use kv_hashing::BlockHash;

use super::heartbeat::{HEARTBEAT, Heartbeat, SILENT};
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
        for file in [INDEX, BLOCKS] {
            self.set(name, file, Duration::from_secs(hours * 3600));
        }
    }

    /// Its worker is silent since then.
    fn silence(&self, name: &str, for_: Duration) {
        self.set(name, HEARTBEAT, for_);
    }

    fn set(&self, name: &str, file: &str, ago: Duration) {
        let file = OpenOptions::new().write(true).open(self.at(name).join(file)).expect("there");
        file.set_modified(SystemTime::now() - ago).expect("settable");
    }

    /// As after a kill: the lock is free, also for those whom it never reached, and nothing was said.
    fn killed(&self, name: &str, silent: Duration) -> [Found; 3] {
        let blocks = filled(&self.own(name));
        self.silence(name, silent);
        blocks
    }
}

/// A little more and a little less than what is taken for an end.
const LONG: Duration = SILENT.saturating_add(Duration::from_secs(30));
const SHORT: Duration = SILENT.saturating_sub(Duration::from_secs(30));

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

/// Where locks do not reach, which is as if nobody had one.
#[test]
fn a_heart_that_has_beaten_lately_keeps_a_directory_that_is_not_locked() {
    let volume = Volume::new();
    volume.killed("silent", LONG);
    let blocks = volume.killed("living", SHORT);
    for (name, hours) in [("silent", 25), ("living", 25)] {
        volume.age(name, hours);
    }
    let other = DiskFormat { fingerprint: 8, ..FORMAT };
    open(&volume.own("new"), other, 8);
    assert!(!volume.at("silent").exists(), "its worker is gone");
    assert!(open(&volume.at("taker"), FORMAT, 8).1.is_empty());
    assert_eq!(open(&volume.at("living"), FORMAT, 8).1, blocks, "its worker has it still");
}

#[test]
fn a_directory_is_taken_over_when_its_worker_has_been_silent_for_long() {
    let volume = Volume::new();
    let blocks = volume.killed("silent", LONG);
    assert_eq!(open(&volume.at("new"), FORMAT, 8).1, blocks);
    assert!(!volume.at("silent").exists());
}

/// A client's clock may be hours off; the times of files are the volume's.
#[test]
fn a_beat_of_the_future_is_a_sign_of_life() {
    let volume = Volume::new();
    filled(&volume.own("ahead"));
    let heartbeat = OpenOptions::new().write(true).open(volume.at("ahead").join(HEARTBEAT)).expect("there");
    heartbeat.set_modified(SystemTime::now() + Duration::from_secs(7200)).expect("settable");
    volume.age("ahead", 25);
    assert!(open(&volume.at("new"), FORMAT, 8).1.is_empty());
    assert!(volume.at("ahead").exists());
}

/// What an older version has made, and may be writing to, on a node whose locks do not reach here.
#[test]
fn a_directory_without_a_heartbeat_is_left_alone_for_a_day() {
    let volume = Volume::new();
    let mut blocks = Vec::new();
    for (name, hours) in [("young", 23), ("old", 25)] {
        blocks.push(filled(&volume.own(name)));
        std::fs::remove_file(volume.at(name).join(HEARTBEAT)).expect("there");
        volume.age(name, hours);
    }
    assert_eq!(open(&volume.at("new"), FORMAT, 8).1, blocks[1]);
    assert!(volume.at("young").join(BLOCKS).exists());
}

/// What there is after each step of making a directory, where its lock does not reach.
#[test]
fn a_directory_that_is_just_being_made_is_nobodys_to_take() {
    let volume = Volume::new();
    let other = DiskFormat { fingerprint: 8, ..FORMAT };
    let dir = volume.own("making");
    let look = |number: usize, step: &str| {
        open(&volume.own(&format!("other-{number}")), other, 8);
        assert!(open(&volume.at(&format!("new-{number}")), FORMAT, 8).1.is_empty());
        assert!(dir.exists(), "after {step}");
    };
    look(0, "the directory");
    drop(super::open(&dir.join(LOCK)).expect("makes"));
    look(1, "the lock");
    let heartbeat = Heartbeat::begin(&dir).expect("begins");
    look(2, "the heartbeat");
    let index = super::open(&dir.join(INDEX)).expect("makes");
    look(3, "the index");
    index.write_all_at(&Header::of(FORMAT).to_bytes(), 0).expect("writes");
    look(4, "its header");
    drop(super::open(&dir.join(BLOCKS)).expect("makes"));
    look(5, "the blocks");
    drop(heartbeat);
}

#[test]
fn the_thread_beats_also_when_it_has_nothing_to_do() {
    let volume = Volume::new();
    let (disk, _) = open(&volume.at("own"), FORMAT, 8);
    volume.silence("own", LONG);
    let slab = Arc::new(Slab::new(FORMAT.block_bytes, 1).expect("memory"));
    let thread = DiskThread::beating(Duration::from_millis(5), disk, slab, |_| ()).expect("starts");
    let heartbeat = volume.at("own").join(HEARTBEAT);
    let age = || {
        let beat = std::fs::metadata(&heartbeat).and_then(|file| file.modified()).expect("there");
        SystemTime::now().duration_since(beat).unwrap_or_default()
    };
    let until = Instant::now() + Duration::from_secs(20);
    while age() > SHORT {
        assert!(Instant::now() < until, "no beat");
        std::thread::yield_now();
    }
    drop(thread);
    assert!(age() > LONG, "whoever goes says so");
}

/// Its node was cut off from the volume for longer than others wait.
#[test]
fn a_worker_whose_directory_was_taken_writes_there_no_more() {
    let volume = Volume::new();
    let (disk, _) = open(&volume.at("own"), FORMAT, 8);
    let slab = Arc::new(Slab::new(FORMAT.block_bytes, 1).expect("memory"));
    let (told, hears) = mpsc::channel();
    std::fs::rename(volume.at("own"), volume.at("taker")).expect("renames");
    let beat = std::fs::metadata(volume.at("taker").join(HEARTBEAT)).and_then(|file| file.modified()).expect("there");
    let done = move |done| told.send(done).expect("the test listens");
    let thread = DiskThread::beating(Duration::from_millis(5), disk, slab, done).expect("starts");
    assert_eq!(hears.recv_timeout(Duration::from_secs(20)), Ok(Done::Stopped));
    drop(thread);
    let after = std::fs::metadata(volume.at("taker").join(HEARTBEAT)).and_then(|file| file.modified()).expect("there");
    assert_eq!(beat, after, "the heartbeat is the taker's");
}

#[test]
fn whoever_looks_first_claims_before_it_takes() {
    let volume = Volume::new();
    let blocks = volume.killed("silent", LONG);
    heartbeat::claim(&volume.at("silent")).expect("touches");
    assert!(open(&volume.at("second"), FORMAT, 8).1.is_empty(), "the first one is about to take it");
    assert_eq!(open(&volume.at("silent"), FORMAT, 8).1, blocks);
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
