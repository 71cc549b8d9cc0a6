//! Integer arithmetic of every width.

use super::{Alu, one, three, two};
use crate::types::{Ty, mask_of, sign_extend};

/// Which part of a product is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntegerMode {
    Low,
    High,
    Wide,
}

macro_rules! width {
    ($name:ident, $t:ty, $u:ty, $wide:ty, $wide_u:ty) => {
        fn $name(op: &str, mode: IntegerMode, saturate: bool) -> Option<Alu> {
            const BITS: u32 = <$t>::BITS;
            fn bits(x: $t) -> u64 {
                u64::from(x as $u)
            }
            fn product(a: u64, b: u64) -> $wide {
                <$wide>::from(a as $t) * <$wide>::from(b as $t)
            }
            // A 128-bit product is only ever asked for its halves, so that the cast to 64 bits loses nothing that is used.
            fn wide(x: $wide) -> u64 {
                x as $wide_u as u64
            }
            Some(match (op, mode) {
                ("add", _) if saturate => two(|a, b| bits((a as $t).saturating_add(b as $t))),
                ("sub", _) if saturate => two(|a, b| bits((a as $t).saturating_sub(b as $t))),
                ("add", _) => two(|a, b| bits((a as $t).wrapping_add(b as $t))),
                ("sub", _) => two(|a, b| bits((a as $t).wrapping_sub(b as $t))),
                ("mul", IntegerMode::Low) => two(|a, b| bits((a as $t).wrapping_mul(b as $t))),
                ("mul", IntegerMode::High) => two(|a, b| bits((product(a, b) >> BITS) as $t)),
                ("mul", IntegerMode::Wide) => two(|a, b| wide(product(a, b))),
                ("mad", IntegerMode::Low) => {
                    three(|a, b, c| bits((a as $t).wrapping_mul(b as $t).wrapping_add(c as $t)))
                }
                ("mad", IntegerMode::High) => {
                    three(|a, b, c| bits(((product(a, b) >> BITS) as $t).wrapping_add(c as $t)))
                }
                ("mad", IntegerMode::Wide) => three(|a, b, c| wide(product(a, b).wrapping_add(c as $wide))),
                // The result of a division by zero is unspecified; GPUs return all ones.
                ("div", _) => two(|a, b| bits(if b as $t == 0 { !0 } else { (a as $t).wrapping_div(b as $t) })),
                ("rem", _) => two(|a, b| bits(if b as $t == 0 { a as $t } else { (a as $t).wrapping_rem(b as $t) })),
                ("min", _) => two(|a, b| bits((a as $t).min(b as $t))),
                ("max", _) => two(|a, b| bits((a as $t).max(b as $t))),
                ("shr", _) => two(|a, b| {
                    let by = (b as u32).min(BITS);
                    bits(if by == BITS { if (a as $t) < (0 as $t) { !0 } else { 0 } } else { (a as $t) >> by })
                }),
                ("shl", _) => two(|a, b| if b as u32 >= BITS { 0 } else { bits((a as $t) << (b as u32)) }),
                ("neg", _) => one(|a| bits((a as $t).wrapping_neg())),
                ("abs", _) => one(|a| bits(if (a as $t) < (0 as $t) { (a as $t).wrapping_neg() } else { a as $t })),
                ("sad", _) => three(|a, b, c| bits((a as $t).abs_diff(b as $t).wrapping_add(c as $u) as $t)),
                _ => return None,
            })
        }
    };
}

width!(u16_op, u16, u16, u32, u32);
width!(i16_op, i16, u16, i32, u32);
width!(u32_op, u32, u32, u64, u64);
width!(i32_op, i32, u32, i64, u64);
width!(u64_op, u64, u64, u128, u128);
width!(i64_op, i64, u64, i128, u128);

/// The function of an integer instruction, if it exists.
pub(crate) fn integer_op(op: &str, ty: Ty, mode: IntegerMode, saturate: bool) -> Option<Alu> {
    let by_width = match (ty.bytes(), ty.is_signed()) {
        (2, false) => u16_op,
        (2, true) => i16_op,
        (4, false) => u32_op,
        (4, true) => i32_op,
        (8, false) => u64_op,
        (8, true) => i64_op,
        _ => return None,
    };
    by_width(op, mode, saturate)
}

/// An instruction of extended precision: `a + b + carry`, `a - b - borrow`, or `a * b + c + carry` with one half of the product.
/// Returns the result and the carry or borrow.
pub(crate) fn carry(op: &str, ty: Ty, mode: IntegerMode, [a, b, c]: [u64; 3], carry: bool) -> (u64, bool) {
    let (bytes, mask) = (ty.bytes(), u128::from(mask_of(ty.bytes())));
    let [x, y, z] = [a, b, c].map(|v| u128::from(v) & mask);
    let sum = |x: u128, y: u128| {
        let total = x + y + u128::from(carry);
        ((total & mask) as u64, total > mask)
    };
    match op {
        "sub" => (x.wrapping_sub(y).wrapping_sub(u128::from(carry)) as u64 & mask as u64, x < y + u128::from(carry)),
        "mad" => {
            let product = if ty.is_signed() {
                (i128::from(sign_extend(a, bytes) as i64) * i128::from(sign_extend(b, bytes) as i64)) as u128
            } else {
                x * y
            };
            sum(if mode == IntegerMode::High { product >> (8 * bytes) & mask } else { product & mask }, z)
        }
        _ => sum(x, y),
    }
}
