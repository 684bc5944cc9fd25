//! Who owns which blocks of a run: one coverage mask for each owner, bit n for the run's block n.
//!
//! Up to two owners on devices are inline in the header. More spill into a set: a common mask, a bit for each slot that has
//! exactly it, and a list of the exceptions; a system prompt that all workers hold costs one bit each. Owners in lower tiers
//! are in a list of their own, absent in most runs.

use std::sync::atomic::{AtomicU64, Ordering};

use super::arena::{Allocator, Arena, Class};
use super::run::{OwnerWord, Run};
use crate::event::Tier;

/// Dense number of a rank.
pub(super) type Slot = u16;

/// Words before a set's bits: its lengths (exact words << 48 | exceptions << 32 | class << 24), and the common mask.
const SET_HEADER: usize = 2;

/// Length of a list of pairs, in its first word: class << 24 | length.
const LIST_LEN: u64 = 0xff_ffff;

/// Exceptions that a new set has room for beyond those it has.
const SLACK: usize = 4;

/// A set of owners, as a reader may see it: lengths are cut to what is there.
pub(super) struct OwnerSet<'a> {
    /// The mask that most have.
    pub(super) common: u64,
    /// A bit for each slot that has it.
    pub(super) exact: &'a [AtomicU64],
    /// Pairs of slot and mask.
    exceptions: &'a [AtomicU64],
}

impl<'a> OwnerSet<'a> {
    /// The set in a block.
    #[inline]
    pub(super) fn at(arena: &'a Arena, set: u32) -> Option<Self> {
        let words = arena.at(set)?;
        let (header, rest) = words.split_at_checked(SET_HEADER)?;
        let lengths = header[0].load(Ordering::Relaxed);
        let (exact, exceptions) = ((lengths >> 48) as usize, (lengths >> 32 & 0xffff) as usize);
        let (exact, rest) = rest.split_at_checked(exact)?;
        Some(Self { common: header[1].load(Ordering::Relaxed), exact, exceptions: rest.get(..2 * exceptions)? })
    }

    /// Owners with a mask of their own.
    #[inline]
    pub(super) fn exceptions(&self) -> impl Iterator<Item = (Slot, u64)> + 'a {
        let pairs = self.exceptions.chunks_exact(2);
        pairs.map(|pair| (pair[0].load(Ordering::Relaxed) as Slot, pair[1].load(Ordering::Relaxed)))
    }

    fn has_common(&self, slot: Slot) -> bool {
        let word = self.exact.get(usize::from(slot) / 64).map_or(0, |word| word.load(Ordering::Relaxed));
        word >> (slot % 64) & 1 == 1
    }

    fn all(&self) -> Vec<(Slot, u64)> {
        let mut all: Vec<(Slot, u64)> = self.exceptions().collect();
        for (index, word) in self.exact.iter().enumerate() {
            let mut word = word.load(Ordering::Relaxed);
            while word != 0 {
                all.push(((index * 64) as Slot + word.trailing_zeros() as Slot, self.common));
                word &= word - 1;
            }
        }
        all
    }
}

/// Owners in tiers below the device: slot, tier, mask.
#[inline]
pub(super) fn below<'a>(arena: &'a Arena, run: &Run<'_>) -> impl Iterator<Item = (Slot, Tier, u64)> + 'a {
    list(arena, run.below()).chunks_exact(2).map(|pair| {
        let (owner, mask) = (pair[0].load(Ordering::Relaxed), pair[1].load(Ordering::Relaxed));
        ((owner >> 2) as Slot, tier(owner), mask)
    })
}

fn list(arena: &Arena, list: u32) -> &[AtomicU64] {
    if list == 0 {
        return &[];
    }
    let Some((header, pairs)) = arena.at(list).and_then(<[AtomicU64]>::split_first) else { return &[] };
    pairs.get(..2 * (header.load(Ordering::Relaxed) & LIST_LEN) as usize).unwrap_or(&[])
}

fn tier(owner: u64) -> Tier {
    [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared][(owner & 3) as usize]
}

fn owner(slot: Slot, tier: Tier) -> u64 {
    u64::from(slot) << 2 | tier as u64
}

/// Every owner on devices.
pub(super) fn on_device(arena: &Arena, run: &Run<'_>) -> Vec<(Slot, u64)> {
    let word = run.owners();
    if word.set() != 0 {
        return OwnerSet::at(arena, word.set()).map_or_else(Vec::new, |set| set.all());
    }
    let inline = word.slots().into_iter().enumerate();
    inline.filter_map(|(at, slot)| Some((slot?, run.mask(at)))).collect()
}

/// What a slot covers in a tier.
pub(super) fn mask(arena: &Arena, run: &Run<'_>, slot: Slot, tier: Tier) -> u64 {
    if tier != Tier::Device {
        let found = below(arena, run).find(|(other, its, _)| (*other, *its) == (slot, tier));
        return found.map_or(0, |(_, _, mask)| mask);
    }
    let word = run.owners();
    if word.set() == 0 {
        let at = word.slots().iter().position(|other| *other == Some(slot));
        return at.map_or(0, |at| run.mask(at));
    }
    let Some(set) = OwnerSet::at(arena, word.set()) else { return 0 };
    if set.has_common(slot) {
        return set.common;
    }
    set.exceptions().find(|(other, _)| *other == slot).map_or(0, |(_, mask)| mask)
}

/// What anybody covers in any tier.
pub(super) fn union(arena: &Arena, run: &Run<'_>) -> u64 {
    let lower = below(arena, run).fold(0, |bits, (_, _, mask)| bits | mask);
    let word = run.owners();
    if word.set() == 0 {
        let inline = word.slots().into_iter().enumerate();
        return inline.filter(|(_, slot)| slot.is_some()).fold(lower, |bits, (at, _)| bits | run.mask(at));
    }
    let Some(set) = OwnerSet::at(arena, word.set()) else { return lower };
    let common = if set.exact.iter().any(|word| word.load(Ordering::Relaxed) != 0) { set.common } else { 0 };
    set.exceptions().fold(lower | common, |bits, (_, mask)| bits | mask)
}

/// Changes a slot's mask in a tier. False when there is no memory for it; then the slot may cover less.
pub(super) fn set_mask(
    arena: &Arena,
    allocator: &mut Allocator,
    run: &Run<'_>,
    slot: Slot,
    tier: Tier,
    mask: u64,
) -> bool {
    if tier != Tier::Device {
        return set_below(arena, allocator, run, owner(slot, tier), mask);
    }
    let word = run.owners();
    if word.set() == 0 {
        let slots = word.slots();
        if let Some(at) = slots.iter().position(|other| *other == Some(slot)) {
            if mask != 0 {
                run.set_mask(at, mask);
            } else {
                // Its place may get another owner: who has read the old word must not see the new owner's mask.
                run.begin();
                let mut slots = slots;
                slots[at] = None;
                run.set_owners(OwnerWord::new(slots, 0));
                run.end();
            }
            return true;
        }
        if mask == 0 {
            return true;
        }
        if let Some(at) = slots.iter().position(Option::is_none) {
            let mut slots = slots;
            slots[at] = Some(slot);
            run.set_mask(at, mask);
            run.set_owners(OwnerWord::new(slots, 0));
            return true;
        }
    } else if mask != 0
        && let Some(set) = OwnerSet::at(arena, word.set())
    {
        if set.has_common(slot) && set.common == mask {
            return true;
        }
        let pair = set.exceptions.chunks_exact(2).find(|pair| pair[0].load(Ordering::Relaxed) == u64::from(slot));
        if let Some(pair) = pair
            && mask != set.common
        {
            pair[1].store(mask, Ordering::Release);
            return true;
        }
    }
    let mut owners = on_device(arena, run);
    owners.retain(|(other, _)| *other != slot);
    let others = owners.len();
    if mask != 0 {
        owners.push((slot, mask));
    }
    if rewrite(arena, allocator, run, &owners) {
        return true;
    }
    owners.truncate(others);
    // Without the newcomer it fits where it is: nobody else's mask has changed.
    rewrite(arena, allocator, run, &owners);
    false
}

/// Replaces all owners on devices.
fn rewrite(arena: &Arena, allocator: &mut Allocator, run: &Run<'_>, owners: &[(Slot, u64)]) -> bool {
    let old = run.owners().set();
    if let [] | [_] | [_, _] = owners {
        run.begin();
        for (at, (_, mask)) in owners.iter().enumerate() {
            run.set_mask(at, *mask);
        }
        let slot = |at: usize| owners.get(at).map(|(slot, _)| *slot);
        run.set_owners(OwnerWord::new([slot(0), slot(1)], 0));
        run.end();
        free_set(arena, allocator, old);
        return true;
    }
    let common = most_frequent(owners);
    let exceptions: Vec<(Slot, u64)> = owners.iter().copied().filter(|(_, mask)| *mask != common).collect();
    let highest = owners.iter().map(|(slot, _)| *slot).max().unwrap_or_default();
    let exact = usize::from(highest) / 64 + 1;
    let needed = SET_HEADER + exact + 2 * exceptions.len();
    let fits = |class: Class| class.words() >= needed;
    let (set, class) = match class_of(arena, old).filter(|class| old != 0 && fits(*class)) {
        Some(class) => (old, class),
        None => {
            let class = Class::set(needed + 2 * SLACK).or_else(|| Class::set(needed));
            let Some(class) = class else { return false };
            let Some(set) = allocator.take_set(arena, class) else { return false };
            (set, class)
        }
    };
    let Some(words) = arena.at(set) else { return false };
    run.begin();
    let put = |at: usize, value: u64| words[at].store(value, Ordering::Relaxed);
    put(0, (exact as u64) << 48 | (exceptions.len() as u64) << 32 | class_bits(class));
    put(1, common);
    (0..exact).for_each(|word| put(SET_HEADER + word, 0));
    for (slot, _) in owners.iter().filter(|(_, mask)| *mask == common) {
        let at = SET_HEADER + usize::from(*slot) / 64;
        put(at, words[at].load(Ordering::Relaxed) | 1 << (slot % 64));
    }
    for (n, (slot, mask)) in exceptions.iter().enumerate() {
        put(SET_HEADER + exact + 2 * n, u64::from(*slot));
        put(SET_HEADER + exact + 2 * n + 1, *mask);
    }
    run.set_owners(OwnerWord::new([None; 2], set));
    run.end();
    if set != old {
        free_set(arena, allocator, old);
    }
    true
}

fn most_frequent(owners: &[(Slot, u64)]) -> u64 {
    let mut masks: Vec<u64> = owners.iter().map(|(_, mask)| *mask).collect();
    masks.sort_unstable();
    let groups = masks.chunk_by(|a, b| a == b);
    groups.max_by_key(|group| group.len()).map_or(0, |group| group[0])
}

fn set_below(arena: &Arena, allocator: &mut Allocator, run: &Run<'_>, owner: u64, mask: u64) -> bool {
    let old = run.below();
    let pairs = list(arena, old);
    let found = pairs.chunks_exact(2).position(|pair| pair[0].load(Ordering::Relaxed) == owner);
    match found {
        Some(at) if mask != 0 => pairs[2 * at + 1].store(mask, Ordering::Release),
        Some(at) => {
            let last = pairs.len() - 2;
            run.begin();
            for word in 0..2 {
                pairs[2 * at + word].store(pairs[last + word].load(Ordering::Relaxed), Ordering::Relaxed);
            }
            set_len(arena, old, last / 2);
            if last == 0 {
                run.set_below(0);
            }
            run.end();
            if last == 0 {
                free_set(arena, allocator, old);
            }
        }
        None if mask == 0 => {}
        None => return append_below(arena, allocator, run, owner, mask),
    }
    true
}

fn append_below(arena: &Arena, allocator: &mut Allocator, run: &Run<'_>, owner: u64, mask: u64) -> bool {
    let old = run.below();
    let pairs = list(arena, old);
    let (n, room) = (pairs.len() / 2, class_of(arena, old).filter(|_| old != 0).map_or(0, |class| class.words()));
    let mut list = old;
    if room < 1 + 2 * (n + 1) {
        let Some(class) = Class::set(2 * (1 + 2 * (n + 1))) else { return false };
        let Some(new) = allocator.take_set(arena, class) else { return false };
        let Some(words) = arena.at(new) else { return false };
        words[0].store(class_bits(class) | n as u64, Ordering::Relaxed);
        for (to, from) in words[1..].iter().zip(pairs) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        list = new;
    }
    let Some(words) = arena.at(list) else { return false };
    run.begin();
    words[1 + 2 * n].store(owner, Ordering::Relaxed);
    words[2 + 2 * n].store(mask, Ordering::Relaxed);
    set_len(arena, list, n + 1);
    run.set_below(list);
    run.end();
    if list != old {
        free_set(arena, allocator, old);
    }
    true
}

/// Frees what a run without owners still has.
pub(super) fn release(arena: &Arena, allocator: &mut Allocator, run: &Run<'_>) {
    free_set(arena, allocator, run.owners().set());
    free_set(arena, allocator, run.below());
}

fn free_set(arena: &Arena, allocator: &mut Allocator, set: u32) {
    if set != 0
        && let Some(class) = class_of(arena, set)
    {
        allocator.give(set, class);
    }
}

fn class_bits(class: Class) -> u64 {
    u64::from(class.number()) << 24
}

/// Size class of a set or list.
fn class_of(arena: &Arena, set: u32) -> Option<Class> {
    arena.at(set).map(|words| Class::from_number((words[0].load(Ordering::Relaxed) >> 24) as u8))
}

fn set_len(arena: &Arena, list: u32, len: usize) {
    if let Some(words) = arena.at(list) {
        let class = words[0].load(Ordering::Relaxed) & !LIST_LEN;
        words[0].store(class | len as u64, Ordering::Relaxed);
    }
}
