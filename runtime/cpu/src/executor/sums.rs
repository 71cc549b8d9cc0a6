//! Products and sums.

use super::operands::{Kernel, Operands, copy, f32s, with_element};
use super::product::product;
use crate::kernels::reduce;
use phalanx_strategies::program::op;

impl Kernel for op::MatMul {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let bias = self.bias.then(|| o.reads[2]);
            if self.residual {
                copy(o.reads[o.reads.len() - 1], o.writes[0]);
            }
            product(self, o.reads[0], o.reads[1], bias, o.writes[0], o.scratch);
        }
    }
}

impl Kernel for op::ColumnSum {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::ColumnSum { residual, columns } = self;
            if *residual {
                copy(o.reads[1], o.writes[0]);
            }
            let first = columns.map_or(0, |c| c.start);
            let (dy, db) = (o.reads[0], o.writes[0].slice_mut());
            with_element!(dy.dtype, T => {
                reduce::column_sum::<T>(dy.slice(), dy.cols, first, db, *residual, f32s(o.scratch));
            });
        }
    }
}

impl Kernel for op::TreeSum {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let plan = o.sum_plan.take().expect("the executor passes a plan for every tree sum");
            o.tree_sum(&plan);
        }
    }
}

impl Kernel for op::SumSquaresBlocks {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::SumSquaresBlocks { block } = self;
            reduce::sum_squares_blocks(o.reads[0].slice::<f32>(), *block, o.writes[0].slice_mut());
        }
    }
}

impl Kernel for op::SumSquares {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::SumSquares { elements } = self;
            let g = o.reads[0];
            let (first, len) = elements.unwrap_or((0, g.len()));
            o.writes[0].slice_mut::<f64>()[0] =
                with_element!(g.dtype, T => reduce::sum_squares::<T>(&g.slice()[first..first + len]));
        }
    }
}
