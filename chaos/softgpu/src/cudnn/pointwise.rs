//! Pointwise modes and their arithmetic in f32. A number that is not 0 is true.

use super::status::{NOT_SUPPORTED, Outcome, refuse};
use std::cmp::Ordering;

/// A `cudnnPointwiseMode_t`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Unary(Unary),
    Binary(Binary),
    Compare(Compare),
    And,
    Or,
    Not,
    GenIndex,
    Select,
}

/// A function of x.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unary {
    Sqrt,
    Abs,
    Ceil,
    Cos,
    Exp,
    Floor,
    Log,
    Neg,
    Rsqrt,
    Sin,
    Identity,
    Reciprocal,
    Relu,
    Tanh,
    Sigmoid,
}

/// A function of x and b.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Binary {
    Add,
    Mul,
    Min,
    Max,
    AddSquare,
    Div,
    Mod,
    Pow,
    Sub,
}

/// A comparison of x with b.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compare {
    Eq,
    Ne,
    Gt,
    Ge,
    Lt,
    Le,
}

impl Mode {
    pub fn of(number: i64) -> Outcome<Mode> {
        Ok(match number {
            0 => Mode::Binary(Binary::Add),
            1 => Mode::Binary(Binary::Mul),
            2 => Mode::Binary(Binary::Min),
            3 => Mode::Binary(Binary::Max),
            4 => Mode::Unary(Unary::Sqrt),
            5 => Mode::Binary(Binary::AddSquare),
            6 => Mode::Binary(Binary::Div),
            7 => Mode::Binary(Binary::Mod),
            8 => Mode::Binary(Binary::Pow),
            9 => Mode::Binary(Binary::Sub),
            10 => Mode::Unary(Unary::Abs),
            11 => Mode::Unary(Unary::Ceil),
            12 => Mode::Unary(Unary::Cos),
            13 => Mode::Unary(Unary::Exp),
            14 => Mode::Unary(Unary::Floor),
            15 => Mode::Unary(Unary::Log),
            16 => Mode::Unary(Unary::Neg),
            17 => Mode::Unary(Unary::Rsqrt),
            18 => Mode::Unary(Unary::Sin),
            21 => Mode::Unary(Unary::Identity),
            22 => Mode::Unary(Unary::Reciprocal),
            100 => Mode::Unary(Unary::Relu),
            101 => Mode::Unary(Unary::Tanh),
            102 => Mode::Unary(Unary::Sigmoid),
            300 => Mode::Compare(Compare::Eq),
            301 => Mode::Compare(Compare::Ne),
            302 => Mode::Compare(Compare::Gt),
            303 => Mode::Compare(Compare::Ge),
            304 => Mode::Compare(Compare::Lt),
            305 => Mode::Compare(Compare::Le),
            400 => Mode::And,
            401 => Mode::Or,
            402 => Mode::Not,
            501 => Mode::GenIndex,
            601 => Mode::Select,
            other => return refuse(NOT_SUPPORTED, format_args!("pointwise mode {other} is not imitated")),
        })
    }

    pub fn n_inputs(self) -> usize {
        match self {
            Mode::Unary(_) | Mode::Not | Mode::GenIndex => 1,
            Mode::Binary(_) | Mode::Compare(_) | Mode::And | Mode::Or => 2,
            Mode::Select => 3,
        }
    }
}

impl Unary {
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Unary::Sqrt => x.sqrt(),
            Unary::Abs => x.abs(),
            Unary::Ceil => x.ceil(),
            Unary::Cos => x.cos(),
            Unary::Exp => x.exp(),
            Unary::Floor => x.floor(),
            Unary::Log => x.ln(),
            Unary::Neg => -x,
            Unary::Rsqrt => 1.0 / x.sqrt(),
            Unary::Sin => x.sin(),
            Unary::Identity => x,
            Unary::Reciprocal => 1.0 / x,
            Unary::Relu => x.max(0.0),
            Unary::Tanh => x.tanh(),
            Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        }
    }
}

impl Binary {
    pub fn apply(self, x: f32, b: f32) -> f32 {
        match self {
            Binary::Add => x + b,
            Binary::Mul => x * b,
            Binary::Min => min(x, b),
            Binary::Max => max(x, b),
            Binary::AddSquare => x + b * b,
            Binary::Div => x / b,
            Binary::Mod => x % b,
            Binary::Pow => x.powf(b),
            Binary::Sub => x - b,
        }
    }
}

impl Compare {
    pub fn apply(self, x: f32, b: f32) -> f32 {
        let order = x.partial_cmp(&b);
        let holds = match self {
            Compare::Eq => order == Some(Ordering::Equal),
            Compare::Ne => order != Some(Ordering::Equal),
            Compare::Gt => order == Some(Ordering::Greater),
            Compare::Ge => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
            Compare::Lt => order == Some(Ordering::Less),
            Compare::Le => matches!(order, Some(Ordering::Less | Ordering::Equal)),
        };
        f32::from(holds)
    }
}

/// The larger one; NaN where there is one, so that poison is seen.
pub fn max(x: f32, y: f32) -> f32 {
    if x > y || x.is_nan() { x } else { y }
}

/// The smaller one; NaN where there is one.
pub fn min(x: f32, y: f32) -> f32 {
    if x < y || x.is_nan() { x } else { y }
}
