//! One structure, measured: the same steps for ours and the peer's.
//!
//! Rates are over CPU time of the whole process, so that queues and their threads count. Single finds are timed with the
//! monotonic clock, because the CPU clock costs as much as a find; what reading it costs is printed, and not subtracted.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::workload::{Held, SYSTEM, TURN, TURNS, Workload};

/// Conversations on each worker that are turned into events at a time.
const GROUP: u64 = 4;

/// Prompts that are matched.
const PROMPTS: u64 = 20_000;

/// Times each prompt is matched for the filtered percentiles.
const PASSES: usize = 7;

/// Matches, and tells how many workers scored.
pub type Find<Hash> = Box<dyn FnMut(&[Hash]) -> usize + Send>;

/// Something that can be measured.
pub trait Structure {
    /// Its event.
    type Event;
    /// Its hash of a block's tokens.
    type Hash: Copy + Send + Sync;

    /// Its name in the output.
    fn name(&self) -> String;
    /// A hash.
    fn hash(local: u64) -> Self::Hash;
    /// A worker will hold that many blocks.
    fn expect(&mut self, worker: u64, blocks: u64);
    /// Blocks of a conversation are stored.
    fn stored(held: &Held, blocks: std::ops::Range<usize>) -> Self::Event;
    /// They are removed, the last first.
    fn removed(held: &Held, blocks: std::ops::Range<usize>) -> Self::Event;
    /// Applies events, to the end.
    fn apply(&mut self, events: Vec<Self::Event>);
    /// Matches; returns how many workers scored.
    fn find(&mut self, prompt: &[Self::Hash]) -> usize;
    /// Something that matches while events are applied; `None` where that is impossible.
    fn reader(&self) -> Option<Find<Self::Hash>>;
    /// Forgets a worker, to the end.
    fn remove_worker(&mut self, worker: u64);
    /// Dumps everything and loads it into another one; blocks in it, and how long both took.
    fn dump_and_load(&mut self, workers: u64) -> Option<(usize, Duration, Duration)>;
    /// What it says it takes, in bytes.
    fn counted_bytes(&mut self) -> Option<usize>;
}

fn cpu(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn process_cpu() -> Duration {
    cpu(ClockId::ProcessCPUTime)
}

/// Resident bytes of this process.
pub fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// The value that a share of the others is below, in microseconds.
fn percentile(sorted: &[Duration], share: f64) -> f64 {
    let at = (sorted.len().saturating_sub(1) as f64 * share) as usize;
    rounded(sorted.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6))
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn per_second(events: u64, time: Duration) -> u64 {
    (events as f64 / time.as_secs_f64().max(1e-9)) as u64
}

/// Events of the conversations `range` of all workers, turn by turn; `reversed` turns and removals for eviction.
fn events<S: Structure>(workload: &Workload, range: std::ops::Range<u64>, stored: bool) -> Vec<S::Event> {
    let mut events = Vec::new();
    for n in range {
        let held: Vec<Held> = (0..workload.workers).map(|worker| workload.held(worker, n)).collect();
        for turn in 0..TURNS {
            for held in &held {
                events.push(if stored {
                    S::stored(held, held.turn(turn))
                } else {
                    let start = SYSTEM + (TURNS - 1 - turn) * TURN;
                    S::removed(held, start..start + TURN)
                });
            }
        }
    }
    events
}

/// Events applied, and what that took.
struct Applied {
    events: u64,
    time: Duration,
    /// Events a second of each group.
    rates: Vec<u64>,
}

impl Applied {
    fn rate(&self) -> u64 {
        per_second(self.events, self.time)
    }

    /// That of the fastest tenth: what a shared machine gives while the others leave its caches alone.
    fn best(mut self) -> u64 {
        self.rates.sort_unstable();
        self.rates.get(self.rates.len() * 9 / 10).copied().unwrap_or(0)
    }
}

/// Applies the events of a range in groups.
fn apply<S: Structure>(structure: &mut S, workload: &Workload, range: std::ops::Range<u64>, stored: bool) -> Applied {
    let mut applied = Applied { events: 0, time: Duration::ZERO, rates: Vec::new() };
    for start in range.clone().step_by(GROUP as usize) {
        let batch = events::<S>(workload, start..(start + GROUP).min(range.end), stored);
        let count = batch.len() as u64;
        let before = process_cpu();
        structure.apply(batch);
        let took = process_cpu() - before;
        applied.events += count;
        applied.time += took;
        applied.rates.push(per_second(count, took));
    }
    applied
}

/// Measures one structure.
pub fn measure<S: Structure>(mut structure: S, workload: &Workload) -> Value {
    let conversations = workload.conversations();
    let base = resident();
    for worker in 0..workload.workers {
        structure.expect(worker, workload.owned(conversations) / workload.workers);
    }
    let stored = apply(&mut structure, workload, 0..conversations, true);
    let owned = workload.owned(conversations);
    let grown = resident().saturating_sub(base);
    let counted = structure.counted_bytes();
    let find = find(&mut structure, workload);
    let (beside_p50, beside_p99, writer) = find_beside_writer(&mut structure, workload);
    let evicted = (conversations / 10).max(1);
    let removed = apply(&mut structure, workload, 0..evicted, false);
    let again = apply(&mut structure, workload, conversations..conversations + evicted, true);
    let dump = structure.dump_and_load(workload.workers);
    let mut gone: Vec<Duration> = (0..4.min(workload.workers))
        .map(|worker| {
            let before = process_cpu();
            structure.remove_worker(worker);
            process_cpu() - before
        })
        .collect();
    let first = gone[0];
    gone.sort_unstable();
    let ms_per_million = |time: Duration, blocks: usize| rounded(time.as_secs_f64() * 1e9 / blocks.max(1) as f64);
    json!({
        "structure": structure.name(),
        "blocks_per_worker": workload.blocks,
        "workers": workload.workers,
        "seed": workload.seed,
        "engine_hashes": if workload.opaque { "per worker" } else { "sequence" },
        "store_events_per_cpu_s": stored.rate(),
        "store_steady_events_per_cpu_s": again.rate(),
        "remove_events_per_cpu_s": removed.rate(),
        "best_tenth_store_steady_remove": [stored.best(), again.best(), removed.best()],
        "find_p50_us": find.p50,
        "find_p99_us": find.p99,
        "find_filtered_p50_us": find.filtered_p50,
        "find_filtered_p99_us": find.filtered_p99,
        "find_mean_us": find.mean,
        "find_beside_writer_p50_us": beside_p50,
        "find_beside_writer_p99_us": beside_p99,
        "writer_events_per_s": writer,
        "clock_us": clock_cost(),
        "workers_scored": find.scored,
        "bytes_per_owned_block": rounded(grown as f64 / owned as f64),
        "counted_bytes_per_owned_block": counted.map(|bytes| rounded(bytes as f64 / owned as f64)),
        "remove_worker_ms": rounded(gone[gone.len() / 2].as_secs_f64() * 1e3),
        "remove_first_worker_ms": rounded(first.as_secs_f64() * 1e3),
        "dump_ms_per_m_blocks": dump.map(|(blocks, time, _)| ms_per_million(time, blocks)),
        "load_ms_per_m_blocks": dump.map(|(blocks, _, time)| ms_per_million(time, blocks)),
    })
}

struct Finds {
    p50: f64,
    p99: f64,
    filtered_p50: f64,
    filtered_p99: f64,
    mean: f64,
    scored: f64,
}

/// One find at a time; the prompt lies in cache, as one that was hashed just now does.
fn find<S: Structure>(structure: &mut S, workload: &Workload) -> Finds {
    let prompts: Vec<Vec<S::Hash>> =
        workload.prompts(PROMPTS).iter().map(|prompt| prompt.iter().map(|local| S::hash(*local)).collect()).collect();
    let mut prompt: Vec<S::Hash> = Vec::new();
    let mut scored = 0;
    let mut times = vec![Vec::with_capacity(PASSES); prompts.len()];
    for _ in 0..PASSES {
        for (query, times) in prompts.iter().zip(&mut times) {
            prompt.clear();
            prompt.extend_from_slice(query);
            let before = Instant::now();
            let found = black_box(structure.find(black_box(&prompt)));
            times.push(before.elapsed());
            scored += if times.len() == 1 { found } else { 0 };
        }
    }
    let before = cpu(ClockId::ThreadCPUTime);
    for query in &prompts {
        black_box(structure.find(black_box(query)));
    }
    let mean = (cpu(ClockId::ThreadCPUTime) - before).as_secs_f64() * 1e6 / prompts.len() as f64;
    let mut raw: Vec<Duration> = times.iter().map(|passes| passes[0]).collect();
    raw.sort_unstable();
    let mut filtered: Vec<Duration> = times
        .iter_mut()
        .map(|passes| {
            passes.sort_unstable();
            passes[PASSES / 2]
        })
        .collect();
    filtered.sort_unstable();
    Finds {
        p50: percentile(&raw, 0.5),
        p99: percentile(&raw, 0.99),
        filtered_p50: percentile(&filtered, 0.5),
        filtered_p99: percentile(&filtered, 0.99),
        mean: rounded(mean),
        scored: rounded(scored as f64 / prompts.len() as f64),
    }
}

/// Finds by the wall clock while another thread stores and removes as fast as it can; p50, p99, and its events a second.
fn find_beside_writer<S: Structure>(structure: &mut S, workload: &Workload) -> (Option<f64>, Option<f64>, Option<u64>) {
    let Some(mut reader) = structure.reader() else { return (None, None, None) };
    let prompts: Vec<Vec<S::Hash>> =
        workload.prompts(PROMPTS).iter().map(|prompt| prompt.iter().map(|local| S::hash(*local)).collect()).collect();
    // The first turn of conversations that nobody asks for, on the same system prompts.
    let beyond = 2 * workload.conversations() + 1000;
    let batches = || {
        let held = (0..workload.workers).flat_map(|worker| (0..4).map(move |n| (worker, beyond + n)));
        held.flat_map(|(worker, n)| {
            let held = workload.held(worker, n);
            [S::stored(&held, held.turn(0)), S::removed(&held, SYSTEM..SYSTEM + TURN)]
        })
        .collect::<Vec<S::Event>>()
    };
    let (done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let read = || {
        let mut prompt: Vec<S::Hash> = Vec::new();
        while written.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let (begin, before) = (Instant::now(), written.load(Ordering::Relaxed));
        let time = |query: &Vec<S::Hash>| {
            prompt.clear();
            prompt.extend_from_slice(query);
            let start = Instant::now();
            black_box(reader(black_box(&prompt)));
            start.elapsed()
        };
        let mut times: Vec<Duration> = prompts.iter().map(time).collect();
        let rate = per_second(written.load(Ordering::Relaxed) - before, begin.elapsed());
        done.store(true, Ordering::Relaxed);
        times.sort_unstable();
        (percentile(&times, 0.5), percentile(&times, 0.99), rate)
    };
    let (p50, p99, rate) = std::thread::scope(|scope| {
        let reading = scope.spawn(read);
        while !done.load(Ordering::Relaxed) {
            let batch = batches();
            let count = batch.len() as u64;
            structure.apply(batch);
            written.fetch_add(count, Ordering::Relaxed);
        }
        reading.join().expect("it only reads")
    });
    (Some(p50), Some(p99), Some(rate))
}

/// What an empty region measures.
fn clock_cost() -> f64 {
    let mut times: Vec<Duration> = (0..10_001)
        .map(|_| {
            let before = Instant::now();
            before.elapsed()
        })
        .collect();
    times.sort_unstable();
    percentile(&times, 0.5)
}
