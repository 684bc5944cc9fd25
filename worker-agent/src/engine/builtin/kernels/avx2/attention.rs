//! Scores, softmax weights and weighted sums of values.

use std::arch::x86_64::*;

use super::elementwise::exp;

/// Calls `$f::<N>` for the number of queries.
macro_rules! for_queries {
    ($n:expr, $f:ident($($arg:expr),*)) => {
        match $n {
            1 => $f::<1>($($arg),*),
            2 => $f::<2>($($arg),*),
            3 => $f::<3>($($arg),*),
            4 => $f::<4>($($arg),*),
            5 => $f::<5>($($arg),*),
            _ => $f::<6>($($arg),*),
        }
    };
}

/// # Safety
/// The processor has AVX2, FMA and F16C; see [`super::super::Queries::scores`].
pub(in super::super) unsafe fn scores(
    queries: &[*const f32],
    keys: *const u16,
    dim: usize,
    slots: usize,
    scale: f32,
    out: &[*mut f32],
) {
    // SAFETY: the caller's promise.
    unsafe { for_queries!(queries.len(), scores_of(queries, keys, dim, slots, scale, out)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scores_of<const N: usize>(
    queries: &[*const f32],
    keys: *const u16,
    dim: usize,
    slots: usize,
    scale: f32,
    out: &[*mut f32],
) {
    let queries: [_; N] = std::array::from_fn(|i| queries[i]);
    for slot in (0..slots).step_by(16) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); 2]; N];
            for d in 0..dim {
                let at = keys.add(d * slots + slot);
                let k0 = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
                let k1 = _mm256_cvtph_ps(_mm_loadu_si128(at.add(8).cast()));
                for (query, sums) in queries.iter().zip(&mut sums) {
                    let q = _mm256_broadcast_ss(&*query.add(d));
                    sums[0] = _mm256_fmadd_ps(q, k0, sums[0]);
                    sums[1] = _mm256_fmadd_ps(q, k1, sums[1]);
                }
            }
            let scale = _mm256_set1_ps(scale);
            for (out, sums) in out.iter().zip(sums) {
                _mm256_storeu_ps(out.add(slot), _mm256_mul_ps(sums[0], scale));
                _mm256_storeu_ps(out.add(slot + 8), _mm256_mul_ps(sums[1], scale));
            }
        }
    }
}

/// # Safety
/// The processor has AVX2, FMA and F16C; see [`super::super::Queries::mix`].
pub(in super::super) unsafe fn mix(
    weights: &[*const f32],
    values: *const u16,
    dim: usize,
    used: usize,
    out: &[*mut f32],
) {
    // SAFETY: the caller's promise.
    unsafe { for_queries!(weights.len(), mix_of(weights, values, dim, used, out)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn mix_of<const N: usize>(
    weights: &[*const f32],
    values: *const u16,
    dim: usize,
    used: usize,
    out: &[*mut f32],
) {
    let weights: [_; N] = std::array::from_fn(|i| weights[i]);
    for d in (0..dim).step_by(16) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums: [[__m256; 2]; N] =
                std::array::from_fn(|i| [_mm256_loadu_ps(out[i].add(d)), _mm256_loadu_ps(out[i].add(d + 8))]);
            for slot in 0..used {
                let at = values.add(slot * dim + d);
                let v0 = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
                let v1 = _mm256_cvtph_ps(_mm_loadu_si128(at.add(8).cast()));
                for (weight, sums) in weights.iter().zip(&mut sums) {
                    let w = _mm256_broadcast_ss(&*weight.add(slot));
                    sums[0] = _mm256_fmadd_ps(w, v0, sums[0]);
                    sums[1] = _mm256_fmadd_ps(w, v1, sums[1]);
                }
            }
            for (out, sums) in out.iter().zip(sums) {
                _mm256_storeu_ps(out.add(d), sums[0]);
                _mm256_storeu_ps(out.add(d + 8), sums[1]);
            }
        }
    }
}

/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn exponentials(scores: &mut [f32]) -> f32 {
    // SAFETY: the caller's promise; the last lanes go through a buffer.
    unsafe {
        let mut chunks = scores.chunks_exact(8);
        let mut lanes = [f32::NEG_INFINITY; 8];
        let greatest = chunks.by_ref().fold(_mm256_loadu_ps(lanes.as_ptr()), |greatest, chunk| {
            _mm256_max_ps(greatest, _mm256_loadu_ps(chunk.as_ptr()))
        });
        _mm256_storeu_ps(lanes.as_mut_ptr(), greatest);
        let max = _mm256_set1_ps(lanes.iter().chain(chunks.remainder()).copied().fold(f32::NEG_INFINITY, f32::max));
        let mut sums = _mm256_setzero_ps();
        let mut chunks = scores.chunks_exact_mut(8);
        for chunk in &mut chunks {
            let e = exp(_mm256_sub_ps(_mm256_loadu_ps(chunk.as_ptr()), max));
            _mm256_storeu_ps(chunk.as_mut_ptr(), e);
            sums = _mm256_add_ps(sums, e);
        }
        let rest = chunks.into_remainder();
        let mut lanes = [0.0; 8];
        lanes[..rest.len()].copy_from_slice(rest);
        let e = exp(_mm256_sub_ps(_mm256_loadu_ps(lanes.as_ptr()), max));
        _mm256_storeu_ps(lanes.as_mut_ptr(), e);
        lanes[rest.len()..].fill(0.0);
        rest.copy_from_slice(&lanes[..rest.len()]);
        super::sum(_mm256_add_ps(sums, _mm256_loadu_ps(lanes.as_ptr())))
    }
}
