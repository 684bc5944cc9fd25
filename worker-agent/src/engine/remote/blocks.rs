//! Which blocks the server holds, as its events tell: told on to routers, and looked up for what a prompt can reuse.
//!
//! A block counts only if the one before it does: a reader that joined late must not tell of blocks that no prompt can be
//! matched with. The server tells of them anew when it reuses them.

use std::collections::HashMap;
use std::sync::Arc;

use engine_feed::{Note, Sink};
use kv_hashing::{BlockHash, BlockSize, HashSpace};
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier};
use protocol::kv_event::{KvCacheEventData, StorageTier};
use protocol::vllm_events::{EventBatch, Refused, Translated, Translator};

use super::Shared;
use super::dialect::{Told, ToldBlock, ToldEvent};
use crate::engine::ArenaEvent;

/// All blocks are gone, in every tier.
pub(super) fn cleared() -> ArenaEvent {
    ArenaEvent { tier: Tier::Device, data: KvEventData::Cleared }
}

/// The blocks that the server holds.
#[derive(Debug)]
pub(super) struct Held {
    block_size: BlockSize,
    /// In each tier, in the order of [`Tier`]: the block before it, and its tokens.
    tiers: [HashMap<EngineHash, Place>; 4],
    /// Blocks on the device by what they are.
    children: HashMap<Place, EngineHash>,
}

/// All tiers, fastest first.
const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared];

/// The block before, and the hash of the tokens.
type Place = (Option<EngineHash>, BlockHash);

impl Held {
    pub(super) fn new(block_size: BlockSize) -> Self {
        Self { block_size, tiers: Default::default(), children: HashMap::new() }
    }

    /// Blocks on the device.
    pub(super) fn on_device(&self) -> usize {
        self.tiers[Tier::Device as usize].len()
    }

    /// Whether nothing is held.
    fn is_empty(&self) -> bool {
        self.tiers.iter().all(HashMap::is_empty)
    }

    /// Nothing is held.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.block_size);
    }

    /// How many leading blocks of `tokens` are on the device. Cost: a hash and a look-up for each block.
    pub(super) fn prefix(&self, space: HashSpace, tokens: &[u32]) -> usize {
        let mut parent = None;
        let held = |block: &BlockHash| {
            parent = self.children.get(&(parent, *block)).copied();
            parent.is_some()
        };
        tokens.chunks_exact(self.block_size.get()).map(|block| space.block(block, &[])).take_while(held).count()
    }

    /// Takes an event; gives back what is to be told of it. False: it continues a block that is not known.
    fn apply(&mut self, tier: Tier, data: KvEventData) -> Result<Option<ArenaEvent>, UnknownParent> {
        let data = match data {
            KvEventData::Stored { parent, blocks } => {
                if parent.is_some_and(|parent| !self.tiers.iter().any(|held| held.contains_key(&parent))) {
                    return Err(UnknownParent);
                }
                self.store(tier, parent, &blocks);
                KvEventData::Stored { parent, blocks }
            }
            KvEventData::Removed { blocks } => {
                let known: Vec<EngineHash> = blocks.into_iter().filter(|block| self.remove(tier, *block)).collect();
                if known.is_empty() {
                    return Ok(None);
                }
                KvEventData::Removed { blocks: known }
            }
            KvEventData::Cleared => {
                self.clear();
                KvEventData::Cleared
            }
        };
        Ok(Some(ArenaEvent { tier, data }))
    }

    fn store(&mut self, tier: Tier, parent: Option<EngineHash>, blocks: &[StoredBlock]) {
        let mut parent = parent;
        for block in blocks {
            let place = (parent, block.local);
            self.tiers[tier as usize].insert(block.engine, place);
            if tier == Tier::Device {
                self.children.insert(place, block.engine);
            }
            parent = Some(block.engine);
        }
    }

    /// The tier of a block, the fastest one if there are several.
    fn tier_of(&self, block: EngineHash) -> Option<Tier> {
        TIERS.into_iter().find(|&tier| self.tiers[tier as usize].contains_key(&block))
    }

    /// Moves a block to another tier; gives back what is to be told of it.
    fn transfer(&mut self, block: EngineHash, to: Tier) -> Vec<ArenaEvent> {
        let Some(from) = self.tier_of(block).filter(|&from| from != to) else { return Vec::new() };
        let (parent, local) = self.tiers[from as usize][&block];
        let stored = vec![StoredBlock { engine: block, local }];
        self.store(to, parent, &stored);
        self.remove(from, block);
        vec![
            ArenaEvent { tier: to, data: KvEventData::Stored { parent, blocks: stored } },
            ArenaEvent { tier: from, data: KvEventData::Removed { blocks: vec![block] } },
        ]
    }

    fn remove(&mut self, tier: Tier, block: EngineHash) -> bool {
        let Some(place) = self.tiers[tier as usize].remove(&block) else { return false };
        if tier == Tier::Device && self.children.get(&place) == Some(&block) {
            self.children.remove(&place);
        }
        true
    }
}

/// An event continues a block that is not known.
#[derive(Debug, PartialEq)]
struct UnknownParent;

/// Takes the server's events.
pub(super) struct Listener {
    shared: Arc<Shared>,
    dp_rank: u32,
    translator: Translator,
    /// Somebody has been told that the port is taken.
    unbound: bool,
    /// Somebody has been told that the blocks are of another size.
    warned: bool,
}

impl Listener {
    pub(super) fn new(shared: Arc<Shared>, dp_rank: u32) -> Self {
        let translator = Translator::new(shared.info.block_size);
        Self { shared, dp_rank, translator, unbound: false, warned: false }
    }

    fn apply(&mut self, translated: Translated) -> Result<(), &'static str> {
        let tier = match translated.tier {
            StorageTier::Device => Tier::Device,
            StorageTier::HostPinned => Tier::Host,
            StorageTier::Disk => Tier::Disk,
            StorageTier::External => Tier::Shared,
            StorageTier::Unknown => return Err("unknown medium"),
        };
        let told = self.shared.held.lock().apply(tier, data(translated.data)).map_err(|_| "unknown parent")?;
        told.into_iter().for_each(|event| self.shared.tell(event));
        Ok(())
    }

    fn refuse(&mut self, refused: &Refused) {
        self.shared.metrics.refused(refused.label()).inc();
        let (Refused::BlockSize(theirs), 0) = (refused, self.shared.held.lock().on_device()) else { return };
        if !std::mem::replace(&mut self.warned, true) {
            let ours = self.shared.info.block_size.get();
            tracing::warn!(theirs, ours, "the engine's KV blocks are of another size than it said");
        }
    }
}

/// Takes the events that a server was asked for.
pub(super) struct PolledBlocks {
    shared: Arc<Shared>,
    dp_rank: u32,
    /// Number of the next event.
    next: Option<u64>,
    /// The widest window so far.
    window: u64,
}

impl PolledBlocks {
    pub(super) fn new(shared: Arc<Shared>, dp_rank: u32) -> Self {
        Self { shared, dp_rank, next: None, window: 0 }
    }

    pub(super) fn take(&mut self, told: Vec<Told>) {
        for told in told {
            if self.next.is_some_and(|next| next != told.number) {
                self.shared.metrics.event_gaps.inc();
                self.forget();
            }
            self.next = Some(told.number.wrapping_add(1));
            self.window = self.window.max(told.window);
            if told.window < self.window {
                self.shared.metrics.refused("other window").inc();
                continue;
            }
            // Without ranks there is one.
            if told.dp_rank.unwrap_or(self.dp_rank) == self.dp_rank {
                self.apply(told.event);
            } else {
                self.shared.metrics.refused("other rank").inc();
            }
        }
    }

    fn forget(&self) {
        self.shared.metrics.event_resyncs.inc();
        self.shared.held.lock().clear();
        self.shared.tell(cleared());
    }

    fn apply(&self, event: ToldEvent) {
        match event {
            ToldEvent::Created if self.shared.held.lock().is_empty() => {}
            ToldEvent::Created => self.forget(),
            ToldEvent::Stored { parent, blocks } => self.store(parent, blocks),
            ToldEvent::Removed(blocks) => {
                for block in blocks {
                    let Some(tier) = self.shared.held.lock().tier_of(block) else { continue };
                    self.put(tier, KvEventData::Removed { blocks: vec![block] });
                }
            }
            ToldEvent::Moved { block, to } => {
                let told = self.shared.held.lock().transfer(block, to);
                told.into_iter().for_each(|event| self.shared.tell(event));
            }
            ToldEvent::Useless(reason) => _ = self.shared.metrics.refused(reason).inc(),
        }
    }

    /// Whole blocks, as far as each follows the one before; the server also tells of the part of a block.
    fn store(&self, mut parent: Option<EngineHash>, blocks: Vec<ToldBlock>) {
        let size = self.shared.info.block_size.get();
        for block in blocks {
            let Some(tokens) = block.tokens else {
                self.shared.metrics.refused("not only tokens").inc();
                return;
            };
            if tokens.len() != size {
                self.shared.metrics.refused("partial block").inc();
                return;
            }
            let local = HashSpace::default().block(&tokens, &[]);
            let blocks = vec![StoredBlock { engine: block.hash, local }];
            self.put(block.tier, KvEventData::Stored { parent, blocks });
            parent = Some(block.hash);
        }
    }

    fn put(&self, tier: Tier, data: KvEventData) {
        let told = self.shared.held.lock().apply(tier, data);
        match told {
            Ok(event) => event.into_iter().for_each(|event| self.shared.tell(event)),
            Err(UnknownParent) => _ = self.shared.metrics.refused("unknown parent").inc(),
        }
    }
}

impl Sink for Listener {
    async fn take(&mut self, _sequence: u64, batch: EventBatch) {
        if batch.dp_rank.unwrap_or(self.dp_rank) != self.dp_rank {
            self.shared.metrics.refused("other rank").inc();
            return;
        }
        for event in &batch.events {
            match self.translator.translate(event) {
                Ok(None) => {}
                Ok(Some(translated)) => {
                    if let Err(reason) = self.apply(translated) {
                        self.shared.metrics.refused(reason).inc();
                    }
                }
                Err(refused) => self.refuse(&refused),
            }
        }
    }

    async fn forget(&mut self) {
        self.shared.metrics.event_resyncs.inc();
        self.translator = Translator::new(self.shared.info.block_size);
        self.shared.held.lock().clear();
        self.shared.tell(cleared());
    }

    fn note(&mut self, note: Note) {
        let metrics = &self.shared.metrics;
        match note {
            Note::Gap => _ = metrics.event_gaps.inc(),
            Note::Restarted => {
                tracing::info!("the numbers of events went backwards: the engine restarted");
                self.shared.suspect.notify_one();
            }
            Note::Replayed => _ = metrics.event_replays.inc(),
            Note::NotReplayed(error) => tracing::debug!(%error, "KV events could not be replayed"),
            Note::Duplicate => {}
            Note::Refused(reason) => _ = metrics.refused(reason).inc(),
            Note::Unbound(error) => {
                if !std::mem::replace(&mut self.unbound, true) {
                    tracing::warn!(%error, "cannot listen for the engine's KV events; trying again");
                }
            }
            Note::Ended(error) => tracing::debug!(%error, "the subscription to KV events ended"),
        }
    }
}

fn data(data: KvCacheEventData) -> KvEventData {
    match data {
        KvCacheEventData::Stored(stored) => KvEventData::Stored {
            parent: stored.parent_hash.map(EngineHash),
            blocks: stored
                .blocks
                .iter()
                .map(|block| StoredBlock { engine: EngineHash(block.block_hash), local: BlockHash(block.tokens_hash) })
                .collect(),
        },
        KvCacheEventData::Removed(removed) => {
            KvEventData::Removed { blocks: removed.block_hashes.into_iter().map(EngineHash).collect() }
        }
        KvCacheEventData::Cleared => KvEventData::Cleared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 2;

    fn held() -> Held {
        Held::new(BlockSize::new(SIZE as u32).expect("not zero"))
    }

    fn stored(tokens: &[u32], first: u64, parent: Option<u64>) -> KvEventData {
        let blocks = tokens.chunks_exact(SIZE).zip(first..);
        let block = |(tokens, engine): (&[u32], u64)| StoredBlock {
            engine: EngineHash(engine),
            local: HashSpace::default().block(tokens, &[]),
        };
        KvEventData::Stored { parent: parent.map(EngineHash), blocks: blocks.map(block).collect() }
    }

    fn removed(blocks: &[u64]) -> KvEventData {
        KvEventData::Removed { blocks: blocks.iter().copied().map(EngineHash).collect() }
    }

    #[test]
    fn a_prompt_reuses_the_blocks_from_its_beginning_on() {
        let (mut held, space) = (held(), HashSpace::default());
        held.apply(Tier::Device, stored(&[1, 2, 3, 4], 10, None)).expect("known");
        held.apply(Tier::Device, stored(&[5, 6], 12, Some(11))).expect("known");
        assert_eq!((held.prefix(space, &[1, 2, 3, 4, 5, 6, 7]), held.on_device()), (3, 3));
        assert_eq!(
            (held.prefix(space, &[1, 2, 9, 9]), held.prefix(space, &[3, 4]), held.prefix(space, &[1])),
            (1, 0, 0)
        );
        assert_eq!(held.prefix(HashSpace::new(Some("lora"), None), &[1, 2]), 0);
        held.apply(Tier::Device, removed(&[11])).expect("known");
        assert_eq!(held.prefix(space, &[1, 2, 3, 4, 5, 6]), 1);
        held.apply(Tier::Device, KvEventData::Cleared).expect("known");
        assert_eq!((held.prefix(space, &[1, 2]), held.on_device()), (0, 0));
    }

    #[test]
    fn what_nobody_can_match_is_not_told() {
        let mut held = held();
        assert_eq!(held.apply(Tier::Device, stored(&[5, 6], 12, Some(11))), Err(UnknownParent));
        assert_eq!(held.apply(Tier::Device, removed(&[12])), Ok(None), "it was never told of");
        held.apply(Tier::Host, stored(&[3, 4], 11, None)).expect("known");
        let told = held.apply(Tier::Device, stored(&[5, 6], 12, Some(11))).expect("its parent is in another tier");
        assert!(told.is_some());
        let told = held.apply(Tier::Host, removed(&[11, 99])).expect("known");
        assert_eq!(told, Some(ArenaEvent { tier: Tier::Host, data: removed(&[11]) }));
    }

    #[test]
    fn a_block_that_is_told_of_twice_is_held_once() {
        let (mut held, space) = (held(), HashSpace::default());
        for _ in 0..2 {
            held.apply(Tier::Device, stored(&[1, 2], 10, None)).expect("known");
        }
        assert_eq!(held.on_device(), 1);
        held.apply(Tier::Device, removed(&[10])).expect("known");
        assert_eq!((held.on_device(), held.prefix(space, &[1, 2])), (0, 0));
    }
}
