//! Arithmetic of f32 and f64.
//!
//! Sums, products, quotients and square roots are correctly rounded. Approximations (`ex2.approx`, `rsqrt.approx`, …) are
//! computed in f64 and rounded, so a kernel that passes here may still be off by the documented error of the instruction, which
//! stands beside each.

use super::format::{F32, add_to_odd, narrow};
use super::{Alu, Rounding, one, three, two};

/// Modifiers of a floating-point instruction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FloatMode {
    pub(crate) rounding: Rounding,
    /// Subnormal operands and results become zero.
    pub(crate) ftz: bool,
    /// Results are clamped to [0, 1], and NaN becomes 0.
    pub(crate) sat: bool,
    /// Minimum and maximum return NaN if an operand is one.
    pub(crate) nan: bool,
    /// The instruction is an approximation.
    pub(crate) approx: bool,
}

impl FloatMode {
    fn is_plain(self) -> bool {
        !self.ftz && !self.sat
    }

    fn input(self, bits: u64) -> f32 {
        let x = f32::from_bits(bits as u32);
        if self.ftz && x.is_subnormal() { 0f32.copysign(x) } else { x }
    }

    fn output(self, x: f32) -> u64 {
        let x = if self.ftz && x.is_subnormal() { 0f32.copysign(x) } else { x };
        let saturated = if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) };
        canonical(if self.sat { saturated } else { x })
    }
}

/// The bits of a result: every NaN that arithmetic produces is the same one.
fn canonical(x: f32) -> u64 {
    u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() })
}

/// The function of an f32 instruction, if it exists with these modifiers.
pub(crate) fn f32_op(op: &str, mode: FloatMode) -> Option<Alu> {
    if mode.rounding != Rounding::Nearest {
        return directed(op, mode);
    }
    Some(match op {
        "add" => f32_two(mode, |a, b| a + b),
        "sub" => f32_two(mode, |a, b| a - b),
        "mul" => f32_two(mode, |a, b| a * b),
        "fma" | "mad" => f32_three(mode, f32::mul_add),
        // `.approx`: 2 ulp for divisors of 2^-126 to 2^126; `.full`: 2 ulp.
        "div" => f32_two(mode, |a, b| a / b),
        // `.approx`: 1 ulp.
        "rcp" => f32_one(mode, |a| 1.0 / a),
        // `.approx`: relative error 2^-23.
        "sqrt" => f32_one(mode, f32::sqrt),
        // Relative error 2^-22.9.
        "rsqrt" => f32_one(mode, |a| (1.0 / f64::from(a).sqrt()) as f32),
        // 2 ulp.
        "ex2" => f32_one(mode, |a| f64::from(a).exp2() as f32),
        // Absolute error 2^-22 between 0.5 and 2, else 2 ulp.
        "lg2" => f32_one(mode, |a| f64::from(a).log2() as f32),
        // Absolute error 2^-20.5 within [-pi, pi].
        "sin" => f32_one(mode, |a| f64::from(a).sin() as f32),
        "cos" => f32_one(mode, |a| f64::from(a).cos() as f32),
        // Relative error 2^-11.
        "tanh" => f32_one(mode, |a| f64::from(a).tanh() as f32),
        "min" => f32_two(mode, move |a, b| pick(a, b, mode.nan, true)),
        "max" => f32_two(mode, move |a, b| pick(a, b, mode.nan, false)),
        "neg" if mode.is_plain() => one(|a| (a ^ 0x8000_0000) & 0xffff_ffff),
        "neg" => f32_one(mode, |a| -a),
        "abs" if mode.is_plain() => one(|a| a & 0x7fff_ffff),
        "abs" => f32_one(mode, f32::abs),
        "copysign" => two(|a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff)),
        _ => return None,
    })
}

/// Sums and products rounded toward zero or an infinity.
fn directed(op: &str, mode: FloatMode) -> Option<Alu> {
    let FloatMode { rounding, .. } = mode;
    let round = move |x: f64| f32::from_bits(narrow(x, F32, rounding, false) as u32);
    Some(match op {
        "add" => f32_two(mode, move |a, b| round(add_to_odd(f64::from(a), f64::from(b)))),
        "sub" => f32_two(mode, move |a, b| round(add_to_odd(f64::from(a), -f64::from(b)))),
        "mul" => f32_two(mode, move |a, b| round(f64::from(a) * f64::from(b))),
        "fma" => f32_three(mode, move |a, b, c| round(add_to_odd(f64::from(a) * f64::from(b), f64::from(c)))),
        _ => return None,
    })
}

fn f32_one(mode: FloatMode, f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Alu {
    if mode.is_plain() {
        one(move |a| canonical(f(f32::from_bits(a as u32))))
    } else {
        one(move |a| mode.output(f(mode.input(a))))
    }
}

fn f32_two(mode: FloatMode, f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static) -> Alu {
    if mode.is_plain() {
        two(move |a, b| canonical(f(f32::from_bits(a as u32), f32::from_bits(b as u32))))
    } else {
        two(move |a, b| mode.output(f(mode.input(a), mode.input(b))))
    }
}

fn f32_three(mode: FloatMode, f: impl Fn(f32, f32, f32) -> f32 + Send + Sync + 'static) -> Alu {
    if mode.is_plain() {
        three(move |a, b, c| canonical(f(f32::from_bits(a as u32), f32::from_bits(b as u32), f32::from_bits(c as u32))))
    } else {
        three(move |a, b, c| mode.output(f(mode.input(a), mode.input(b), mode.input(c))))
    }
}

/// Minimum or maximum: a NaN gives way to a number, or with `nan` prevails; -0 is less than +0.
fn pick(a: f32, b: f32, nan: bool, minimum: bool) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if nan || a.is_nan() && b.is_nan() {
            f32::NAN
        } else if a.is_nan() {
            b
        } else {
            a
        };
    }
    let a_first = if a == b { a.is_sign_negative() } else { a < b };
    if a_first == minimum { a } else { b }
}

/// The function of an f64 instruction, if it exists with these modifiers.
pub(crate) fn f64_op(op: &str, mode: FloatMode) -> Option<Alu> {
    if mode.rounding != Rounding::Nearest || mode.sat {
        return None;
    }
    let unary = |f: fn(f64) -> f64| one(move |a| f(f64::from_bits(a)).to_bits());
    let binary = |f: fn(f64, f64) -> f64| two(move |a, b| f(f64::from_bits(a), f64::from_bits(b)).to_bits());
    Some(match op {
        "add" => two(|a, b| (f64::from_bits(a) + f64::from_bits(b)).to_bits()),
        "sub" => two(|a, b| (f64::from_bits(a) - f64::from_bits(b)).to_bits()),
        "mul" => two(|a, b| (f64::from_bits(a) * f64::from_bits(b)).to_bits()),
        "fma" | "mad" => three(|a, b, c| f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c)).to_bits()),
        "div" => binary(|a, b| a / b),
        // With `.ftz`, the result has an upper word only; programs refine it.
        "rcp" if mode.approx => unary(|a| upper_word(1.0 / a)),
        "rsqrt" if mode.ftz => unary(|a| upper_word(1.0 / a.sqrt())),
        // Documented: 2 ulp.
        "rsqrt" => unary(|a| 1.0 / a.sqrt()),
        "rcp" => unary(|a| 1.0 / a),
        "sqrt" => unary(f64::sqrt),
        "min" => binary(f64::min),
        "max" => binary(f64::max),
        "neg" => one(|a| a ^ 1 << 63),
        "abs" => one(|a| a & !(1 << 63)),
        "copysign" => two(|a, b| (a & 1 << 63) | (b & !(1 << 63))),
        _ => return None,
    })
}

fn upper_word(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & !0xffff_ffff)
}
