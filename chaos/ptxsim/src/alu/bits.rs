//! Logic and bit fields.

use super::{Alu, one, three, two};
use crate::types::{Ty, mask_of};

/// The function of a logic or bit-field instruction, if it exists.
pub(crate) fn bits(op: &str, ty: Ty, shift_amount: bool) -> Option<Alu> {
    let mask = mask_of(ty.bytes());
    let width = 8 * ty.bytes() as u64;
    let is_signed = ty.is_signed();
    Some(match op {
        "and" => two(move |a, b| a & b & mask),
        "or" => two(move |a, b| (a | b) & mask),
        "xor" => two(move |a, b| (a ^ b) & mask),
        "not" => one(move |a| !a & mask),
        "cnot" => one(move |a| u64::from(a & mask == 0)),
        "mov" => one(move |a| a & mask),
        "popc" => one(move |a| u64::from((a & mask).count_ones())),
        "clz" => one(move |a| u64::from((a & mask).leading_zeros()) + width - 64),
        "brev" => one(move |a| (a & mask).reverse_bits() >> (64 - width)),
        "bfind" => one(move |a| find_leading(a & mask, width, is_signed, shift_amount)),
        "bfe" => three(move |a, at, n| extract(a & mask, at & 255, n & 255, width, is_signed) & mask),
        "dp4a" => three(move |a, b, c| dot(a, b, c, is_signed)),
        "prmt" => three(permute),
        _ => return None,
    })
}

/// Position of the highest bit that differs from the sign; all ones if there is none.
fn find_leading(a: u64, width: u64, is_signed: bool, shift_amount: bool) -> u64 {
    let negative = is_signed && a >> (width - 1) & 1 == 1;
    let value = if negative { !a & mask_of(width as usize / 8) } else { a };
    match value.checked_ilog2() {
        None => u64::from(u32::MAX),
        Some(at) if shift_amount => width - 1 - u64::from(at),
        Some(at) => u64::from(at),
    }
}

fn extract(a: u64, at: u64, n: u64, width: u64, is_signed: bool) -> u64 {
    let bit = |k: u64| if k < width { a >> k & 1 } else { 0 };
    let sign_at = (at + n).saturating_sub(1).min(width - 1);
    let sign = if is_signed && n > 0 { bit(sign_at) } else { 0 };
    (0..width).map(|k| if k < n && at + k < width { bit(at + k) << k } else { sign << k }).fold(0, |all, b| all | b)
}

fn dot(a: u64, b: u64, c: u64, is_signed: bool) -> u64 {
    let byte =
        |v: u64, k: u32| if is_signed { i64::from((v >> (8 * k)) as i8) } else { i64::from((v >> (8 * k)) as u8) };
    let sum: i64 = (0..4).map(|k| byte(a, k) * byte(b, k)).sum();
    u64::from((c as u32).wrapping_add(sum as u32))
}

fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = (a & 0xffff_ffff) | b << 32;
    (0..4).fold(0, |all, k| {
        let nibble = selector >> (4 * k);
        let byte = bytes >> (8 * (nibble & 7)) & 0xff;
        let byte = if nibble & 8 == 0 { byte } else { (byte >> 7) * 0xff };
        all | byte << (8 * k)
    })
}

/// `shf`: the word `shift` bits into the pair `b:a`.
pub(crate) fn funnel_shift(left: bool, wrap: bool) -> Alu {
    three(move |a, b, by| {
        let pair = b << 32 | (a & 0xffff_ffff);
        let by = if wrap { by & 31 } else { (by & 0xffff_ffff).min(32) };
        if left { (pair << by) >> 32 } else { pair >> by & 0xffff_ffff }
    })
}
