//! What a run came to, in the trace's time.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Answer, Ended};
use super::replay::Outcome;

/// When a request counts as good.
#[derive(Clone, Copy, Debug)]
pub struct Slo {
    /// Longest time to the first token, in ms.
    pub ttft_ms: f64,
    /// Longest mean time between tokens, in ms.
    pub itl_ms: f64,
}

/// The figures of one mode; times in ms of the trace.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    mode: String,
    requests: usize,
    /// Cached prompt tokens of all prompt tokens, as the workers counted them.
    hit_rate: f64,
    ttft_p50_ms: f64,
    ttft_p95_ms: f64,
    /// Of each request's mean.
    itl_p50_ms: f64,
    itl_p95_ms: f64,
    /// Good requests a second, until the last answer.
    goodput_req_s: f64,
    /// Requests refused with 429 or 503.
    rejects: usize,
    errors: usize,
    first_error: Option<String>,
    /// Prompt tokens that the busiest worker computed, of the mean of all workers that were used.
    imbalance: f64,
    /// From the first arrival to the last answer.
    makespan_s: f64,
    /// Between when a request was due and when it was sent.
    late_p99_ms: f64,
    router_cpu_ms_per_req: f64,
    /// Of all processors, whoever kept them busy.
    machine_busy: f64,
}

/// Columns of the table.
const COLUMNS: &[&str] = &[
    "hit_rate",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    "goodput_req_s",
    "rejects",
    "errors",
    "imbalance",
    "late_p99_ms",
    "router_cpu_ms_per_req",
    "machine_busy",
];
/// Above these the machine is a part of what was measured.
const BUSY: f64 = 0.9;
const LATE: f64 = 0.1;

impl Summary {
    /// Sums up a run that was `speedup` times faster than the trace.
    pub fn of(mode: &str, outcomes: &[Outcome], speedup: f64, slo: Slo) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3 * speedup;
        let mut summary = Self { mode: mode.to_owned(), requests: outcomes.len(), ..Self::default() };
        let (mut ttft, mut itl, mut late) = (Vec::new(), Vec::new(), Vec::new());
        let (mut prompt, mut cached, mut good) = (0, 0, 0);
        let mut computed = BTreeMap::<&str, u64>::new();
        for outcome in outcomes {
            late.push(ms(outcome.sent - outcome.due));
            let answer = match &outcome.ended {
                Ok(Ended::Answered(answer)) => answer,
                Ok(Ended::Rejected) => {
                    summary.rejects += 1;
                    continue;
                }
                Err(error) => {
                    summary.errors += 1;
                    summary.first_error.get_or_insert_with(|| format!("{error:#}"));
                    continue;
                }
            };
            let (first, between) = (ms(answer.first - outcome.due), between(answer).map(ms));
            good += usize::from(first <= slo.ttft_ms && between.is_none_or(|between| between <= slo.itl_ms));
            ttft.push(first);
            itl.extend(between);
            prompt += answer.prompt_tokens;
            cached += answer.cached_tokens;
            *computed.entry(&answer.worker).or_default() += answer.prompt_tokens - answer.cached_tokens;
        }
        summary.hit_rate = cached as f64 / prompt.max(1) as f64;
        [summary.ttft_p50_ms, summary.ttft_p95_ms] = [0.5, 0.95].map(|share| quantile(&mut ttft, share));
        [summary.itl_p50_ms, summary.itl_p95_ms] = [0.5, 0.95].map(|share| quantile(&mut itl, share));
        summary.late_p99_ms = quantile(&mut late, 0.99);
        let mean = computed.values().sum::<u64>() as f64 / computed.len().max(1) as f64;
        summary.imbalance = computed.values().copied().max().unwrap_or(0) as f64 / mean.max(1.0);
        summary.makespan_s = ms(makespan(outcomes)) / 1e3;
        summary.goodput_req_s = good as f64 / summary.makespan_s.max(1.0);
        summary
    }

    /// Adds what the run cost: the router's CPU time, and how busy the machine was.
    pub fn with_cost(mut self, router_cpu: Duration, machine_busy: f64) -> Self {
        self.router_cpu_ms_per_req = router_cpu.as_secs_f64() * 1e3 / self.requests.max(1) as f64;
        self.machine_busy = machine_busy;
        self
    }

    /// Its line.
    pub fn json(&self) -> Value {
        let mut line = json!({"server": "armature", "mode": self.mode, "requests": self.requests});
        let figures = [
            ("hit_rate", self.hit_rate),
            ("ttft_p50_ms", self.ttft_p50_ms),
            ("ttft_p95_ms", self.ttft_p95_ms),
            ("itl_p50_ms", self.itl_p50_ms),
            ("itl_p95_ms", self.itl_p95_ms),
            ("goodput_req_s", self.goodput_req_s),
            ("imbalance", self.imbalance),
            ("makespan_s", self.makespan_s),
            ("late_p99_ms", self.late_p99_ms),
            ("router_cpu_ms_per_req", self.router_cpu_ms_per_req),
            ("machine_busy", self.machine_busy),
        ];
        for (name, value) in figures {
            line[name] = rounded(value).into();
        }
        line["rejects"] = self.rejects.into();
        line["errors"] = self.errors.into();
        if let Some(error) = &self.first_error {
            line["first_error"] = error.as_str().into();
        }
        line
    }

    /// Why the figures are not the router's alone, if so.
    fn doubt(&self) -> Option<String> {
        let (mode, busy, late) = (&self.mode, self.machine_busy, self.late_p99_ms);
        if busy > BUSY {
            return Some(format!("{mode}: the machine was {:.0} % busy; lower --speedup", busy * 100.0));
        }
        (late > LATE * self.ttft_p50_ms)
            .then(|| format!("{mode}: requests left up to {late:.0} ms late; lower --speedup"))
    }
}

/// Prints the table, and below it what makes it doubtful.
pub fn table(summaries: &[Summary]) {
    println!("\n| mode | {} |\n|---{}|", COLUMNS.join(" | "), "|---".repeat(COLUMNS.len()));
    for summary in summaries {
        let line = summary.json();
        let cells: Vec<String> = COLUMNS.iter().map(|column| line[*column].to_string()).collect();
        println!("| {} | {} |", summary.mode, cells.join(" | "));
    }
    for doubt in summaries.iter().filter_map(Summary::doubt) {
        println!("{doubt}");
    }
}

/// Mean time between the tokens of an answer that has several.
fn between(answer: &Answer) -> Option<Duration> {
    let gaps = u32::try_from(answer.answer_tokens.checked_sub(1)?).ok().filter(|gaps| *gaps > 0)?;
    Some((answer.last - answer.first) / gaps)
}

fn makespan(outcomes: &[Outcome]) -> Duration {
    let first = outcomes.iter().map(|outcome| outcome.due).min();
    let last = outcomes.iter().filter_map(|outcome| match &outcome.ended {
        Ok(Ended::Answered(answer)) => Some(answer.last),
        _ => None,
    });
    first.zip(last.max()).map_or(Duration::ZERO, |(first, last)| last - first)
}

/// The value below which this share of them lies; 0 of none.
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let index = (values.len() as f64 * share) as usize;
    values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

/// Three decimals.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn answered(start: Instant, (due, first, last): (u64, u64, u64), cached_tokens: u64, worker: &str) -> Outcome {
        let at = |ms| start + Duration::from_millis(ms);
        let answer = Answer {
            first: at(first),
            last: at(last),
            prompt_tokens: 100,
            answer_tokens: 11,
            cached_tokens,
            worker: worker.to_owned(),
            id: String::new(),
        };
        Outcome { due: at(due), sent: at(due), ended: Ok(Ended::Answered(answer)) }
    }

    #[test]
    fn times_are_the_trace_s_and_only_answers_count_as_good() {
        let start = Instant::now();
        let failed = |ended| Outcome { due: start, sent: start, ended };
        let outcomes = [
            answered(start, (0, 10, 20), 0, "a"),
            answered(start, (5, 10, 110), 50, "a"),
            answered(start, (50, 500, 500), 64, "b"),
            failed(Ok(Ended::Rejected)),
            failed(Err(anyhow::anyhow!("gone"))),
        ];
        let summary = Summary::of("kv", &outcomes, 10.0, Slo { ttft_ms: 2000.0, itl_ms: 50.0 });
        assert_eq!((summary.requests, summary.rejects, summary.errors), (5, 1, 1));
        assert_eq!((summary.ttft_p50_ms, summary.ttft_p95_ms), (100.0, 4500.0));
        assert_eq!((summary.itl_p50_ms, summary.itl_p95_ms), (10.0, 100.0));
        assert_eq!(summary.hit_rate, 0.38);
        // One of the three is slow between tokens, one to its first.
        assert_eq!((summary.makespan_s, summary.goodput_req_s), (5.0, 0.2));
        assert!((summary.imbalance - 150.0 / 93.0).abs() < 1e-9);
        let line = summary.with_cost(Duration::from_millis(5), 0.95).json();
        assert_eq!((&line["first_error"], &line["router_cpu_ms_per_req"]), (&"gone".into(), &1.0.into()));
    }

    #[test]
    fn a_busy_machine_and_late_requests_are_told() {
        let calm = Summary { ttft_p50_ms: 100.0, machine_busy: 0.5, late_p99_ms: 5.0, ..Summary::default() };
        assert_eq!(calm.doubt(), None);
        assert!(Summary { machine_busy: 0.95, ..calm.clone() }.doubt().expect("busy").contains("95 % busy"));
        assert!(Summary { late_p99_ms: 40.0, ..calm }.doubt().expect("late").contains("40 ms late"));
    }

    #[test]
    fn nothing_at_all_is_no_division_by_zero() {
        let summary = Summary::of("kv", &[], 10.0, Slo { ttft_ms: 1.0, itl_ms: 1.0 });
        assert_eq!((summary.hit_rate, summary.goodput_req_s, summary.imbalance), (0.0, 0.0, 0.0));
    }
}
