//! What happened to blocks, in order, with neighbouring blocks in one event.

use kv_hashing::SequenceHash;
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier};

use crate::engine::ArenaEvent;

/// Events that nobody has taken yet.
#[derive(Debug, Default)]
pub struct EventLog(Vec<ArenaEvent>);

impl EventLog {
    /// A block has come into a tier. It extends the last event when it continues its run.
    pub fn stored(&mut self, tier: Tier, parent: Option<SequenceHash>, block: StoredBlock) {
        let parent = parent.map(|hash| EngineHash(hash.0));
        if let Some(ArenaEvent { tier: last_tier, data: KvEventData::Stored { blocks, .. } }) = self.0.last_mut()
            && *last_tier == tier
            && parent.is_some()
            && blocks.last().map(|last| last.engine) == parent
        {
            blocks.push(block);
            return;
        }
        self.0.push(ArenaEvent { tier, data: KvEventData::Stored { parent, blocks: vec![block] } });
    }

    /// A block is gone from a tier.
    pub fn removed(&mut self, tier: Tier, hash: SequenceHash) {
        let gone = EngineHash(hash.0);
        match self.0.last_mut() {
            Some(ArenaEvent { tier: last_tier, data: KvEventData::Removed { blocks } }) if *last_tier == tier => {
                blocks.push(gone);
            }
            _ => self.0.push(ArenaEvent { tier, data: KvEventData::Removed { blocks: vec![gone] } }),
        }
    }

    /// Every block is gone, from every tier.
    pub fn cleared(&mut self) {
        self.0.push(ArenaEvent { tier: Tier::Device, data: KvEventData::Cleared });
    }

    /// What happened since the last call.
    pub fn take(&mut self) -> Vec<ArenaEvent> {
        std::mem::take(&mut self.0)
    }
}
