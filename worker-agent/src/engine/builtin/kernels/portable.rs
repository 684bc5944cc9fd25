//! The kernels as plain loops: for processors without AVX2, and as the tests' reference.

use half::f16;

use super::super::quant::Quant;
use super::Output;

/// Lanes of a sum; see the module above.
const LANES: usize = 8;

/// `a * b + c`, fused where that is one instruction and not a call.
#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a, b) = (a.chunks(LANES), b.chunks(LANES));
    for (a, b) in a.zip(b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = multiply_add(a, b, *lane);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

/// # Safety
/// As [`super::Isa::fused`].
pub(super) unsafe fn fused(quant: Quant, weights: &[u8], rows: usize, x: &[f32], cols: usize, out: Output) {
    let mut row = vec![0.0; cols];
    for (r, weights) in weights.chunks_exact(weights.len() / rows).enumerate() {
        quant.dequantize(weights, &mut row);
        for (t, x) in x.chunks_exact(cols).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.put(t, r, dot(&row, x)) };
        }
    }
}

/// # Safety
/// As [`super::Isa::panel`].
pub(super) unsafe fn panel(panel: &[f32], x: &[f32], cols: usize, out: Output) {
    for (t, x) in x.chunks_exact(cols).enumerate() {
        for (r, row) in panel.chunks_exact(cols).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.put(t, r, dot(row, x)) };
        }
    }
}

pub(super) fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

pub(super) fn to_half(src: &[f32], dst: &mut [u16]) {
    for (src, dst) in src.iter().zip(dst) {
        *dst = f16::from_f32(*src).to_bits();
    }
}

/// # Safety
/// As [`super::attention::Queries::scores`]; `rows` are the queries.
pub(super) unsafe fn scores(
    queries: &[*const f32],
    keys: *const u16,
    dim: usize,
    slots: usize,
    scale: f32,
    out: &[*mut f32],
) {
    for (&query, &out) in queries.iter().zip(out) {
        for slot in 0..slots {
            let mut sum = 0.0;
            for d in 0..dim {
                // SAFETY: the caller's promise.
                let (q, k) = unsafe { (*query.add(d), *keys.add(d * slots + slot)) };
                sum = multiply_add(q, f16::from_bits(k).to_f32(), sum);
            }
            // SAFETY: the caller's promise.
            unsafe { *out.add(slot) = sum * scale };
        }
    }
}

/// # Safety
/// As [`super::attention::Queries::mix`].
pub(super) unsafe fn mix(weights: &[*const f32], values: *const u16, dim: usize, used: usize, out: &[*mut f32]) {
    for (&weight, &out) in weights.iter().zip(out) {
        for slot in 0..used {
            for d in 0..dim {
                // SAFETY: the caller's promise.
                unsafe {
                    let value = f16::from_bits(*values.add(slot * dim + d)).to_f32();
                    *out.add(d) = multiply_add(*weight.add(slot), value, *out.add(d));
                }
            }
        }
    }
}

/// Turns scores into `exp(score - max)` and returns their sum.
pub(super) fn exponentials(scores: &mut [f32]) -> f32 {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut lanes = [0f32; LANES];
    for chunk in scores.chunks_mut(LANES) {
        for (score, lane) in chunk.iter_mut().zip(&mut lanes) {
            *score = (*score - max).exp();
            *lane += *score;
        }
    }
    lanes.iter().sum()
}
