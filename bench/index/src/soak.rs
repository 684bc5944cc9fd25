//! Hours of churn in minutes: conversations come and go, workers leave and return, and memory must stay flat.

use std::time::{Duration, Instant};

use kv_hashing::BlockHash;
use kv_index::WorkerId;
use serde_json::json;

use crate::measure::{Structure, resident};
use crate::ours::Tree;
use crate::workload::{SYSTEM, TURN, TURNS, Workload};

/// Rounds between two workers that leave.
const RESTART_EVERY: u64 = 50;

/// Runs until `limit` has passed; prints a line about twenty times, and a last one with the growth since the first quarter.
pub fn soak(workload: &Workload, limit: Duration, bytes: usize) {
    let mut tree = Tree::new(false, bytes);
    let keep = workload.conversations();
    let (start, mut events, mut shown) = (Instant::now(), 0_u64, 0);
    let mut level = None;
    // Oldest conversation that each worker still holds.
    let mut oldest = vec![0; workload.workers as usize];
    for n in 0_u64.. {
        for worker in 0..workload.workers {
            let held = workload.held(worker, n);
            let mut batch: Vec<_> = (0..TURNS).map(|turn| Tree::stored(&held, held.turn(turn))).collect();
            if n - oldest[worker as usize] >= keep {
                let gone = workload.held(worker, oldest[worker as usize]);
                oldest[worker as usize] += 1;
                let turns = (0..TURNS).rev().map(|turn| SYSTEM + turn * TURN);
                batch.extend(turns.map(|at| Tree::removed(&gone, at..at + TURN)));
            }
            events += batch.len() as u64;
            for (rank, data) in &batch {
                tree.writer().apply(*rank, kv_index::Tier::Device, data);
            }
        }
        if n % RESTART_EVERY == RESTART_EVERY - 1 {
            let worker = n / RESTART_EVERY % workload.workers;
            tree.writer().remove_worker(WorkerId(worker));
            oldest[worker as usize] = n + 1;
        }
        let prompt: Vec<BlockHash> = workload.locals(n % workload.workers, n).into_iter().map(BlockHash).collect();
        tree.find(&prompt);
        let elapsed = start.elapsed();
        let due = elapsed.as_millis() * 20 / limit.as_millis().max(1) > shown;
        if due || elapsed >= limit {
            shown = elapsed.as_millis() * 20 / limit.as_millis().max(1);
            let stats = tree.writer().stats();
            let rss = resident();
            if level.is_none() && elapsed >= limit / 4 {
                level = Some((rss, stats.bytes));
            }
            let (rss_before, bytes_before) = level.unwrap_or((rss, stats.bytes));
            println!(
                "{}",
                json!({
                    "soak_s": elapsed.as_secs(), "events": events, "conversations_per_worker": n + 1,
                    "rss_mb": rss >> 20, "bytes_mb": stats.bytes >> 20, "live_mb": stats.live_bytes >> 20,
                    "owned_blocks": stats.owned_blocks, "distinct_blocks": stats.distinct_blocks,
                    "evicted_blocks": stats.evicted_blocks,
                    "rss_growth_pct": growth(rss_before as f64, rss as f64),
                    "bytes_growth_pct": growth(bytes_before as f64, stats.bytes as f64),
                })
            );
        }
        if elapsed >= limit {
            return;
        }
    }
}

fn growth(before: f64, now: f64) -> f64 {
    ((now / before.max(1.0) - 1.0) * 1000.0).round() / 10.0
}
