//! Arithmetic: each instruction becomes one function over the 32 lanes of its operands, chosen once when the kernel is decoded.
//!
//! Registers hold values zero-extended to 64 bits. Functions cast their inputs to their own type, so that constants may be given
//! sign-extended, and return results zero-extended.

mod bits;
mod compare;
mod convert;
mod float;
mod format;
mod half;
mod integer;
mod rounding;

pub(crate) use bits::{bits, funnel_shift};
pub(crate) use compare::{Comparison, comparison};
pub(crate) use convert::{Conversion, convert, convert_pair};
pub(crate) use float::{FloatMode, f32_op, f64_op};
pub(crate) use format::{BF16, F16, Format, add_to_odd, narrow, widen};
pub(crate) use half::half_op;
pub(crate) use integer::{IntegerMode, carry, integer_op};
pub(crate) use rounding::Rounding;

/// Threads of a warp.
pub(crate) const WARP: usize = 32;

/// A register of a warp: one value per lane.
pub(crate) type Lanes = [u64; WARP];

type Unary = Box<dyn Fn(&Lanes, &mut Lanes) + Send + Sync>;
type Binary = Box<dyn Fn(&Lanes, &Lanes, &mut Lanes) + Send + Sync>;
type Ternary = Box<dyn Fn(&Lanes, &Lanes, &Lanes, &mut Lanes) + Send + Sync>;

/// A function over the lanes of one to three operands.
pub(crate) enum Alu {
    One(Unary),
    Two(Binary),
    Three(Ternary),
}

impl Alu {
    pub(crate) fn operands(&self) -> usize {
        match self {
            Alu::One(_) => 1,
            Alu::Two(_) => 2,
            Alu::Three(_) => 3,
        }
    }
}

pub(crate) fn one(f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Alu {
    Alu::One(Box::new(move |a, out| {
        for lane in 0..WARP {
            out[lane] = f(a[lane]);
        }
    }))
}

pub(crate) fn two(f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Alu {
    Alu::Two(Box::new(move |a, b, out| {
        for lane in 0..WARP {
            out[lane] = f(a[lane], b[lane]);
        }
    }))
}

pub(crate) fn three(f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Alu {
    Alu::Three(Box::new(move |a, b, c, out| {
        for lane in 0..WARP {
            out[lane] = f(a[lane], b[lane], c[lane]);
        }
    }))
}
