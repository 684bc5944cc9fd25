//! One request of a trace, and reading them from a file.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

/// Tokens that one block id of a trace stands for.
pub const BLOCK_TOKENS: usize = 512;

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Arrival, counted from the first request's.
    pub at: Duration,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer.
    pub answer_tokens: usize,
    /// Ids of the prompt's blocks, the last one possibly partial. Equal ids: equal tokens up to the block's end.
    pub blocks: Vec<u64>,
}

/// A line of the file.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

/// Reads the first `limit` requests of a file. The first line that is no request ends it with an error that names it.
pub fn read(path: &Path, limit: usize) -> anyhow::Result<Vec<Record>> {
    let shown = path.display();
    let file = File::open(path).with_context(|| format!("cannot open {shown}"))?;
    records(BufReader::new(file), limit).with_context(|| format!("{shown} is no trace"))
}

fn records(lines: impl BufRead, limit: usize) -> anyhow::Result<Vec<Record>> {
    let mut records: Vec<Record> = Vec::new();
    let mut first = None;
    for (number, line) in (1..).zip(lines.lines()) {
        if records.len() == limit {
            break;
        }
        let line = line.with_context(|| format!("line {number}"))?;
        if line.trim().is_empty() {
            continue;
        }
        let before = records.last().map_or(Duration::ZERO, |record| record.at);
        records.push(record(&line, &mut first, before).with_context(|| format!("line {number}"))?);
    }
    if records.is_empty() {
        bail!("it has no requests");
    }
    Ok(records)
}

fn record(line: &str, first: &mut Option<u64>, before: Duration) -> anyhow::Result<Record> {
    let line: Line = serde_json::from_str(line)?;
    let (tokens, blocks) = (line.input_length, line.hash_ids.len());
    ensure!(tokens > 0, "input_length is 0");
    ensure!(line.output_length > 0, "output_length is 0");
    ensure!(blocks == tokens.div_ceil(BLOCK_TOKENS), "{tokens} tokens are not {blocks} blocks of {BLOCK_TOKENS}");
    let at = line.timestamp.checked_sub(*first.get_or_insert(line.timestamp)).map(Duration::from_millis);
    let at = at.filter(|at| *at >= before).context("timestamp goes back")?;
    Ok(Record { at, prompt_tokens: tokens, answer_tokens: line.output_length, blocks: line.hash_ids })
}

/// Share of all prompt tokens that an earlier request had in the same place: the hit rate of one worker that forgets nothing.
pub fn seen_before(records: &[Record]) -> f64 {
    let (mut seen, mut again, mut all) = (HashSet::<u64>::new(), 0, 0);
    for record in records {
        let known = record.blocks.iter().take_while(|block| seen.contains(*block)).count();
        again += (known * BLOCK_TOKENS).min(record.prompt_tokens);
        all += record.prompt_tokens;
        seen.extend(&record.blocks);
    }
    again as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"timestamp": 7000, "input_length": 700, "output_length": 5, "hash_ids": [0, 14]}
{"timestamp": 7000, "input_length": 512, "output_length": 1, "hash_ids": [0], "type": "text"}

{"timestamp": 8500, "input_length": 1025, "output_length": 9, "hash_ids": [0, 14, 15]}
"#;

    fn read(text: &str) -> Result<Vec<Record>, String> {
        records(text.as_bytes(), 100).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn requests_are_read_with_arrivals_from_the_first() {
        let read = read(GOOD).expect("good");
        assert_eq!(read.iter().map(|record| record.at.as_millis()).collect::<Vec<_>>(), [0, 0, 1500]);
        let last =
            Record { at: Duration::from_millis(1500), prompt_tokens: 1025, answer_tokens: 9, blocks: vec![0, 14, 15] };
        assert_eq!(read[2], last);
        assert_eq!(records(GOOD.as_bytes(), 2).expect("good").len(), 2);
        // Nothing, all 512 tokens, and two blocks.
        assert_eq!(seen_before(&read), (512.0 + 1024.0) / 2237.0);
    }

    #[test]
    fn a_broken_line_is_named_with_what_is_wrong() {
        let line = |line: &str| read(&format!("{GOOD}{line}\n")).expect_err(line);
        for (text, wrong) in [
            ("{", "line 5: EOF"),
            ("[1]", "line 5: "),
            (r#"{"timestamp": 9000, "input_length": 5, "output_length": 5}"#, "line 5: missing field `hash_ids`"),
            (
                r#"{"timestamp": 9000, "input_length": 0, "output_length": 5, "hash_ids": []}"#,
                "line 5: input_length is 0",
            ),
            (
                r#"{"timestamp": 9000, "input_length": 5, "output_length": 0, "hash_ids": [1]}"#,
                "line 5: output_length is 0",
            ),
            (
                r#"{"timestamp": 9000, "input_length": 513, "output_length": 5, "hash_ids": [1]}"#,
                "line 5: 513 tokens are not 1 blocks of 512",
            ),
            (
                r#"{"timestamp": 8499, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#,
                "line 5: timestamp goes back",
            ),
            (r#"{"timestamp": 6000, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#, "timestamp goes back"),
            (r#"{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#, "invalid value"),
        ] {
            let error = line(text);
            assert!(error.contains(wrong), "{error} for {text}");
        }
        assert!(read("\n\n").expect_err("empty").contains("no requests"));
    }
}
