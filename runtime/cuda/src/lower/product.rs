//! Matrix products.

use super::Lowering;
use super::fp8::Operands;
use crate::command::{Buffer, Command};
use crate::product::{Matrix, Product, WORKSPACE_BYTES};
use phalanx_strategies::program::{Compute, DType, MatMul};

impl Lowering {
    /// `c = residual + alpha op(a) op(b) + bias`. Operands that are not stored in the precision of the product are converted
    /// first.
    pub(super) fn product(&mut self, m: &MatMul) {
        let (a, b, c) = (self.reads[0], self.reads[1], self.writes[0]);
        let compute = precision(m.compute, a.dtype, b.dtype);
        let a = self.in_precision(a, compute);
        let b = if b.dtype == DType::E4m3 { b } else { self.in_precision(b, compute) };
        let a_columns = m.a_columns.map_or((0, a.cols), |columns| (columns.start, columns.len));
        let b_first = m.b_columns.map_or(0, |columns| columns.start);
        let c_columns = m.c_columns.map_or((0, c.cols), |columns| (columns.start, columns.len));
        let covers_c = c_columns == (0, c.cols);
        let (rows, k) = if m.trans_a { (a_columns.1, a.rows) } else { (a.rows, a_columns.1) };
        // A bias is added before the one rounding of a narrow result. The library writes f32 or the type of the operands, and
        // adds a bias of the type that it writes.
        let is_direct = c.dtype == DType::F32 || (c.dtype == compute && !m.bias);
        let bias = m.bias.then(|| self.reads[2]);
        let fused_bias = bias.filter(|bias| covers_c && (bias.dtype, c.dtype) == (DType::F32, DType::F32));
        let Operands { a, b, scales } = match m.compute {
            Compute::Fp8 => self.fp8_operands(m, a, b),
            _ => Operands { a: matrix(a, a_columns.0, m.trans_a), b: matrix(b, b_first, m.trans_b), scales: None },
        };
        // In FP8 the library adds a bias of bf16 only.
        let fused_bias = fused_bias.filter(|_| scales.is_none());
        let sum = if is_direct { c } else { self.take(c.rows, c.cols, DType::F32) };
        let workspace = self.take(1, WORKSPACE_BYTES / size_of::<f32>(), DType::F32);
        let to = matrix(sum, c_columns.0, false);
        let added = m.residual.then(|| self.reads[self.reads.len() - 1]).and_then(|residual| {
            if covers_c && residual.dtype == sum.dtype {
                return (!m.replaces).then_some(residual.address);
            }
            self.cast(residual, sum);
            (!m.replaces).then_some(to.address)
        });
        self.push(Command::Product(Product {
            m: rows,
            n: c_columns.1,
            k,
            a,
            b,
            scales,
            c: to,
            alpha: m.alpha,
            added,
            bias: fused_bias.map(|bias| bias.address),
            workspace: workspace.address,
        }));
        if let Some(bias) = bias.filter(|_| fused_bias.is_none()) {
            self.add_row(bias, sum, c);
        } else if !is_direct {
            self.cast(sum, c);
        }
    }

    /// The operand, converted to the element type of the product if it has another.
    fn in_precision(&mut self, buffer: Buffer, compute: DType) -> Buffer {
        if buffer.dtype == compute {
            return buffer;
        }
        let converted = self.take(buffer.rows, buffer.cols, compute);
        self.cast(buffer, converted);
        converted
    }
}

/// The element type of the operands of a product.
fn precision(compute: Compute, a: DType, b: DType) -> DType {
    match compute {
        Compute::Bf16 | Compute::Fp8 => DType::Bf16,
        // Products of float16 are exact in the f32 sums of the tensor cores.
        Compute::F32 if a == DType::F16 && b == DType::F16 => DType::F16,
        Compute::F32 => DType::F32,
    }
}

/// The columns of a buffer from `first` on.
fn matrix(buffer: Buffer, first: usize, is_transposed: bool) -> Matrix {
    Matrix {
        address: buffer.address + (first * buffer.dtype.size_bytes()) as u64,
        stride: buffer.cols,
        dtype: buffer.dtype,
        is_transposed,
    }
}
