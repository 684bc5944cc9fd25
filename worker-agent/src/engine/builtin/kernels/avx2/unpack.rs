//! Unpacks the formats without super-blocks, 32 weights at a time.
//!
//! Each gives the bits of [`Quant::dequantize`](super::super::super::quant::Quant::dequantize): products of scale and code
//! are exact in single precision, so a fused multiply-add rounds where the definition does.

use std::arch::x86_64::*;

/// A format as units of 32 weights.
pub(super) trait Unpack {
    /// Bytes of a block.
    const BYTES: usize;
    /// Units of 32 weights in a block.
    const UNITS: usize;

    /// Unit `u` of the block at `p`, in order.
    ///
    /// # Safety
    /// `p` covers a block, and the processor has AVX2, FMA and F16C.
    unsafe fn unit(p: *const u8, u: usize) -> [__m256; 4];
}

/// Sixteen bytes, each alone in the lowest byte of a 32-bit lane.
///
/// # Safety
/// `p` covers 16 bytes.
#[inline(always)]
pub(super) unsafe fn spread(p: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
        let x = -1;
        let first = _mm256_setr_epi8(
            0, x, x, x, 1, x, x, x, 2, x, x, x, 3, x, x, x, 4, x, x, x, 5, x, x, x, 6, x, x, x, 7, x, x, x,
        );
        let second = _mm256_setr_epi8(
            8, x, x, x, 9, x, x, x, 10, x, x, x, 11, x, x, x, 12, x, x, x, 13, x, x, x, 14, x, x, x, 15, x, x, x,
        );
        [_mm256_shuffle_epi8(both, first), _mm256_shuffle_epi8(both, second)]
    }
}

/// The 32 codes in 16 bytes: low nibbles first.
///
/// # Safety
/// `p` covers 16 bytes.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let [a, b] = spread(p);
        let low = _mm256_set1_epi32(15);
        [_mm256_and_si256(a, low), _mm256_and_si256(b, low), _mm256_srli_epi32::<4>(a), _mm256_srli_epi32::<4>(b)]
    }
}

/// Adds bit `i` of the word at `p` to code `i` as its fifth bit.
///
/// # Safety
/// `p` covers 4 bytes.
#[inline(always)]
unsafe fn fifth_bits(p: *const u8, codes: [__m256i; 4]) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mut with = codes;
        for (i, code) in with.iter_mut().enumerate() {
            let bit = _mm256_srlv_epi32(bits, _mm256_add_epi32(lane, _mm256_set1_epi32(8 * i as i32)));
            let bit = _mm256_and_si256(_mm256_slli_epi32::<4>(bit), _mm256_set1_epi32(16));
            *code = _mm256_or_si256(*code, bit);
        }
        with
    }
}

/// The half at `p` in all lanes.
///
/// # Safety
/// `p` covers 2 bytes.
#[inline(always)]
pub(super) unsafe fn half(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm_cvtsi32_si128(i32::from(p.cast::<u16>().read_unaligned()));
        _mm256_broadcastss_ps(_mm_cvtph_ps(bits))
    }
}

/// The two halves at `p`, each in all lanes.
///
/// # Safety
/// `p` covers 4 bytes.
#[inline(always)]
unsafe fn two_halves(p: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller's promise.
    unsafe {
        let pair = _mm_cvtph_ps(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()));
        (_mm256_broadcastss_ps(pair), _mm256_broadcastss_ps(_mm_movehdup_ps(pair)))
    }
}

/// `scale * code + min`.
///
/// # Safety
/// The processor has the features.
#[inline(always)]
unsafe fn scaled(codes: [__m256i; 4], scale: __m256, min: __m256) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe { std::array::from_fn(|i| _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[i]), scale, min)) }
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal, |$p:ident| $unit:expr;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl Unpack for $name {
            const BYTES: usize = $bytes;
            const UNITS: usize = 1;

            #[inline(always)]
            unsafe fn unit($p: *const u8, _: usize) -> [__m256; 4] {
                // SAFETY: the caller's promise.
                unsafe { $unit }
            }
        }
    )*};
}

formats! {
    /// A unit of 32 singles.
    F32: 128, |p| std::array::from_fn(|i| _mm256_loadu_ps(p.cast::<f32>().add(8 * i)));
    /// A unit of 32 halves.
    F16: 64, |p| std::array::from_fn(|i| _mm256_cvtph_ps(_mm_loadu_si128(p.add(16 * i).cast())));
    /// A unit of 32 upper halves of singles.
    Bf16: 64, |p| std::array::from_fn(|i| {
        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16 * i).cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    });
    /// `d * (code - 8)`.
    Q4_0: 18, |p| {
        let d = half(p);
        scaled(nibbles(p.add(2)), d, _mm256_mul_ps(d, _mm256_set1_ps(-8.0)))
    };
    /// `d * code + m`.
    Q4_1: 20, |p| {
        let (d, m) = two_halves(p);
        scaled(nibbles(p.add(4)), d, m)
    };
    /// `d * (code - 16)`.
    Q5_0: 22, |p| {
        let d = half(p);
        scaled(fifth_bits(p.add(2), nibbles(p.add(6))), d, _mm256_mul_ps(d, _mm256_set1_ps(-16.0)))
    };
    /// `d * code + m`.
    Q5_1: 24, |p| {
        let (d, m) = two_halves(p);
        scaled(fifth_bits(p.add(4), nibbles(p.add(8))), d, m)
    };
    /// `d * code`. The code is put at the top of its lane, which keeps its sign and multiplies it by 2^24; the scale is
    /// divided by as much. Powers of two change no bit of the product.
    Q8_0: 34, |p| {
        let d = _mm256_mul_ps(half(p), _mm256_set1_ps(1.0 / (1 << 24) as f32));
        let x = -1;
        let first = _mm256_setr_epi8(
            x, x, x, 0, x, x, x, 1, x, x, x, 2, x, x, x, 3, x, x, x, 4, x, x, x, 5, x, x, x, 6, x, x, x, 7,
        );
        let second = _mm256_setr_epi8(
            x, x, x, 8, x, x, x, 9, x, x, x, 10, x, x, x, 11, x, x, x, 12, x, x, x, 13, x, x, x, 14, x, x, x, 15,
        );
        std::array::from_fn(|i| {
            let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(2 + i / 2 * 16).cast()));
            let codes = _mm256_shuffle_epi8(both, if i % 2 == 0 { first } else { second });
            _mm256_mul_ps(_mm256_cvtepi32_ps(codes), d)
        })
    };
}
