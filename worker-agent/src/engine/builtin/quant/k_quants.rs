//! The formats with super-blocks of 256 weights.

use super::half_at;

/// Scale and minimum of sub-block `j` of 8, six bits each, packed in twelve bytes: the first four pairs lie in the low six
/// bits of bytes 0..4 and 4..8; the last four have their low nibbles in bytes 8..12 and their top bits above the first ones.
pub(crate) fn scale_and_min(j: usize, packed: &[u8]) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    }
}

/// `d, dmin, scales[12], codes[128]`: each 32 bytes of codes hold two sub-blocks of 32, low nibbles first.
pub(super) fn q4_k(b: &[u8], y: &mut [f32]) {
    five_bits(b, &[0; 32], &b[16..], y);
}

/// `d, dmin, scales[12], high[32], codes[128]`: as Q4_K, with bit `j` of `high[l]` the fifth bit of weight `l` of
/// sub-block `j`.
pub(super) fn q5_k(b: &[u8], y: &mut [f32]) {
    five_bits(b, &b[16..48], &b[48..], y);
}

fn five_bits(b: &[u8], high: &[u8], codes: &[u8], y: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for (j, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(j, &b[4..16]);
        // 11 + 6 + 5 bits: exact up to the last addition.
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let codes = &codes[j / 2 * 32..][..32];
        for (l, y) in y.iter_mut().enumerate() {
            let q = codes[l] >> (j % 2 * 4) & 15 | (high[l] >> j & 1) << 4;
            *y = scale * f32::from(q) - min;
        }
    }
}

/// `low[128], high[64], scales[16], d`: in each half of 128 weights, four groups of 32; group `g` has its low nibbles in
/// bytes `g % 2 * 32..` (the upper nibble from group 2 on) and two more bits at `2 g` of `high`.
pub(super) fn q6_k(b: &[u8], y: &mut [f32]) {
    let d = half_at(b, 208);
    for (j, y) in y.chunks_exact_mut(32).enumerate() {
        let (half, group) = (j / 4, j % 4);
        let low = &b[half * 64 + group % 2 * 32..][..32];
        let high = &b[128 + half * 32..][..32];
        for (l, y) in y.iter_mut().enumerate() {
            let q = low[l] >> (group / 2 * 4) & 15 | (high[l] >> (2 * group) & 3) << 4;
            let scale = b[192 + half * 8 + group * 2 + l / 16] as i8;
            *y = d * f32::from(scale) * f32::from(q as i8 - 32);
        }
    }
}
