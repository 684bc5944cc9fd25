//! What a run came to: where it chose as one router that sees everything would have, how evenly, and what clients saw of it.

use std::time::Duration;

use serde_json::{Value, json};

use super::Outcome;
use super::whole::Judgement;

/// A cost that is higher by no more than this many blocks is the same cost: costs are sums of sixteenths.
const SAME: f64 = 1e-6;

/// The figures of one run.
pub struct Summary {
    errors: usize,
    first_error: Option<String>,
    figures: [(&'static str, f64); 7],
}

impl Summary {
    /// Sums up; decisions count from a quarter of them on, when the load has built up.
    pub fn of(outcomes: &[Outcome], judgements: &[Judgement], workers: usize, cpu: Duration) -> Self {
        let judged = &judgements[judgements.len() / 4..];
        let mean = |of: &dyn Fn(&Judgement) -> f64| judged.iter().map(of).sum::<f64>() / judged.len().max(1) as f64;
        let blocks = |of: fn(&Judgement) -> u64| judged.iter().map(of).sum::<u64>() as f64;
        let active = blocks(|judgement| judgement.active_blocks).max(1.0);
        let mut ttft: Vec<f64> = outcomes
            .iter()
            .filter_map(|outcome| Some((outcome.ended.as_ref().ok()?.first - outcome.sent).as_secs_f64() * 1e3))
            .collect();
        ttft.sort_by(f64::total_cmp);
        let ttft = |share: f64| ttft.get((ttft.len() as f64 * share) as usize).copied().unwrap_or_default();
        let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.ended.as_ref().err()).collect();
        Self {
            errors: failed.len(),
            first_error: failed.first().map(|error| format!("{error:#}")),
            figures: [
                ("as_one", mean(&|judgement| f64::from(u8::from(judgement.regret <= SAME)))),
                ("regret_blocks", mean(&|judgement| judgement.regret)),
                ("load_seen", blocks(|judgement| judgement.seen_blocks) / active),
                ("imbalance", blocks(|judgement| judgement.busiest_blocks) * workers as f64 / active),
                ("ttft_p50_ms", ttft(0.5)),
                ("ttft_p95_ms", ttft(0.95)),
                ("router_cpu_ms_per_req", cpu.as_secs_f64() * 1e3 / outcomes.len().max(1) as f64),
            ],
        }
    }

    /// Adds the figures to a line.
    pub fn add_to(&self, line: &mut Value) {
        for (name, value) in self.figures {
            line[name] = json!((value * 1e3).round() / 1e3);
        }
        line["errors"] = json!(self.errors);
        if let Some(error) = &self.first_error {
            line["first_error"] = json!(error);
        }
    }
}

/// Columns of the table.
const COLUMNS: [&str; 8] = [
    "as_one",
    "regret_blocks",
    "load_seen",
    "imbalance",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "router_cpu_ms_per_req",
    "errors",
];

/// Prints the lines as a table in Markdown, and what its columns are.
pub fn table(lines: &[Value]) {
    println!("\n| workload | routers | {} |\n|---|---{}|", COLUMNS.join(" | "), "|---".repeat(COLUMNS.len()));
    for line in lines {
        let cells: Vec<String> = COLUMNS.iter().map(|column| line[*column].to_string()).collect();
        let text = |name: &str| line[name].as_str().unwrap_or("?");
        println!("| {} | {} | {} |", text("workload"), text("case"), cells.join(" | "));
    }
    println!(
        "\nas_one: decisions for a worker of the lowest cost by the load of all routers. regret_blocks: what the chosen worker cost \
         beyond that, mean. load_seen: blocks in use that the routers knew of when they decided, of all. imbalance: blocks in use on \
         the busiest worker when a request comes, of the mean of all workers."
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_counted_once_the_load_has_built_up() {
        let judged = |regret, seen_blocks, active_blocks, busiest_blocks| Judgement {
            regret,
            seen_blocks,
            active_blocks,
            busiest_blocks,
        };
        let judgements =
            [judged(9.0, 0, 0, 0), judged(0.0, 10, 20, 10), judged(3.0, 10, 20, 10), judged(0.0, 20, 40, 30)];
        let summary = Summary::of(&[], &judgements, 2, Duration::ZERO);
        let mut line = json!({});
        summary.add_to(&mut line);
        assert_eq!((&line["as_one"], &line["regret_blocks"]), (&json!(0.667), &json!(1.0)));
        assert_eq!((&line["load_seen"], &line["imbalance"]), (&json!(0.5), &json!(1.25)));
        Summary::of(&[], &[], 2, Duration::ZERO).add_to(&mut line);
        assert_eq!((&line["as_one"], &line["imbalance"], &line["errors"]), (&json!(0.0), &json!(0.0), &json!(0)));
    }
}
