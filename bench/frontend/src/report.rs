//! The tables after the runs: median and, in parentheses, least and greatest of the rounds; then ours beside the best peer.

use std::fmt::Write;

use serde_json::Value;

use crate::servers::Server;

/// A column: key, and whether more is better.
type Column = (&'static str, bool);

/// Columns of a run.
const RUN: [Column; 5] =
    [("req_s", true), ("ttft_p50_ms", false), ("ttft_p99_ms", false), ("cpu_ms_per_req", false), ("rss_mb", false)];
/// Columns of a start.
const START: [Column; 3] = [("start_to_ready_ms", false), ("start_to_model_ms", false), ("idle_rss_mb", false)];

/// Results of one server in one run, over all rounds.
struct Row<'a> {
    run: String,
    server: &'a str,
    who: String,
    results: Vec<&'a Value>,
}

/// The tables, in Markdown.
pub fn tables(results: &[Value]) -> String {
    let rows = rows(results);
    let (starts, runs): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.run == "start");
    let mut text = String::new();
    values(&mut text, &starts, &START, false);
    values(&mut text, &runs, &RUN, true);
    modes(&mut text, results, &rows);
    if rows.iter().any(Row::is_peer) {
        text.push_str("\nOurs is so many times better than the best peer, by medians:\n");
        ratios(&mut text, &starts, &START);
        ratios(&mut text, &runs, &RUN);
    }
    for row in &rows {
        if let Some(error) = row.results.iter().find_map(|result| result["first_error"].as_str()) {
            let _ = writeln!(text, "\nfirst error of {}, {}: {error}", row.who, row.run);
        }
    }
    text
}

/// Runs in the order in which they were first made, and in each the servers.
fn rows(results: &[Value]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row> = Vec::new();
    for result in results {
        let (run, who) = (run(result), who(result));
        match rows.iter_mut().find(|row| row.run == run && row.who == who) {
            Some(row) => row.results.push(result),
            None => {
                // Beside the other servers of this run.
                let place = rows.iter().rposition(|row| row.run == run).map_or(rows.len(), |last| last + 1);
                let server = result["server"].as_str().unwrap_or_default();
                rows.insert(place, Row { run, server, who, results: vec![result] });
            }
        }
    }
    rows
}

fn run(result: &Value) -> String {
    let Some(prompt) = result["prompt"].as_str() else { return "start".into() };
    let kind = if result["stream"] == true { "stream" } else { "whole" };
    format!("{prompt}:{}:{kind}", result["concurrency"])
}

fn who(result: &Value) -> String {
    let word = |key: &str| result[key].as_str().unwrap_or_default();
    let build = if result["build"] == "other" { ", other build" } else { "" };
    match (word("server"), word("mode"), word("workers")) {
        (server, "none", _) => server.to_owned(),
        (server, mode, "agents") => format!("{server} {mode}, agents{build}"),
        (server, mode, _) => format!("{server} {mode}{build}"),
    }
}

impl Row<'_> {
    fn of(&self, key: &str) -> Vec<f64> {
        let mut values: Vec<f64> = self.results.iter().filter_map(|result| result[key].as_f64()).collect();
        values.sort_by(f64::total_cmp);
        values
    }

    fn median(&self, key: &str) -> Option<f64> {
        let values = self.of(key);
        values.get(values.len() / 2).copied()
    }

    fn is_ours(&self) -> bool {
        self.server == Server::Armature.name()
    }

    fn is_peer(&self) -> bool {
        self.server != Server::Direct.name() && !self.is_ours()
    }

    fn errors(&self) -> u64 {
        self.results.iter().filter_map(|result| result["errors"].as_u64()).sum()
    }
}

/// Our first mode and build beside each other one in front of the same workers: CPU of a request, round by round.
fn modes(text: &mut String, results: &[Value], rows: &[Row]) {
    let mut lines = String::new();
    for row in rows.iter().filter(|row| row.is_ours() && row.run != "start") {
        // The first of all results: which row comes first in a run may be another one each time.
        let of = |result: &&Value| result["server"] == row.server && result["workers"] == row.results[0]["workers"];
        let Some(first) = results.iter().find(of).map(who).filter(|first| *first != row.who) else { continue };
        let Some(first) = rows.iter().find(|other| other.run == row.run && other.who == first) else { continue };
        let cpu = |result: &Value| result["cpu_ms_per_req"].as_f64().filter(|cpu| *cpu > 0.0);
        let rounds = first.results.iter().zip(&row.results);
        let mut times: Vec<f64> = rounds.filter_map(|(first, other)| Some(cpu(first)? / cpu(other)?)).collect();
        times.sort_by(f64::total_cmp);
        if times.is_empty() {
            continue;
        }
        let [quarter, half, three] = [0.25, 0.5, 0.75].map(|share| quantile(&times, share));
        let _ = writeln!(
            lines,
            "| {} | {} | {} | {half:.3} ({quarter:.3}–{three:.3}) | {} |",
            row.run,
            first.who,
            row.who,
            times.len()
        );
    }
    if !lines.is_empty() {
        text.push_str("\nCPU of a request, A's over B's in each round: median, and the middle half of the rounds\n");
        let _ = write!(text, "\n| run | A | B | A ÷ B | rounds |\n|---|---|---|---|---|\n{lines}");
    }
}

/// Of sorted values, of which there is one at least; between two of them where the share falls there.
fn quantile(values: &[f64], share: f64) -> f64 {
    let at = share * (values.len() - 1) as f64;
    let (below, above) = (values[at.floor() as usize], values[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

fn head(text: &mut String, columns: &[Column], last: &str) {
    let names: Vec<_> = columns.iter().map(|(key, _)| *key).collect();
    let _ = writeln!(text, "\n| run | server | {} |{last}", names.join(" | "));
    let cells = columns.len() + 2 + usize::from(!last.is_empty());
    let _ = writeln!(text, "|{}", "---|".repeat(cells));
}

fn values(text: &mut String, rows: &[&Row], columns: &[Column], with_errors: bool) {
    if rows.is_empty() {
        return;
    }
    head(text, columns, if with_errors { " errors |" } else { "" });
    for row in rows {
        let cells: Vec<_> = columns.iter().map(|(key, _)| spread(&row.of(key))).collect();
        let errors = if with_errors { format!(" {} |", row.errors()) } else { String::new() };
        let _ = writeln!(text, "| {} | {} | {} |{errors}", row.run, row.who, cells.join(" | "));
    }
}

/// How many times better ours is than the best peer, which may be another one in each column.
fn ratios(text: &mut String, rows: &[&Row], columns: &[Column]) {
    head(text, columns, "");
    for row in rows.iter().filter(|row| row.is_ours()) {
        let peers: Vec<_> = rows.iter().filter(|peer| peer.is_peer() && peer.run == row.run).collect();
        let cell = |&(key, more): &Column| {
            let values = peers.iter().filter_map(|peer| Some((peer.median(key)?, peer.server)));
            // No measurement has this little: 0 is below the clock's step, and nothing is a multiple of it.
            let values = values.filter(|(value, _)| *value > 0.0);
            let better =
                |a: &(f64, &str), b: &(f64, &str)| if more { b.0.total_cmp(&a.0) } else { a.0.total_cmp(&b.0) };
            match (row.median(key).filter(|ours| *ours > 0.0), values.min_by(better)) {
                (Some(ours), Some((best, peer))) => {
                    format!("{:.2} ({peer})", if more { ours / best } else { best / ours })
                }
                _ => "-".into(),
            }
        };
        let cells: Vec<_> = columns.iter().map(cell).collect();
        let _ = writeln!(text, "| {} | {} | {} |", row.run, row.who, cells.join(" | "));
    }
}

/// Median, least and greatest of sorted values.
fn spread(values: &[f64]) -> String {
    let (Some(least), Some(greatest)) = (values.first(), values.last()) else { return "-".into() };
    let digits = if *greatest >= 100.0 || values.iter().all(|value| value.fract() == 0.0) { 0 } else { 2 };
    let show = |value: f64| format!("{value:.digits$}");
    let median = show(values[values.len() / 2]);
    if show(*least) == show(*greatest) { median } else { format!("{median} ({}–{})", show(*least), show(*greatest)) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn result(server: &str, workers: &str, cpu: f64, errors: u64) -> Value {
        let mut result = json!({"server": server, "mode": "kv", "workers": workers, "prompt": "short", "concurrency": 16, "stream": true,
            "req_s": 1000.0 / cpu, "cpu_ms_per_req": cpu, "errors": errors});
        if errors > 0 {
            result["first_error"] = "status 503".into();
        }
        result
    }

    #[test]
    fn a_cell_shows_median_and_spread() {
        assert_eq!(spread(&[1.0, 2.0, 3.5]), "2.00 (1.00–3.50)");
        assert_eq!(spread(&[100.2, 100.4]), "100");
        assert_eq!((spread(&[0.0, 0.0]), spread(&[])), ("0".into(), "-".into()));
    }

    #[test]
    fn ours_is_compared_with_the_best_peer_of_each_column() {
        let text = tables(&[
            result("vllm-router", "openai", 0.75, 2),
            result("armature", "openai", 0.25, 0),
            result("sglang-router", "openai", 0.5, 0),
            result("direct", "openai", 0.1, 0),
            result("armature", "agents", 1.0, 0),
            result("vllm-router", "openai", 0.75, 1),
        ]);
        for line in [
            "| short:16:stream | vllm-router kv | 1333 | - | - | 0.75 | - | 3 |",
            "| short:16:stream | armature kv | 2.00 (sglang-router) | - | - | 2.00 (sglang-router) | - |",
            "| short:16:stream | armature kv, agents | 0.50 (sglang-router) | - | - | 0.50 (sglang-router) | - |",
            "first error of vllm-router kv, short:16:stream: status 503",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn our_modes_are_compared_round_by_round() {
        let of = |mode: &str, cpu: f64| {
            let mut result = result("armature", "agents", cpu, 0);
            result["mode"] = mode.into();
            result
        };
        // A round of the other mode was three times slower: its pair says nothing else than the others.
        let rounds = [("kv", 1.1), ("random", 1.0), ("random", 3.0), ("kv", 3.3), ("kv", 1.0), ("random", 2.0)];
        let text = tables(&rounds.map(|(mode, cpu)| of(mode, cpu)));
        let line = "| short:16:stream | armature kv, agents | armature random, agents | 1.100 (0.800–1.100) | 3 |";
        assert!(text.lines().any(|found| found == line), "{text}");
        assert!(!tables(&[of("kv", 1.0)]).contains("A ÷ B"), "one mode alone");
        let mut other = of("kv", 2.0);
        other["build"] = "other".into();
        let line =
            "| short:16:stream | armature kv, agents | armature kv, agents, other build | 0.500 (0.500–0.500) | 1 |";
        assert!(tables(&[of("kv", 1.0), other]).contains(line), "two builds");
        assert_eq!((quantile(&[1.0, 2.0], 0.5), quantile(&[3.0], 0.75)), (1.5, 3.0));
    }

    #[test]
    fn starts_have_a_table_of_their_own_and_without_peers_nothing_is_compared() {
        let start = |ready: Option<f64>| {
            json!({"server": "armature", "mode": "kv", "workers": "openai", "start_to_ready_ms": ready, "start_to_model_ms": 20.0,
                "idle_rss_mb": 30.0})
        };
        let text = tables(&[start(Some(9.0)), result("armature", "openai", 0.25, 0), start(Some(11.0))]);
        assert!(text.contains("| start | armature kv | 11 (9–11) | 20 | 30 |"), "{text}");
        assert!(!text.contains("best peer"), "{text}");
    }
}
