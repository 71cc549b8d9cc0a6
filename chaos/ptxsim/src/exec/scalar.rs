//! Instructions on registers and predicates that are more than one function.

use super::warp::Warp;
use crate::alu::{WARP, carry};
use crate::exec::access::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_SHIFT};
use crate::memory::clock::lanes;
use crate::program::{Logic, Op, Reg};
use crate::types::{Space, Ty, mask_of};

/// Executes an instruction that touches neither memory nor other lanes.
pub(super) fn scalar(warp: &mut Warp, op: &Op, exec: u32) {
    match op {
        Op::SetPredicate { test, a, b, with, p, q } => {
            let holds = test(warp.reg(*a), warp.reg(*b));
            let (yes, no) = match with {
                None => (holds, !holds),
                Some((logic, pred)) => {
                    (combine(*logic, holds, warp.pred(*pred)), combine(*logic, !holds, warp.pred(*pred)))
                }
            };
            warp.set_pred(*p, yes, exec);
            if let Some(q) = q {
                warp.set_pred(*q, no, exec);
            }
        }
        Op::Set { test, a, b, with, dst, holds } => {
            let mask = test(warp.reg(*a), warp.reg(*b));
            let mask = with.map_or(mask, |(logic, pred)| combine(logic, mask, warp.pred(pred)));
            let out = std::array::from_fn(|lane| if mask >> lane & 1 == 1 { *holds } else { 0 });
            warp.set(*dst, &out, exec);
        }
        Op::PredicateLogic { op, dst, a, b } => {
            let value = combine(*op, warp.pred(*a), warp.pred(*b));
            warp.set_pred(*dst, value, exec);
        }
        Op::Select { dst, a, b, by, mask } => {
            let (by, a, b) = (warp.pred(*by), warp.reg(*a), warp.reg(*b));
            let out = std::array::from_fn(|lane| (if by >> lane & 1 == 1 { a[lane] } else { b[lane] }) & mask);
            warp.set(*dst, &out, exec);
        }
        Op::Pack { dst, parts, bytes } => {
            let (mask, mut out) = (mask_of(*bytes), [0; WARP]);
            for (k, part) in parts.iter().enumerate() {
                let part = warp.reg(*part);
                (0..WARP).for_each(|lane| out[lane] |= (part[lane] & mask) << (8 * bytes * k));
            }
            warp.set(*dst, &out, exec);
        }
        Op::Unpack { parts, src, bytes } => {
            let src = *warp.reg(*src);
            let mask = mask_of(*bytes);
            for (k, part) in parts.iter().enumerate() {
                if let Some(part) = part {
                    warp.set(*part, &src.map(|v| v >> (8 * bytes * k) & mask), exec);
                }
            }
        }
        Op::Carry { .. } => extended(warp, op, exec),
        Op::BitInsert { ty, dst, src } => bit_insert(warp, *ty, *dst, *src, exec),
        Op::Lop3 { dst, src, table } => {
            let [a, b, c] = src.map(|reg| warp.reg(reg));
            let out = std::array::from_fn(|lane| lop3(a[lane] as u32, b[lane] as u32, c[lane] as u32, *table));
            warp.set(*dst, &out, exec);
        }
        Op::ConvertAddress { dst, src, space, to_space } => {
            let window = window(*space) << WINDOW_SHIFT;
            let out = warp.reg(*src).map(|v| if *to_space { v.wrapping_sub(window) } else { v.wrapping_add(window) });
            warp.set(*dst, &out, exec);
        }
        Op::IsSpace { dst, src, space } => {
            let window = window(*space);
            let holds = (0..WARP)
                .fold(0, |mask, lane| mask | u32::from(warp.reg(*src)[lane] >> WINDOW_SHIFT == window) << lane);
            warp.set_pred(*dst, holds, exec);
        }
        _ => {}
    }
}

/// A step of extended-precision arithmetic, with the carry flags of the warp.
fn extended(warp: &mut Warp, op: &Op, exec: u32) {
    let Op::Carry { op, ty, mode, takes, gives, dst, src } = op else { return };
    let mut out = [0; WARP];
    let mut flags = 0;
    for lane in lanes(exec) {
        let operands = src.map(|reg| warp.reg(reg)[lane]);
        let (value, flag) = carry(op, *ty, *mode, operands, *takes && warp.carry >> lane & 1 == 1);
        out[lane] = value;
        flags |= u32::from(flag) << lane;
    }
    warp.set(*dst, &out, exec);
    if *gives {
        warp.carry = warp.carry & !exec | flags;
    }
}

/// `bfi`: the lowest bits of the first operand, inserted into the second one.
fn bit_insert(warp: &mut Warp, ty: Ty, dst: Reg, src: [Reg; 4], exec: u32) {
    let (width, mask) = (8 * ty.bytes() as u64, mask_of(ty.bytes()));
    let mut out = [0; WARP];
    for lane in lanes(exec) {
        let [a, b, at, n] = src.map(|reg| warp.reg(reg)[lane]);
        let (at, n) = ((at & 255).min(width) as u32, (n & 255).min(width));
        let ones = if n == 64 { u64::MAX } else { (1 << n) - 1 };
        let field = ones.checked_shl(at).unwrap_or(0) & mask;
        out[lane] = b & !field & mask | a.checked_shl(at).unwrap_or(0) & field;
    }
    warp.set(dst, &out, exec);
}

/// The upper byte of generic addresses of a space.
fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        _ => 0,
    }
}

fn combine(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

fn lop3(a: u32, b: u32, c: u32, table: u8) -> u64 {
    let mut out = 0;
    for row in 0..8u32 {
        if table >> row & 1 == 1 {
            let pick = |bit: u32, v: u32| if row >> bit & 1 == 1 { v } else { !v };
            out |= pick(2, a) & pick(1, b) & pick(0, c);
        }
    }
    u64::from(out)
}
