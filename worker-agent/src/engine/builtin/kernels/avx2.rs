//! The kernels for x86-64 with AVX2, FMA and F16C.
//!
//! Functions carry `target_feature`; what they inline is `inline(always)` and therefore compiled with their features. All
//! of it is `unsafe` for two reasons only: the processor must have the features, and pointers must cover what the lengths
//! say. Both are checked in the module above.
#![cfg(target_arch = "x86_64")]

mod attention;
mod elementwise;
mod panel;
mod unpack;
mod unpack_k;

use std::arch::x86_64::*;

pub(super) use self::attention::{exponentials, mix, scores};
pub(super) use self::elementwise::{dot, swiglu, to_half};
pub(super) use self::panel::panel;
use self::unpack::{Bf16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Unpack};
use self::unpack_k::{Q4K, Q5K, Q6K};
use super::super::quant::Quant;
use super::Output;

/// Calls `$f::<FORMAT $(, more)*>($args)` for the format that `$quant` is.
macro_rules! for_format {
    ($quant:expr, $f:ident $(, $const:literal)*; $($arg:expr),*) => {
        match $quant {
            Quant::F32 => $f::<F32 $(, $const)*>($($arg),*),
            Quant::F16 => $f::<F16 $(, $const)*>($($arg),*),
            Quant::Bf16 => $f::<Bf16 $(, $const)*>($($arg),*),
            Quant::Q4_0 => $f::<Q4_0 $(, $const)*>($($arg),*),
            Quant::Q4_1 => $f::<Q4_1 $(, $const)*>($($arg),*),
            Quant::Q5_0 => $f::<Q5_0 $(, $const)*>($($arg),*),
            Quant::Q5_1 => $f::<Q5_1 $(, $const)*>($($arg),*),
            Quant::Q8_0 => $f::<Q8_0 $(, $const)*>($($arg),*),
            Quant::Q4K => $f::<Q4K $(, $const)*>($($arg),*),
            Quant::Q5K => $f::<Q5K $(, $const)*>($($arg),*),
            Quant::Q6K => $f::<Q6K $(, $const)*>($($arg),*),
        }
    };
}

/// # Safety
/// See the top of this file; `src` holds `dst.len()` weights, a multiple of 32.
pub(super) unsafe fn dequantize(quant: Quant, src: *const u8, dst: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { for_format!(quant, dequantize_as; src, dst) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize_as<F: Unpack>(src: *const u8, dst: &mut [f32]) {
    for (b, block) in dst.chunks_exact_mut(F::UNITS * 32).enumerate() {
        for u in 0..F::UNITS {
            // SAFETY: block `b` lies within `src`, unit `u` within `block`.
            unsafe {
                let unit = F::unit(src.add(b * F::BYTES), u);
                let to = block.as_mut_ptr().add(u * 32);
                for (i, v) in unit.into_iter().enumerate() {
                    _mm256_storeu_ps(to.add(i * 8), v);
                }
            }
        }
    }
}

/// # Safety
/// See the top of this file and [`super::Isa::fused`].
pub(super) unsafe fn fused(
    quant: Quant,
    weights: *const u8,
    rows: usize,
    cols: usize,
    x: *const f32,
    n: usize,
    out: Output,
) {
    // Weight rows by activation rows: enough independent sums to hide the latency of the multiply-add (4 cycles, 2 a
    // cycle), few enough to stay in 16 registers.
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => for_format!(quant, fused_as, 4, 1; weights, rows, cols, x, out),
            2 => for_format!(quant, fused_as, 4, 2; weights, rows, cols, x, out),
            3 => for_format!(quant, fused_as, 2, 3; weights, rows, cols, x, out),
            4 => for_format!(quant, fused_as, 2, 4; weights, rows, cols, x, out),
            5 => for_format!(quant, fused_as, 1, 5; weights, rows, cols, x, out),
            6 => for_format!(quant, fused_as, 1, 6; weights, rows, cols, x, out),
            7 => for_format!(quant, fused_as, 1, 7; weights, rows, cols, x, out),
            _ => for_format!(quant, fused_as, 1, 8; weights, rows, cols, x, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fused_as<F: Unpack, const R: usize, const N: usize>(
    weights: *const u8,
    rows: usize,
    cols: usize,
    x: *const f32,
    out: Output,
) {
    let blocks = cols / (F::UNITS * 32);
    for r0 in (0..rows).step_by(R) {
        // SAFETY: rows past the end are replaced by the last one, and not written; the rest is the caller's promise.
        unsafe {
            let row: [*const u8; R] = std::array::from_fn(|r| weights.add((r0 + r).min(rows - 1) * blocks * F::BYTES));
            let mut sums = [[_mm256_setzero_ps(); N]; R];
            for b in 0..blocks {
                for u in 0..F::UNITS {
                    let x = x.add((b * F::UNITS + u) * 32);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        // The next rows at the same place: rows side by side are more streams, and shorter ones, than
                        // the processor recognises by itself.
                        let ahead = R * blocks * F::BYTES + b * F::BYTES + u * (F::BYTES / F::UNITS);
                        _mm_prefetch::<_MM_HINT_T0>(row[r].wrapping_add(ahead).cast());
                        let unit = F::unit(row[r].add(b * F::BYTES), u);
                        for (i, w) in unit.into_iter().enumerate() {
                            for (t, sum) in sums.iter_mut().enumerate() {
                                let x = _mm256_loadu_ps(x.add(t * cols + i * 8));
                                *sum = _mm256_fmadd_ps(w, x, *sum);
                            }
                        }
                    }
                }
            }
            for (r, sums) in sums.into_iter().take(rows - r0).enumerate() {
                for (t, lanes) in sums.into_iter().enumerate() {
                    out.put(t, r0 + r, sum(lanes));
                }
            }
        }
    }
}

/// The eight lanes as the tree `((0+1)+(2+3)) + ((4+5)+(6+7))`.
///
/// # Safety
/// See the top of this file.
#[inline(always)]
unsafe fn sum(v: __m256) -> f32 {
    // SAFETY: the processor has the features.
    unsafe {
        let pairs = _mm256_hadd_ps(v, v);
        let quads = _mm256_hadd_ps(pairs, pairs);
        _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads)))
    }
}
