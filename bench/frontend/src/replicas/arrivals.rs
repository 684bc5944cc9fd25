//! Requests of chat-like sizes at random times. The same seed gives the same requests.

use std::time::Duration;

use crate::prompts::Numbers;
use crate::trace::record::{BLOCK_TOKENS, Record};

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Long prompts, whose beginnings are few, and short answers: where a beginning is cached decides as much as the load.
    SharedPrompts,
    /// Short prompts, of which no two are alike, and long answers: only the load decides.
    LongAnswers,
}

/// Beginnings that prompts share, each a block.
const SHARED: u64 = 8;

/// Most blocks that follow the shared one.
const OWN_BLOCKS: u64 = 3;

/// Shortest and longest prompt of those that share nothing, in tokens.
const SHORT: (usize, usize) = (32, 256);

impl Workload {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::SharedPrompts, Self::LongAnswers];

    /// As results name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedPrompts => "shared prompts",
            Self::LongAnswers => "long answers",
        }
    }

    /// Median of the answers' lengths in tokens, and the longest.
    fn answers(self) -> (f64, usize) {
        match self {
            Self::SharedPrompts => (60.0, 600),
            Self::LongAnswers => (120.0, 800),
        }
    }

    /// Makes `count` requests, which arrive at `rate` per second on average.
    pub fn records(self, count: usize, rate: f64, seed: u64) -> Vec<Record> {
        let mut numbers = Numbers(seed);
        let (mut now_s, mut next_block) = (0.0, SHARED);
        let record = |_| {
            now_s -= (1.0 - numbers.unit()).ln() / rate;
            let (blocks, prompt_tokens) = self.prompt(&mut numbers, &mut next_block);
            let answer_tokens = self.answer(&mut numbers);
            Record { at: Duration::from_secs_f64(now_s), prompt_tokens, answer_tokens, blocks }
        };
        (0..count).map(record).collect()
    }

    /// Its blocks, and how many tokens they are.
    fn prompt(self, numbers: &mut Numbers, next_block: &mut u64) -> (Vec<u64>, usize) {
        let mut own = || {
            *next_block += 1;
            *next_block - 1
        };
        match self {
            Self::SharedPrompts => {
                let mut blocks = vec![numbers.next() % SHARED];
                blocks.extend((0..=numbers.next() % OWN_BLOCKS).map(|_| own()));
                let last = 1 + numbers.next() as usize % BLOCK_TOKENS;
                let tokens = (blocks.len() - 1) * BLOCK_TOKENS + last;
                (blocks, tokens)
            }
            Self::LongAnswers => (vec![own()], SHORT.0 + numbers.next() as usize % (SHORT.1 - SHORT.0 + 1)),
        }
    }

    fn answer(self, numbers: &mut Numbers) -> usize {
        let (median, longest) = self.answers();
        // Box and Muller's way from two even numbers to a normal one, here the logarithm of the length.
        let normal = (-2.0 * (1.0 - numbers.unit()).ln()).sqrt() * (std::f64::consts::TAU * numbers.unit()).cos();
        ((median * normal.exp()) as usize).clamp(1, longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_at_the_rate_and_repeat_with_the_seed() {
        for workload in Workload::ALL {
            let records = workload.records(4000, 50.0, 7);
            assert_eq!(records, workload.records(4000, 50.0, 7));
            let last = records.last().expect("some").at.as_secs_f64();
            assert!((72.0..88.0).contains(&last), "4000 at 50 a second took {last} s");
            assert!(records.windows(2).all(|pair| pair[0].at <= pair[1].at));
            assert!(
                records.iter().all(|r| r.prompt_tokens.div_ceil(BLOCK_TOKENS) == r.blocks.len() && r.answer_tokens > 0)
            );
        }
    }

    #[test]
    fn beginnings_are_shared_or_nothing_is() {
        let beginnings = |workload: Workload| {
            let records = workload.records(1000, 50.0, 7);
            let firsts = records.iter().map(|record| record.blocks[0]);
            firsts.collect::<std::collections::HashSet<_>>().len()
        };
        assert_eq!((beginnings(Workload::SharedPrompts), beginnings(Workload::LongAnswers)), (8, 1000));
    }
}
