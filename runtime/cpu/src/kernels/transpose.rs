//! Transposition of small f32 matrices.
#![allow(unsafe_code)] // Shuffles transpose sixteen registers; no plain loop compiles to them.

use crate::isa::{Isa, isa};
use crate::kernels::strided::VECTOR;

/// Transposes `n_rows` rows of `n_columns` elements, `ld` apart, into `n_columns` rows, `to_ld` apart. Columns of the
/// result beyond `n_rows` are zeroed up to the next multiple of [`VECTOR`].
///
/// # Panics
/// If a shape exceeds its slice.
pub fn transpose(from: &[f32], ld: usize, n_rows: usize, n_columns: usize, to: &mut [f32], to_ld: usize) {
    let width = n_rows.next_multiple_of(VECTOR);
    if n_rows == 0 || n_columns == 0 {
        return;
    }
    assert!((n_rows - 1) * ld + n_columns <= from.len() && (n_columns - 1) * to_ld + width <= to.len());
    for column in (0..n_columns).step_by(VECTOR) {
        for row in (0..n_rows).step_by(VECTOR) {
            let size = (VECTOR.min(n_rows - row), VECTOR.min(n_columns - column));
            let (from, to) = (&from[row * ld + column..], &mut to[column * to_ld + row..]);
            #[cfg(target_arch = "x86_64")]
            if isa() >= Isa::Avx512 {
                // SAFETY: the CPU has AVX-512F; the assert above keeps the block in bounds.
                unsafe { avx512::block(from, ld, size, to, to_ld) };
                continue;
            }
            plain_block(from, ld, size, to, to_ld);
        }
    }
}

fn plain_block(from: &[f32], ld: usize, (n_rows, n_columns): (usize, usize), to: &mut [f32], to_ld: usize) {
    for j in 0..n_columns {
        let to = &mut to[j * to_ld..j * to_ld + VECTOR];
        for (i, to) in to.iter_mut().enumerate() {
            *to = if i < n_rows { from[i * ld + j] } else { 0.0 };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::VECTOR;
    use std::arch::x86_64::*;

    /// Transposes a block of at most 16 by 16: interleaves pairs of rows by one element, then by two, four and eight.
    ///
    /// # Safety
    /// `from` has `n_rows` rows of `n_columns` elements, and `to` has `n_columns` rows of [`VECTOR`].
    #[target_feature(enable = "avx512f")]
    pub unsafe fn block(from: &[f32], ld: usize, (n_rows, n_columns): (usize, usize), to: &mut [f32], to_ld: usize) {
        let columns = if n_columns == VECTOR { 0xffff } else { (1u16 << n_columns) - 1 };
        let mut rows = [_mm512_setzero_ps(); VECTOR];
        for i in 0..VECTOR {
            if i < n_rows {
                // SAFETY: row `i` lies in `from`, and only its columns are read.
                rows[i] = unsafe { _mm512_maskz_loadu_ps(columns, from.as_ptr().add(i * ld)) };
            }
        }
        let mut by_one = [_mm512_setzero_ps(); VECTOR];
        for i in 0..VECTOR / 2 {
            by_one[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            by_one[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        let mut by_two = [_mm512_setzero_ps(); VECTOR];
        for i in 0..VECTOR / 4 {
            for half in 0..2 {
                let low = _mm512_castps_pd(by_one[4 * i + half]);
                let high = _mm512_castps_pd(by_one[4 * i + 2 + half]);
                by_two[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                by_two[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
            }
        }
        // Now register 4 i + c holds, in each quarter q, column 4 q + c of rows 4 i .. 4 i + 4.
        for c in 0..4 {
            let quarters = [by_two[c], by_two[4 + c], by_two[8 + c], by_two[12 + c]];
            let even = [
                _mm512_shuffle_f32x4::<0b10_00_10_00>(quarters[0], quarters[1]),
                _mm512_shuffle_f32x4::<0b10_00_10_00>(quarters[2], quarters[3]),
            ];
            let odd = [
                _mm512_shuffle_f32x4::<0b11_01_11_01>(quarters[0], quarters[1]),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(quarters[2], quarters[3]),
            ];
            let columns = [
                (c, _mm512_shuffle_f32x4::<0b10_00_10_00>(even[0], even[1])),
                (4 + c, _mm512_shuffle_f32x4::<0b10_00_10_00>(odd[0], odd[1])),
                (8 + c, _mm512_shuffle_f32x4::<0b11_01_11_01>(even[0], even[1])),
                (12 + c, _mm512_shuffle_f32x4::<0b11_01_11_01>(odd[0], odd[1])),
            ];
            for (j, column) in columns {
                if j < n_columns {
                    // SAFETY: row `j` of the result has `VECTOR` elements in `to`.
                    unsafe { _mm512_storeu_ps(to.as_mut_ptr().add(j * to_ld), column) };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::random;
    use super::*;

    fn expected(from: &[f32], ld: usize, (n_rows, n_columns): (usize, usize), to_ld: usize) -> Vec<f32> {
        let mut to = vec![9.0; n_columns * to_ld];
        for (j, i) in (0..n_columns).flat_map(|j| (0..n_rows.next_multiple_of(VECTOR)).map(move |i| (j, i))) {
            to[j * to_ld + i] = if i < n_rows { from[i * ld + j] } else { 0.0 };
        }
        to
    }

    #[test]
    fn any_shape_is_transposed_and_padded_with_zeros_to_a_whole_register() {
        for size in [(1usize, 1usize), (16, 16), (5, 7), (64, 64), (17, 33), (40, 16), (64, 100)] {
            let (ld, to_ld) = (size.1 + 3, size.0.next_multiple_of(VECTOR) + 2);
            let from = random(size.0 * ld, 4);
            let mut to = vec![9.0; size.1 * to_ld];

            transpose(&from, ld, size.0, size.1, &mut to, to_ld);

            assert_eq!(to, expected(&from, ld, size, to_ld), "{size:?}");
        }
    }

    #[test]
    fn plain_block_agrees_with_the_definition() {
        for size in [(1usize, 1usize), (16, 16), (5, 7), (16, 3)] {
            let from = random(size.0 * 20, 5);
            let mut to = vec![9.0; size.1 * 17];

            plain_block(&from, 20, size, &mut to, 17);

            assert_eq!(to, expected(&from, 20, size, 17), "{size:?}");
        }
    }
}
