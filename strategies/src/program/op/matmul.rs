//! Matrix products.

use super::adjoints::{Adjoints, NoAdjoint};
use super::bias::adjoint_of_bias;
use super::columns::Columns;
use super::cost::{Cost, bytes, touched_bytes};
use super::operation::Operation;
use super::shares::{Pieces, Reading, Share, inside};
use super::signature::{Signature, columns};
use super::weight_use::WeightUse;
use super::width::Width;
use crate::program::{DType, Instr, Program, ValueId};
use std::ops::Range;

/// Precision in which a matrix product multiplies; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 operands.
    F32,
    /// Operands rounded to bf16.
    Bf16,
    /// Operands rounded to bf16 and then to e4m3. Each row of `a` is first divided by a power of two, so that its largest number just
    /// fits, and `b`, a weight, by [`crate::program::packing::E4M3_STEP`]. `a` is not transposed, has all its rows, and rows of `b` and of
    /// its transpose have multiples of 16 elements.
    Fp8,
}

impl Compute {
    /// Rows of operands of FP8 have a multiple of as many elements: 16 bytes, which the matrix units of GPUs load at a time.
    pub const FP8_VECTOR: usize = 16;

    /// The precision of everything else in a program with such products: that of attention and of gradients of weights.
    #[must_use]
    pub const fn without_fp8(self) -> Compute {
        match self {
            Compute::Fp8 => Compute::Bf16,
            other => other,
        }
    }
}

/// `[a, b, (bias), (residual)] -> [c]`: `c = residual + alpha * op(a) op(b) + bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatMul {
    /// Use `a` transposed.
    pub trans_a: bool,
    /// Use `b` transposed.
    pub trans_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// A bias row is added to every row.
    pub bias: bool,
    /// A matrix of the shape of `c` is added.
    pub residual: bool,
    /// Precision of the products.
    pub compute: Compute,
    /// Use only these columns of `a` as stored.
    pub a_columns: Option<Columns>,
    /// Use only these columns of `b` as stored.
    pub b_columns: Option<Columns>,
    /// Write only these columns of `c`. The others are those of the residual; without a residual, later products write them.
    pub c_columns: Option<Columns>,
    /// The product replaces `c_columns` of the residual, which need not be written yet, instead of being added to them.
    pub replaces: bool,
}

impl MatMul {
    /// `a b^T`: a linear layer whose weight is stored `[out, in]`.
    pub const fn nt() -> MatMul {
        MatMul {
            trans_a: false,
            trans_b: true,
            alpha: 1.0,
            bias: false,
            residual: false,
            compute: Compute::F32,
            a_columns: None,
            b_columns: None,
            c_columns: None,
            replaces: false,
        }
    }

    /// `a b`.
    pub const fn nn() -> MatMul {
        MatMul { trans_b: false, ..MatMul::nt() }
    }

    /// `a^T b`.
    pub const fn tn() -> MatMul {
        MatMul { trans_a: true, trans_b: false, ..MatMul::nt() }
    }

    /// Checks sizes and types of a product in FP8, and that no other one reads e4m3.
    fn check_fp8(&self, s: &Signature<'_>, [k, n]: [usize; 2]) -> Result<(), String> {
        let is_e4m3 = s.reads[1].dtype == DType::E4m3;
        match self.compute {
            Compute::Fp8 if self.trans_a || self.b_columns.is_some() => {
                Err("operands of FP8 are not transposed or cut".into())
            }
            Compute::Fp8 if !(k.is_multiple_of(Compute::FP8_VECTOR) && n.is_multiple_of(Compute::FP8_VECTOR)) => {
                Err(format!("a product in FP8 of [{k}, {n}] weights, expected multiples of {}", Compute::FP8_VECTOR))
            }
            Compute::F32 | Compute::Bf16 if is_e4m3 => {
                Err(format!("`{}` is read as {:?}", s.reads[1].name, self.compute))
            }
            _ => Ok(()),
        }
    }

    /// Appends the gradient of `x`, which continues that of other readers of `x`.
    fn adjoint_of_input(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) {
        let (x, w) = (instr.reads[0], instr.reads[1]);
        let carried = adjoints.take(x);
        let layout = if self.trans_b { MatMul::nn() } else { MatMul::nt() };
        let op = MatMul {
            alpha: self.alpha,
            compute: self.compute,
            residual: carried.is_some(),
            a_columns: self.c_columns,
            c_columns: self.a_columns,
            replaces: carried.is_some_and(|dx| adjoints.in_columns.contains(&dx)),
            ..layout
        };
        let dx = adjoints.grad_of(x);
        adjoints.emit(op, [dy, w].into_iter().chain(carried).collect(), &[dx]);
        if self.a_columns.is_some() && (carried.is_none() || op.replaces) {
            adjoints.in_columns.insert(dx);
        }
        adjoints.give(x, dx);
    }

    fn adjoint_of_weight(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) {
        let (x, w) = (instr.reads[0], instr.reads[1]);
        let carried = adjoints.take(w);
        let (x, dy) = ((x, self.a_columns), (dy, self.c_columns));
        // `W [out, in]`: dW = dy^T x; `W [in, out]`: dW = x^T dy.
        let (a, b) = if self.trans_b { (dy, x) } else { (x, dy) };
        let op = MatMul {
            alpha: self.alpha,
            // Of a sum over tokens, the terms would have different scales in FP8.
            compute: self.compute.without_fp8(),
            residual: carried.is_some(),
            a_columns: a.1,
            b_columns: b.1,
            ..MatMul::tn()
        };
        let dw = adjoints.grad_of(w);
        adjoints.emit(op, [a.0, b.0].into_iter().chain(carried).collect(), &[dw]);
        adjoints.give(w, dw);
    }
}

impl Operation for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2 + usize::from(self.bias) + usize::from(self.residual), 1)?;
        let (a_rows, a_stored) = s.matrix(s.reads[0])?;
        let a_columns = columns(self.a_columns, a_stored)?;
        let (rows, k) = if self.trans_a { (a_columns, a_rows) } else { (a_rows, a_columns) };
        let (b_rows, b_stored) = s.matrix(s.reads[1])?;
        let b_columns = columns(self.b_columns, b_stored)?;
        let (k_b, n) = if self.trans_b { (b_columns, b_rows) } else { (b_rows, b_columns) };
        if k != k_b {
            return Err(format!("inner dims {k} and {k_b} differ"));
        }
        let (c_rows, c_stored) = s.matrix(s.writes[0])?;
        let c_columns = columns(self.c_columns, c_stored)?;
        if (c_rows, c_columns) != (rows, n) {
            return Err(format!("the product is [{rows}, {n}], its result [{c_rows}, {c_columns}]"));
        }
        self.check_fp8(s, [k, n])?;
        if self.replaces && !(self.residual && self.c_columns.is_some()) {
            return Err("nothing to replace: replaces needs a residual and c_columns".into());
        }
        if self.bias {
            s.shape(s.reads[2], &[n], Some(DType::F32))?;
        }
        if self.residual {
            s.like(s.reads[s.reads.len() - 1], s.writes[0])?;
        }
        Ok(())
    }

    fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(n_reads.wrapping_sub(1), 0)] } else { Vec::new() }
    }

    fn compute(&self) -> Option<DType> {
        Some(match self.compute {
            Compute::F32 => DType::F32,
            Compute::Bf16 => DType::Bf16,
            Compute::Fp8 => DType::E4m3,
        })
    }

    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        let c = program.value(instr.writes[0]);
        let n = self.c_columns.map_or(c.n_columns(), |cols| cols.len);
        let a = program.value(instr.reads[0]);
        let k = if self.trans_a { a.n_rows() } else { self.a_columns.map_or(a.n_columns(), |cols| cols.len) };
        Cost {
            matmul_flops: 2.0 * c.n_rows() as f64 * n as f64 * k as f64,
            streamed_bytes: self.product_bytes(program, instr),
            rounded_bytes: if self.compute == Compute::Fp8 { self.rounded_bytes(program, instr) } else { 0.0 },
            ..Cost::default()
        }
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        if self.bias {
            adjoint_of_bias(instr.reads[2], self.c_columns, dy, adjoints);
        }
        // First, since adjoints of earlier operations wait for it, but only the optimizer for dW.
        if adjoints.needs(instr.reads[0]) {
            self.adjoint_of_input(instr, dy, adjoints);
        }
        if adjoints.needs(instr.reads[1]) {
            self.adjoint_of_weight(instr, dy, adjoints);
        }
        if self.residual {
            adjoints.give(instr.reads[instr.reads.len() - 1], dy);
        }
        Ok(())
    }

    fn width(&self) -> Width {
        if self.residual { Width::OfLastOperand } else { Width::Half }
    }

    // A product to which an adapter adds is as wide as the sum.
    fn wide_operands(&self, is_wide: bool, n_reads: usize) -> Range<usize> {
        if is_wide && self.residual { n_reads - 1..n_reads } else { 0..0 }
    }

    fn weight(&self) -> Option<(usize, WeightUse)> {
        Some((1, WeightUse::Matrix))
    }

    fn operands_of(&self, columns: &Pieces) -> Option<Vec<(usize, Share)>> {
        let here = match self.c_columns {
            Some(c) => inside(columns, c.start..c.start + c.len),
            None => columns.clone(),
        };
        let mut operands = vec![(1, Share::Param { dim: usize::from(!self.trans_b), pieces: here.clone() })];
        if self.bias {
            operands.push((2, Share::Param { dim: 0, pieces: here }));
        }
        if self.residual {
            operands.push((2 + usize::from(self.bias), Share::Columns(columns.clone())));
        }
        Some(operands)
    }

    fn of_some_columns(&self) -> Option<Reading> {
        let reads_all = !self.trans_a && self.a_columns.is_none();
        reads_all.then_some(Reading::Product { weight: 1, dim: usize::from(self.trans_b) })
    }
}

impl MatMul {
    /// Bytes of operands and results; only the columns in use of packed values. The other columns of a residual stay where they are.
    fn product_bytes(&self, program: &Program, instr: &Instr) -> f64 {
        let unused = |v: ValueId, columns: Option<Columns>| {
            let (value, used) = (program.value(v), columns.map(|c| c.len));
            used.map_or(0.0, |used| {
                (value.n_columns() - used) as f64 / value.n_columns() as f64 * value.size_bytes() as f64
            })
        };
        let residual = instr.reads.last().filter(|_| self.residual);
        let unused_residual =
            residual.map_or(0.0, |v| if self.replaces { bytes(program, *v) } else { unused(*v, self.c_columns) });
        let unused_operands = unused(instr.reads[0], self.a_columns) + unused(instr.reads[1], self.b_columns);
        touched_bytes(program, instr) - unused_operands - unused_residual - unused(instr.writes[0], self.c_columns)
    }

    /// Bytes that are moved to have both operands of a product as e4m3, their rows along the sums.
    fn rounded_bytes(&self, program: &Program, instr: &Instr) -> f64 {
        let [a, b] = [0, 1].map(|i| program.value(instr.reads[i]));
        let from_bf16 = (DType::Bf16.size_bytes() + DType::E4m3.size_bytes()) as f64;
        let used = a.n_rows() * self.a_columns.map_or(a.n_columns(), |columns| columns.len);
        let of_weight = match (b.dtype, self.trans_b) {
            (DType::E4m3, true) => 0.0,
            (DType::E4m3, false) => 2.0 * DType::E4m3.size_bytes() as f64,
            _ => from_bf16,
        };
        from_bf16 * used as f64 + of_weight * b.n_elements() as f64
    }
}
