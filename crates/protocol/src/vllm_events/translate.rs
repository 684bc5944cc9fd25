//! What engine events mean: the tier, and every block by the hash of its tokens.
//!
//! Only events of the main cache are of use: of a model whose layers differ in what they keep, a prefix is reusable when the
//! layers that see all of it have it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use kv_hashing::{BlockHash, BlockSize, HashSpace, media_hash};

use super::{BlockRemoved, BlockStored, EngineEvent, ExtraKey, Place, TokenIds};
use crate::kv_event::{KvCacheEventData, Removed, StorageTier, Stored, StoredBlock};

/// An event as an index takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Translated {
    /// Where the blocks are.
    pub tier: StorageTier,
    /// What happened to them.
    pub data: KvCacheEventData,
}

/// Why an event is left out. The blocks in it are then not known, and so are those that continue them.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refused {
    /// Requests are cut into blocks of another size.
    #[error("blocks of {0} tokens")]
    BlockSize(u32),
    /// The tokens are not those of as many blocks.
    #[error("{tokens} tokens in {blocks} blocks")]
    Shape {
        /// How many tokens.
        tokens: usize,
        /// How many blocks.
        blocks: usize,
    },
    /// A block twice in one run, or its own parent.
    #[error("a block that is its own ancestor")]
    Repeats,
    /// Not a place that we know of.
    #[error("unknown medium {0:?}")]
    Medium(String),
}

impl Refused {
    /// Label under which it is counted.
    pub fn label(&self) -> &'static str {
        match self {
            Self::BlockSize(_) => "block size",
            Self::Shape { .. } => "shape",
            Self::Repeats => "repeated block",
            Self::Medium(_) => "unknown medium",
        }
    }
}

/// Translates the events of one rank, in their order.
#[derive(Debug)]
pub struct Translator {
    block_size: BlockSize,
    /// Blocks of sequences with a cache namespace: only the first event of a sequence tells it.
    namespaced: HashMap<u64, Namespaced>,
}

/// A block in a namespace, and where it is: what continues it is of the same one until its last copy is gone.
#[derive(Debug)]
struct Namespaced {
    space: HashSpace,
    /// One bit for each tier, by its number.
    tiers: u8,
}

impl Translator {
    /// For requests that are cut into blocks of this size.
    pub fn new(block_size: BlockSize) -> Self {
        Self { block_size, namespaced: HashMap::new() }
    }

    /// What `event` means; `None` for one that says nothing of reusable prefixes.
    pub fn translate(&mut self, event: &EngineEvent) -> Result<Option<Translated>, Refused> {
        match event {
            EngineEvent::Stored(stored) if is_main(&stored.place) => self.stored(stored).map(Some),
            EngineEvent::Removed(removed) if is_main(&removed.place) => self.removed(removed).map(Some),
            EngineEvent::Cleared => {
                self.namespaced.clear();
                Ok(Some(Translated { tier: StorageTier::Device, data: KvCacheEventData::Cleared }))
            }
            EngineEvent::Stored(_) | EngineEvent::Removed(_) | EngineEvent::Unknown => Ok(None),
        }
    }

    fn stored(&mut self, stored: &BlockStored) -> Result<Translated, Refused> {
        let tier = tier(&stored.place)?;
        if stored.block_size as usize != self.block_size.get() {
            return Err(Refused::BlockSize(stored.block_size));
        }
        let mut seen: HashSet<u64> = stored.parent_block_hash.into_iter().collect();
        if !stored.block_hashes.iter().all(|hash| seen.insert(*hash)) {
            return Err(Refused::Repeats);
        }
        let inherited = stored.parent_block_hash.and_then(|parent| Some(self.namespaced.get(&parent)?.space));
        let namespace = namespace(stored);
        let space = inherited.unwrap_or_else(|| HashSpace::new(adapter(stored).as_deref(), namespace));
        let locals = self.locals(stored, space)?;
        if inherited.is_some() || namespace.is_some() {
            for hash in &stored.block_hashes {
                let tiers = self.namespaced.get(hash).map_or(0, |block| block.tiers) | bit(tier);
                self.namespaced.insert(*hash, Namespaced { space, tiers });
            }
        }
        let blocks = stored.block_hashes.iter().zip(locals);
        let blocks = blocks.map(|(&block_hash, local)| StoredBlock { block_hash, tokens_hash: local.0 }).collect();
        let parent_hash = stored.parent_block_hash;
        let data = KvCacheEventData::Stored(Stored { parent_hash, start_position: None, blocks });
        Ok(Translated { tier, data })
    }

    fn locals(&self, stored: &BlockStored, space: HashSpace) -> Result<Vec<BlockHash>, Refused> {
        let (size, blocks) = (self.block_size.get(), stored.block_hashes.len());
        // A block of bigrams reaches one token into the next.
        let (tokens, beyond) = match &stored.token_ids {
            TokenIds::Tokens(tokens) => (tokens, 0),
            TokenIds::Bigrams(tokens) => (tokens, 1),
        };
        if tokens.len() != blocks * size + beyond {
            return Err(Refused::Shape { tokens: tokens.len(), blocks });
        }
        let local = |at: usize| {
            let keys = stored.extra_keys.get(at).map_or(&[][..], Vec::as_slice);
            space.block(&tokens[at * size..(at + 1) * size + beyond], &media(keys, stored, at))
        };
        Ok((0..blocks).map(local).collect())
    }

    fn removed(&mut self, removed: &BlockRemoved) -> Result<Translated, Refused> {
        let tier = tier(&removed.place)?;
        if !self.namespaced.is_empty() {
            for hash in &removed.block_hashes {
                if let Entry::Occupied(mut block) = self.namespaced.entry(*hash) {
                    block.get_mut().tiers &= !bit(tier);
                    if block.get().tiers == 0 {
                        block.remove();
                    }
                }
            }
        }
        let data = KvCacheEventData::Removed(Removed { block_hashes: removed.block_hashes.clone() });
        Ok(Translated { tier, data })
    }
}

/// Whether blocks of this place are what a prefix match finds.
fn is_main(place: &Place) -> bool {
    match place.kind.as_deref() {
        Some(kind) => matches!(kind, "full_attention" | "mla_attention"),
        None => place.group.is_none_or(|group| group == 0),
    }
}

fn tier(place: &Place) -> Result<StorageTier, Refused> {
    let Some(medium) = place.medium.as_deref() else { return Ok(StorageTier::Device) };
    match medium.to_ascii_uppercase().as_str() {
        "GPU" | "DEVICE" => Ok(StorageTier::Device),
        "CPU" | "CPU_PINNED" | "CPU_TIER1" => Ok(StorageTier::HostPinned),
        "CPU_TIER2" | "DISK" | "NVME" | "STORAGE" => Ok(StorageTier::Disk),
        "EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED" => Ok(StorageTier::External),
        _ => Err(Refused::Medium(medium.to_owned())),
    }
}

fn bit(tier: StorageTier) -> u8 {
    1 << tier as u8
}

/// What stands for the adapter in hashes: its name. A nameless one gets a name that no request has, so that its blocks are not
/// taken for the base model's.
fn adapter(stored: &BlockStored) -> Option<String> {
    stored.lora_name.clone().or_else(|| stored.lora_id.map(|id| format!("\u{0}{id}")))
}

/// The cache namespace of a sequence: among the keys of its first block, a name that is neither the adapter's nor a medium's.
fn namespace(stored: &BlockStored) -> Option<&str> {
    if stored.parent_block_hash.is_some() {
        return None;
    }
    stored.extra_keys.first()?.iter().find_map(|key| match key {
        ExtraKey::Name(name) if Some(name) != stored.lora_name.as_ref() && !is_digest(name) => Some(name.as_str()),
        _ => None,
    })
}

/// Hashes of the media in a block, and of whatever else makes it differ from a block of the same tokens.
fn media(keys: &[ExtraKey], stored: &BlockStored, at: usize) -> Vec<u64> {
    let names_namespace = at == 0 && stored.parent_block_hash.is_none();
    let hash = |key: &ExtraKey| match key {
        ExtraKey::Name(name) if Some(name) == stored.lora_name.as_ref() => None,
        ExtraKey::Name(name) if names_namespace && !is_digest(name) => None,
        ExtraKey::Name(name) | ExtraKey::Media(name) => Some(media_hash(name)),
        ExtraKey::Other => Some(u64::MAX),
    };
    keys.iter().filter_map(hash).collect()
}

/// Engines name a medium by 64 hexadecimal digits where they do not tell where it is.
fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}
