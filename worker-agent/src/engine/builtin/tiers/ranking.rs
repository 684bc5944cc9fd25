//! The blocks of one tier, in the order in which they have to go.

use std::collections::{BTreeMap, HashMap};

use clap::ValueEnum;
use kv_hashing::SequenceHash;

use super::CachedBlock;

/// Which block of a full tier goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The one that was used longest ago.
    #[default]
    Lru,
    /// The one that was used least often. Uses fade: a new block counts as much as the one that went last.
    Lfu,
}

/// A block and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held<P> {
    /// The block.
    pub block: CachedBlock,
    /// Where it is.
    pub place: P,
    /// How often it was used, in any tier below the arena; at least 1.
    pub uses: u64,
    /// Its tier's readers know of it.
    pub told: bool,
}

/// Weight, then the moment of the last use; unique by the latter.
type Key = (u64, u64);

/// The blocks of a tier. Every operation is O(log blocks).
#[derive(Debug)]
pub struct Ranking<P> {
    policy: Policy,
    held: HashMap<SequenceHash, (Held<P>, Key)>,
    /// The first goes first.
    order: BTreeMap<Key, SequenceHash>,
    /// Counts uses; the clock.
    now: u64,
    /// Weight of the last block that had to go (dynamic aging, as in LFU-DA): what was often used once goes in the end.
    age: u64,
}

impl<P: Copy> Ranking<P> {
    /// An empty tier.
    pub fn new(policy: Policy) -> Self {
        Self { policy, held: HashMap::new(), order: BTreeMap::new(), now: 0, age: 0 }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Where a block is.
    pub fn place(&self, hash: SequenceHash) -> Option<P> {
        self.held.get(&hash).map(|(held, _)| held.place)
    }

    /// Adds a block that is not here.
    pub fn insert(&mut self, held: Held<P>) {
        let key = self.key(held.uses);
        let before = self.held.insert(held.block.hash, (held, key));
        debug_assert!(before.is_none(), "a block is held twice");
        self.order.insert(key, held.block.hash);
    }

    /// Notes a use; false when the block is not here.
    pub fn touch(&mut self, hash: SequenceHash) -> bool {
        let Some((held, _)) = self.held.get(&hash) else { return false };
        let key = self.key(held.uses + 1);
        let (held, old) = self.held.get_mut(&hash).expect("just found");
        held.uses += 1;
        self.order.remove(&std::mem::replace(old, key));
        self.order.insert(key, hash);
        true
    }

    /// The tier's readers know of the block now; gives it when it is here and they did not.
    pub fn tell(&mut self, hash: SequenceHash) -> Option<CachedBlock> {
        let (held, _) = self.held.get_mut(&hash)?;
        (!std::mem::replace(&mut held.told, true)).then_some(held.block)
    }

    /// Takes out the block that has to go.
    pub fn pop(&mut self) -> Option<Held<P>> {
        let ((weight, _), hash) = self.order.pop_first()?;
        self.age = self.age.max(weight);
        self.held.remove(&hash).map(|(held, _)| held)
    }

    /// All blocks, the next to go first.
    pub fn next_to_go(&self) -> impl Iterator<Item = SequenceHash> {
        self.order.values().copied()
    }

    /// Takes out one block.
    pub fn remove(&mut self, hash: SequenceHash) -> Option<Held<P>> {
        let (held, key) = self.held.remove(&hash)?;
        self.order.remove(&key);
        Some(held)
    }

    /// Takes out all blocks, the next to go first.
    pub fn drain(&mut self) -> impl Iterator<Item = Held<P>> + use<P> {
        let (order, mut held) = (std::mem::take(&mut self.order), std::mem::take(&mut self.held));
        order.into_values().filter_map(move |hash| held.remove(&hash).map(|(held, _)| held))
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Held<P>> {
        self.held.values().map(|(held, _)| held)
    }

    fn key(&mut self, uses: u64) -> Key {
        self.now += 1;
        let weight = match self.policy {
            Policy::Lru => 0,
            Policy::Lfu => self.age + uses,
        };
        (weight, self.now)
    }
}

#[cfg(test)]
mod tests {
    use kv_hashing::BlockHash;

    use super::*;

    fn filled(policy: Policy, blocks: std::ops::Range<u64>) -> Ranking<u64> {
        let mut ranking = Ranking::new(policy);
        blocks.for_each(|n| ranking.insert(held(n, 1)));
        ranking
    }

    fn held(n: u64, uses: u64) -> Held<u64> {
        let block = CachedBlock { hash: SequenceHash(n), parent: None, local: BlockHash(n) };
        Held { block, place: n, uses, told: true }
    }

    fn order(mut ranking: Ranking<u64>) -> Vec<u64> {
        std::iter::from_fn(|| ranking.pop()).map(|held| held.place).collect()
    }

    #[test]
    fn lru_forgets_what_was_used_longest_ago() {
        let mut ranking = filled(Policy::Lru, 0..4);
        assert!(ranking.touch(SequenceHash(0)) && ranking.touch(SequenceHash(2)) && !ranking.touch(SequenceHash(9)));
        assert_eq!(ranking.remove(SequenceHash(3)).map(|held| held.place), Some(3));
        assert_eq!(order(ranking), [1, 0, 2]);
    }

    #[test]
    fn lfu_forgets_what_was_used_least() {
        let mut ranking = filled(Policy::Lfu, 0..4);
        [1, 1, 3, 0].into_iter().for_each(|n| _ = ranking.touch(SequenceHash(n)));
        assert_eq!(order(ranking), [2, 3, 0, 1]);
    }

    #[test]
    fn lfu_forgets_in_the_end_what_was_often_used_once() {
        let mut ranking = filled(Policy::Lfu, 0..2);
        (0..3).for_each(|_| _ = ranking.touch(SequenceHash(0)));
        // Each newcomer is used once, and replaces the one before.
        let gone: Vec<_> = (2..8)
            .map(|n| {
                let gone = ranking.pop().expect("two are here").place;
                ranking.insert(held(n, 1));
                gone
            })
            .collect();
        assert!(gone.contains(&0), "{gone:?}");
    }
}
