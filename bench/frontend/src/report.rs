//! The table after the runs: median and, in parentheses, least and greatest of the rounds.

use serde_json::Value;

/// Columns of a run.
const COLUMNS: &[&str] = &["req_s", "ttft_p50_ms", "ttft_p99_ms", "cpu_ms_per_req", "rss_mb", "errors"];
/// Columns of a start.
const START: &[&str] = &["start_to_ready_ms", "start_to_model_ms", "idle_rss_mb"];

/// Prints both tables in Markdown.
pub fn table(results: &[Value]) {
    print(results, START, |result| {
        (result["prompt"].is_null()).then(|| result["mode"].as_str().unwrap_or("?").to_owned())
    });
    print(results, COLUMNS, |result| {
        let prompt = result["prompt"].as_str()?;
        let kind = if result["stream"] == true { "stream" } else { "whole" };
        Some(format!("{prompt}:{}:{kind} {}", result["concurrency"], result["mode"].as_str().unwrap_or("?")))
    });
}

fn print(results: &[Value], columns: &[&str], name: impl Fn(&Value) -> Option<String>) {
    println!("\n| run | {} |\n|---{}|", columns.join(" | "), "|---".repeat(columns.len()));
    let mut names: Vec<String> = Vec::new();
    for name in results.iter().filter_map(&name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    for wanted in names {
        let runs: Vec<_> = results.iter().filter(|result| name(result).as_ref() == Some(&wanted)).collect();
        let cells: Vec<_> = columns
            .iter()
            .map(|column| spread(runs.iter().filter_map(|run| run[*column].as_f64()).collect()))
            .collect();
        println!("| {wanted} | {} |", cells.join(" | "));
    }
}

fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let (Some(least), Some(greatest)) = (values.first(), values.last()) else { return "-".into() };
    let digits = if *greatest >= 100.0 || values.iter().all(|value| value.fract() == 0.0) { 0 } else { 2 };
    let show = |value: f64| format!("{value:.digits$}");
    let median = show(values[values.len() / 2]);
    if show(*least) == show(*greatest) { median } else { format!("{median} ({}-{})", show(*least), show(*greatest)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_shows_median_and_spread() {
        assert_eq!(spread(vec![3.5, 1.0, 2.0]), "2.00 (1.00-3.50)");
        assert_eq!(spread(vec![100.2, 100.4]), "100");
        assert_eq!((spread(vec![0.0, 0.0]), spread(vec![])), ("0".into(), "-".into()));
    }
}
