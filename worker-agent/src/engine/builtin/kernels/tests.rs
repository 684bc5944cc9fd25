//! Every kernel against its definition, on whatever this processor offers and on the portable loops.

use half::f16;
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::quant::tests::random_weights;
use super::*;

const COLS: usize = 512;

fn floats(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-2.0..2.0)).collect()
}

fn dequantized(isa: Isa, quant: Quant, bytes: &[u8], len: usize) -> Vec<f32> {
    let mut weights = vec![0.0; len];
    isa.dequantize(quant, bytes, &mut weights);
    weights
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The product of rows and rows, with rows of `out` two elements longer than needed.
fn product(n: usize, rows: usize, out: &mut Vec<f32>, add: bool, run: impl FnOnce(Output)) -> Vec<f32> {
    out.resize(n * (rows + 2), 7.0);
    run(Output { at: out.as_mut_ptr(), stride: rows + 2, add });
    assert!(out.chunks(rows + 2).all(|row| row[rows..] == [7.0, 7.0]), "written beyond the rows");
    out.chunks(rows + 2).flat_map(|row| row[..rows].to_vec()).collect()
}

fn fused(isa: Isa, quant: Quant, bytes: &[u8], rows: usize, x: &[f32]) -> Vec<f32> {
    let n = x.len() / COLS;
    // SAFETY: `product` makes room for the results.
    product(n, rows, &mut Vec::new(), false, |out| unsafe { isa.fused(quant, bytes, rows, x, n, out) })
}

fn panel(isa: Isa, weights: &[f32], x: &[f32], cols: usize) -> Vec<f32> {
    let (n, rows) = (x.len() / cols, weights.len() / cols);
    // SAFETY: as above.
    product(n, rows, &mut Vec::new(), false, |out| unsafe { isa.panel(weights, x, cols, out) })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn unpacking_gives_the_definitions_bits(seed: u64) {
        for quant in Quant::ALL {
            let bytes = random_weights(quant, COLS, seed);
            let fast = dequantized(Isa::detect(), quant, &bytes, COLS);
            let slow = dequantized(Isa::Portable, quant, &bytes, COLS);
            prop_assert_eq!(bits(&fast), bits(&slow), "{:?}", quant);
        }
    }

    #[test]
    fn fused_and_panel_products_agree_to_the_bit(seed: u64, rows in 1usize..11, n in 1usize..=MAX_FUSED_ROWS) {
        let isa = Isa::detect();
        let x = floats(n * COLS, seed);
        for quant in Quant::ALL {
            let bytes = random_weights(quant, rows * COLS, seed);
            let weights = dequantized(isa, quant, &bytes, rows * COLS);
            let expected: Vec<f32> =
                x.chunks(COLS).flat_map(|x| weights.chunks(COLS).map(|w| isa.dot(w, x)).collect::<Vec<_>>()).collect();
            prop_assert_eq!(bits(&fused(isa, quant, &bytes, rows, &x)), bits(&expected), "fused {:?}", quant);
            prop_assert_eq!(bits(&panel(isa, &weights, &x, COLS)), bits(&expected), "panel {:?}", quant);
        }
    }

    #[test]
    fn panels_of_any_size_are_sums_of_products(
        seed: u64, rows in 1usize..10, n in 1usize..100, cols in (1usize..120).prop_map(|c| c * 8), fast: bool,
    ) {
        let isa = if fast { Isa::detect() } else { Isa::Portable };
        let (weights, x) = (floats(rows * cols, seed), floats(n * cols, !seed));
        let got = panel(isa, &weights, &x, cols);
        for (i, got) in got.into_iter().enumerate() {
            let (x, w) = (&x[i / rows * cols..][..cols], &weights[i % rows * cols..][..cols]);
            let exact: f64 = x.iter().zip(w).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            prop_assert!((exact - f64::from(got)).abs() < 1e-5 * cols as f64, "{} instead of {}", got, exact);
        }
    }

    #[test]
    fn attention_to_a_block(seed: u64, count in 1usize..=MAX_QUERIES, used in 1usize..=32, fast: bool) {
        let isa = if fast { Isa::detect() } else { Isa::Portable };
        let (dim, slots, position) = (48, 32, 16);
        let queries = floats(count * dim, seed);
        let halves = |seed| floats(dim * slots, seed).iter().map(|&v| f16::from_f32(v).to_bits()).collect::<Vec<_>>();
        let (keys, values) = (halves(seed ^ 1), halves(seed ^ 2));
        let mut scores = vec![0.0f32; count * (position + slots)];
        let mut out = vec![1.0f32; count * dim];
        let block = HeadBlock { keys: keys.as_ptr(), values: values.as_ptr(), dim, slots };
        let rows = |v: &mut Vec<f32>| {
            let len = v.len() / count;
            v.chunks_mut(len).map(|row| row.as_mut_ptr()).collect::<Vec<_>>()
        };
        let pointers: Vec<_> = queries.chunks(dim).map(<[f32]>::as_ptr).collect();
        let batch = Queries { queries: &pointers, scores: &rows(&mut scores), out: &rows(&mut out) };
        // SAFETY: all rows are as long as `Queries` wants them.
        unsafe {
            batch.scores(isa, block, position, 0.5);
            batch.mix(isa, block, position, used);
        }
        let half = |bits: u16| f64::from(f16::from_bits(bits).to_f32());
        for (i, query) in queries.chunks(dim).enumerate() {
            let mut expected = vec![1.0f64; dim];
            for slot in 0..slots {
                let dot: f64 = query.iter().enumerate().map(|(d, &q)| f64::from(q) * half(keys[d * slots + slot])).sum();
                prop_assert!((dot * 0.5 - f64::from(scores[i * 48 + position + slot])).abs() < 1e-4);
                if slot < used {
                    (0..dim).for_each(|d| expected[d] += dot * 0.5 * half(values[slot * dim + d]));
                }
            }
            for (expected, &got) in expected.iter().zip(&out[i * dim..]) {
                prop_assert!((expected - f64::from(got)).abs() < 1e-2, "{} instead of {}", got, expected);
            }
        }
    }

    #[test]
    fn exponentials_are_exact_and_sum_up(seed: u64, len in 1usize..70, scale in 0.1f32..40.0) {
        let scores: Vec<f32> = floats(len, seed).iter().map(|v| v * scale).collect();
        let max = scores.iter().copied().fold(f32::MIN, f32::max);
        for isa in [Isa::detect(), Isa::Portable] {
            let mut e = scores.clone();
            let sum = isa.exponentials(&mut e);
            for (&score, &e) in scores.iter().zip(&e) {
                let exact = f64::from(score - max).exp();
                prop_assert!((f64::from(e) - exact).abs() <= 4e-7 * exact + 1e-37, "exp({}) = {}", score - max, e);
            }
            let total: f64 = e.iter().map(|&e| f64::from(e)).sum();
            prop_assert!((total - f64::from(sum)).abs() < 1e-5 * total);
        }
    }

    #[test]
    fn elementwise_operations(seed: u64, eighths in 1usize..20) {
        let len = eighths * 8;
        let (x, up) = (floats(len, seed), floats(len, !seed));
        for isa in [Isa::detect(), Isa::Portable] {
            let mut gate: Vec<f32> = x.iter().map(|v| v * 50.0).collect();
            let before = gate.clone();
            isa.swiglu(&mut gate, &up);
            for ((&got, &gate), &up) in gate.iter().zip(&before).zip(&up) {
                let exact = f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up);
                prop_assert!((f64::from(got) - exact).abs() <= 1e-6 * exact.abs() + 1e-30, "{} for {}", got, exact);
            }
            let mut normed = vec![0.0; len];
            isa.rms_norm(&x, &up, 1e-5, &mut normed);
            let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / len as f64;
            for ((&got, &x), &w) in normed.iter().zip(&x).zip(&up) {
                let exact = f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w);
                prop_assert!((f64::from(got) - exact).abs() <= 1e-5);
            }
            let mut halves = vec![0; len];
            let wide: Vec<f32> = x.iter().zip(&up).map(|(a, b)| a * (b * 6.0).exp()).collect();
            isa.to_half(&wide, &mut halves);
            let expected: Vec<u16> = wide.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
            prop_assert_eq!(halves, expected);
        }
    }
}

#[test]
fn products_can_be_added_to_what_is_there() {
    let (quant, rows, n) = (Quant::Q4_1, 5, 9);
    for isa in [Isa::detect(), Isa::Portable] {
        let bytes = random_weights(quant, rows * COLS, 3);
        let weights = dequantized(isa, quant, &bytes, rows * COLS);
        let x = floats(n * COLS, 4);
        let plain = panel(isa, &weights, &x, COLS);
        let mut out = vec![7.0; n * (rows + 2)];
        // SAFETY: `product` makes room for the results.
        let added = product(n, rows, &mut out, true, |out| unsafe { isa.panel(&weights, &x, COLS, out) });
        assert_eq!(added, plain.iter().map(|v| 7.0 + v).collect::<Vec<_>>());
        let mut out = vec![7.0; rows + 2];
        // SAFETY: as above.
        let one = product(1, rows, &mut out, true, |out| unsafe { isa.fused(quant, &bytes, rows, &x[..COLS], 1, out) });
        assert_eq!(one, added[..rows]);
    }
}

#[test]
fn extreme_arguments_stay_finite() {
    for isa in [Isa::detect(), Isa::Portable] {
        let mut gate = [-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, -0.0];
        isa.swiglu(&mut gate, &[1.0; 8]);
        assert!(gate.iter().all(|v| v.is_finite()), "{isa:?}: {gate:?}");
        assert_eq!((gate[3], gate[5]), (0.0, 200.0));
        let mut scores = [f32::MIN, -1e9, 0.0, -200.0];
        let sum = isa.exponentials(&mut scores);
        assert!((sum - 1.0).abs() < 1e-6, "{isa:?}: {sum}");
    }
}
