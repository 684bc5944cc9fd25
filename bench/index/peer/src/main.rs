//! Measures the peer's index (dynamo-kv-router, from its crate) as ours is measured: same workload, same steps, one JSON line.

#[path = "../../src/measure.rs"]
mod measure;
#[path = "../../src/workload.rs"]
mod workload;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_seq_hash_for_block,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use measure::{Find, Structure};
use workload::{Held, Workload};

/// Threads of the concurrent structure.
const THREADS: usize = 2;

/// Measures Dynamo's prefix index.
#[derive(Parser)]
struct Args {
    /// Which of its structures.
    structure: Kind,
    /// Blocks of each worker, system prompts apart.
    #[arg(long, default_value_t = 1 << 14)]
    blocks_per_worker: u64,
    /// Workers.
    #[arg(long, default_value_t = 64)]
    workers: u64,
    /// Seed of all hashes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Gives each worker engine hashes of its own.
    #[arg(long)]
    opaque: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// The single-threaded tree, called directly.
    Radix,
    /// The concurrent tree behind its pool of threads.
    Concurrent,
}

fn sequence(locals: &[u64]) -> Vec<u64> {
    let locals: Vec<LocalBlockHash> = locals.iter().map(|local| LocalBlockHash(*local)).collect();
    compute_seq_hash_for_block(&locals)
}

fn event(worker: u64, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker, KvCacheEvent { event_id: 0, dp_rank: 0, data })
}

fn stored(held: &Held, blocks: Range<usize>) -> RouterEvent {
    let hash = |at: usize| ExternalSequenceBlockHash(held.engines[at]);
    let parent_hash = blocks.start.checked_sub(1).map(hash);
    let block = |at: usize| KvCacheStoredBlockData {
        block_hash: hash(at),
        tokens_hash: LocalBlockHash(held.locals[at]),
        mm_extra_info: None,
    };
    let blocks = blocks.map(block).collect();
    event(held.worker, KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks }))
}

fn removed(held: &Held, blocks: Range<usize>) -> RouterEvent {
    let block_hashes = blocks.rev().map(|at| ExternalSequenceBlockHash(held.engines[at])).collect();
    event(held.worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
}

struct Single(RadixTree);

impl Structure for Single {
    type Event = RouterEvent;
    type Hash = LocalBlockHash;

    fn name(&self) -> String {
        "dynamo 1.6.1 RadixTree".to_owned()
    }

    fn hash(local: u64) -> LocalBlockHash {
        LocalBlockHash(local)
    }

    fn expect(&mut self, _worker: u64, _blocks: u64) {}

    fn stored(held: &Held, blocks: Range<usize>) -> RouterEvent {
        stored(held, blocks)
    }

    fn removed(held: &Held, blocks: Range<usize>) -> RouterEvent {
        removed(held, blocks)
    }

    fn apply(&mut self, events: Vec<RouterEvent>) {
        for event in events {
            self.0.apply_event(event).expect("every parent is known");
        }
    }

    fn find(&mut self, prompt: &[LocalBlockHash]) -> usize {
        self.0.find_matches(prompt.to_vec(), false).scores.len()
    }

    fn reader(&self) -> Option<Find<LocalBlockHash>> {
        None
    }

    fn remove_worker(&mut self, worker: u64) {
        self.0.remove_worker(worker);
    }

    fn dump_and_load(&mut self, _workers: u64) -> Option<(usize, Duration, Duration)> {
        let start = Instant::now();
        let dump = self.0.dump_tree_as_events();
        let dumped = start.elapsed();
        let mut other = RadixTree::new();
        let of = |event: &RouterEvent| match &event.event.data {
            KvCacheEventData::Stored(stored) => stored.blocks.len(),
            _ => 0,
        };
        let blocks = dump.iter().map(of).sum();
        let start = Instant::now();
        for event in dump {
            other.apply_event(event).expect("parents come first");
        }
        Some((blocks, dumped, start.elapsed()))
    }

    fn counted_bytes(&mut self) -> Option<usize> {
        None
    }
}

struct Pool<T: SyncIndexer> {
    indexer: Arc<ThreadPoolIndexer<T>>,
    runtime: tokio::runtime::Runtime,
}

impl<T: SyncIndexer> Pool<T> {
    fn new(backend: T) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime without drivers");
        Self { indexer: Arc::new(ThreadPoolIndexer::new(backend, THREADS, 16)), runtime }
    }

    fn flush(&self) {
        self.runtime.block_on(self.indexer.flush_and_wait()).expect("its threads run");
    }
}

impl<T: SyncIndexer> Structure for Pool<T> {
    type Event = RouterEvent;
    type Hash = LocalBlockHash;

    fn name(&self) -> String {
        format!("dynamo 1.6.1 ConcurrentRadixTreeCompressed, {THREADS} threads")
    }

    fn hash(local: u64) -> LocalBlockHash {
        LocalBlockHash(local)
    }

    fn expect(&mut self, _worker: u64, _blocks: u64) {}

    fn stored(held: &Held, blocks: Range<usize>) -> RouterEvent {
        stored(held, blocks)
    }

    fn removed(held: &Held, blocks: Range<usize>) -> RouterEvent {
        removed(held, blocks)
    }

    fn apply(&mut self, events: Vec<RouterEvent>) {
        for event in events {
            self.indexer.enqueue_event(event).expect("its threads run");
        }
        self.flush();
    }

    fn find(&mut self, prompt: &[LocalBlockHash]) -> usize {
        self.indexer.backend().find_matches(prompt, false).scores.len()
    }

    fn reader(&self) -> Option<Find<LocalBlockHash>> {
        let indexer = self.indexer.clone();
        Some(Box::new(move |prompt| indexer.backend().find_matches(prompt, false).scores.len()))
    }

    fn remove_worker(&mut self, worker: u64) {
        self.runtime.block_on(self.indexer.remove_worker(worker));
        self.flush();
    }

    fn dump_and_load(&mut self, _workers: u64) -> Option<(usize, Duration, Duration)> {
        None
    }

    fn counted_bytes(&mut self) -> Option<usize> {
        None
    }
}

fn main() {
    let args = Args::parse();
    let workload = Workload {
        workers: args.workers.max(1),
        blocks: args.blocks_per_worker,
        seed: args.seed,
        opaque: args.opaque,
        sequence,
    };
    let line = match args.structure {
        Kind::Radix => measure::measure(Single(RadixTree::new()), &workload),
        Kind::Concurrent => measure::measure(Pool::new(ConcurrentRadixTreeCompressed::new()), &workload),
    };
    println!("{line}");
}
