//! Rotary position embedding.
//!
//! Pair `i` of a head is rotated by `position / scale * base^(-2i / dims) / factor[i]`. Llama's tensors are stored so that
//! pairs are neighbours; Qwen's keep a pair's second element half the dimensions further.

use super::super::gguf::{Gguf, GgufError};
use super::config::{Architecture, Config};
use super::weights::vector;

/// Frequencies of a model.
pub(super) struct Rope {
    /// Radians per position, for each pair. In double precision, because they are multiplied with thousands.
    frequencies: Vec<f64>,
    neighbours: bool,
    head_dim: usize,
}

impl Rope {
    /// As the file says.
    pub(super) fn load(gguf: &Gguf, config: &Config) -> Result<Rope, GgufError> {
        let factors = match gguf.has_tensor("rope_freqs.weight") {
            true => vector(gguf, "rope_freqs.weight", config.rope_dims / 2)?,
            false => vec![1.0; config.rope_dims / 2],
        };
        Ok(Rope::new(config, &factors))
    }

    /// `factors`: what each pair's frequency is divided by.
    fn new(config: &Config, factors: &[f32]) -> Rope {
        let (base, dims) = (f64::from(config.rope_base), config.rope_dims as f64);
        let frequency = |(i, &factor): (usize, &f32)| {
            base.powf(-2.0 * i as f64 / dims) / f64::from(config.rope_scale) / f64::from(factor)
        };
        Rope {
            frequencies: factors.iter().enumerate().map(frequency).collect(),
            neighbours: config.architecture == Architecture::Llama,
            head_dim: config.head_dim,
        }
    }

    /// Whether a pair's elements are neighbours; else the second is half the dimensions further.
    #[cfg(feature = "candle")]
    pub(super) fn pairs_are_neighbours(&self) -> bool {
        self.neighbours
    }

    /// Numbers that describe the rotation at one position.
    pub(super) fn turn_len(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Writes the rotation at `position`: the pairs' cosines, then their sines.
    pub(super) fn turn(&self, position: usize, turn: &mut [f32]) {
        let (cosines, sines) = turn.split_at_mut(self.frequencies.len());
        for ((frequency, cosine), sine) in self.frequencies.iter().zip(cosines).zip(sines) {
            let (s, c) = (frequency * position as f64).sin_cos();
            (*cosine, *sine) = (c as f32, s as f32);
        }
    }

    /// Rotates every head in `heads`.
    pub(super) fn rotate(&self, turn: &[f32], heads: &mut [f32]) {
        let pairs = self.frequencies.len();
        let (cosines, sines) = turn.split_at(pairs);
        for head in heads.chunks_exact_mut(self.head_dim) {
            if self.neighbours {
                for ((pair, c), s) in head.chunks_exact_mut(2).zip(cosines).zip(sines) {
                    (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c);
                }
            } else {
                let (first, second) = head.split_at_mut(pairs);
                for (((a, b), c), s) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                    (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
                }
            }
        }
    }
}
