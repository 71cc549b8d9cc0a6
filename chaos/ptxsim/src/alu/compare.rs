//! Comparisons of `setp` and `set`: masks of the lanes where they hold.

use super::format::{BF16, F16, widen};
use super::{Lanes, WARP};
use crate::types::{Ty, mask_of, sign_extend};
use std::cmp::Ordering;

/// The lanes where a comparison holds.
pub(crate) type Comparison = Box<dyn Fn(&Lanes, &Lanes) -> u32 + Send + Sync>;

/// The comparison of an operator such as `geu`, if it exists for the type.
pub(crate) fn comparison(operator: &str, ty: Ty, ftz: bool) -> Option<Comparison> {
    let holds = Holds::parse(operator, ty)?;
    let bytes = ty.bytes();
    Some(match ty {
        Ty::F32 => {
            let value = move |bits: u64| {
                let x = f32::from_bits(bits as u32);
                if ftz && x.is_subnormal() { 0.0 } else { x }
            };
            lanes(move |a, b| holds.test(value(a).partial_cmp(&value(b))))
        }
        Ty::F64 => lanes(move |a, b| holds.test(f64::from_bits(a).partial_cmp(&f64::from_bits(b)))),
        Ty::F16 => lanes(move |a, b| holds.test(widen(a, F16).partial_cmp(&widen(b, F16)))),
        Ty::Bf16 => lanes(move |a, b| holds.test(widen(a, BF16).partial_cmp(&widen(b, BF16)))),
        Ty::Signed(_) => {
            lanes(move |a, b| holds.test(Some((sign_extend(a, bytes) as i64).cmp(&(sign_extend(b, bytes) as i64)))))
        }
        Ty::Unsigned(_) | Ty::Bits(_) => {
            let mask = mask_of(bytes);
            lanes(move |a, b| holds.test(Some((a & mask).cmp(&(b & mask)))))
        }
        _ => return None,
    })
}

fn lanes(f: impl Fn(u64, u64) -> bool + Send + Sync + 'static) -> Comparison {
    Box::new(move |a, b| {
        let mut mask = 0;
        for lane in 0..WARP {
            mask |= u32::from(f(a[lane], b[lane])) << lane;
        }
        mask
    })
}

/// The outcomes that satisfy an operator.
#[derive(Clone, Copy)]
struct Holds {
    less: bool,
    equal: bool,
    greater: bool,
    unordered: bool,
}

impl Holds {
    fn parse(operator: &str, ty: Ty) -> Option<Holds> {
        let is_float = ty.is_float();
        let (name, unordered) = match operator {
            "equ" | "neu" | "ltu" | "leu" | "gtu" | "geu" if is_float => (&operator[..2], true),
            // Of integers, these are the unsigned comparisons.
            "lo" => ("lt", false),
            "ls" => ("le", false),
            "hi" => ("gt", false),
            "hs" => ("ge", false),
            _ => (operator, false),
        };
        let (less, equal, greater, unordered) = match name {
            "eq" => (false, true, false, unordered),
            "ne" => (true, false, true, unordered),
            "lt" => (true, false, false, unordered),
            "le" => (true, true, false, unordered),
            "gt" => (false, false, true, unordered),
            "ge" => (false, true, true, unordered),
            "num" if is_float => (true, true, true, false),
            "nan" if is_float => (false, false, false, true),
            _ => return None,
        };
        Some(Holds { less, equal, greater, unordered })
    }

    fn test(self, order: Option<Ordering>) -> bool {
        match order {
            Some(Ordering::Less) => self.less,
            Some(Ordering::Equal) => self.equal,
            Some(Ordering::Greater) => self.greater,
            None => self.unordered,
        }
    }
}
