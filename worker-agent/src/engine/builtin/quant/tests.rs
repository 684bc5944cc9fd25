//! Hand-computed blocks, and random weights for the kernels' tests.

use half::f16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;

/// Random bytes that are valid weights: the scales are finite and small, everything else is arbitrary.
pub(crate) fn random_weights(quant: Quant, weights: usize, seed: u64) -> Vec<u8> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut bytes = vec![0u8; quant.row_bytes(weights).expect("whole blocks")];
    rng.fill(&mut bytes[..]);
    let mut scale = |at: &mut [u8]| at.copy_from_slice(&f16::from_f32(rng.random_range(-0.1..0.1)).to_le_bytes());
    for block in bytes.chunks_exact_mut(quant.block_bytes()) {
        match quant {
            Quant::F32 => {
                let v = f16::from_le_bytes([block[0], block[1]]).to_bits() as f32 / 65536.0 - 0.5;
                block.copy_from_slice(&v.to_le_bytes());
            }
            Quant::Bf16 => block[1] = block[1] & 0x80 | 0x3d,
            Quant::F16 | Quant::Q4_0 | Quant::Q5_0 | Quant::Q8_0 => scale(&mut block[..2]),
            Quant::Q4_1 | Quant::Q5_1 | Quant::Q4K | Quant::Q5K => {
                scale(&mut block[..2]);
                scale(&mut block[2..4]);
            }
            Quant::Q6K => scale(&mut block[208..]),
        }
    }
    bytes
}

fn dequantized(quant: Quant, bytes: &[u8]) -> Vec<f32> {
    let mut y = vec![0.0; bytes.len() / quant.block_bytes() * quant.block_len()];
    quant.dequantize(bytes, &mut y);
    y
}

fn half_bytes(v: f32) -> [u8; 2] {
    f16::from_f32(v).to_le_bytes()
}

#[test]
fn small_blocks_by_hand() {
    let mut q4_1 = [half_bytes(0.5), half_bytes(-1.0)].concat();
    q4_1.extend((0..16).map(|j| j | (15 - j) << 4));
    let y = dequantized(Quant::Q4_1, &q4_1);
    assert_eq!((y[0], y[3], y[15]), (-1.0, 0.5, 6.5));
    assert_eq!((y[16], y[31]), (6.5, -1.0));

    let mut q4_0 = half_bytes(2.0).to_vec();
    q4_0.extend([0x80; 16]);
    let y = dequantized(Quant::Q4_0, &q4_0);
    assert_eq!((y[0], y[16]), (-16.0, 0.0));

    let mut q5_0 = half_bytes(1.0).to_vec();
    q5_0.extend((1u32 | 1 << 31).to_le_bytes());
    q5_0.extend([0; 16]);
    let y = dequantized(Quant::Q5_0, &q5_0);
    assert_eq!((y[0], y[1], y[30], y[31]), (0.0, -16.0, -16.0, 0.0));

    let mut q8_0 = half_bytes(0.25).to_vec();
    q8_0.extend([0x80; 32]);
    assert_eq!(dequantized(Quant::Q8_0, &q8_0), [-32.0; 32]);

    assert_eq!(dequantized(Quant::Bf16, &[0x80, 0x3f, 0x00, 0xc0]), [1.0, -2.0]);
    assert_eq!(dequantized(Quant::F16, &[half_bytes(1.5), half_bytes(-3.0)].concat()), [1.5, -3.0]);
}

#[test]
fn super_blocks_by_hand() {
    let mut q4_k = vec![0; 144];
    q4_k[..2].copy_from_slice(&half_bytes(1.0));
    q4_k[2..4].copy_from_slice(&half_bytes(1.0));
    // Sub-block 0: scale 3, minimum 2. Sub-block 5: scale 0x2a = low nibble 10, top bits 2; minimum 0x15.
    (q4_k[4], q4_k[8]) = (3, 2);
    q4_k[4 + 1] = 2 << 6;
    q4_k[4 + 5] = 1 << 6;
    q4_k[4 + 9] = 10 | 5 << 4;
    q4_k[16] = 7;
    q4_k[16 + 64 + 1] = 9 << 4;
    let y = dequantized(Quant::Q4K, &q4_k);
    assert_eq!((y[0], y[1]), (3.0 * 7.0 - 2.0, -2.0));
    assert_eq!((y[160], y[161]), (-21.0, 42.0 * 9.0 - 21.0));

    let mut q5_k = vec![0; 176];
    q5_k[..4].copy_from_slice(&q4_k[..4]);
    (q5_k[4], q5_k[8]) = (3, 2);
    q5_k[16] = 1;
    q5_k[48] = 7;
    let y = dequantized(Quant::Q5K, &q5_k);
    assert_eq!((y[0], y[1]), (3.0 * 23.0 - 2.0, -2.0));

    let mut q6_k = vec![0; 210];
    q6_k[208..].copy_from_slice(&half_bytes(0.5));
    q6_k[192 + 8 + 2 * 3 + 1] = (-2i8) as u8; // second half, group 3, upper sixteen
    q6_k[64 + 32 + 20] = 5 << 4;
    q6_k[128 + 32 + 20] = 3 << 6;
    let y = dequantized(Quant::Q6K, &q6_k);
    assert_eq!(y[128 + 96 + 20], -(5.0 + 48.0 - 32.0));
    assert_eq!(y[128 + 96 + 21], 32.0);
    assert_eq!(y[0], 0.0, "a scale of zero");
}

#[test]
fn sizes() {
    for quant in Quant::ALL {
        assert_eq!(quant.row_bytes(512), Some(512 / quant.block_len() * quant.block_bytes()));
    }
    assert_eq!(Quant::F32.row_bytes(usize::MAX), None);
    assert_eq!(Quant::Q4K.row_bytes(32), None);
    assert_eq!(Quant::NAMES.split(", ").count(), Quant::ALL.len());
}
