//! Tokens to block hashes to sequence hashes: the identity of a KV block everywhere in Armature.
//!
//! Owns the hash functions and nothing else: no index, no wire format. The values equal Dynamo's, so that blocks hashed
//! by either system name the same content; `tests/golden.rs` holds values computed by the peer.
#![forbid(unsafe_code)]

use std::num::NonZeroU32;

use smallvec::SmallVec;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Seed of every block and sequence hash (Dynamo's default).
pub const BASE_SEED: u64 = 1337;

/// Hash of one full block's tokens alone, whatever came before it ("local hash").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// Hash of a whole prefix that ends with a block: it names the block *in its context*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceHash(pub u64);

/// Tokens in one KV block; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// `None` when `tokens` is zero.
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// Tokens per block.
    pub const fn get(self) -> usize {
        self.0.get() as usize
    }

    /// Full blocks that `tokens` tokens fill.
    pub const fn full_blocks(self, tokens: usize) -> usize {
        tokens / self.get()
    }

    /// Blocks needed to hold `tokens` tokens, the last one possibly partial.
    pub const fn blocks_for(self, tokens: usize) -> usize {
        tokens.div_ceil(self.get())
    }
}

/// What separates equal tokens whose KV differs: the LoRA adapter and the cache namespace (`cache_salt`) of a request.
///
/// Both go into the seed: `1337 + xxh3(lora, 0) + xxh3(namespace, 1)`, wrapping; an empty string counts as absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashSpace {
    seed: u64,
}

impl Default for HashSpace {
    fn default() -> Self {
        Self { seed: BASE_SEED }
    }
}

impl HashSpace {
    /// The space of one adapter and one namespace.
    pub fn new(lora: Option<&str>, namespace: Option<&str>) -> Self {
        let part = |text: Option<&str>, seed| match text {
            Some(t) if !t.is_empty() => xxh3_64_with_seed(t.as_bytes(), seed),
            _ => 0,
        };
        Self { seed: BASE_SEED.wrapping_add(part(lora, 0)).wrapping_add(part(namespace, 1)) }
    }

    /// Hash of one full block of tokens.
    ///
    /// `media` are the multimodal hashes inside the block; they are sorted first, so their order does not matter.
    pub fn block(self, tokens: &[u32], media: &[u64]) -> BlockHash {
        // 128 words hold the largest common block (64 tokens) and 32 media hashes; more spills to the heap.
        let mut words: SmallVec<[[u8; 4]; 128]> = tokens.iter().map(|token| token.to_le_bytes()).collect();
        if !media.is_empty() {
            let mut sorted = media.to_vec();
            sorted.sort_unstable();
            for hash in sorted {
                words.extend_from_slice(hash.to_le_bytes().as_chunks().0);
            }
        }
        BlockHash(xxh3_64_with_seed(words.as_flattened(), self.seed))
    }

    /// Hashes of the full blocks of `tokens`; a last partial block has none. Cost: about 0.5 ns a token.
    pub fn blocks(self, tokens: &[u32], size: BlockSize) -> Vec<BlockHash> {
        // Converted many blocks at a time, which compiles to a copy; 4 KiB of tokens stay in the first-level cache.
        let piece = size.get() * (1024 / size.get()).max(1);
        let mut hashes = Vec::with_capacity(size.full_blocks(tokens.len()));
        for piece in tokens.chunks(piece) {
            let words: Vec<[u8; 4]> = piece.iter().map(|token| token.to_le_bytes()).collect();
            let blocks = words.as_flattened().chunks_exact(4 * size.get());
            hashes.extend(blocks.map(|block| BlockHash(xxh3_64_with_seed(block, self.seed))));
        }
        hashes
    }

    /// Like [`Self::blocks`] for EAGLE-style draft models: windows of `size + 1` tokens, one block apart.
    pub fn blocks_eagle(self, tokens: &[u32], size: BlockSize) -> Vec<BlockHash> {
        let n = size.get();
        (0..tokens.len().saturating_sub(1) / n).map(|i| self.block(&tokens[i * n..=(i + 1) * n], &[])).collect()
    }
}

/// Extends a prefix by one block: the first block's sequence hash is its local hash, every other one is
/// `xxh3(parent ‖ local, 1337)`, both little endian.
pub fn chain(parent: Option<SequenceHash>, local: BlockHash) -> SequenceHash {
    let Some(parent) = parent else { return SequenceHash(local.0) };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
    bytes[8..].copy_from_slice(&local.0.to_le_bytes());
    SequenceHash(xxh3_64_with_seed(&bytes, BASE_SEED))
}

/// The sequence hash of every prefix of `blocks`, in order.
pub fn sequence_hashes(blocks: &[BlockHash]) -> Vec<SequenceHash> {
    let mut parent = None;
    blocks
        .iter()
        .map(|&local| {
            let hash = chain(parent, local);
            parent = Some(hash);
            hash
        })
        .collect()
}

/// Hash of a multimodal item's identifier: 64 hex digits are read as a number (first 16 of them), anything else is hashed.
pub fn media_hash(identifier: &str) -> u64 {
    if identifier.len() == 64 && identifier.bytes().all(|b| b.is_ascii_hexdigit()) {
        return u64::from_str_radix(&identifier[..16], 16).unwrap_or_else(|_| xxh3_64(identifier.as_bytes()));
    }
    xxh3_64(identifier.as_bytes())
}
