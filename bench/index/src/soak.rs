//! Hours of churn in minutes: conversations come and go, workers leave and return, and memory must stay flat.
//!
//! Memory is sampled from when every worker is full, and the first third of the samples compared with the last.

use std::time::{Duration, Instant};

use kv_hashing::BlockHash;
use kv_index::WorkerId;
use serde_json::{Value, json};

use crate::measure::{Structure, resident};
use crate::ours::Tree;
use crate::workload::{SYSTEM, TURN, TURNS, Workload};

/// Rounds between two workers that leave.
const RESTART_EVERY: u64 = 50;

/// Lines in all, about.
const LINES: u32 = 30;

/// Memory at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    /// Of the process, in bytes.
    rss: u64,
    /// As the index counts it, in bytes.
    bytes: usize,
    /// Blocks owned.
    blocks: u64,
}

/// The index under churn.
struct Churn<'a> {
    workload: &'a Workload,
    tree: Tree,
    events: u64,
    /// Conversations that each worker has begun.
    rounds: u64,
    /// Oldest conversation that each worker still holds.
    oldest: Vec<u64>,
}

impl Churn<'_> {
    /// Each worker begins a conversation, and forgets its oldest one if it is full.
    fn round(&mut self) {
        let (n, workload) = (self.rounds, self.workload);
        for worker in 0..workload.workers {
            let held = workload.held(worker, n);
            let mut batch: Vec<_> = (0..TURNS).map(|turn| Tree::stored(&held, held.turn(turn))).collect();
            let oldest = &mut self.oldest[worker as usize];
            if n - *oldest >= workload.conversations() {
                let gone = workload.held(worker, *oldest);
                *oldest += 1;
                let turns = (0..TURNS).rev().map(|turn| SYSTEM + turn * TURN);
                batch.extend(turns.map(|at| Tree::removed(&gone, at..at + TURN)));
            }
            self.events += batch.len() as u64;
            for (rank, data) in &batch {
                self.tree.writer().apply(*rank, kv_index::Tier::Device, data);
            }
        }
        if n % RESTART_EVERY == RESTART_EVERY - 1 {
            let worker = n / RESTART_EVERY % workload.workers;
            self.tree.writer().remove_worker(WorkerId(worker));
            self.oldest[worker as usize] = n + 1;
        }
        let prompt: Vec<BlockHash> = workload.locals(n % workload.workers, n).into_iter().map(BlockHash).collect();
        self.tree.find(&prompt);
        self.rounds += 1;
    }

    /// Whether every worker has been full: what grows from now on should not.
    fn is_warm(&self) -> bool {
        self.rounds > self.workload.conversations()
    }

    fn sample(&mut self) -> Sample {
        let stats = self.tree.writer().stats();
        Sample { rss: resident(), bytes: stats.bytes, blocks: stats.owned_blocks as u64 }
    }

    fn line(&mut self, elapsed: Duration) -> Value {
        let stats = self.tree.writer().stats();
        json!({
            "soak_s": elapsed.as_secs(), "warm": self.is_warm(), "events": self.events,
            "conversations_per_worker": self.rounds, "rss_mb": resident() >> 20, "bytes_mb": stats.bytes >> 20,
            "live_mb": stats.live_bytes >> 20, "owned_blocks": stats.owned_blocks,
            "distinct_blocks": stats.distinct_blocks, "evicted_blocks": stats.evicted_blocks,
        })
    }
}

/// Runs until `limit` has passed; prints a line about thirty times, and then how the last third compares with the first.
pub fn soak(workload: &Workload, limit: Duration, bytes: usize) {
    let tree = Tree::new(false, bytes);
    let oldest = vec![0; workload.workers as usize];
    let mut churn = Churn { workload, tree, events: 0, rounds: 0, oldest };
    let (start, pause) = (Instant::now(), limit / LINES);
    let (mut due, mut samples) = (pause, Vec::new());
    while start.elapsed() < limit {
        churn.round();
        if start.elapsed() >= due {
            due += pause;
            println!("{}", churn.line(start.elapsed()));
            if churn.is_warm() {
                samples.push(churn.sample());
            }
        }
    }
    let result = compare(&samples);
    println!("{result}");
    print!("{}", table(&result));
}

/// Means of the first and of the last third of the samples.
fn compare(samples: &[Sample]) -> Value {
    let third = samples.len() / 3;
    if third == 0 {
        return json!({"soak": "too short: the workers were not full in time"});
    }
    let (first, last) = (&samples[..third], &samples[samples.len() - third..]);
    let mean = |part: &[Sample], of: fn(&Sample) -> f64| part.iter().map(of).sum::<f64>() / part.len() as f64;
    let pair = |of: fn(&Sample) -> f64| (mean(first, of), mean(last, of));
    let mib = f64::from(1 << 20);
    let ((rss, rss_last), (bytes, bytes_last)) = (pair(|s| s.rss as f64), pair(|s| s.bytes as f64));
    let (blocks, blocks_last) = pair(|s| s.blocks as f64);
    json!({
        "soak": "thirds", "samples": samples.len(),
        "rss_mb": [round(rss / mib), round(rss_last / mib)], "rss_growth_pct": growth(rss, rss_last),
        "bytes_mb": [round(bytes / mib), round(bytes_last / mib)], "bytes_growth_pct": growth(bytes, bytes_last),
        "owned_blocks": [blocks.round(), blocks_last.round()], "owned_blocks_growth_pct": growth(blocks, blocks_last),
    })
}

fn table(result: &Value) -> String {
    let mut text = format!("\n{:<14}{:>14}{:>14}{:>10}\n", "", "first third", "last third", "growth");
    for (name, key) in [("resident, MB", "rss_mb"), ("counted, MB", "bytes_mb"), ("owned blocks", "owned_blocks")] {
        let growth = &result[format!("{}_growth_pct", key.trim_end_matches("_mb"))];
        let [first, last] = [0, 1].map(|at| result[key][at].to_string());
        text += &format!("{name:<14}{first:>14}{last:>14}{:>10}\n", format!("{growth} %"));
    }
    text
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn growth(before: f64, now: f64) -> f64 {
    round((now / before.max(1.0) - 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirds_are_compared_and_too_few_samples_are_not() {
        let sample = |mib: usize| Sample { rss: (mib as u64) << 20, bytes: (mib / 2) << 20, blocks: 7 };
        let samples: Vec<Sample> = [100, 100, 900, 900, 110, 110].map(sample).into();
        let result = compare(&samples);
        assert_eq!((&result["rss_growth_pct"], &result["bytes_growth_pct"]), (&json!(10.0), &json!(10.0)));
        assert_eq!(result["owned_blocks_growth_pct"], 0.0);
        assert!(table(&result).contains("resident, MB"));
        assert!(compare(&samples[..2])["soak"].as_str().is_some_and(|text| text.contains("too short")));
    }
}
