//! Readers beside the writer, step by step on one thread: at every point that a reader comes to the writer does something, and
//! at every point that the writer comes to a reader looks. What it finds must be what was there before, after or in between.
//!
//! Plain stress does not notice when all checks are gone; this does, and shows it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::*;
use crate::tree::pause::{with_checks_off, with_hook};

/// Contents are few, so that runs are shared, freed and used again: conversations of 8-block turns on two system prompts.
fn path(conversation: u64, turns: usize) -> Vec<u64> {
    let mut path: Vec<u64> = (0..5).map(|at| 1000 + conversation % 2 * 100 + at).collect();
    path.extend((0..turns * 8).map(|at| conversation * 1000 + 10_000 + at as u64));
    path
}

/// A small generator, so that a failure names its seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn random_op(dice: &mut Dice) -> Op {
    let (worker, conversation) = (dice.roll(4), dice.roll(6));
    let turns = 1 + dice.roll(3) as usize;
    let whole = path(conversation, turns);
    let rank = rank(worker, 0);
    match dice.roll(20) {
        0 => Op::RemoveWorker(rank.worker),
        1 => Op::Apply(rank, Tier::Device, KvEventData::Cleared),
        2..9 => {
            let from = whole.len() - 1 - dice.roll(whole.len() as u64 - 1) as usize;
            let ends: Vec<&[u64]> = (from..whole.len()).rev().map(|end| &whole[..=end]).collect();
            Op::Apply(rank, tier(dice), removed(&ends))
        }
        _ => Op::Apply(rank, tier(dice), stored(&whole, 0)),
    }
}

fn tier(dice: &mut Dice) -> Tier {
    if dice.roll(8) == 0 { Tier::Host } else { Tier::Device }
}

/// Which blocks of a path each of the four workers has, in the best and in the worst case.
#[derive(Clone)]
struct Bounds {
    ever: Vec<[bool; 4]>,
    always: Vec<[bool; 4]>,
}

impl Bounds {
    fn new(path: &[u64]) -> Self {
        Self { ever: vec![[false; 4]; path.len()], always: vec![[true; 4]; path.len()] }
    }

    fn see(&mut self, reference: &PrefixIndex, path: &[u64]) {
        for end in 0..path.len() {
            for worker in 0..4 {
                let held = reference.holds(rank(worker, 0), sequence(&path[..=end]));
                self.ever[end][worker as usize] |= held;
                self.always[end][worker as usize] &= held;
            }
        }
    }

    fn allow(&self, matches: &Matches) -> bool {
        let leading = |held: &Vec<[bool; 4]>, worker: usize| held.iter().take_while(|held| held[worker]).count() as u32;
        (0..4).all(|worker| {
            let found = matches.get(rank(worker as u64, 0)).total();
            (leading(&self.always, worker)..=leading(&self.ever, worker)).contains(&found)
        })
    }
}

/// What happens in one experiment.
struct Story {
    before: Vec<Op>,
    meanwhile: Vec<Op>,
    prompt: Vec<u64>,
}

impl Story {
    fn of(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let before = (0..4 + dice.roll(24)).map(|_| random_op(&mut dice)).collect();
        let meanwhile = (0..1 + dice.roll(6)).map(|_| random_op(&mut dice)).collect();
        let conversation = dice.roll(6);
        Self { before, meanwhile, prompt: path(conversation, 3) }
    }

    fn begin(&self) -> Pair {
        let mut pair = Pair::new();
        self.before.iter().for_each(|op| pair.apply(op));
        pair
    }

    fn bounds(&self) -> Bounds {
        let mut pair = self.begin();
        let mut bounds = Bounds::new(&self.prompt);
        bounds.see(&pair.reference, &self.prompt);
        for op in &self.meanwhile {
            pair.apply(op);
            bounds.see(&pair.reference, &self.prompt);
        }
        bounds
    }

    /// The writer does all it does at the reader's `nth` point. `None` past the last one.
    fn writer_at(&self, nth: usize, bounds: &Bounds) -> Option<bool> {
        let mut pair = self.begin();
        let (mut matches, reader) = (Matches::default(), pair.reader.clone());
        let (seen, meanwhile) = (Rc::new(Cell::new(0)), self.meanwhile.clone());
        let count = seen.clone();
        let hook = Box::new(move || {
            if count.replace(count.get() + 1) == nth {
                meanwhile.iter().for_each(|op| pair.apply(op));
            }
        });
        with_hook(hook, || reader.find(&locals(&self.prompt), &mut matches));
        (seen.get() > nth).then(|| bounds.allow(&matches))
    }

    /// A reader looks at every point of the writer.
    fn reader_everywhere(&self, bounds: &Bounds) -> bool {
        let mut pair = self.begin();
        let (reader, prompt) = (pair.reader.clone(), locals(&self.prompt));
        let matches = RefCell::new(Matches::default());
        let (fine, bounds) = (Rc::new(Cell::new(true)), bounds.clone());
        let result = fine.clone();
        let hook = Box::new(move || {
            let mut matches = matches.borrow_mut();
            // Where the writer is in the middle of a change there is no answer yet.
            if reader.try_find(&prompt, &mut matches) {
                result.set(result.get() && bounds.allow(&matches));
            }
        });
        with_hook(hook, || self.meanwhile.iter().for_each(|op| pair.apply(op)));
        fine.get()
    }
}

/// Stories in which a reader finds what never was.
fn violations(seeds: std::ops::Range<u64>) -> Vec<u64> {
    seeds
        .filter(|&seed| {
            let story = Story::of(seed);
            let bounds = story.bounds();
            let mut points = (0..).map_while(|nth| story.writer_at(nth, &bounds));
            !points.all(|fine| fine) || !story.reader_everywhere(&bounds)
        })
        .collect()
}

#[test]
fn a_reader_never_finds_what_never_was() {
    assert_eq!(violations(0..600), Vec::<u64>::new());
}

#[test]
fn without_its_checks_it_would() {
    assert!(!with_checks_off(|| violations(0..300)).is_empty());
}

#[test]
fn threads_agree_on_what_does_not_change() {
    let (mut tree, reader) = new(Limits::default());
    let stable: Vec<Vec<u64>> = (0..8).map(|conversation| path(conversation, 2)).collect();
    for path in &stable {
        tree.apply(rank(9, 0), Tier::Device, &stored(path, 0));
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut matches = Matches::default();
                while !stop.load(Ordering::Relaxed) {
                    for path in &stable {
                        reader.find(&locals(path), &mut matches);
                        assert_eq!(matches.get(rank(9, 0)).device as usize, path.len());
                        assert_eq!(matches.get(rank(8, 0)).total(), 0, "that worker never held anything");
                    }
                }
            });
        }
        let mut dice = Dice(1);
        for _ in 0..60_000 {
            match random_op(&mut dice) {
                Op::Apply(rank, tier, data) => {
                    tree.apply(rank, tier, &data);
                }
                Op::RemoveWorker(worker) => {
                    tree.remove_worker(worker);
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
