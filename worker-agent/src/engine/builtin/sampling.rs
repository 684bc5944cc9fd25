//! From a row of logits to a token: masks, biases, penalties, then greedy choice or a seeded draw.
//!
//! The order of operations is vLLM's: log-probabilities of the *raw* logits, minimum-length mask, logit bias, penalties,
//! greedy choice; or temperature, min_p, top_k, top_p, draw. Nothing here depends on what else is in the batch.

use std::collections::HashMap;

use protocol::request_plane::Sampling;

mod candidates;
mod logprobs;
#[cfg(test)]
mod tests;

use candidates::Candidates;
pub use logprobs::token_logprobs;

/// Temperatures below this one are greedy: dividing by them would overflow.
const GREEDY_TEMPERATURE: f32 = 1e-5;

/// Largest |bias| of a token, as in OpenAI's API.
const MAX_BIAS: f32 = 100.0;

/// The logits hold no number to choose by: all are NaN or −∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model returned no usable logit")]
pub struct NoUsableLogit;

/// A setting that cannot be sampled with.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidSampling {
    /// Outside its range, or not a number.
    #[error("{name} must be {range}, not {value}")]
    Range {
        /// The setting.
        name: &'static str,
        /// What it may be.
        range: &'static str,
        /// What it is.
        value: f32,
    },
    /// A bias for a token that the model does not have.
    #[error("logit_bias names token {token}, but the vocabulary has {vocab} tokens")]
    BiasToken {
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
}

/// Settings that can be sampled with; "off" values are normalised away.
#[derive(Clone, Debug)]
pub struct SamplingParams {
    /// 0: greedy.
    temperature: f32,
    /// In (0, 1]; 1: off.
    top_p: f32,
    /// 0: off.
    top_k: usize,
    /// In [0, 1); 0: off.
    min_p: f32,
    /// > 0; 1: off.
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    logit_bias: Vec<(u32, f32)>,
    seed: u64,
}

impl SamplingParams {
    /// Checks the settings of a request. `seed` is used when the request names none.
    pub fn new(wire: &Sampling, vocab: usize, seed: u64) -> Result<Self, InvalidSampling> {
        let check = |name, value: f32, ok: bool, range| {
            if ok { Ok(value) } else { Err(InvalidSampling::Range { name, range, value }) }
        };
        let t = wire.temperature;
        let temperature = check("temperature", t, t.is_finite() && t >= 0.0, "at least 0")?;
        let top_p = check("top_p", wire.top_p, (0.0..=1.0).contains(&wire.top_p), "in 0..1")?;
        let min_p = check("min_p", wire.min_p, (0.0..=1.0).contains(&wire.min_p), "in 0..1")?;
        let r = wire.repetition_penalty;
        let repetition = check("repetition_penalty", r, r.is_finite() && r >= 0.0, "at least 0")?;
        let additive = |name, value: f32| check(name, value, (-2.0..=2.0).contains(&value), "in -2..2");
        let mut logit_bias = Vec::with_capacity(wire.logit_bias.len());
        for (&token, &bias) in &wire.logit_bias {
            if token as usize >= vocab {
                return Err(InvalidSampling::BiasToken { token, vocab });
            }
            let in_range = (-MAX_BIAS..=MAX_BIAS).contains(&bias);
            logit_bias.push((token, check("logit_bias", bias, in_range, "in -100..100")?));
        }
        Ok(Self {
            temperature: if temperature < GREEDY_TEMPERATURE { 0.0 } else { temperature },
            top_p: if top_p == 0.0 { 1.0 } else { top_p },
            top_k: if wire.top_k as usize >= vocab { 0 } else { wire.top_k as usize },
            min_p,
            repetition_penalty: if repetition == 0.0 { 1.0 } else { repetition },
            presence_penalty: additive("presence_penalty", wire.presence_penalty)?,
            frequency_penalty: additive("frequency_penalty", wire.frequency_penalty)?,
            logit_bias,
            seed: wire.seed.unwrap_or(seed),
        })
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    /// Tokens of prompt and output, with how often they are in the output; empty while there is no penalty.
    seen: HashMap<u32, u32>,
}

impl Sampler {
    /// A sampler for a sequence that begins with `prompt`.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        let seen = if params.penalises() { prompt.iter().map(|&token| (token, 0)).collect() } else { HashMap::new() };
        Self { params, seen }
    }

    /// Counts tokens as output that were chosen elsewhere: what is chosen next is what would have been chosen there.
    pub fn replay(&mut self, output: &[u32]) {
        if self.params.penalises() {
            output.iter().for_each(|&token| *self.seen.entry(token).or_default() += 1);
        }
    }

    /// Chooses the token at `position` of the sequence, and counts it as output. `row` holds the raw logits and is
    /// changed; `masked` tokens are never chosen. NaN counts as −∞.
    ///
    /// The random number is a function of seed and position alone, so that a sequence that is preempted, resumed
    /// elsewhere or batched differently continues with the same tokens. Cost: one pass over the row when greedy.
    pub fn sample(&mut self, row: &mut [f32], masked: &[u32], position: usize) -> Result<u32, NoUsableLogit> {
        for &token in masked {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        for &(token, bias) in &self.params.logit_bias {
            row[token as usize] += bias;
        }
        self.penalise(row);
        let token = if self.params.temperature == 0.0 { argmax(row)? } else { self.draw(row, position)? };
        if self.params.penalises() {
            *self.seen.entry(token).or_default() += 1;
        }
        Ok(token)
    }

    /// Repetition counts prompt and output, presence and frequency the output alone.
    fn penalise(&self, row: &mut [f32]) {
        let p = &self.params;
        for (&token, &count) in &self.seen {
            let logit = &mut row[token as usize];
            *logit = if *logit > 0.0 { *logit / p.repetition_penalty } else { *logit * p.repetition_penalty };
            if count > 0 {
                *logit -= p.frequency_penalty * count as f32 + p.presence_penalty;
            }
        }
    }

    fn draw(&self, row: &[f32], position: usize) -> Result<u32, NoUsableLogit> {
        let p = &self.params;
        let mut candidates = Candidates::softmax(row, p.temperature).ok_or(NoUsableLogit)?;
        candidates.min_p(p.min_p);
        if p.top_k > 0 {
            candidates.top_k(p.top_k);
        }
        if p.top_p < 1.0 {
            candidates.top_p(p.top_p);
        }
        Ok(candidates.pick(uniform(p.seed, position)))
    }
}

/// The first of the largest logits.
fn argmax(row: &[f32]) -> Result<u32, NoUsableLogit> {
    // Two simple loops vectorise; one loop that carries an index does not. The comparison is false for NaN.
    let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    if max == f32::NEG_INFINITY {
        return Err(NoUsableLogit);
    }
    let index = row.iter().position(|&x| x == max).ok_or(NoUsableLogit)?;
    Ok(index as u32)
}

/// A number in [0, 1) with 53 random bits: output `position` of the SplitMix64 generator (Steele, Lea, Flood 2014)
/// that the scrambled seed starts. Being counter-based it has no state to lose, and it is the same on every platform.
fn uniform(seed: u64, position: usize) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let start = scramble(seed.wrapping_add(GOLDEN));
    let bits = scramble(start.wrapping_add((position as u64 + 1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64's output function.
fn scramble(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
