//! What a run came to: how evenly the workers were loaded, and where it chose as the reference did.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::Outcome;

/// The figures of one run.
pub struct Summary {
    errors: usize,
    first_error: Option<String>,
    /// Running requests of the busiest worker, of the mean of all, over time.
    imbalance: f64,
    /// Requests that went to the same worker as in the reference run.
    equal_choices: f64,
    ttft_p50_ms: f64,
    ttft_p95_ms: f64,
    cpu_ms_per_req: f64,
}

/// Columns of the table.
const COLUMNS: &[&str] =
    &["imbalance", "equal_choices", "ttft_p50_ms", "ttft_p95_ms", "router_cpu_ms_per_req", "errors"];

/// The worker of each request; none where it failed.
pub fn choices(outcomes: &[Outcome]) -> Vec<Option<String>> {
    outcomes.iter().map(|outcome| outcome.ended.as_ref().ok().map(|answer| answer.worker.clone())).collect()
}

impl Summary {
    pub fn of(outcomes: &[Outcome], reference: &[Option<String>], workers: usize, cpu: Duration) -> Self {
        let count = outcomes.len().max(1) as f64;
        let equal = choices(outcomes).iter().zip(reference).filter(|(a, b)| a.is_some() && a == b).count();
        let mut ttft: Vec<f64> = outcomes
            .iter()
            .filter_map(|outcome| Some((outcome.ended.as_ref().ok()?.first - outcome.sent).as_secs_f64() * 1e3))
            .collect();
        ttft.sort_by(f64::total_cmp);
        let at = |share: f64| ttft.get((ttft.len() as f64 * share) as usize).copied().unwrap_or_default();
        let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.ended.as_ref().err()).collect();
        Self {
            errors: failed.len(),
            first_error: failed.first().map(|error| format!("{error:#}")),
            imbalance: imbalance(&runs(outcomes), workers),
            equal_choices: equal as f64 / count,
            ttft_p50_ms: at(0.5),
            ttft_p95_ms: at(0.95),
            cpu_ms_per_req: cpu.as_secs_f64() * 1e3 / count,
        }
    }

    /// Adds the figures to a line.
    pub fn add_to(&self, line: &mut Value) {
        let figures = [
            ("imbalance", self.imbalance),
            ("equal_choices", self.equal_choices),
            ("ttft_p50_ms", self.ttft_p50_ms),
            ("ttft_p95_ms", self.ttft_p95_ms),
            ("router_cpu_ms_per_req", self.cpu_ms_per_req),
        ];
        for (name, value) in figures {
            line[name] = json!((value * 1e3).round() / 1e3);
        }
        line["errors"] = json!(self.errors);
        if let Some(error) = &self.first_error {
            line["first_error"] = json!(error);
        }
    }
}

/// Where each request ran, and from when to when.
fn runs(outcomes: &[Outcome]) -> Vec<(&str, Instant, Instant)> {
    let answered = outcomes.iter().filter_map(|outcome| Some((outcome.sent, outcome.ended.as_ref().ok()?)));
    answered.map(|(sent, answer)| (answer.worker.as_str(), sent, answer.last)).collect()
}

/// The mean over time of the busiest worker's running requests, divided by the mean over time of all workers'. Counted from a
/// quarter of the arrivals, when the load has built up, to the last one.
fn imbalance(runs: &[(&str, Instant, Instant)], workers: usize) -> f64 {
    let (Some(from), Some(to)) = (runs.get(runs.len() / 4), runs.last()) else { return 0.0 };
    let (from, to) = (from.1, to.1);
    let mut changes: Vec<(Instant, &str, i64)> =
        runs.iter().flat_map(|(worker, begin, end)| [(*begin, *worker, 1), (*end, *worker, -1)]).collect();
    changes.sort_by_key(|(at, _, _)| *at);
    let mut running = BTreeMap::<&str, i64>::new();
    let (mut busiest, mut all, mut before) = (0.0, 0.0, from);
    for (at, worker, change) in changes {
        let seconds = at.min(to).saturating_duration_since(before).as_secs_f64();
        busiest += running.values().max().copied().unwrap_or_default() as f64 * seconds;
        all += running.values().sum::<i64>() as f64 * seconds;
        before = before.max(at);
        *running.entry(worker).or_default() += change;
    }
    if all > 0.0 { busiest * workers as f64 / all } else { 0.0 }
}

/// Prints the lines as a table in Markdown.
pub fn table(lines: &[Value]) {
    println!("\n| routers | {} |\n|---{}|", COLUMNS.join(" | "), "|---".repeat(COLUMNS.len()));
    for line in lines {
        let cells: Vec<String> = COLUMNS.iter().map(|column| line[*column].to_string()).collect();
        println!("| {} ({}) | {} |", line["case"].as_str().unwrap_or("?"), line["routers"], cells.join(" | "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(runs: &[(&'static str, u64, u64)], workers: usize) -> f64 {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let runs: Vec<_> = runs.iter().map(|(worker, begin, end)| (*worker, at(*begin), at(*end))).collect();
        imbalance(&runs, workers)
    }

    #[test]
    fn even_load_is_one_and_a_worker_that_has_all_counts_for_all() {
        assert_eq!(of(&[("a", 0, 10), ("b", 0, 10), ("a", 5, 9), ("b", 5, 9)], 2), 1.0);
        assert_eq!(of(&[("a", 0, 10), ("a", 0, 10), ("a", 5, 9)], 4), 4.0);
        assert_eq!(of(&[], 4), 0.0);
        // From 2 s to 6 s: 2 s of (1, 0), then 2 s of (1, 1): busiest 4, all 6.
        assert_eq!(of(&[("a", 0, 2), ("a", 2, 9), ("b", 4, 9), ("a", 6, 7)], 2), 4.0 * 2.0 / 6.0);
    }
}
