//! Vectors of eight lanes, for CPUs with AVX2 and without AVX-512: partial loads and stores of every storage type,
//! rounding, and the 8 × 8 transpose.
//!
//! Every function needs [`Isa::Avx2`](crate::isa::Isa). Lanes from `n` on are neither read nor written in memory
//! (MATMUL-2). Partial stores copy through the stack: AMD CPUs before Zen 4 take tens of cycles for a masked store.

use std::arch::x86_64::*;
use std::ptr::copy_nonoverlapping;

use super::operand::Storage;

/// Lanes of a vector.
pub(super) const LANES: usize = 8;

/// The mask of the first `n` of eight lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn first8(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// Loads the first `n` of eight elements as f32; the other lanes are zero.
///
/// # Safety
/// `n` elements at `ptr` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn load(ptr: *const u8, storage: Storage, n: usize) -> __m256 {
    // SAFETY: the caller guarantees `n` elements.
    unsafe {
        match storage {
            Storage::F32 if n >= LANES => _mm256_loadu_ps(ptr.cast()),
            Storage::F32 => _mm256_maskload_ps(ptr.cast(), first8(n)),
            Storage::Bf16 => widen(load_halves(ptr, n)),
            Storage::F16 => _mm256_cvtph_ps(load_halves(ptr, n)),
        }
    }
}

/// Stores the first `n` of eight lanes, rounded to nearest even where the storage is narrower.
///
/// # Safety
/// `n` elements at `ptr` are writable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn store(ptr: *mut u8, storage: Storage, n: usize, x: __m256) {
    // SAFETY: the caller guarantees `n` elements.
    unsafe {
        match storage {
            Storage::F32 if n >= LANES => _mm256_storeu_ps(ptr.cast(), x),
            Storage::F32 => {
                let mut lanes = [0f32; LANES];
                _mm256_storeu_ps(lanes.as_mut_ptr(), x);
                copy_nonoverlapping(lanes.as_ptr(), ptr.cast(), n);
            }
            Storage::Bf16 => {
                let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(round_to_bf16(x)));
                let halves = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high));
                store_halves(ptr, n, halves);
            }
            Storage::F16 => {
                store_halves(ptr, n, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
            }
        }
    }
}

/// # Safety
/// `n` elements of two bytes at `ptr` are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_halves(ptr: *const u8, n: usize) -> __m128i {
    // SAFETY: by the caller.
    unsafe {
        if n >= LANES {
            return _mm_loadu_si128(ptr.cast());
        }
        let mut lanes = [0u16; LANES];
        copy_nonoverlapping(ptr, lanes.as_mut_ptr().cast(), 2 * n);
        _mm_loadu_si128(lanes.as_ptr().cast())
    }
}

/// # Safety
/// `n` elements of two bytes at `ptr` are writable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_halves(ptr: *mut u8, n: usize, x: __m128i) {
    // SAFETY: by the caller.
    unsafe {
        if n >= LANES {
            return _mm_storeu_si128(ptr.cast(), x);
        }
        let mut lanes = [0u16; LANES];
        _mm_storeu_si128(lanes.as_mut_ptr().cast(), x);
        copy_nonoverlapping(lanes.as_ptr().cast(), ptr, 2 * n);
    }
}

/// Widens eight bf16 to f32.
#[inline]
#[target_feature(enable = "avx2")]
fn widen(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
}

/// Rounds to the nearest bf16, ties to even, as f32; a NaN stays a NaN because its quiet bit is set instead.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn round_to_bf16(x: __m256) -> __m256 {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    let kept = _mm256_blendv_epi8(rounded, quiet, nan);
    _mm256_castsi256_ps(_mm256_and_si256(kept, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
}

/// Transposes an 8 × 8 matrix of 32-bit lanes, one row a vector: pairs of rows, pairs of pairs, then halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose(r: &mut [__m256; LANES]) {
    let mut t = [_mm256_setzero_ps(); LANES];
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..2 {
        let [a, b, c, d] = [t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]];
        r[4 * i] = _mm256_shuffle_ps::<0x44>(a, c);
        r[4 * i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
        r[4 * i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
        r[4 * i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
    }
    // Now half h of r[4g + s] holds column 4h + s of rows 4g .. 4g + 4.
    for s in 0..4 {
        t[s] = _mm256_permute2f128_ps::<0x20>(r[s], r[4 + s]);
        t[4 + s] = _mm256_permute2f128_ps::<0x31>(r[s], r[4 + s]);
    }
    *r = t;
}
