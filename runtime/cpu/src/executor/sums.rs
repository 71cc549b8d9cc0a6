//! Products and sums.

use super::operands::{Operands, copy, f32s, with_element};
use super::product::product;
use crate::kernels::reduce;
use phalanx_strategies::program::{Op, op};

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    pub(super) unsafe fn of_sums(&mut self, op: &Op) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            match op {
                Op::MatMul(m) => {
                    let bias = m.bias.then(|| self.reads[2]);
                    if m.residual {
                        copy(self.reads[self.reads.len() - 1], self.writes[0]);
                    }
                    product(m, self.reads[0], self.reads[1], bias, self.writes[0], self.scratch);
                }
                Op::ColumnSum(op::ColumnSum { residual, columns }) => {
                    if *residual {
                        copy(self.reads[1], self.writes[0]);
                    }
                    let first = columns.map_or(0, |c| c.start);
                    let (dy, db) = (self.reads[0], self.writes[0].slice_mut());
                    with_element!(dy.dtype, T => {
                        reduce::column_sum::<T>(dy.slice(), dy.cols, first, db, *residual, f32s(self.scratch));
                    });
                }
                Op::TreeSum(_) => {
                    let plan = self.sum_plan.take().expect("the executor passes a plan for every tree sum");
                    self.tree_sum(&plan);
                }
                Op::SumSquaresBlocks(op::SumSquaresBlocks { block }) => {
                    reduce::sum_squares_blocks(self.reads[0].slice::<f32>(), *block, self.writes[0].slice_mut());
                }
                Op::SumSquares(op::SumSquares { elements }) => {
                    let g = self.reads[0];
                    let (first, len) = elements.unwrap_or((0, g.len()));
                    self.writes[0].slice_mut::<f64>()[0] =
                        with_element!(g.dtype, T => reduce::sum_squares::<T>(&g.slice()[first..first + len]));
                }
                _ => unreachable!("of another family"),
            }
        }
    }
}
