//! How long a step takes: a sum of five terms, each a count of the step times a constant.
//!
//! The form is that of a transformer's step: reading the weights once, the products of each token, attention of prompts
//! (compute), and reading the KV of what is decoded (memory). The constants are arithmetic, not a measurement: a model's
//! shape over half of its accelerators' peak compute and 0.7 of their peak bandwidth. See docs/decisions/0013.

use std::time::Duration;

use clap::ValueEnum;

use crate::engine::builtin::Chunk;

/// Whose times are imitated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// Llama 3 8B in bf16 on one H100 SXM.
    #[default]
    #[value(name = "llama-3-8b")]
    Llama3_8b,
    /// Llama 3 70B in bf16 on eight of them, communication between them left out.
    #[value(name = "llama-3-70b")]
    Llama3_70b,
}

/// Bytes of a bf16.
const BF16: f64 = 2.0;
/// FLOP/s of an accelerator: half of the 989 TFLOP/s that the H100's data sheet gives for dense bf16.
const COMPUTE: f64 = 0.5 * 989e12;
/// Bytes/s: 0.7 of its 3.35 TB/s.
const BANDWIDTH: f64 = 0.7 * 3.35e12;
/// Nanoseconds in a second.
const NS: f64 = 1e9;

/// A model and how many accelerators it runs on.
struct Shape {
    accelerators: f64,
    /// All parameters; those of the layers, which every token is multiplied with; and those of the head, which only tokens
    /// with logits are.
    parameters: f64,
    layer_parameters: f64,
    head_parameters: f64,
    layers: f64,
    /// Width of all queries, and of all keys.
    query_width: f64,
    key_width: f64,
}

impl Profile {
    fn shape(self) -> Shape {
        match self {
            Self::Llama3_8b => Shape {
                accelerators: 1.0,
                parameters: 8.03e9,
                layer_parameters: 6.98e9,
                head_parameters: 0.525e9,
                layers: 32.0,
                query_width: 4096.0,
                key_width: 1024.0,
            },
            Self::Llama3_70b => Shape {
                accelerators: 8.0,
                parameters: 70.6e9,
                layer_parameters: 68.5e9,
                head_parameters: 1.05e9,
                layers: 80.0,
                query_width: 8192.0,
                key_width: 1024.0,
            },
        }
    }

    /// The constants; those in parentheses are of the two profiles.
    pub fn timing(self) -> TimingModel {
        let shape = self.shape();
        let (compute, bandwidth) = (shape.accelerators * COMPUTE, shape.accelerators * BANDWIDTH);
        TimingModel {
            // Reading all weights (6.85, 7.53 ms).
            base_ns: BF16 * shape.parameters / bandwidth * NS,
            // A multiplication and an addition for each parameter (28.2, 34.6 µs: at most 35 000, 29 000 tokens a second).
            prefill_token_ns: 2.0 * shape.layer_parameters / compute * NS,
            // Two products of the queries' width in each layer (1.06, 0.66 ns).
            attention_pair_ns: 4.0 * shape.layers * shape.query_width / compute * NS,
            // As for a prompt token, and the head (30.4, 35.2 µs).
            decode_sequence_ns: 2.0 * (shape.layer_parameters + shape.head_parameters) / compute * NS,
            // A key and a value in each layer: 128, 320 KiB (55.9, 17.5 ns).
            kv_token_ns: 2.0 * shape.layers * shape.key_width * BF16 / bandwidth * NS,
        }
    }
}

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Prompt tokens.
    pub prefill_tokens: u64,
    /// Pairs of a prompt token and a token that it attends to, itself included.
    pub attention_pairs: u64,
    /// Sequences that decode one token.
    pub decode_sequences: u64,
    /// Tokens whose KV these read.
    pub kv_tokens: u64,
}

impl StepWork {
    /// The work of a step. A chunk of one token decodes, wherever the token comes from.
    pub fn of(chunks: &[Chunk<'_>]) -> Self {
        let mut work = Self::default();
        for chunk in chunks {
            let (tokens, start) = (chunk.tokens.len() as u64, chunk.start as u64);
            if tokens == 1 {
                work.decode_sequences += 1;
                work.kv_tokens += start + 1;
            } else {
                work.prefill_tokens += tokens;
                work.attention_pairs += tokens * start + tokens * (tokens + 1) / 2;
            }
        }
        work
    }
}

/// Time of a step, in nanoseconds for each count of [`StepWork`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimingModel {
    /// Of every step: reading the weights.
    pub base_ns: f64,
    /// Of each prompt token: its products.
    pub prefill_token_ns: f64,
    /// Of each pair of a prompt token and a token of its context.
    pub attention_pair_ns: f64,
    /// Of each decoding sequence: the products of its token, the head included.
    pub decode_sequence_ns: f64,
    /// Of each token of a decoding sequence's context: reading its KV.
    pub kv_token_ns: f64,
}

impl Default for TimingModel {
    fn default() -> Self {
        Profile::default().timing()
    }
}

impl TimingModel {
    /// Time of a step.
    pub fn step(&self, work: StepWork) -> Duration {
        let ns = self.base_ns
            + self.prefill_token_ns * work.prefill_tokens as f64
            + self.attention_pair_ns * work.attention_pairs as f64
            + self.decode_sequence_ns * work.decode_sequences as f64
            + self.kv_token_ns * work.kv_tokens as f64;
        Duration::from_nanos(ns as u64)
    }
}
