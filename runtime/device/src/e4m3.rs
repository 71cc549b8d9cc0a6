//! The 8-bit floats of products in FP8, and the scales of rows.
//!
//! A number has a sign, 4 bits of exponent and 3 of mantissa: up to 448 in steps of 1/16 of itself, below 2^-6 in steps of 2^-9. There is
//! no infinity. Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, §3 (arXiv:2209.05433).

use crate::float::Float;
use half::bf16;

/// The bits of NaN without its sign.
const NAN: u8 = 0x7f;
/// The bits of the largest number.
const MAX: u32 = 0x7e;
/// Difference of the exponents' biases of f32 and e4m3.
const BIAS: u32 = 120;

/// Rounds to nearest even; larger numbers become the largest one.
pub fn encode(x: f32) -> u8 {
    let (sign, magnitude) = ((x.to_bits() >> 24 & 0x80) as u8, x.to_bits() & 0x7fff_ffff);
    if x.is_nan() {
        return sign | NAN;
    }
    let code = if magnitude < 0x3c80_0000 {
        (x.abs() * 512.0).round_ties_even() as u32
    } else {
        ((magnitude + 0x7_ffff + (magnitude >> 20 & 1)) >> 20).saturating_sub(BIAS << 3)
    };
    sign | code.min(MAX) as u8
}

/// The number that these bits mean.
pub fn decode(bits: u8) -> f32 {
    let magnitude = if bits & 0x7f == NAN {
        f32::NAN
    } else {
        // The exponent is as if it had the bias of f32.
        f32::from_bits(u32::from(bits & 0x7f) << 20) * f32::from_bits((127 + BIAS) << 23)
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// What a row is divided by: the least power of two with which its largest magnitude, of bf16 numbers, is at most 448; NaN for a row with
/// numbers that are not finite, 1 for a row of zeros.
pub fn scale_of_row(row: &[bf16]) -> f32 {
    scale_of_largest(row.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7fff)))
}

/// The same from the bits of the largest magnitude.
fn scale_of_largest(bits: u16) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 7), bits & 0x7f);
    match (exponent, mantissa) {
        (255, _) => f32::NAN,
        (0, 0) => 1.0,
        // 448 is 1.75 x 2^8. Reciprocals of scales are finite too.
        _ => {
            let shift = exponent.max(1) - 127 - 8 + i32::from(mantissa > 0x60);
            f32::from_bits(((shift.max(-126) + 127) as u32) << 23)
        }
    }
}

/// The numbers that a product in FP8 multiplies instead of those of a row: e4m3 times the scale of the row, exact in bf16.
pub fn round_row(row: &mut [bf16]) {
    let scale = scale_of_row(row);
    row.iter_mut().for_each(|x| *x = rounded(*x, scale));
}

/// `scale e4m3(x / scale)` for a scale that is a power of two.
pub fn rounded(x: bf16, scale: f32) -> bf16 {
    <bf16 as Float>::from_f32(decode(encode(Float::to_f32(x) * (1.0 / scale))) * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_way_to_f32_and_back() {
        for bits in 0..=u8::MAX {
            assert_eq!(encode(decode(bits)), bits, "{bits:#x}");
        }
    }

    #[test]
    fn numbers_round_to_the_nearest_even_one_and_end_at_the_largest() {
        for bits in 0..0x7e {
            let (low, high) = (decode(bits), decode(bits + 1));
            let middle = f32::midpoint(low, high);
            let even = if bits % 2 == 0 { bits } else { bits + 1 };

            assert_eq!([middle.next_down(), middle, middle.next_up()].map(encode), [bits, even, bits + 1]);
        }
        assert_eq!([448.0, 464.1, 1e30, f32::INFINITY, -1e30].map(encode), [0x7e, 0x7e, 0x7e, 0x7e, 0xfe]);
    }

    #[test]
    fn scale_of_a_row_is_the_least_power_of_two_under_which_nothing_saturates() {
        for bits in (1..0x7f80).step_by(7) {
            let (largest, scale) = (bf16::from_bits(bits).to_f32(), scale_of_largest(bits));

            assert!(largest / scale <= 448.0, "{largest}");
            assert!(scale == 2f32.powi(-126) || f64::from(largest) / f64::from(scale / 2.0) > 448.0, "{largest}");
            assert!(scale.log2().fract() == 0.0 && (1.0 / scale).is_finite());
        }
        assert_eq!(scale_of_row(&[bf16::ZERO; 3]), 1.0);
        assert!([bf16::INFINITY, bf16::NAN].into_iter().all(|x| scale_of_row(&[bf16::ONE, x]).is_nan()));
    }

    #[test]
    fn rounded_row_keeps_four_bits_of_each_number_and_is_not_rounded_again() {
        let mut row: Vec<bf16> = (1..=200).map(|i| bf16::from_f32(i as f32 * 0.37 - 30.0)).collect();
        let before = row.clone();

        round_row(&mut row);

        let is_near = |(x, y): (&bf16, &bf16)| (x.to_f32() - y.to_f32()).abs() <= x.to_f32().abs() / 16.0;
        assert!(before.iter().zip(&row).all(is_near));
        let once = row.clone();
        round_row(&mut row);
        assert_eq!(row, once);
    }
}
