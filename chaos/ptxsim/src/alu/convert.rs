//! `cvt`: between all types.

use super::format::{BF16, F16, F32, Format, TF32, narrow, widen};
use super::rounding::Rounding;
use super::{Alu, one, two};
use crate::types::{Ty, mask_of, sign_extend};

/// Modifiers of a conversion.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Conversion {
    pub(crate) rounding: Rounding,
    pub(crate) to_integer: bool,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    pub(crate) satfinite: bool,
    pub(crate) relu: bool,
}

/// The conversion of one value, if it exists.
pub(crate) fn convert(to: Ty, from: Ty, mode: Conversion) -> Option<Alu> {
    Some(match (is_number(to)?, is_number(from)?) {
        (false, false) => integers(to, from, mode.sat),
        (false, true) => one(move |a| to_int(mode.rounding.to_integer(float(a, from, mode.ftz)), to, from)),
        (true, false) if from.is_signed() => {
            let bytes = from.bytes();
            match to {
                Ty::F32 if mode.rounding == Rounding::Nearest => {
                    one(move |a| u64::from((sign_extend(a, bytes) as i64 as f32).to_bits()))
                }
                _ => one(move |a| from_float(sign_extend(a, bytes) as i64 as f64, to, mode)),
            }
        }
        (true, false) => {
            let mask = mask_of(from.bytes());
            match to {
                Ty::F32 if mode.rounding == Rounding::Nearest => one(move |a| u64::from(((a & mask) as f32).to_bits())),
                _ => one(move |a| from_float((a & mask) as f64, to, mode)),
            }
        }
        (true, true) => one(move |a| {
            let x = float(a, from, mode.ftz);
            from_float(if mode.to_integer { mode.rounding.to_integer(x) } else { x }, to, mode)
        }),
    })
}

/// The conversion of two f32 into a pair, the first into the upper half.
pub(crate) fn convert_pair(to: Ty, mode: Conversion) -> Option<Alu> {
    if to == Ty::E4m3x2 && mode.satfinite {
        return Some(two(move |a, b| e4m3(float(a, Ty::F32, mode.ftz)) << 8 | e4m3(float(b, Ty::F32, mode.ftz))));
    }
    let format = match to {
        Ty::F16x2 => F16,
        Ty::Bf16x2 => BF16,
        _ => return None,
    };
    let half = move |bits: u64| finish(float(bits, Ty::F32, mode.ftz), format, mode);
    Some(two(move |a, b| half(a) << 16 | half(b)))
}

/// Whether a type is a floating-point number; pairs are neither.
fn is_number(ty: Ty) -> Option<bool> {
    match ty {
        Ty::Pred | Ty::F16x2 | Ty::Bf16x2 | Ty::E4m3x2 | Ty::F32x2 => None,
        ty => Some(ty.is_float()),
    }
}

fn float(bits: u64, ty: Ty, ftz: bool) -> f64 {
    match ty {
        Ty::F64 => f64::from_bits(bits),
        Ty::F16 => widen(bits, F16),
        Ty::Bf16 => widen(bits, BF16),
        _ => {
            let x = f32::from_bits(bits as u32);
            f64::from(if ftz && x.is_subnormal() { 0f32.copysign(x) } else { x })
        }
    }
}

fn from_float(x: f64, to: Ty, mode: Conversion) -> u64 {
    match to {
        Ty::F64 => x.to_bits(),
        Ty::F16 => finish(x, F16, mode),
        Ty::Bf16 => finish(x, BF16, mode),
        Ty::Tf32 => finish(x, TF32, mode),
        _ => {
            let bits = finish(x, F32, mode);
            let y = f32::from_bits(bits as u32);
            if mode.ftz && y.is_subnormal() { u64::from(0f32.copysign(y).to_bits()) } else { bits }
        }
    }
}

/// A number of 4 bits of exponent and 3 of mantissa, at most 448: to nearest, ties to even.
fn e4m3(x: f64) -> u64 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return 0x7f;
    }
    let exponent = x.abs().log2().floor().clamp(-6.0, 8.0) as i32;
    // Units of the last place of numbers with this exponent.
    let units = (x.abs() * 2f64.powi(3 - exponent)).round_ties_even().min(16.0) as u64;
    sign | (8 * (exponent + 6) as u64 + units).min(0x7e)
}

fn finish(x: f64, format: Format, mode: Conversion) -> u64 {
    let x = if mode.relu && x <= 0.0 { 0.0 } else { x };
    let saturated = if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) };
    narrow(if mode.sat { saturated } else { x }, format, mode.rounding, mode.satfinite)
}

/// A whole number into an integer type, clamped to its range. A NaN becomes 0, but the lowest value where f64 or 64 bits are
/// involved.
fn to_int(x: f64, to: Ty, from: Ty) -> u64 {
    let bytes = to.bytes();
    if x.is_nan() {
        return if from == Ty::F64 || bytes == 8 { 1 << (8 * bytes - 1) } else { 0 };
    }
    let bits = 8 * bytes as i32;
    if to.is_signed() {
        let limit = 2f64.powi(bits - 1);
        let clamped = if x >= limit { (mask_of(bytes) >> 1) as i64 } else { x.max(-limit) as i64 };
        return clamped as u64 & mask_of(bytes);
    }
    if x >= 2f64.powi(bits) { mask_of(bytes) } else { x as u64 }
}

fn integers(to: Ty, from: Ty, sat: bool) -> Alu {
    let (to_bytes, from_bytes, mask) = (to.bytes(), from.bytes(), mask_of(to.bytes()));
    if sat {
        return one(move |a| {
            let value = if from.is_signed() {
                i128::from(sign_extend(a, from_bytes) as i64)
            } else {
                i128::from(a & mask_of(from_bytes))
            };
            let (low, high) = match to.is_signed() {
                true => (-(1i128 << (8 * to_bytes - 1)), (1i128 << (8 * to_bytes - 1)) - 1),
                false => (0, (1i128 << (8 * to_bytes)) - 1),
            };
            value.clamp(low, high) as u64 & mask
        });
    }
    if from.is_signed() {
        one(move |a| sign_extend(a, from_bytes) & mask)
    } else {
        let both = mask & mask_of(from_bytes);
        one(move |a| a & both)
    }
}
