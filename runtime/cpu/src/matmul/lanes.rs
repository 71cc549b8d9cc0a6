//! Vectors of sixteen lanes: masked loads and stores of every storage type, rounding, and the 16 × 16 transpose.
//!
//! Every function needs [`Isa::Avx512`](crate::isa::Isa). Masked lanes are neither read nor written (MATMUL-2).

use std::arch::x86_64::*;

use super::operand::Storage;

/// The mask of the first `n` of sixteen lanes.
#[inline(always)]
pub(crate) fn first16(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1u16 << n) - 1 }
}

/// The mask of the first `n` of thirty-two lanes.
#[inline(always)]
pub(super) fn first32(n: usize) -> __mmask32 {
    if n >= 32 { u32::MAX } else { (1u32 << n) - 1 }
}

/// Loads sixteen elements as f32; masked lanes are zero.
///
/// # Safety
/// The lanes of `mask` are readable elements at `ptr`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn load(ptr: *const u8, storage: Storage, mask: __mmask16) -> __m512 {
    // SAFETY: masked lanes are not accessed; the caller guarantees the others.
    unsafe {
        match storage {
            Storage::F32 => _mm512_maskz_loadu_ps(mask, ptr.cast()),
            Storage::Bf16 => widen(_mm256_maskz_loadu_epi16(mask, ptr.cast())),
            Storage::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, ptr.cast())),
        }
    }
}

/// Stores sixteen lanes, rounded to nearest even where the storage is narrower.
///
/// # Safety
/// The lanes of `mask` are writable elements at `ptr`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn store(ptr: *mut u8, storage: Storage, mask: __mmask16, x: __m512) {
    // SAFETY: masked lanes are not accessed; the caller guarantees the others.
    unsafe {
        match storage {
            Storage::F32 => _mm512_mask_storeu_ps(ptr.cast(), mask, x),
            Storage::Bf16 => {
                let half = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(round_to_bf16(x))));
                _mm256_mask_storeu_epi16(ptr.cast(), mask, half);
            }
            Storage::F16 => {
                let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
                _mm256_mask_storeu_epi16(ptr.cast(), mask, half);
            }
        }
    }
}

/// Widens sixteen bf16 to f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn widen(x: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

/// Rounds to the nearest bf16, ties to even, as f32. Uses integers to keep subnormals, which the conversion instruction
/// flushes; a NaN stays a NaN because its quiet bit is set instead.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn round_to_bf16(x: __m512) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x0040_0000));
    _mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
}

/// Transposes a 16 × 16 matrix of 32-bit lanes, one row a vector: pairs of rows, pairs of pairs, then the two levels of
/// 128-bit quarters.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(r: &mut [__m512i; 16]) {
    let mut t = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        let [a, b, c, d] = [t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]];
        r[4 * i] = _mm512_unpacklo_epi64(a, c);
        r[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
        r[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
        r[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    // Now quarter q of r[4g + s] holds column 4q + s of rows 4g .. 4g + 4.
    for s in 0..4 {
        t[s] = _mm512_shuffle_i32x4::<0x88>(r[s], r[4 + s]);
        t[4 + s] = _mm512_shuffle_i32x4::<0xdd>(r[s], r[4 + s]);
        t[8 + s] = _mm512_shuffle_i32x4::<0x88>(r[8 + s], r[12 + s]);
        t[12 + s] = _mm512_shuffle_i32x4::<0xdd>(r[8 + s], r[12 + s]);
    }
    for s in 0..4 {
        r[s] = _mm512_shuffle_i32x4::<0x88>(t[s], t[8 + s]);
        r[4 + s] = _mm512_shuffle_i32x4::<0x88>(t[4 + s], t[12 + s]);
        r[8 + s] = _mm512_shuffle_i32x4::<0xdd>(t[s], t[8 + s]);
        r[12 + s] = _mm512_shuffle_i32x4::<0xdd>(t[4 + s], t[12 + s]);
    }
}
