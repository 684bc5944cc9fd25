//! The arithmetic of a forward pass, in the widest vectors that the processor offers.
//!
//! Every result is defined by one order of operations, whatever kernel computes it: a product of a weight row and an
//! activation row is summed in eight lanes (lane `k % 8`, ascending `k`, fused multiply-add), and the lanes are added as a
//! fixed tree. So one row alone, a batch of rows, and the dequantised panel of a long prompt all give the same bits, and so
//! does any number of threads. Between processors with and without AVX2 the last bits may differ.

mod attention;
mod avx2;
mod portable;
#[cfg(test)]
mod tests;
pub(crate) mod threads;

pub(crate) use self::attention::{HeadBlock, MAX_QUERIES, Queries};
use super::quant::Quant;

/// Activation rows that the fused kernels take at once.
pub(crate) const MAX_FUSED_ROWS: usize = 8;

/// Weight rows that the panel kernel computes together; panels are best cut at multiples of it.
pub(crate) const PANEL_STEP: usize = 4;

/// Which implementation runs; chosen once, when a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// 256-bit vectors with fused multiply-add and half-precision conversion.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "detected on x86-64 only"))]
    Avx2,
    /// What the compiler makes of plain loops.
    Portable,
}

/// Where a product's results go: `out[t * stride + r]` for activation row `t` and weight row `r`.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    /// The first result.
    pub(crate) at: *mut f32,
    /// Distance between the results of two activation rows.
    pub(crate) stride: usize,
    /// Whether to add to what is there.
    pub(crate) add: bool,
}

impl Output {
    /// # Safety
    /// The element must lie within the output, and nothing else may access it meanwhile.
    #[inline(always)]
    unsafe fn put(self, t: usize, r: usize, value: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.at.add(t * self.stride + r);
            *at = if self.add { *at + value } else { value };
        }
    }
}

impl Isa {
    pub(crate) fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Isa::Avx2;
        }
        Isa::Portable
    }

    /// As [`Quant::dequantize`], for multiples of 32 weights.
    pub(crate) fn dequantize(self, quant: Quant, src: &[u8], dst: &mut [f32]) {
        assert_eq!(quant.row_bytes(dst.len()), Some(src.len()), "the lengths do not match");
        assert_eq!(dst.len() % 32, 0);
        match self {
            // SAFETY: the processor has AVX2, FMA and F16C; the lengths match.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::dequantize(quant, src.as_ptr(), dst) },
            _ => quant.dequantize(src, dst),
        }
    }

    /// Products of `rows` consecutive weight rows with the `n` rows of `x`, `1 <= n <= MAX_FUSED_ROWS`, unpacking each
    /// weight once, in registers. `cols` is a multiple of 32.
    ///
    /// # Safety
    /// `out` must cover `n` by `rows` elements that nothing else accesses meanwhile.
    pub(crate) unsafe fn fused(self, quant: Quant, weights: &[u8], rows: usize, x: &[f32], n: usize, out: Output) {
        let cols = x.len() / n;
        assert!((1..=MAX_FUSED_ROWS).contains(&n) && cols.is_multiple_of(32) && cols * n == x.len());
        assert_eq!(quant.row_bytes(cols).map(|row| row * rows), Some(weights.len()), "the lengths do not match");
        match self {
            // SAFETY: the processor has the features, the lengths match, and the caller vouches for `out`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::fused(quant, weights.as_ptr(), rows, cols, x.as_ptr(), n, out) },
            // SAFETY: the caller vouches for `out`.
            _ => unsafe { portable::fused(quant, weights, rows, x, cols, out) },
        }
    }

    /// Products of the rows of a dequantised panel with the rows of `x`, both of `cols` elements.
    ///
    /// # Safety
    /// `out` must cover the product's elements, and nothing else may access them meanwhile.
    pub(crate) unsafe fn panel(self, panel: &[f32], x: &[f32], cols: usize, out: Output) {
        assert!(cols > 0 && cols.is_multiple_of(8) && panel.len().is_multiple_of(cols) && x.len().is_multiple_of(cols));
        match self {
            // SAFETY: the processor has the features, the lengths match, and the caller vouches for `out`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::panel(panel, x, cols, out) },
            // SAFETY: the caller vouches for `out`.
            _ => unsafe { portable::panel(panel, x, cols, out) },
        }
    }

    /// `out = x / rms(x) * weight`, with `rms(x) = sqrt(mean(x²) + eps)`.
    pub(crate) fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len());
        let scale = 1.0 / (self.dot(x, x) / x.len() as f32 + eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }

    /// Inner product, in the order of the products above.
    fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        match self {
            // SAFETY: the processor has the features.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if a.len().is_multiple_of(8) => unsafe { avx2::dot(a, b) },
            _ => portable::dot(a, b),
        }
    }

    /// `gate = silu(gate) * up`, with `silu(v) = v / (1 + exp(-v))`.
    pub(crate) fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        match self {
            // SAFETY: the processor has the features.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if gate.len().is_multiple_of(8) => unsafe { avx2::swiglu(gate, up) },
            _ => portable::swiglu(gate, up),
        }
    }

    /// Rounds to half precision, to nearest even.
    pub(crate) fn to_half(self, src: &[f32], dst: &mut [u16]) {
        assert_eq!(src.len(), dst.len());
        match self {
            // SAFETY: the processor has the features.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if src.len().is_multiple_of(8) => unsafe { avx2::to_half(src, dst) },
            _ => portable::to_half(src, dst),
        }
    }
}
