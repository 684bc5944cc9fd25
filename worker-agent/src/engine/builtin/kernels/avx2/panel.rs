//! Dequantised weight rows times many activation rows.

use std::arch::x86_64::*;

use super::super::{Output, PANEL_STEP};

/// Activation rows of a tile: 4 weight rows by 3 activation rows are 12 sums, which with 3 activations and a weight are
/// the 16 registers there are.
const TILE: usize = 3;

/// Tiles of a group. Their activation rows stay in the second-level cache while all rows of the panel pass: 48 rows of 576
/// are 108 KiB.
const GROUP: usize = 16;

/// Columns of a pass: 4 weight rows of it (12 KiB) and 3 activation rows (9 KiB) fit the first-level cache.
const PASS: usize = 768;

type Sums = [[__m256; TILE]; PANEL_STEP];

/// # Safety
/// See the top of the module above and [`super::super::Isa::panel`].
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn panel(panel: &[f32], x: &[f32], cols: usize, out: Output) {
    let (rows, n) = (panel.len() / cols, x.len() / cols);
    // SAFETY: row numbers past the end are replaced by the last row's, and nothing is written for them.
    unsafe {
        let mut group = [[[_mm256_setzero_ps(); TILE]; PANEL_STEP]; GROUP];
        for t0 in (0..n).step_by(GROUP * TILE) {
            let tiles = (n - t0).div_ceil(TILE).min(GROUP);
            for r0 in (0..rows).step_by(PANEL_STEP) {
                let w: [_; PANEL_STEP] = std::array::from_fn(|r| panel.as_ptr().add((r0 + r).min(rows - 1) * cols));
                group[..tiles].fill([[_mm256_setzero_ps(); TILE]; PANEL_STEP]);
                for k0 in (0..cols).step_by(PASS) {
                    let len = PASS.min(cols - k0);
                    let w = w.map(|w| w.add(k0));
                    for (i, sums) in group[..tiles].iter_mut().enumerate() {
                        let x: [_; TILE] =
                            std::array::from_fn(|t| x.as_ptr().add((t0 + i * TILE + t).min(n - 1) * cols + k0));
                        *sums = tile(w, x, len, *sums);
                    }
                }
                for (i, sums) in group[..tiles].iter().enumerate() {
                    store(sums, t0 + i * TILE, n, r0, rows, out);
                }
            }
        }
    }
}

/// # Safety
/// See the top of the module above; the pointers cover `len` elements, a multiple of 8.
#[inline(always)]
unsafe fn tile(w: [*const f32; PANEL_STEP], x: [*const f32; TILE], len: usize, mut sums: Sums) -> Sums {
    // SAFETY: the caller's promise.
    unsafe {
        for k in (0..len).step_by(8) {
            let x = x.map(|x| _mm256_loadu_ps(x.add(k)));
            for (w, sums) in w.into_iter().zip(&mut sums) {
                let w = _mm256_loadu_ps(w.add(k));
                for (x, sum) in x.into_iter().zip(sums) {
                    *sum = _mm256_fmadd_ps(w, x, *sum);
                }
            }
        }
    }
    sums
}

/// # Safety
/// See the top of the module above; `out` covers the rows up to `n` and `rows`.
#[inline(always)]
unsafe fn store(sums: &Sums, t0: usize, n: usize, r0: usize, rows: usize, out: Output) {
    for t in (0..TILE).take(n - t0) {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b, c, d] = sums.map(|row| row[t]);
            // Per 128-bit half: the four rows' sums of four lanes, as the tree of `super::sum`.
            let quads = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let mut four = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads));
            if r0 + PANEL_STEP <= rows {
                let at = out.at.add((t0 + t) * out.stride + r0);
                if out.add {
                    four = _mm_add_ps(_mm_loadu_ps(at), four);
                }
                _mm_storeu_ps(at, four);
            } else {
                let mut values = [0.0; PANEL_STEP];
                _mm_storeu_ps(values.as_mut_ptr(), four);
                for (r, value) in values.into_iter().take(rows - r0).enumerate() {
                    out.put(t0 + t, r0 + r, value);
                }
            }
        }
    }
}
