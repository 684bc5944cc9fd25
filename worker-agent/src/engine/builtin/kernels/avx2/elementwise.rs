//! Inner product, SwiGLU, conversion to halves, and the exponential function.

use std::arch::x86_64::*;

/// # Safety
/// The processor has AVX2 and FMA; the lengths are equal and multiples of 8.
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = _mm256_setzero_ps();
        for k in (0..a.len()).step_by(8) {
            sums = _mm256_fmadd_ps(_mm256_loadu_ps(a.as_ptr().add(k)), _mm256_loadu_ps(b.as_ptr().add(k)), sums);
        }
        super::sum(sums)
    }
}

/// # Safety
/// As [`dot`].
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn swiglu(gate: &mut [f32], up: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let one = _mm256_set1_ps(1.0);
        for k in (0..gate.len()).step_by(8) {
            let at = gate.as_mut_ptr().add(k);
            let v = _mm256_loadu_ps(at);
            let denominator = _mm256_add_ps(one, exp(_mm256_sub_ps(_mm256_setzero_ps(), v)));
            let silu = _mm256_div_ps(v, denominator);
            _mm256_storeu_ps(at, _mm256_mul_ps(silu, _mm256_loadu_ps(up.as_ptr().add(k))));
        }
    }
}

/// # Safety
/// The processor has F16C; the lengths are equal and multiples of 8.
#[target_feature(enable = "avx2,f16c")]
pub(in super::super) unsafe fn to_half(src: &[f32], dst: &mut [u16]) {
    // SAFETY: the caller's promise.
    unsafe {
        for k in (0..src.len()).step_by(8) {
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(src.as_ptr().add(k)));
            _mm_storeu_si128(dst.as_mut_ptr().add(k).cast(), half);
        }
    }
}

/// `exp(x)` to about 2 units in the last place: `x = n ln 2 + r` with `|r| <= ln 2 / 2`, a polynomial of degree 7 in `r`
/// (the coefficients of Cephes' `expf`), and `2^n` put into the exponent. Arguments beyond ±87 are taken as ±87, so the
/// result is always a normal number.
///
/// # Safety
/// The processor has AVX2 and FMA.
#[inline(always)]
pub(super) unsafe fn exp(x: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0)), _mm256_set1_ps(87.0));
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
            x,
            _mm256_set1_ps(std::f32::consts::LOG2_E),
        ));
        // ln 2 in two parts, the first short enough for an exact product.
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
        let mut p = _mm256_set1_ps(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
        }
        let y = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0));
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
        _mm256_mul_ps(y, _mm256_castsi256_ps(power))
    }
}
