//! Requests of chat-like sizes at random times. The same seed gives the same requests.

use std::time::Duration;

use crate::prompts::Numbers;
use crate::trace::record::{BLOCK_TOKENS, Record};

/// Beginnings that prompts share.
const SHARED: u64 = 8;

/// Most blocks that follow the shared one.
const OWN_BLOCKS: u64 = 3;

/// Median of the answers' lengths in tokens, their spread (of the logarithm), and the longest.
const ANSWER: (f64, f64, usize) = (60.0, 1.0, 600);

/// Makes `count` requests, which arrive at `rate` per second on average.
pub fn records(count: usize, rate: f64, seed: u64) -> Vec<Record> {
    let mut numbers = Numbers(seed);
    let (mut now_s, mut next_block) = (0.0, SHARED);
    let record = |_| {
        now_s -= (1.0 - numbers.unit()).ln() / rate;
        let mut blocks = vec![numbers.next() % SHARED];
        for _ in 0..1 + numbers.next() % OWN_BLOCKS {
            blocks.push(next_block);
            next_block += 1;
        }
        let last = 1 + numbers.next() as usize % BLOCK_TOKENS;
        Record {
            at: Duration::from_secs_f64(now_s),
            prompt_tokens: (blocks.len() - 1) * BLOCK_TOKENS + last,
            answer_tokens: answer(&mut numbers),
            blocks,
        }
    };
    (0..count).map(record).collect()
}

fn answer(numbers: &mut Numbers) -> usize {
    let (median, sigma, longest) = ANSWER;
    // Box and Muller's way from two even numbers to a normal one.
    let normal = (-2.0 * (1.0 - numbers.unit()).ln()).sqrt() * (std::f64::consts::TAU * numbers.unit()).cos();
    ((median * (sigma * normal).exp()) as usize).clamp(1, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_at_the_rate_and_repeat_with_the_seed() {
        let records = records(4000, 50.0, 7);
        assert_eq!(records, super::records(4000, 50.0, 7));
        let last = records.last().expect("some").at.as_secs_f64();
        assert!((72.0..88.0).contains(&last), "4000 at 50 a second took {last} s");
        assert!(records.windows(2).all(|pair| pair[0].at <= pair[1].at));
        assert!(
            records.iter().all(|r| r.prompt_tokens.div_ceil(BLOCK_TOKENS) == r.blocks.len() && r.answer_tokens > 0)
        );
    }
}
