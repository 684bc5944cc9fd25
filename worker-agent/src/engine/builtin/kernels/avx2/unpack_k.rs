//! Unpacks the formats with super-blocks of 256, 32 weights at a time; the layouts are explained in `quant/k_quants.rs`.

use std::arch::x86_64::*;

use super::super::super::quant::scale_and_min;
use super::unpack::{Unpack, half, spread};

/// `scale * code - min`, four bits and a scale and minimum for each unit.
pub(super) struct Q4K;
/// As [`Q4K`], with a fifth bit.
pub(super) struct Q5K;
/// `scale * (code - 32)`, six bits and a scale for each sixteen.
pub(super) struct Q6K;

impl Unpack for Q4K {
    const BYTES: usize = 144;
    const UNITS: usize = 8;

    #[inline(always)]
    unsafe fn unit(p: *const u8, u: usize) -> [__m256; 4] {
        // SAFETY: the caller's promise; units 2 i and 2 i + 1 share 32 bytes of codes.
        unsafe { scaled(p, u, codes(p.add(16 + u / 2 * 32), u % 2 * 4, 15)) }
    }
}

impl Unpack for Q5K {
    const BYTES: usize = 176;
    const UNITS: usize = 8;

    #[inline(always)]
    unsafe fn unit(p: *const u8, u: usize) -> [__m256; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let low = codes(p.add(48 + u / 2 * 32), u % 2 * 4, 15);
            let high = codes(p.add(16), u, 1);
            let code = std::array::from_fn(|i| _mm256_or_si256(low[i], _mm256_slli_epi32::<4>(high[i])));
            scaled(p, u, code)
        }
    }
}

impl Unpack for Q6K {
    const BYTES: usize = 210;
    const UNITS: usize = 8;

    #[inline(always)]
    unsafe fn unit(p: *const u8, u: usize) -> [__m256; 4] {
        let (upper, group) = (u / 4, u % 4);
        // SAFETY: the caller's promise.
        unsafe {
            let low = codes(p.add(upper * 64 + group % 2 * 32), group / 2 * 4, 15);
            let high = codes(p.add(128 + upper * 32), 2 * group, 3);
            let d = half(p.add(208));
            let scales = p.add(192 + upper * 8 + group * 2).cast::<i8>();
            std::array::from_fn(|i| {
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(f32::from(*scales.add(i / 2))));
                let code = _mm256_or_si256(low[i], _mm256_slli_epi32::<4>(high[i]));
                let code = _mm256_sub_epi32(code, _mm256_set1_epi32(32));
                _mm256_mul_ps(scale, _mm256_cvtepi32_ps(code))
            })
        }
    }
}

/// The 32 bytes at `p`, each in a 32-bit lane, shifted right and masked.
///
/// # Safety
/// `p` covers 32 bytes; the processor has the features.
#[inline(always)]
unsafe fn codes(p: *const u8, shift: usize, mask: i32) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let ([a, b], [c, d]) = (spread(p), spread(p.add(16)));
        let (shift, mask) = (_mm_cvtsi32_si128(shift as i32), _mm256_set1_epi32(mask));
        let cut = |v| _mm256_and_si256(_mm256_srl_epi32(v, shift), mask);
        [cut(a), cut(b), cut(c), cut(d)]
    }
}

/// # Safety
/// `p` covers the head of a block; the processor has the features.
#[inline(always)]
unsafe fn scaled(p: *const u8, u: usize, codes: [__m256i; 4]) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (scale, min) = scale_and_min(u, std::slice::from_raw_parts(p.add(4), 12));
        let scale = _mm256_mul_ps(half(p), _mm256_set1_ps(f32::from(scale)));
        let min = _mm256_mul_ps(half(p.add(2)), _mm256_set1_ps(f32::from(min)));
        std::array::from_fn(|i| _mm256_fmsub_ps(_mm256_cvtepi32_ps(codes[i]), scale, min))
    }
}
