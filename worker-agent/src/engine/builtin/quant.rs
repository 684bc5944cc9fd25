//! Weight formats of GGUF files, and what their bytes mean.
//!
//! The functions here are the definition: plain, portable, one weight after the other. The fast kernels must give the same
//! bits (see `kernels`). Block layouts and formulas are those of ggml's `ggml-common.h` and `ggml-quants.c`.

mod k_quants;
#[cfg(test)]
pub(crate) mod tests;

use half::{bf16, f16};

pub(crate) use self::k_quants::scale_and_min;

/// How a tensor's weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quant {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// Blocks of 32: scale, 4-bit codes about 8.
    Q4_0,
    /// Blocks of 32: scale, minimum, 4-bit codes.
    Q4_1,
    /// Blocks of 32: scale, 5-bit codes about 16.
    Q5_0,
    /// Blocks of 32: scale, minimum, 5-bit codes.
    Q5_1,
    /// Blocks of 32: scale, signed bytes.
    Q8_0,
    /// Blocks of 256: eight 6-bit scales and minima, 4-bit codes.
    Q4K,
    /// Blocks of 256: eight 6-bit scales and minima, 5-bit codes.
    Q5K,
    /// Blocks of 256: sixteen 8-bit scales, 6-bit codes about 32.
    Q6K,
}

impl Quant {
    /// Every format, for tests and messages.
    pub const ALL: [Quant; 11] = [
        Quant::F32,
        Quant::F16,
        Quant::Bf16,
        Quant::Q4_0,
        Quant::Q4_1,
        Quant::Q5_0,
        Quant::Q5_1,
        Quant::Q8_0,
        Quant::Q4K,
        Quant::Q5K,
        Quant::Q6K,
    ];

    /// The names of all formats, as ggml writes them.
    pub const NAMES: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

    /// The format of ggml's type number; `None` if we do not read it.
    pub fn from_ggml(number: u32) -> Option<Quant> {
        Some(match number {
            0 => Quant::F32,
            1 => Quant::F16,
            2 => Quant::Q4_0,
            3 => Quant::Q4_1,
            6 => Quant::Q5_0,
            7 => Quant::Q5_1,
            8 => Quant::Q8_0,
            12 => Quant::Q4K,
            13 => Quant::Q5K,
            14 => Quant::Q6K,
            30 => Quant::Bf16,
            _ => return None,
        })
    }

    /// Weights in a block.
    pub const fn block_len(self) -> usize {
        match self {
            Quant::F32 | Quant::F16 | Quant::Bf16 => 1,
            Quant::Q4_0 | Quant::Q4_1 | Quant::Q5_0 | Quant::Q5_1 | Quant::Q8_0 => 32,
            Quant::Q4K | Quant::Q5K | Quant::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Quant::F32 => 4,
            Quant::F16 | Quant::Bf16 => 2,
            Quant::Q4_0 => 2 + 16,
            Quant::Q4_1 => 2 + 2 + 16,
            Quant::Q5_0 => 2 + 4 + 16,
            Quant::Q5_1 => 2 + 2 + 4 + 16,
            Quant::Q8_0 => 2 + 32,
            Quant::Q4K => 2 + 2 + 12 + 128,
            Quant::Q5K => 2 + 2 + 12 + 32 + 128,
            Quant::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes of a row of `cols` weights; `None` if they are not whole blocks or the number is absurd.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Writes the weights of whole blocks as `f32`. `src` holds exactly `dst.len()` weights.
    pub fn dequantize(self, src: &[u8], dst: &mut [f32]) {
        assert_eq!(self.row_bytes(dst.len()), Some(src.len()), "the lengths do not match");
        let blocks = src.chunks_exact(self.block_bytes()).zip(dst.chunks_exact_mut(self.block_len()));
        match self {
            Quant::F32 => blocks.for_each(|(b, y)| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Quant::F16 => blocks.for_each(|(b, y)| y[0] = half_at(b, 0)),
            Quant::Bf16 => blocks.for_each(|(b, y)| y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            Quant::Q4_0 => blocks.for_each(|(b, y)| nibbles(&b[2..], [0; 4], y, half_at(b, 0), -8.0 * half_at(b, 0))),
            Quant::Q4_1 => blocks.for_each(|(b, y)| nibbles(&b[4..], [0; 4], y, half_at(b, 0), half_at(b, 2))),
            Quant::Q5_0 => blocks.for_each(|(b, y)| {
                nibbles(&b[6..], [b[2], b[3], b[4], b[5]], y, half_at(b, 0), -16.0 * half_at(b, 0));
            }),
            Quant::Q5_1 => blocks.for_each(|(b, y)| {
                nibbles(&b[8..], [b[4], b[5], b[6], b[7]], y, half_at(b, 0), half_at(b, 2));
            }),
            Quant::Q8_0 => blocks.for_each(|(b, y)| {
                let d = half_at(b, 0);
                y.iter_mut().zip(&b[2..]).for_each(|(y, &q)| *y = d * f32::from(q as i8));
            }),
            Quant::Q4K => blocks.for_each(|(b, y)| k_quants::q4_k(b, y)),
            Quant::Q5K => blocks.for_each(|(b, y)| k_quants::q5_k(b, y)),
            Quant::Q6K => blocks.for_each(|(b, y)| k_quants::q6_k(b, y)),
        }
    }
}

/// Thirty-two codes `q` as `d * q + m`: low nibbles first, then high ones, with a fifth bit from `high`. `d * q` is exact in
/// single precision (11 + 5 bits), so a fused multiply-add gives the same result.
fn nibbles(codes: &[u8], high: [u8; 4], y: &mut [f32], d: f32, m: f32) {
    let high = u32::from_le_bytes(high);
    for (j, &byte) in codes.iter().enumerate() {
        let low = u32::from(byte & 15) | (high >> j & 1) << 4;
        let upper = u32::from(byte >> 4) | (high >> (j + 16) & 1) << 4;
        y[j] = d * low as f32 + m;
        y[j + 16] = d * upper as f32 + m;
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// ggml's name of a type number, for messages.
pub fn ggml_name(number: u32) -> String {
    let name = match number {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        30 => "BF16",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("format {number}"),
    };
    name.to_owned()
}
