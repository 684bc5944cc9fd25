//! Log-probabilities as OpenAI's API and vLLM return them: the log-softmax of the raw logits, before any setting acts.

use std::cmp::Ordering;

use protocol::request_plane::{TokenLogprobs, TopLogprob};

/// Log-probability of `token`, and the `top` most likely tokens, best first. NaN counts as −∞.
pub fn token_logprobs(row: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let norm = log_sum_exp(row);
    let logprob = |token: u32| match row.get(token as usize) {
        Some(logit) if !logit.is_nan() => (f64::from(*logit) - norm) as f32,
        _ => f32::NEG_INFINITY,
    };
    let best = best(row, top);
    let top = best.into_iter().map(|token_id| TopLogprob { token_id, logprob: logprob(token_id) }).collect();
    TokenLogprobs { token_id: token, logprob: logprob(token), top }
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    if max.is_infinite() {
        return f64::from(max);
    }
    let sum: f64 = row.iter().filter(|x| !x.is_nan()).map(|&x| f64::from((x - max).exp())).sum();
    f64::from(max) + sum.ln()
}

/// The `n` tokens with the largest logits, best first, the smaller token first among equals.
fn best(row: &[f32], n: usize) -> Vec<u32> {
    if n == 0 {
        return Vec::new();
    }
    let mut tokens: Vec<u32> = (0u32..).zip(row).filter(|(_, x)| !x.is_nan()).map(|(token, _)| token).collect();
    let rank = |a: &u32, b: &u32| -> Ordering { row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)) };
    if n < tokens.len() {
        tokens.select_nth_unstable_by(n, rank);
        tokens.truncate(n);
    }
    tokens.sort_unstable_by(rank);
    tokens
}
