//! The whole state of a rank at one moment, and its form as events that rebuild it.
//!
//! Copying the state is cheap and happens under the owner's lock; ordering it is not, and happens here, afterwards.

use super::MAX_EVENT_BLOCKS;
use crate::event::{EngineHash, KvEvent, KvEventData, StoredBlock, Tier};

/// One held block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) tier: Tier,
    pub(super) block: StoredBlock,
    pub(super) parent: Option<EngineHash>,
}

/// Every block of a rank, and the event that this state includes.
#[derive(Clone, Debug)]
pub struct Snapshot {
    dp_rank: u32,
    last_id: Option<u64>,
    entries: Vec<Entry>,
}

/// "No block" in the links below.
const NONE: u32 = u32::MAX;

impl Snapshot {
    pub(super) fn new(dp_rank: u32, last_id: Option<u64>, entries: Vec<Entry>) -> Self {
        Self { dp_rank, last_id, entries }
    }

    /// Number of the newest event that this state includes: the reader's cursor.
    pub fn last_id(&self) -> Option<u64> {
        self.last_id
    }

    /// Blocks, over all tiers.
    pub fn blocks(&self) -> usize {
        self.entries.len()
    }

    /// The state as Stored events, parents before children, with each run of single children in one event of at most
    /// [`MAX_EVENT_BLOCKS`]. Their ids count from 0 and mean nothing. A block whose parent is gone keeps that parent's hash;
    /// of blocks that are each other's ancestors, which no sound engine has, each still comes once.
    ///
    /// Cost: a sort of the blocks, and one search for each of them.
    pub fn into_events(mut self) -> Vec<KvEvent> {
        self.entries.sort_unstable_by_key(|entry| (entry.tier, entry.block.engine));
        let (roots, children) = Children::of(&self.entries);
        let mut seen = vec![false; self.entries.len()];
        let mut events = Vec::new();
        let mut open = roots;
        open.reverse();
        // The second pass finds only what no root leads to: cycles.
        let mut rest = 0..self.entries.len() as u32;
        while let Some(head) = open.pop().or_else(|| rest.find(|&at| !seen[at as usize])) {
            if !seen[head as usize] {
                let data = self.run(head, &children, &mut seen, &mut open);
                let tier = self.entries[head as usize].tier;
                events.push(KvEvent { id: events.len() as u64, dp_rank: self.dp_rank, tier, data });
            }
        }
        events
    }

    /// The run that starts at `head`; what branches off it goes on `open`.
    fn run(&self, head: u32, children: &Children, seen: &mut [bool], open: &mut Vec<u32>) -> KvEventData {
        let Entry { tier, parent, .. } = self.entries[head as usize];
        let mut blocks = Vec::new();
        let mut next = Some(head);
        while let Some(at) = next.take() {
            seen[at as usize] = true;
            blocks.push(self.entries[at as usize].block);
            for child in children.iter(at).filter(|&child| !seen[child as usize]) {
                let continues = next.is_none() && blocks.len() < MAX_EVENT_BLOCKS;
                if continues && self.entries[child as usize].tier == tier {
                    next = Some(child);
                } else {
                    open.push(child);
                }
            }
        }
        KvEventData::Stored { parent, blocks }
    }
}

/// The children of each block, as lists threaded through two arrays.
struct Children {
    first: Vec<u32>,
    sibling: Vec<u32>,
}

impl Children {
    /// `entries` are sorted by tier and engine hash. Also returns the blocks without a parent here. A parent in the block's
    /// own tier is preferred, then the fastest tier that has it.
    fn of(entries: &[Entry]) -> (Vec<u32>, Self) {
        let find = |tier: Tier, engine: EngineHash| {
            entries.binary_search_by_key(&(tier, engine), |entry| (entry.tier, entry.block.engine)).ok()
        };
        let (mut roots, mut first, mut sibling) = (Vec::new(), vec![NONE; entries.len()], vec![NONE; entries.len()]);
        for (at, entry) in entries.iter().enumerate() {
            let parent = entry.parent.and_then(|parent| {
                let tiers = [entry.tier, Tier::Device, Tier::Host, Tier::Disk, Tier::Shared];
                tiers.into_iter().find_map(|tier| find(tier, parent))
            });
            match parent {
                Some(parent) => sibling[at] = std::mem::replace(&mut first[parent], at as u32),
                None => roots.push(at as u32),
            }
        }
        (roots, Self { first, sibling })
    }

    fn iter(&self, parent: u32) -> impl Iterator<Item = u32> {
        let link = |at: u32| (at != NONE).then_some(at);
        std::iter::successors(link(self.first[parent as usize]), move |&at| link(self.sibling[at as usize]))
    }
}
