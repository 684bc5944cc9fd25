//! Measures the built-in engine's forward pass: tokens per second of a prompt of 512 tokens (`pp512`) and of 64 generated
//! tokens (`tg64`), as JSON lines. `bench/engine/run` runs it beside llama.cpp's `llama-bench`, which measures the same.
//!
//! `engine_bench MODEL [--threads N[,N...]] [--test pp512[,tg64...]] [--batch N] [--reps N]`; any number may follow `pp` and
//! `tg`. With `--batch N`, N sequences run side by side and their tokens are counted together.

use std::io::Write;
use std::time::Instant;

use worker_agent::engine::builtin::llama::{Llama, LlamaOptions};
use worker_agent::engine::builtin::{BlockId, Chunk, Forward, Logits};

const BLOCK_SIZE: usize = 16;

struct Arguments {
    model: String,
    threads: Vec<usize>,
    tests: Vec<String>,
    batch: usize,
    reps: usize,
}

fn arguments() -> Result<Arguments, String> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: engine_bench MODEL [--threads N,N] [--test pp512,tg64] [--batch N] [--reps N]";
    let model = args.next().ok_or(usage)?;
    let mut parsed =
        Arguments { model, threads: vec![1], tests: vec!["pp512".into(), "tg64".into()], batch: 1, reps: 3 };
    while let Some(option) = args.next() {
        let value = args.next().ok_or(usage)?;
        let number = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(format!("{option} takes positive numbers, not {text:?}")),
            Ok(n) => Ok(n),
        };
        match option.as_str() {
            "--threads" => parsed.threads = value.split(',').map(number).collect::<Result<_, _>>()?,
            "--test" => parsed.tests = value.split(',').map(str::to_owned).collect(),
            "--batch" => parsed.batch = number(&value)?,
            "--reps" => parsed.reps = number(&value)?,
            _ => return Err(usage.into()),
        }
    }
    Ok(parsed)
}

/// Tokens of sequence `s`: anything but repetitive, which could be faster or slower than text.
fn token(vocab: usize, s: usize, position: usize) -> u32 {
    ((position * 7919 + s * 104_729 + 17) % vocab) as u32
}

/// Runs one test once; returns tokens per second.
fn measure(llama: &mut Llama, test: &str, batch: usize, tables: &[Vec<BlockId>]) -> Result<f64, String> {
    let tokens: usize = test[2..].parse().map_err(|_| format!("no such test: {test}"))?;
    let vocab = llama.vocab();
    let prompts: Vec<Vec<u32>> = (0..batch).map(|s| (0..tokens).map(|p| token(vocab, s, p)).collect()).collect();
    let chunk_len = if test.starts_with("pp") { tokens } else { 1 };
    let mut logits = Vec::new();
    let start = Instant::now();
    for position in (0..tokens).step_by(chunk_len) {
        let chunks: Vec<_> = (0..batch)
            .map(|s| Chunk {
                tokens: &prompts[s][position..position + chunk_len],
                start: position,
                blocks: &tables[s],
                logits: Logits::Last,
            })
            .collect();
        logits.clear();
        llama.forward(&chunks, &mut logits);
    }
    Ok((batch * tokens) as f64 / start.elapsed().as_secs_f64())
}

fn run() -> Result<(), String> {
    let Arguments { model, threads, tests, batch, reps } = arguments()?;
    if let Some(unknown) = tests.iter().find(|t| !["pp", "tg"].iter().any(|kind| t.starts_with(kind))) {
        return Err(format!("no such test: {unknown}"));
    }
    let longest = tests.iter().filter_map(|t| t[2..].parse::<usize>().ok()).max().unwrap_or(0);
    let per_sequence = longest.div_ceil(BLOCK_SIZE).max(1);
    let tables: Vec<Vec<BlockId>> =
        (0..batch).map(|s| (0..per_sequence).map(|b| BlockId((s * per_sequence + b) as u32)).collect()).collect();
    for threads in threads {
        let options = LlamaOptions { threads, block_size: BLOCK_SIZE, total_blocks: batch * per_sequence };
        let mut llama = Llama::load(&model, options).map_err(|e| e.to_string())?;
        // The first pass reads the file and touches the arena.
        measure(&mut llama, "pp16", 1, &tables)?;
        for test in &tests {
            let mut rates =
                (0..reps).map(|_| measure(&mut llama, test, batch, &tables)).collect::<Result<Vec<_>, _>>()?;
            rates.sort_by(f64::total_cmp);
            let line = format!(
                r#"{{"engine":"armature","threads":{threads},"test":"{test}","batch":{batch},"tok_s":{:.1},"min":{:.1},"max":{:.1},"reps":{reps}}}"#,
                rates[reps / 2],
                rates[0],
                rates[reps - 1],
            );
            writeln!(std::io::stdout(), "{line}").map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

fn main() {
    if let Err(message) = run() {
        eprintln!("engine_bench: {message}");
        std::process::exit(2);
    }
}
