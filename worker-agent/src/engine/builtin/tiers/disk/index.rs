//! The index file, byte by byte: a header and one entry for each place, 64 bytes each, little-endian.
//!
//! | bytes | header | entry |
//! |---|---|---|
//! | 0–7 | `ARMKV` and the version | sequence hash |
//! | 8–15 | fingerprint | sequence hash of the parent |
//! | 16–23 | bytes of a block | hash of the tokens |
//! | 24–31 | 0 | 1 without, 2 with a parent |
//! | 32–39 | 0 | checksum of the block |
//! | 40–55 | 0 | 0 |
//! | 56–63 | checksum of 0–55 | the same, seeded with the place |

use kv_hashing::{BlockHash, SequenceHash};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::DiskFormat;
use crate::engine::builtin::tiers::{CachedBlock, DiskSlot};

/// Bytes of an entry, and of the header.
pub(super) const ENTRY: usize = 64;

/// `ARMKV`, two zeros, and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"ARMKV\0\0\x01");

/// Whether a file that begins so is an index, of this layout or another.
pub(super) fn is_ours(header: &[u8; ENTRY]) -> bool {
    header[..7] == MAGIC.to_le_bytes()[..7]
}

/// Seed of the header's checksum; no place has it.
const HEADER_SEED: u64 = u64::MAX;

type Words = [u64; 7];

fn seal(words: Words, seed: u64) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    let sum = xxh3_64_with_seed(&bytes[..ENTRY - 8], seed);
    bytes[ENTRY - 8..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn open(bytes: &[u8; ENTRY], seed: u64) -> Option<Words> {
    let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * index + byte]));
    (word(7) == xxh3_64_with_seed(&bytes[..ENTRY - 8], seed)).then(|| std::array::from_fn(word))
}

/// What all blocks of the files have in common.
pub(super) struct Header(DiskFormat);

impl Header {
    pub(super) fn of(format: DiskFormat) -> Self {
        Self(format)
    }

    pub(super) fn to_bytes(&self) -> [u8; ENTRY] {
        seal([MAGIC, self.0.fingerprint, self.0.block_bytes as u64, 0, 0, 0, 0], HEADER_SEED)
    }
}

/// What is at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) block: CachedBlock,
    pub(super) sum: u64,
}

impl Entry {
    pub(super) fn to_bytes(self, slot: DiskSlot) -> [u8; ENTRY] {
        let CachedBlock { hash, parent, local } = self.block;
        let kind = 1 + u64::from(parent.is_some());
        seal([hash.0, parent.map_or(0, |parent| parent.0), local.0, kind, self.sum, 0, 0], slot.0.into())
    }

    /// `None` where there is no entry, or a damaged one.
    pub(super) fn from_bytes(slot: DiskSlot, bytes: &[u8; ENTRY]) -> Option<Self> {
        let [hash, parent, local, kind, sum, ..] = open(bytes, slot.0.into())?;
        let parent = match kind {
            1 => None,
            2 => Some(SequenceHash(parent)),
            _ => return None,
        };
        let block = CachedBlock { hash: SequenceHash(hash), parent, local: BlockHash(local) };
        Some(Self { block, sum })
    }
}
