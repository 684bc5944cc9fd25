//! Requests of the shape of Mooncake's conversation trace, for those who do not have it.
//!
//! What is imitated, as counted in the trace's 12 031 requests: 3.4 arrivals a second, with timestamps of 3 s; one first block
//! that all prompts share; 39 % of requests go on with an earlier one, after 123 s in the median, keeping all its blocks but
//! the last; lengths of new prompts, of what a turn adds, and of answers. The same seed gives the same requests.

use std::time::Duration;

use super::record::{BLOCK_TOKENS, Record};
use crate::prompts::Numbers;

/// Arrivals per second, and how far timestamps are rounded down.
const RATE: f64 = 3.4;
const TICK_S: f64 = 3.0;
/// Share of requests that go on with an earlier one, where there is one.
const FOLLOW_UPS: f64 = 0.4;
/// Longest prompt, and longest answer, in tokens.
const LONGEST: usize = 126_000;
const LONGEST_ANSWER: usize = 2000;

/// A value whose logarithm is normal.
struct LogNormal {
    median: f64,
    sigma: f64,
}

/// Seconds since the request that a follow-up goes on with.
const PAUSE: LogNormal = LogNormal { median: 123.0, sigma: 1.1 };
/// Tokens of a new prompt beyond [`LEAST`].
const NEW: LogNormal = LogNormal { median: 4150.0, sigma: 1.3 };
/// Tokens that a turn adds to the blocks it keeps, beyond [`LEAST_ADDED`].
const ADDED: LogNormal = LogNormal { median: 600.0, sigma: 2.0 };
/// Least tokens of a prompt: no request of the trace has fewer.
const LEAST: usize = 800;
const LEAST_ADDED: usize = 300;

/// The last request of a conversation.
struct Talk {
    at_s: f64,
    blocks: Vec<u64>,
}

/// Makes `count` requests.
pub fn records(count: usize, seed: u64) -> Vec<Record> {
    let mut numbers = Numbers(seed);
    let (mut talks, mut next_block, mut now_s) = (Vec::<Talk>::new(), 1, 0.0);
    let mut records = Vec::with_capacity(count);
    for _ in 0..count {
        now_s -= (1.0 - numbers.unit()).ln() / RATE;
        let earlier = (numbers.unit() < FOLLOW_UPS).then(|| before(&talks, now_s - PAUSE.draw(&mut numbers))).flatten();
        let (kept, least, more) = match earlier.map(|index| talks.remove(index)) {
            Some(talk) => (talk.blocks[..talk.blocks.len() - 1].to_vec(), LEAST_ADDED, ADDED),
            None => (vec![0], LEAST - BLOCK_TOKENS, NEW),
        };
        let prompt_tokens = (kept.len() * BLOCK_TOKENS + least + more.draw(&mut numbers) as usize).min(LONGEST);
        let mut blocks = kept;
        while blocks.len() < prompt_tokens.div_ceil(BLOCK_TOKENS) {
            blocks.push(next_block);
            next_block += 1;
        }
        let ticks = (now_s / TICK_S).floor() as u64;
        let at = Duration::from_secs(ticks * TICK_S as u64);
        records.push(Record { at, prompt_tokens, answer_tokens: answer(&mut numbers), blocks: blocks.clone() });
        // A prompt that is nearly as long as can be is the last of its conversation.
        if prompt_tokens + 2 * BLOCK_TOKENS < LONGEST && blocks.len() > 1 {
            talks.push(Talk { at_s: now_s, blocks });
        }
    }
    let first = records.first().map_or(Duration::ZERO, |record| record.at);
    records.iter_mut().for_each(|record| record.at -= first);
    records
}

/// The conversation whose last request came latest before `at_s`.
fn before(talks: &[Talk], at_s: f64) -> Option<usize> {
    talks.partition_point(|talk| talk.at_s <= at_s).checked_sub(1)
}

/// Tokens of an answer: a quarter are short, the others spread around 450.
fn answer(numbers: &mut Numbers) -> usize {
    let tokens = match numbers.unit() < 0.28 {
        true => LogNormal { median: 50.0, sigma: 0.9 }.draw(numbers),
        false => LogNormal { median: 430.0, sigma: 0.35 }.draw(numbers),
    };
    (tokens as usize).clamp(1, LONGEST_ANSWER)
}

impl LogNormal {
    /// By Box and Muller.
    fn draw(&self, numbers: &mut Numbers) -> f64 {
        let radius = (-2.0 * (1.0 - numbers.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * numbers.unit()).cos();
        self.median * (self.sigma * normal).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::record::seen_before;

    #[test]
    fn the_shape_is_that_of_the_trace() {
        let made = records(12_000, 1);
        let mean = |of: fn(&Record) -> usize| made.iter().map(of).sum::<usize>() as f64 / made.len() as f64;
        let span = made.last().expect("many").at.as_secs_f64();
        for (what, value, from, to) in [
            ("prompt tokens", mean(|record| record.prompt_tokens), 10_500.0, 13_500.0),
            ("answer tokens", mean(|record| record.answer_tokens), 310.0, 380.0),
            ("seen before", seen_before(&made), 0.31, 0.42),
            ("seconds", span, 3300.0, 3800.0),
            ("at once", made.iter().filter(|record| record.at.is_zero()).count() as f64, 1.0, 30.0),
        ] {
            assert!((from..to).contains(&value), "{what}: {value}");
        }
        for record in &made {
            assert_eq!(record.blocks.len(), record.prompt_tokens.div_ceil(BLOCK_TOKENS));
            assert!(record.prompt_tokens <= LONGEST && record.answer_tokens >= 1 && record.blocks[0] == 0);
        }
        assert!(made.is_sorted_by_key(|record| record.at));
    }

    #[test]
    fn a_seed_fixes_the_requests_and_more_of_them_begin_the_same() {
        let made = records(500, 7);
        assert_eq!(made, records(500, 7));
        assert_eq!(made[..200], records(200, 7));
        assert_ne!(made, records(500, 8));
    }
}
