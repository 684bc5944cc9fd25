//! Makes the moves that the catalog leaves: copies at once, on the engine's thread; the disk's on a thread of its own.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::catalog::{Catalog, Sizes};
use super::disk::thread::DiskThread;
use super::disk::{Disk, DiskError, DiskFormat};
use super::slab::Slab;
use super::{Done, Move, TierOptions};
use crate::engine::builtin::arena::KvArena;
use crate::engine::builtin::exchange::KvLayout;

/// Bytes on their way to disk at most, and as many on their way from it, beside the host cache.
const STAGING_BYTES: usize = 64 << 20;
/// Blocks of each of them: a few, however large.
const STAGING_BLOCKS: std::ops::RangeInclusive<usize> = 4..=1024;
/// Part of a large host cache that is the queue to disk, too: a long prompt pushes many blocks out at once.
const QUEUE_SHARE: usize = 4;
/// Bytes copied into the arena in one step: some milliseconds at the speed of memory (5 to 10 GB/s), beside a step of 10 to 100.
const STEP_BYTES: usize = 32 << 20;

/// Why there are no tiers.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The engine's blocks are not to be had.
    #[error("this engine's KV blocks cannot be moved, so there can be no host or disk cache")]
    Immovable,
    /// There is no room for a block.
    #[error("{flag} {bytes} is less than one KV block needs ({block_bytes} bytes)")]
    TooSmall {
        /// The flag.
        flag: &'static str,
        /// What it says.
        bytes: u64,
        /// What one block takes.
        block_bytes: usize,
    },
    /// More blocks than can be numbered.
    #[error("{flag} {bytes}: more than 2^31 KV blocks are not possible")]
    TooLarge {
        /// The flag.
        flag: &'static str,
        /// What it says.
        bytes: u64,
    },
    /// The system refuses.
    #[error("cannot reserve {bytes} bytes of memory for --host-cache-bytes: {error}")]
    Memory {
        /// What was asked for.
        bytes: usize,
        /// What the system says.
        error: std::io::Error,
    },
    /// The files.
    #[error("--disk-cache-dir {0}")]
    Disk(#[from] DiskError),
    /// No thread could be had.
    #[error("cannot start the disk's thread: {0}")]
    Thread(std::io::Error),
}

/// Tiers that are ready: the files are open, and nothing runs yet.
pub struct Opened {
    /// What is where.
    pub catalog: Catalog,
    slab: Arc<Slab>,
    disk: Option<Disk>,
}

impl Opened {
    /// Makes the tiers of an engine whose blocks have this layout; `None` when there are to be none.
    pub fn new(options: &TierOptions, layout: KvLayout) -> Result<Option<Self>, TierError> {
        if !options.any() {
            return Ok(None);
        }
        let block_bytes = layout.shape.block_bytes();
        let format = DiskFormat { fingerprint: fingerprint(options, layout), block_bytes };
        let host = blocks("--host-cache-bytes", options.host_bytes, block_bytes, block_bytes)?;
        let disk_blocks = match &options.disk {
            Some(disk) if format.blocks(disk.bytes) == 0 => {
                return Err(TierError::TooSmall { flag: "--disk-cache-bytes", bytes: disk.bytes, block_bytes });
            }
            Some(disk) => numbered("--disk-cache-bytes", disk.bytes, format.blocks(disk.bytes))?,
            None => 0,
        };
        let staging = staging(block_bytes);
        let writes = if disk_blocks > 0 { staging.max(host / QUEUE_SHARE) } else { staging };
        let per_step = (STEP_BYTES / block_bytes).max(*STAGING_BLOCKS.start());
        let sizes = Sizes { host: host - (writes - staging), disk: disk_blocks, writes, reads: staging, per_step };
        let slab = Slab::new(block_bytes, sizes.slots())
            .map_err(|error| TierError::Memory { bytes: sizes.slots() * block_bytes, error })?;
        let opened = options.disk.as_ref().map(|disk| Disk::open(&disk.dir, format, disk_blocks)).transpose()?;
        let (disk, found) = opened.map_or((None, Vec::new()), |(disk, found)| (Some(disk), found));
        tracing::info!(host_blocks = sizes.host, disk_blocks, found_on_disk = found.len(), "KV tiers below the arena");
        Ok(Some(Self { catalog: Catalog::new(sizes, options.policy, found), slab: Arc::new(slab), disk }))
    }

    /// Starts what moves blocks between `arena` and the tiers; `done` is called when a move of the disk has ended.
    pub fn start(
        self,
        arena: Arc<KvArena>,
        done: impl Fn(Done) + Send + 'static,
    ) -> Result<(Catalog, Mover), TierError> {
        let slab = self.slab.clone();
        let disk = self.disk.map(|disk| DiskThread::start(disk, slab, done)).transpose().map_err(TierError::Thread)?;
        Ok((self.catalog, Mover { arena, slab: self.slab, disk }))
    }
}

/// Bytes that tiers take beside the host cache itself, for blocks on their way to and from disk.
pub fn staging_bytes(options: &TierOptions, block_bytes: usize) -> u64 {
    if options.disk.is_some() { 2 * (staging(block_bytes) * block_bytes) as u64 } else { 0 }
}

/// Blocks on their way in each direction, where there is no large host cache.
fn staging(block_bytes: usize) -> usize {
    (STAGING_BYTES / block_bytes.max(1)).clamp(*STAGING_BLOCKS.start(), *STAGING_BLOCKS.end())
}

/// Blocks of `each` bytes in `bytes`; at least one unless `bytes` is 0.
fn blocks(flag: &'static str, bytes: u64, each: usize, block_bytes: usize) -> Result<usize, TierError> {
    let count = usize::try_from(bytes / each as u64).unwrap_or(usize::MAX);
    if bytes > 0 && count == 0 {
        return Err(TierError::TooSmall { flag, bytes, block_bytes });
    }
    numbered(flag, bytes, count)
}

fn numbered(flag: &'static str, bytes: u64, count: usize) -> Result<usize, TierError> {
    if count <= 1 << 31 { Ok(count) } else { Err(TierError::TooLarge { flag, bytes }) }
}

/// Names what must be equal for a block in a file to be this engine's.
fn fingerprint(options: &TierOptions, layout: KvLayout) -> u64 {
    let revision = options.disk.as_ref().map_or("", |disk| &disk.revision);
    xxh3_64(format!("{layout:?}\0{revision}").as_bytes())
}

/// Moves blocks.
pub struct Mover {
    arena: Arc<KvArena>,
    slab: Arc<Slab>,
    disk: Option<DiskThread>,
}

impl Mover {
    /// Makes one move, or begins it. Called on the engine's thread, in order, before anything writes to the arena.
    pub fn make(&self, a_move: Move) {
        match a_move {
            Move::Offload { from, to } => {
                // SAFETY: the block was evicted: nobody holds it but whoever it was allocated to, who has not written yet. The
                // catalog gave the slot to this move alone.
                let (from, to) = unsafe { (self.arena.block(from), self.slab.slot_mut(to)) };
                to.copy_from_slice(from);
            }
            Move::Onboard { from, to } => {
                // SAFETY: the slot has its content and is not given to anybody before this move is made. The block belongs to
                // the sequence that asked, whose step has not begun.
                let (from, to) = unsafe { (self.slab.slot(from), self.arena.block_mut(to)) };
                to.copy_from_slice(from);
            }
            Move::Write { from, to, block } => self.on_disk(|disk| disk.write(from, to, block)),
            Move::Read { from, to, hash } => self.on_disk(|disk| disk.read(from, to, hash)),
            Move::Erase(slot) => self.on_disk(|disk| disk.erase(slot)),
        }
    }

    fn on_disk(&self, begin: impl FnOnce(&DiskThread)) {
        // Without a disk the catalog has no place there, and leaves no such move.
        if let Some(disk) = &self.disk {
            begin(disk);
        }
    }
}
