//! Binary floating-point formats narrower than f64, and exact rounding into them.

use super::Rounding;

/// A format with a sign, an exponent and a fraction, and IEEE's special values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    fraction_bits: u32,
    exponent_bits: u32,
    /// Zero bits below the fraction: a tf32 lies in the upper bits of a word.
    padding_bits: u32,
    nan: u64,
}

pub(crate) const F16: Format = Format { fraction_bits: 10, exponent_bits: 5, padding_bits: 0, nan: 0x7fff };
pub(crate) const BF16: Format = Format { fraction_bits: 7, exponent_bits: 8, padding_bits: 0, nan: 0x7fff };
pub(crate) const TF32: Format = Format { fraction_bits: 10, exponent_bits: 8, padding_bits: 13, nan: 0x7fff_ffff };
pub(crate) const F32: Format = Format { fraction_bits: 23, exponent_bits: 8, padding_bits: 0, nan: 0x7fff_ffff };

/// `x` rounded into a format; with `satfinite`, values beyond its range become its largest value.
pub(crate) fn narrow(x: f64, format: Format, rounding: Rounding, satfinite: bool) -> u64 {
    let Format { fraction_bits, exponent_bits, padding_bits, nan } = format;
    if x.is_nan() {
        return nan;
    }
    let bias = (1i64 << (exponent_bits - 1)) - 1;
    let infinity = ((1u64 << exponent_bits) - 1) << fraction_bits;
    let negative = x.is_sign_negative();
    let sign = u64::from(negative) << (fraction_bits + exponent_bits);
    let finish = |magnitude: u64| (sign | magnitude) << padding_bits;
    if x.is_infinite() {
        return finish(if satfinite { infinity - 1 } else { infinity });
    }
    let raw = x.abs().to_bits();
    let exponent = ((raw >> 52) as i64).max(1) - 1023;
    let significand = (raw & ((1 << 52) - 1)) | if raw >> 52 == 0 { 0 } else { 1 << 52 };
    let lowest = 1 - bias;
    let shift = (52 - i64::from(fraction_bits) + (lowest - exponent).max(0)).min(63) as u32;
    let (kept, rest, half) = (significand >> shift, significand & ((1 << shift) - 1), 1u64 << (shift - 1));
    let up = match rounding {
        Rounding::Nearest => rest > half || rest == half && kept & 1 == 1,
        Rounding::NearestAway => rest >= half,
        Rounding::Zero => false,
        Rounding::Down => negative && rest > 0,
        Rounding::Up => !negative && rest > 0,
    };
    // The leading bit of a normal number is added to the exponent below it, and so is the carry of a rounding up.
    let magnitude = (((exponent.max(lowest) + bias - 1) as u64) << fraction_bits) + kept + u64::from(up);
    let overflow_is_finite = satfinite
        || match rounding {
            Rounding::Nearest | Rounding::NearestAway => false,
            Rounding::Zero => true,
            Rounding::Down => !negative,
            Rounding::Up => negative,
        };
    finish(if magnitude < infinity {
        magnitude
    } else if overflow_is_finite {
        infinity - 1
    } else {
        infinity
    })
}

/// The exact value of a number in a format.
pub(crate) fn widen(bits: u64, format: Format) -> f64 {
    let Format { fraction_bits, exponent_bits, padding_bits, .. } = format;
    // All formats but f16 have the exponent of f32, so that they are its upper bits.
    if exponent_bits == 8 {
        return f64::from(f32::from_bits((bits as u32) << (23 - fraction_bits - padding_bits)));
    }
    let bits = bits & 0xffff;
    let fraction = (bits & ((1 << fraction_bits) - 1)) as f64;
    let exponent = (bits >> fraction_bits & ((1 << exponent_bits) - 1)) as i32;
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// `a + b` rounded to odd: the neighbour of the exact sum whose last bit is set, unless the sum is exact.
///
/// Rounding the result once more into a format at least two bits narrower gives the correctly rounded sum.
/// Source: Boldo and Melquiond 2008, Emulation of FMA and correctly rounded sums, §3.
pub(crate) fn add_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    let b_rounded = sum - a;
    let error = (a - (sum - b_rounded)) + (b - b_rounded);
    if error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    if error > 0.0 { sum.next_up() } else { sum.next_down() }
}
