//! Arithmetic of f16 and bf16, alone and in pairs, correctly rounded.

use super::format::{Format, add_to_odd, narrow, widen};
use super::{Alu, Rounding, one, three, two};

/// The function of an instruction on one number or a pair of a format. `relu` replaces negative results by zero.
pub(crate) fn half_op(op: &str, format: Format, pair: bool, nan: bool, relu: bool, sat: bool) -> Option<Alu> {
    let finish = move |x: f64| {
        let x = if relu && x < 0.0 { 0.0 } else { x };
        let x = if sat { clamp(x) } else { x };
        narrow(x, format, Rounding::Nearest, false)
    };
    let value = move |bits: u64| widen(bits, format);
    let unary = |f: fn(f64) -> f64| lift_one(pair, move |a| finish(f(value(a))));
    let binary = |f: fn(f64, f64) -> f64| lift_two(pair, move |a, b| finish(f(value(a), value(b))));
    Some(match op {
        "add" => binary(add_to_odd),
        "sub" => binary(|a, b| add_to_odd(a, -b)),
        "mul" => binary(|a, b| a * b),
        "min" => lift_two(pair, move |a, b| finish(pick(value(a), value(b), nan, true))),
        "max" => lift_two(pair, move |a, b| finish(pick(value(a), value(b), nan, false))),
        "fma" => lift_three(pair, move |a, b, c| finish(add_to_odd(value(a) * value(b), value(c)))),
        "neg" => lift_one(pair, |a| a ^ 0x8000),
        "abs" => lift_one(pair, |a| a & 0x7fff),
        // Documented error: 2^-9.9 for f16, 2^-7 for bf16; computed in f64 and rounded.
        "ex2" => unary(f64::exp2),
        // Documented error: 2^-10.987 for f16, 2^-8 for bf16.
        "tanh" => unary(f64::tanh),
        _ => return None,
    })
}

fn clamp(x: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) }
}

/// Minimum or maximum: a NaN gives way to a number, or with `nan` prevails.
fn pick(a: f64, b: f64, nan: bool, minimum: bool) -> f64 {
    if a.is_nan() || b.is_nan() {
        return if nan || a.is_nan() && b.is_nan() {
            f64::NAN
        } else if a.is_nan() {
            b
        } else {
            a
        };
    }
    let a_first = if a == b { a.is_sign_negative() } else { a < b };
    if a_first == minimum { a } else { b }
}

fn lift_one(pair: bool, f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Alu {
    if pair { one(move |a| f(a & 0xffff) | f(a >> 16 & 0xffff) << 16) } else { one(move |a| f(a & 0xffff)) }
}

fn lift_two(pair: bool, f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Alu {
    if pair {
        two(move |a, b| f(a & 0xffff, b & 0xffff) | f(a >> 16 & 0xffff, b >> 16 & 0xffff) << 16)
    } else {
        two(move |a, b| f(a & 0xffff, b & 0xffff))
    }
}

fn lift_three(pair: bool, f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Alu {
    if pair {
        three(move |a, b, c| {
            f(a & 0xffff, b & 0xffff, c & 0xffff) | f(a >> 16 & 0xffff, b >> 16 & 0xffff, c >> 16 & 0xffff) << 16
        })
    } else {
        three(move |a, b, c| f(a & 0xffff, b & 0xffff, c & 0xffff))
    }
}
