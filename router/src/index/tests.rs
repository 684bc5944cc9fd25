//! Events and guesses through the event threads.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kv_index::predicted::Policy;
use kv_index::tree::Limits;
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier};
use prometheus_client::registry::Registry;

use super::*;
use crate::ingest::Batches;

/// Memory of an index here.
const BUDGET: usize = 64 << 20;

fn indexer(threads: usize, events: bool, guesses: Option<Policy>) -> Indexer {
    within(BUDGET, threads, events, guesses)
}

fn within(bytes: usize, threads: usize, events: bool, guesses: Option<Policy>) -> Indexer {
    let threads = NonZeroUsize::new(threads).expect("not zero");
    let limits = Limits { bytes, ..Limits::default() };
    let check_every = Duration::from_secs(10);
    let settings = IndexSettings { threads, limits, events, guesses, check_every };
    Indexer::start(&settings, Arc::new(CoreMetrics::register(&mut Registry::default())))
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

fn stored(blocks: &[u64]) -> KvEvent {
    let block = |&hash: &u64| StoredBlock { engine: EngineHash(hash + 1000), local: BlockHash(hash) };
    let data = KvEventData::Stored { parent: None, blocks: blocks.iter().map(block).collect() };
    KvEvent { id: 0, dp_rank: 0, tier: Tier::Device, data }
}

fn hashes(blocks: &[u64]) -> Vec<BlockHash> {
    blocks.iter().copied().map(BlockHash).collect()
}

fn depths(index: &Indexer, blocks: &[u64]) -> Vec<(u64, u32)> {
    index.overlaps(&hashes(blocks)).iter().map(|(rank, held)| (rank.worker.0, held.total())).collect()
}

#[tokio::test]
async fn what_was_applied_is_found_whatever_the_number_of_threads() {
    for threads in [1, 4] {
        let (index, life) = (indexer(threads, true, None), CancellationToken::new());
        for worker in 0..8 {
            let prefix: Vec<u64> = (0..=worker).collect();
            assert_eq!(index.apply(rank(worker), vec![stored(&prefix)], &life).await, Outcome::default());
        }
        let expected: Vec<_> = (0..8).map(|worker| (worker, worker as u32 + 1)).collect();
        assert_eq!(depths(&index, &[0, 1, 2, 3, 4, 5, 6, 7]), expected);
        assert_eq!((index.blocks(rank(7)).device, index.holds(rank(7), &hashes(&[0, 1]))), (8, true));
    }
}

#[tokio::test]
async fn nothing_is_added_after_a_worker_was_removed() {
    let (index, life) = (indexer(4, true, None), CancellationToken::new());
    index.apply(rank(1), vec![stored(&[1, 2])], &life).await;
    life.cancel();
    index.remove_worker(WorkerId(1)).await;
    index.apply(rank(1), vec![stored(&[1, 2])], &life).await;
    index.expect(rank(1), Some(10), 100, &life).await;
    assert_eq!(depths(&index, &[1, 2]), []);
    // Its next life begins from nothing.
    index.apply(rank(1), vec![stored(&[1])], &CancellationToken::new()).await;
    assert_eq!(depths(&index, &[1, 2]), [(1, 1)]);
}

#[tokio::test]
async fn a_guess_holds_for_its_life_and_the_larger_answer_counts() {
    let (index, life) = (indexer(2, true, Some(Policy::Ttl(Duration::from_secs(1)))), CancellationToken::new());
    index.routed(rank(1), &hashes(&[1, 2, 3]));
    // Jobs of one worker are taken in order: once this one is done, the guess is in.
    index.apply(rank(1), vec![stored(&[1])], &life).await;
    assert_eq!(depths(&index, &[1, 2, 3, 4]), [(1, 3)]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while depths(&index, &[1, 2, 3]) != [(1, 1)] {
        assert!(Instant::now() < deadline, "the guess never ends");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn without_guesses_nothing_is_guessed() {
    let index = indexer(1, true, None);
    index.routed(rank(1), &hashes(&[1, 2]));
    index.remove_worker(WorkerId(2)).await;
    assert_eq!(depths(&index, &[1, 2]), []);
}

#[tokio::test]
async fn a_full_rank_and_a_lost_parent_are_told() {
    let (index, life) = (indexer(1, true, None), CancellationToken::new());
    index.expect(rank(1), None, 2, &life).await;
    assert_eq!(index.apply(rank(1), vec![stored(&[1, 2, 3])], &life).await.refused, 1);
    let orphan = KvEventData::Stored {
        parent: Some(EngineHash(77)),
        blocks: vec![StoredBlock { engine: EngineHash(78), local: BlockHash(9) }],
    };
    let orphan = KvEvent { id: 1, dp_rank: 0, tier: Tier::Device, data: orphan };
    assert_eq!(index.apply(rank(1), vec![orphan], &life).await.orphans, 1);
}

#[tokio::test]
async fn a_look_comes_after_what_was_applied_before() {
    let (index, life) = (indexer(4, true, None), CancellationToken::new());
    index.apply(rank(1), vec![stored(&[1, 2])], &life).await;
    let block = |hash| (Tier::Device, EngineHash(hash));
    let look = index.look(rank(1), vec![block(1001), block(1003)], 5, &life).await.expect("alive");
    assert_eq!((look.held, look.evicted), (vec![true, false], false));
    assert_eq!(look.drawn.len(), 5);
    assert!(look.drawn.iter().all(|drawn| [block(1001), block(1002)].contains(drawn)));
    life.cancel();
    assert_eq!(index.look(rank(1), vec![block(1001)], 1, &life).await, None);
}

/// Case 7: that nothing is ever told is noticed, whatever is guessed meanwhile.
#[tokio::test]
async fn guesses_do_not_hide_that_events_never_tell_of_any_prompt() {
    for guesses in [None, Some(Policy::Ttl(Duration::from_secs(1000)))] {
        let (index, life) = (indexer(1, true, guesses), CancellationToken::new());
        let prompt = hashes(&[1, 2]);
        index.routed(rank(1), &prompt);
        // An answer comes after what was sent before.
        index.apply(rank(9), vec![stored(&[50])], &life).await;
        assert_eq!(depths(&index, &[1, 2]).len(), guesses.iter().len());
        for second in 0..100 {
            index.matched_at(Duration::from_secs(second), &prompt, &index.overlaps(&prompt));
        }
        assert!(index.finds_nothing(), "with {guesses:?}");
        index.apply(rank(1), vec![stored(&[1])], &life).await;
        index.matched_at(Duration::from_secs(100), &prompt, &index.overlaps(&prompt));
        assert!(!index.finds_nothing());
    }
}

/// Case 3: what engines hold may grow for ever; the index does not.
#[tokio::test]
async fn under_churn_memory_stays_within_its_budget_and_blocks_are_evicted() {
    let (index, life) = (indexer(4, true, None), CancellationToken::new());
    let mut next = 0;
    let (mut most, mut refused) = (0, 0);
    for round in 0..60_000 {
        let prefix: Vec<u64> = (next..next + 64).collect();
        next += 64;
        let outcome = index.apply(rank(round % 16), vec![stored(&prefix)], &life).await;
        assert_eq!(outcome.orphans, 0);
        refused += outcome.refused;
        if round % 5000 == 4999 {
            // Removing nobody shows the size.
            index.remove_worker(WorkerId(999)).await;
            most = most.max(index.metrics.index_bytes.get());
            assert!(most <= BUDGET as i64, "{most} bytes");
            let newest = index.overlaps(&hashes(&prefix)).get(rank(round % 16)).device;
            assert!(newest == 64 || outcome.refused > 0, "the newest are there");
        }
    }
    assert!(index.metrics.index_evicted_blocks.get() > 0, "{most} bytes: nothing had to go");
    assert!(refused < 600, "{refused} of 60,000 prompts were refused, though old ones could go");
}

/// Case 2: a worker comes with two million blocks, and all workers share one event thread. The events of the others go on
/// between the pieces of its dump: none of them waits for a large part of it.
#[tokio::test]
async fn a_dump_of_two_million_blocks_does_not_delay_the_view_of_other_workers() {
    const PROMPTS: u64 = 16_384;
    const BLOCKS: u64 = 128;
    let (index, life) = (Arc::new(within(1 << 30, 1, true, None)), CancellationToken::new());
    let prompt = |number: u64| -> Vec<u64> { (0..BLOCKS).map(|at| 1_000_000 + number * BLOCKS + at).collect() };
    let dump: Vec<KvEvent> = (0..PROMPTS).map(|number| stored(&prompt(number))).collect();
    let pieces = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let dumping = {
        let (index, life, pieces) = (index.clone(), life.clone(), pieces.clone());
        tokio::spawn(async move {
            for piece in Batches::of(dump) {
                assert_eq!(index.apply(rank(1), piece, &life).await.orphans, 0);
                pieces.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let mut meanwhile = 0;
    while !dumping.is_finished() {
        let before = pieces.load(Ordering::Relaxed);
        let prefix = [meanwhile * 2, meanwhile * 2 + 1];
        index.apply(rank(2), vec![stored(&prefix)], &life).await;
        let waited = pieces.load(Ordering::Relaxed) - before;
        // The event thread takes turns; how late this task is woken is up to the machine.
        assert!(waited <= 64, "{waited} pieces of the dump came before one event");
        assert_eq!(depths(&index, &prefix), [(2, 2)], "it is seen at once");
        meanwhile += 1;
    }
    dumping.await.expect("it ends well");
    assert!(meanwhile > PROMPTS * BLOCKS / 1024 / 2, "only {meanwhile} events were taken meanwhile");
    assert_eq!(depths(&index, &prompt(PROMPTS - 1)), [(1, BLOCKS as u32)]);
}
