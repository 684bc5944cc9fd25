//! Products of activations and weight matrices, split over threads by output rows.

use std::cell::RefCell;
use std::ops::Range;

use super::super::gguf::Tensor;
use super::super::kernels::threads::ThreadPool;
use super::super::kernels::{Isa, MAX_FUSED_ROWS, Output, PANEL_STEP};

/// Bytes of a dequantised panel: with the activations it meets, it stays in a second-level cache of 256 KiB or more.
const PANEL_BYTES: usize = 96 << 10;

/// Bytes of packed weights that one task of a fused product reads: some microseconds of work.
const FUSED_BYTES: usize = 24 << 10;

/// Tasks for each thread, at least, so that a slow thread does not hold up the others.
const TASKS_PER_THREAD: usize = 4;

/// A matrix of `rows` output features by `cols` input features.
pub(super) struct Linear {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) weights: Tensor,
    pub(super) bias: Option<Vec<f32>>,
}

/// One matrix of a joint product.
pub(super) struct Product<'a> {
    linear: &'a Linear,
    out: *mut f32,
    out_len: usize,
    add: bool,
    out_life: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: tasks write through `out` to disjoint elements; it stands for a `&mut [f32]`.
unsafe impl Sync for Product<'_> {}

impl<'a> Product<'a> {
    /// `out = linear(x)`, one row of `linear.rows` for each row of `x`.
    pub(super) fn set(linear: &'a Linear, out: &'a mut [f32]) -> Product<'a> {
        Product { linear, out: out.as_mut_ptr(), out_len: out.len(), add: false, out_life: std::marker::PhantomData }
    }

    /// `out += linear(x)`.
    pub(super) fn add(linear: &'a Linear, out: &'a mut [f32]) -> Product<'a> {
        Product { add: true, ..Product::set(linear, out) }
    }

    /// Computes some output features for all `n` rows of `x`.
    ///
    /// # Safety
    /// No two calls with overlapping `rows` at the same time.
    unsafe fn compute(&self, isa: Isa, x: &[f32], n: usize, rows: Range<usize>) {
        let Linear { cols, weights, bias, .. } = self.linear;
        let row_bytes = weights.bytes().len() / self.linear.rows;
        let bytes = &weights.bytes()[rows.start * row_bytes..rows.end * row_bytes];
        // SAFETY: `multiply` has checked that `out` holds `n` rows of `linear.rows`; these columns of it are this call's.
        unsafe {
            let out = Output { at: self.out.add(rows.start), stride: self.linear.rows, add: self.add };
            if n <= MAX_FUSED_ROWS {
                isa.fused(weights.quant, bytes, rows.len(), x, n, out);
            } else {
                PANEL.with_borrow_mut(|panel| {
                    let len = rows.len() * cols;
                    if panel.len() < len {
                        panel.resize(len, 0.0);
                    }
                    isa.dequantize(weights.quant, bytes, &mut panel[..len]);
                    isa.panel(&panel[..len], x, *cols, out);
                });
            }
            if let Some(bias) = bias {
                for t in 0..n {
                    for (r, bias) in bias[rows.clone()].iter().enumerate() {
                        *out.at.add(t * out.stride + r) += bias;
                    }
                }
            }
        }
    }

    /// Output features that one task computes.
    fn step(&self, n: usize, threads: usize) -> usize {
        let Linear { rows, cols, ref weights, .. } = *self.linear;
        let rows_in_cache = if n <= MAX_FUSED_ROWS {
            FUSED_BYTES / (weights.bytes().len() / rows)
        } else {
            PANEL_BYTES / (cols * size_of::<f32>())
        };
        let fair = if threads == 1 { rows } else { rows.div_ceil(threads * TASKS_PER_THREAD) };
        (rows_in_cache.min(fair) / PANEL_STEP * PANEL_STEP).max(PANEL_STEP)
    }
}

thread_local! {
    static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes several products of the same `n` rows of `x` as one job.
pub(super) fn multiply(pool: &mut ThreadPool, isa: Isa, x: &[f32], n: usize, products: &[Product<'_>]) {
    let mut tasks = Vec::new();
    for product in products {
        assert!(x.len() == n * product.linear.cols && product.out_len == n * product.linear.rows);
        let (rows, step) = (product.linear.rows, product.step(n, pool.threads()));
        tasks.extend((0..rows).step_by(step).map(|r| (product, r..rows.min(r + step))));
    }
    // SAFETY: the tasks' rows of a product do not overlap, and products have outputs of their own.
    pool.run(tasks.len(), &|i| unsafe { tasks[i].0.compute(isa, x, n, tasks[i].1.clone()) });
}
