//! Formulas over a few numbers: the losses of objectives that compare sequences, with their derivatives.
//!
//! Objectives write expressions ([`Expr`]); devices run a [`Tape`], a list of steps in f64 in which each step reads earlier ones. The
//! derivative of a tape is more steps on it, so a new objective needs no code on any device.
//! Source: Griewank and Walther 2008, Evaluating Derivatives, §3.2 (reverse mode).

use std::ops::{Add, Div, Mul, Neg, Sub};
use std::sync::Arc;

/// A number that a formula reads: of row `row` of a group, from operand `operand` of the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    /// Index of the operand.
    pub operand: u32,
    /// The number of tokens of the row that were summed, rather than their sum.
    pub count: bool,
    /// Row of the group.
    pub row: u32,
}

/// What is the same for all groups.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'a> {
    /// The scalars of the step.
    pub hyper: &'a [f64],
    /// Results of earlier formulas.
    pub given: &'a [f64],
}

/// One step of a tape; numbers are indices of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// A number of the group.
    Input(Input),
    /// The same number for all groups.
    Const(f64),
    /// A scalar of the step, by its index in [`super::Hyper`].
    Hyper(u32),
    /// A result of earlier formulas over all groups, by its index; it has no derivative.
    Given(u32),
    /// `a + b`.
    Add(u32, u32),
    /// `a - b`.
    Sub(u32, u32),
    /// `a b`.
    Mul(u32, u32),
    /// `a / b`.
    Div(u32, u32),
    /// `e^a`.
    Exp(u32),
    /// `ln a`.
    Ln(u32),
    /// `ln(1 / (1 + e^-a))`.
    LogSigmoid(u32),
    /// `1 / (1 + e^-a)`.
    Sigmoid(u32),
    /// `max(a, 0)`.
    Relu(u32),
    /// 1 where `a > 0`, otherwise 0.
    Positive(u32),
}

impl Step {
    fn value(self, done: &[f64], known: Known<'_>, input: &impl Fn(Input) -> f64) -> f64 {
        let at = |i: u32| done[i as usize];
        match self {
            Step::Input(from) => input(from),
            Step::Const(c) => c,
            Step::Hyper(i) => known.hyper[i as usize],
            Step::Given(i) => known.given[i as usize],
            Step::Add(a, b) => at(a) + at(b),
            Step::Sub(a, b) => at(a) - at(b),
            Step::Mul(a, b) => at(a) * at(b),
            Step::Div(a, b) => at(a) / at(b),
            Step::Exp(a) => at(a).exp(),
            Step::Ln(a) => at(a).ln(),
            // Neither form overflows on its side.
            Step::LogSigmoid(a) if at(a) < 0.0 => at(a) - at(a).exp().ln_1p(),
            Step::LogSigmoid(a) => -(-at(a)).exp().ln_1p(),
            Step::Sigmoid(a) => 1.0 / (1.0 + (-at(a)).exp()),
            // Comparisons would turn NaN into a number.
            Step::Relu(a) if at(a) < 0.0 => 0.0,
            Step::Relu(a) => at(a),
            Step::Positive(a) => f64::from(u8::from(at(a) > 0.0)),
        }
    }
}

/// Steps in the order in which they run, and which of them are results.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tape {
    /// The steps.
    pub steps: Vec<Step>,
    /// Indices of the results.
    pub results: Vec<u32>,
}

impl Tape {
    /// The steps of some expressions; what they share is computed once.
    pub fn of(results: &[Expr]) -> Tape {
        let mut tape = Tape::default();
        tape.results = results.iter().map(|expr| tape.expr(expr)).collect();
        tape
    }

    fn expr(&mut self, expr: &Expr) -> u32 {
        let step = match &*expr.0 {
            Node::Leaf(step) => *step,
            Node::Unary(step, a) => step(self.expr(a)),
            Node::Binary(step, a, b) => {
                let a = self.expr(a);
                step(a, self.expr(b))
            }
        };
        self.push(step)
    }

    fn push(&mut self, step: Step) -> u32 {
        let known = self.steps.iter().position(|s| *s == step);
        known.unwrap_or_else(|| {
            self.steps.push(step);
            self.steps.len() - 1
        }) as u32
    }

    /// Appends the derivatives of the sum of the first results, each times a scalar of the step, with respect to sums of rows, and makes
    /// them results too, in the order of `inputs`.
    pub fn differentiate(&mut self, scales: &[u32], inputs: impl Iterator<Item = Input>) {
        let mut root = self.push(Step::Const(0.0));
        for (result, scale) in scales.iter().enumerate() {
            let scale = self.push(Step::Hyper(*scale));
            let scaled = self.push(Step::Mul(scale, self.results[result]));
            root = if result == 0 { scaled } else { self.push(Step::Add(root, scaled)) };
        }
        let mut partial: Vec<Option<u32>> = vec![None; root as usize + 1];
        partial[root as usize] = Some(self.push(Step::Const(1.0)));
        for i in (0..=root as usize).rev() {
            let Some(d) = partial[i] else { continue };
            for (operand, d) in self.terms(i as u32, d) {
                let sum = match partial[operand as usize] {
                    None => d,
                    Some(before) => self.push(Step::Add(before, d)),
                };
                partial[operand as usize] = Some(sum);
            }
        }
        let zero = self.push(Step::Const(0.0));
        for input in inputs {
            let at = self.steps.iter().position(|s| *s == Step::Input(input));
            let d = at.and_then(|at| partial.get(at).copied().flatten()).unwrap_or(zero);
            self.results.push(d);
        }
    }

    /// What step `i` with the derivative `d` adds to the derivatives of the steps that it reads.
    fn terms(&mut self, i: u32, d: u32) -> Vec<(u32, u32)> {
        match self.steps[i as usize] {
            Step::Input(_) | Step::Const(_) | Step::Hyper(_) | Step::Given(_) | Step::Positive(_) => Vec::new(),
            Step::Add(a, b) => vec![(a, d), (b, d)],
            Step::Sub(a, b) => vec![(a, d), (b, self.negative(d))],
            Step::Mul(a, b) => vec![(a, self.push(Step::Mul(d, b))), (b, self.push(Step::Mul(d, a)))],
            Step::Div(a, b) => {
                let of_a = self.push(Step::Div(d, b));
                let product = self.push(Step::Mul(of_a, i));
                vec![(a, of_a), (b, self.negative(product))]
            }
            Step::Exp(a) => vec![(a, self.push(Step::Mul(d, i)))],
            Step::Ln(a) => vec![(a, self.push(Step::Div(d, a)))],
            Step::LogSigmoid(a) => {
                let minus = self.negative(a);
                let slope = self.push(Step::Sigmoid(minus));
                vec![(a, self.push(Step::Mul(d, slope)))]
            }
            Step::Sigmoid(a) => {
                let one = self.push(Step::Const(1.0));
                let rest = self.push(Step::Sub(one, i));
                let slope = self.push(Step::Mul(i, rest));
                vec![(a, self.push(Step::Mul(d, slope)))]
            }
            Step::Relu(a) => {
                let slope = self.push(Step::Positive(a));
                vec![(a, self.push(Step::Mul(d, slope)))]
            }
        }
    }

    fn negative(&mut self, a: u32) -> u32 {
        let minus = self.push(Step::Const(-1.0));
        self.push(Step::Mul(minus, a))
    }

    /// The numbers that the steps read.
    pub fn inputs(&self) -> impl Iterator<Item = Input> + '_ {
        self.steps.iter().filter_map(|step| match step {
            Step::Input(input) => Some(*input),
            _ => None,
        })
    }

    /// The indices of the results of earlier formulas that the steps read.
    pub fn given(&self) -> impl Iterator<Item = u32> + '_ {
        self.steps.iter().filter_map(|step| match step {
            Step::Given(i) => Some(*i),
            _ => None,
        })
    }

    /// Runs the tape for one group; `done` has the value of each step afterwards.
    pub fn run(&self, known: Known<'_>, input: impl Fn(Input) -> f64, done: &mut Vec<f64>) {
        done.clear();
        for step in &self.steps {
            let value = step.value(done, known, &input);
            done.push(value);
        }
    }
}

/// An expression over the rows of a group.
#[derive(Clone, Debug)]
pub struct Expr(Arc<Node>);

#[derive(Debug)]
enum Node {
    Leaf(Step),
    Unary(fn(u32) -> Step, Expr),
    Binary(fn(u32, u32) -> Step, Expr, Expr),
}

impl Expr {
    /// The sum over the tokens of a row.
    pub fn sum(operand: u32, row: u32) -> Expr {
        Expr(Arc::new(Node::Leaf(Step::Input(Input { operand, count: false, row }))))
    }

    /// The number of tokens of a row that were summed.
    pub fn count(operand: u32, row: u32) -> Expr {
        Expr(Arc::new(Node::Leaf(Step::Input(Input { operand, count: true, row }))))
    }

    /// A result of earlier formulas, summed over all groups; a constant for derivatives.
    pub fn given(i: u32) -> Expr {
        Expr(Arc::new(Node::Leaf(Step::Given(i))))
    }

    fn unary(self, step: fn(u32) -> Step) -> Expr {
        Expr(Arc::new(Node::Unary(step, self)))
    }

    /// `e^x`.
    #[must_use]
    pub fn exp(self) -> Expr {
        self.unary(Step::Exp)
    }

    /// `ln x`.
    #[must_use]
    pub fn ln(self) -> Expr {
        self.unary(Step::Ln)
    }

    /// `ln(1 / (1 + e^-x))`.
    #[must_use]
    pub fn log_sigmoid(self) -> Expr {
        self.unary(Step::LogSigmoid)
    }

    /// `1 / (1 + e^-x)`.
    #[must_use]
    pub fn sigmoid(self) -> Expr {
        self.unary(Step::Sigmoid)
    }

    /// `x²`.
    #[must_use]
    pub fn squared(self) -> Expr {
        self.clone() * self
    }

    /// `max(x, 0)`.
    #[must_use]
    pub fn relu(self) -> Expr {
        self.unary(Step::Relu)
    }

    /// 1 where `x > 0`, otherwise 0.
    #[must_use]
    pub fn positive(self) -> Expr {
        self.unary(Step::Positive)
    }
}

impl From<f64> for Expr {
    fn from(c: f64) -> Expr {
        Expr(Arc::new(Node::Leaf(Step::Const(c))))
    }
}

macro_rules! arithmetic {
    ($($operator:ident $method:ident)*) => {
        $(impl<B: Into<Expr>> $operator<B> for Expr {
            type Output = Expr;
            fn $method(self, b: B) -> Expr {
                Expr(Arc::new(Node::Binary(Step::$operator, self, b.into())))
            }
        }

        impl $operator<Expr> for f64 {
            type Output = Expr;
            fn $method(self, b: Expr) -> Expr {
                Expr(Arc::new(Node::Binary(Step::$operator, self.into(), b)))
            }
        })*
    };
}

arithmetic! { Add add Sub sub Mul mul Div div }

impl Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        -1.0 * self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INPUTS: [Input; 3] = [
        Input { operand: 0, count: false, row: 0 },
        Input { operand: 0, count: false, row: 1 },
        Input { operand: 1, count: false, row: 0 },
    ];

    fn value(expr: &Expr, x: [f64; 3]) -> f64 {
        let tape = Tape::of(std::slice::from_ref(expr));
        let mut done = Vec::new();
        tape.run(
            Known { hyper: &[1.0], given: &[] },
            |input| x[INPUTS.iter().position(|i| *i == input).unwrap()],
            &mut done,
        );
        done[tape.results[0] as usize]
    }

    fn derivatives(expr: &Expr, x: [f64; 3]) -> Vec<f64> {
        let mut tape = Tape::of(std::slice::from_ref(expr));
        tape.differentiate(&[0], INPUTS.into_iter());
        let mut done = Vec::new();
        tape.run(
            Known { hyper: &[1.0], given: &[] },
            |input| x[INPUTS.iter().position(|i| *i == input).unwrap()],
            &mut done,
        );
        tape.results[1..].iter().map(|i| done[*i as usize]).collect()
    }

    fn expression() -> impl Strategy<Value = Expr> {
        let leaf = prop_oneof![
            (0usize..3).prop_map(|i| Expr::sum(INPUTS[i].operand, INPUTS[i].row)),
            (-2.0f64..2.0).prop_map(Expr::from),
        ];
        leaf.prop_recursive(4, 24, 2, |inner| {
            let two = (inner.clone(), inner.clone());
            prop_oneof![
                two.clone().prop_map(|(a, b)| a + b),
                two.clone().prop_map(|(a, b)| a - b),
                two.clone().prop_map(|(a, b)| a * b),
                // Kept away from zero, and from where small numbers lose their digits.
                two.prop_map(|(a, b)| a / (1.0 + b.clone() * b)),
                inner.clone().prop_map(|a| a.sigmoid().exp()),
                inner.clone().prop_map(|a| (1.0f64 + a.clone() * a).ln()),
                inner.clone().prop_map(Expr::log_sigmoid),
                inner.prop_map(Expr::sigmoid),
            ]
        })
    }

    proptest! {
        #[test]
        fn derivatives_are_those_of_finite_differences(
            expr in expression(), x in proptest::array::uniform3(-1.5f64..1.5),
        ) {
            let found = derivatives(&expr, x);

            for (i, found) in found.into_iter().enumerate() {
                let at = |h: f64| { let mut x = x; x[i] += h; value(&expr, x) };
                let expected = (8.0 * (at(1e-4) - at(-1e-4)) - (at(2e-4) - at(-2e-4))) / 12e-4;
                prop_assert!((found - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{found} {expected}");
            }
        }
    }

    #[test]
    fn formulas_of_large_numbers_do_not_overflow() {
        let x = || Expr::sum(0, 0);

        for at in [-800.0, 800.0] {
            let found = value(&x().log_sigmoid(), [at, 0.0, 0.0]);
            assert_eq!(found, f64::min(at, 0.0));
            assert_eq!(derivatives(&x().log_sigmoid(), [at, 0.0, 0.0])[0], f64::from(u8::from(at < 0.0)));
        }
    }

    #[test]
    fn what_expressions_share_is_one_step() {
        let x = Expr::sum(0, 0).exp();

        let tape = Tape::of(&[x.clone() + x.clone(), x]);

        assert_eq!(tape.steps.len(), 3);
    }

    #[test]
    fn number_that_is_none_stays_none() {
        let x = Expr::sum(0, 0);

        assert!(value(&x.clone().relu(), [f64::NAN, 0.0, 0.0]).is_nan());
        assert!(value(&x.log_sigmoid(), [f64::NAN, 0.0, 0.0]).is_nan());
    }
}
