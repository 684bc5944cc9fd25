//! What somebody who sees every router's requests would have thought of each decision.
//!
//! The requests' lives are played once more, on one clock, into one load: the routers' own, of the same code. At each decision
//! the costs are computed anew from that load and from what the deciding router knew of the workers' caches. So equal costs
//! are no difference, and what differs is what the router did not know.

use routing::{ActiveLoad, BookingId, LoadConfig, NewBooking, Prompt, RouterId, Terms};
use tokio::time::Instant;

use super::ring::Decided;

/// A request from its decision to its end.
pub struct Life {
    pub prompt: Prompt,
    pub decided: (Instant, Decided),
    /// When its first token came, and its last.
    pub first: Instant,
    pub last: Instant,
    pub answer_tokens: usize,
}

/// A decision in the light of everything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judgement {
    /// The cost of the worker that was chosen, beyond the lowest. In blocks.
    pub regret: f64,
    /// Blocks in use on all workers: as far as the router knew, and in truth.
    pub seen_blocks: u64,
    /// See `seen_blocks`.
    pub active_blocks: u64,
    /// And in truth on the busiest worker.
    pub busiest_blocks: u64,
}

/// What happens in a life.
#[derive(Clone, Copy)]
enum Event {
    Decided,
    First,
    Token,
    Ended,
}

/// Judges every decision, in the order in which they were made.
pub fn judge(lives: &[Life]) -> Vec<Judgement> {
    let mut load = ActiveLoad::new(RouterId(0), LoadConfig::default());
    let mut bookings: Vec<Option<BookingId>> = vec![None; lives.len()];
    let mut judgements = Vec::with_capacity(lives.len());
    for (_, index, event) in events(lives) {
        match (event, bookings[index]) {
            (Event::Decided, _) => {
                judgements.push(judgement(&load, &lives[index]));
                bookings[index] = Some(load.book(booking(index, &lives[index])));
            }
            (Event::First, Some(id)) => load.prefill_completed(id),
            (Event::Token, Some(id)) => load.add_output(id, 1),
            (Event::Ended, Some(id)) => load.free(id),
            // Before its decision: the clocks disagree by that much.
            (_, None) => {}
        }
    }
    judgements
}

/// Everything that happens, in order. Tokens come evenly between the first and the last.
fn events(lives: &[Life]) -> Vec<(Instant, usize, Event)> {
    let mut events = Vec::new();
    for (index, life) in lives.iter().enumerate() {
        events.extend([(life.decided.0, index, Event::Decided), (life.first, index, Event::First)]);
        let gap = (life.last - life.first) / (life.answer_tokens.max(2) - 1) as u32;
        events.extend((0..life.answer_tokens as u32).map(|token| (life.first + gap * token, index, Event::Token)));
        events.push((life.last, index, Event::Ended));
    }
    events.sort_by_key(|(at, ..)| *at);
    events
}

fn booking(index: usize, life: &Life) -> NewBooking {
    let (_, decided) = &life.decided;
    let row = decided.rows.iter().find(|row| row.rank == decided.chosen);
    let cached = row.map_or(0, |row| row.overlap.total() as usize) * life.prompt.block_size.get();
    NewBooking {
        request: index.to_string().into(),
        rank: decided.chosen,
        prompt: life.prompt.clone(),
        prefill_tokens: life.prompt.tokens.saturating_sub(cached),
        expected_output_tokens: None,
    }
}

fn judgement(load: &ActiveLoad, life: &Life) -> Judgement {
    let (prompt, (_, decided)) = (&life.prompt, &life.decided);
    let (mut chosen, mut lowest) = (f64::INFINITY, f64::INFINITY);
    let (mut seen_blocks, mut active_blocks, mut busiest_blocks) = (0, 0, 0);
    for row in &decided.rows {
        let view = load.rank(row.rank);
        let prefill = (f64::from(view.prefill_tokens) + prompt.tokens as f64) / prompt.block_size.get() as f64;
        let decode = load.potential_blocks(row.rank, prompt) as f64;
        let cost = Terms::new(&decided.weights, prefill, row.overlap, row.shared_beyond, decode).cost;
        lowest = lowest.min(cost);
        if row.rank == decided.chosen {
            chosen = cost;
        }
        seen_blocks += u64::from(row.seen_blocks);
        active_blocks += u64::from(view.active_blocks);
        busiest_blocks = busiest_blocks.max(u64::from(view.active_blocks));
    }
    Judgement { regret: chosen - lowest, seen_blocks, active_blocks, busiest_blocks }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_hashing::{BlockSize, SequenceHash};
    use kv_index::{TierBlocks, WorkerId, WorkerRank};
    use routing::CostConfig;

    use super::super::ring::Row;
    use super::*;

    /// A prompt of three full blocks of 16 tokens which nobody holds, sent to one of two workers at a time in ms. Its first token
    /// comes 10 ms later, then 32 more, one each ms.
    fn life(start: Instant, number: u64, at: u64, worker: u64, seen: [u32; 2]) -> Life {
        let rank = |worker| WorkerRank { worker: WorkerId(worker), dp_rank: 0 };
        let rows = [0, 1].map(|worker| Row {
            rank: rank(worker),
            overlap: TierBlocks::default(),
            shared_beyond: 0,
            seen_blocks: seen[worker as usize],
        });
        let block_size = BlockSize::new(16).expect("not zero");
        let blocks: Vec<_> = (0..3).map(|block| SequenceHash(number * 10 + block)).collect();
        let ms = |ms| start + Duration::from_millis(ms);
        let decided = Decided {
            since_start: Duration::ZERO,
            block_size,
            weights: CostConfig::default(),
            chosen: rank(worker),
            rows: rows.to_vec(),
        };
        Life {
            prompt: Prompt { blocks: blocks.into(), tokens: 48, block_size },
            decided: (ms(at), decided),
            first: ms(at + 10),
            last: ms(at + 42),
            answer_tokens: 33,
        }
    }

    #[test]
    fn what_a_router_did_not_see_is_what_it_regrets() {
        let start = Instant::now();
        // Another router's request is in its prefill on worker 0: three blocks of prompt, three in use.
        let blind = judge(&[life(start, 1, 0, 0, [0, 0]), life(start, 2, 5, 0, [0, 0])]);
        let expected = Judgement { regret: 6.0, seen_blocks: 0, active_blocks: 3, busiest_blocks: 3 };
        assert_eq!(blind, [Judgement { regret: 0.0, active_blocks: 0, busiest_blocks: 0, ..expected }, expected]);
        // It generates: the prompt counts no more, and 17 tokens are two blocks more.
        let later = judge(&[life(start, 1, 0, 0, [0, 0]), life(start, 2, 26, 0, [3, 0])]);
        assert_eq!(later[1], Judgement { regret: 5.0, seen_blocks: 3, active_blocks: 5, busiest_blocks: 5 });
        // The other worker was the right one; and after its end either is.
        assert_eq!(judge(&[life(start, 1, 0, 0, [0, 0]), life(start, 2, 5, 1, [3, 0])])[1].regret, 0.0);
        assert_eq!(judge(&[life(start, 1, 0, 0, [0, 0]), life(start, 2, 43, 0, [0, 0])])[1].regret, 0.0);
    }
}
