//! Attention of a few queries to one block of keys and values.
//!
//! Scores are computed for a whole block at once, keys being stored transposed; weights are normalised at the end. Sums run
//! over ascending positions, so a query's result does not depend on the queries computed beside it.

use super::{Isa, portable};

/// Most queries that the kernels take at once.
pub(crate) const MAX_QUERIES: usize = 6;

/// Keys and values of one head in one block, in half precision.
#[derive(Clone, Copy)]
pub(crate) struct HeadBlock {
    /// `keys[d * slots + slot]`.
    pub(crate) keys: *const u16,
    /// `values[slot * dim + d]`.
    pub(crate) values: *const u16,
    /// Elements of a key and of a value; a multiple of 16.
    pub(crate) dim: usize,
    /// Positions in a block; a multiple of 16.
    pub(crate) slots: usize,
}

/// Queries that attend to the same head's keys, at most [`MAX_QUERIES`].
pub(crate) struct Queries<'a> {
    /// Each query's `dim` elements.
    pub(crate) queries: &'a [*const f32],
    /// Each query's row of scores, one for each position of its sequence, whole blocks.
    pub(crate) scores: &'a [*mut f32],
    /// Each query's result, `dim` elements.
    pub(crate) out: &'a [*mut f32],
}

impl Queries<'_> {
    /// Writes `scale * query · key` for every slot of the block to the scores from `position` on.
    ///
    /// # Safety
    /// All pointers must be valid for what their fields say, and the results accessed by nothing else meanwhile.
    pub(crate) unsafe fn scores(&self, isa: Isa, block: HeadBlock, position: usize, scale: f32) {
        debug_assert!(
            self.queries.len() <= MAX_QUERIES && block.dim.is_multiple_of(16) && block.slots.is_multiple_of(16)
        );
        let mut out = [std::ptr::null_mut(); MAX_QUERIES];
        // SAFETY: the caller's promise; the processor has the features of its variant.
        unsafe {
            for (out, scores) in out.iter_mut().zip(self.scores) {
                *out = scores.add(position);
            }
            let (queries, out) = (self.queries, &out[..self.queries.len()]);
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => super::avx2::scores(queries, block.keys, block.dim, block.slots, scale, out),
                _ => portable::scores(queries, block.keys, block.dim, block.slots, scale, out),
            }
        }
    }

    /// Adds the first `used` values of the block, weighted with the scores from `position` on, to the results.
    ///
    /// # Safety
    /// As [`Queries::scores`].
    pub(crate) unsafe fn mix(&self, isa: Isa, block: HeadBlock, position: usize, used: usize) {
        let mut weights = [std::ptr::null(); MAX_QUERIES];
        // SAFETY: the caller's promise; the processor has the features of its variant.
        unsafe {
            for (weights, scores) in weights.iter_mut().zip(self.scores) {
                *weights = scores.add(position).cast_const();
            }
            let weights = &weights[..self.queries.len()];
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => super::avx2::mix(weights, block.values, block.dim, used, self.out),
                _ => portable::mix(weights, block.values, block.dim, used, self.out),
            }
        }
    }
}

impl Isa {
    /// Turns scores into `exp(score - max)` and returns their sum. Lanes are assigned by position.
    pub(crate) fn exponentials(self, scores: &mut [f32]) -> f32 {
        match self {
            // SAFETY: the processor has the features.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { super::avx2::exponentials(scores) },
            _ => portable::exponentials(scores),
        }
    }
}
