//! Operations of adapted weights whose rows have trained lengths.

use super::operands::{Kernel, Operands, copy, with_element};
use crate::kernels::magnitude;
use phalanx_device::float::Float;
use phalanx_strategies::program::{AdaptedRows, Columns, op};

impl Kernel for op::RowLengths {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::RowLengths(rows) = self;
            o.row_lengths(rows);
        }
    }
}

impl Kernel for op::Magnitude {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Magnitude(columns) = self;
            with_element!(o.writes[0].dtype, T => o.magnitude::<T>(*columns));
        }
    }
}

impl Kernel for op::MagnitudeBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::MagnitudeBackward { columns, residual } = self;
            with_element!(o.writes[0].dtype, T => o.magnitude_backward::<T>(*columns, *residual));
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    unsafe fn row_lengths(&mut self, rows: &AdaptedRows) {
        // SAFETY: the result overlaps no operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let [weight, a, b] = [0, 1, 2].map(|i| self.reads[i].slice());
            let adapted = magnitude::Adapted {
                weight,
                a,
                b,
                n_in: self.reads[1].cols,
                factor: rows.factor,
                is_transposed: !rows.trans_b,
            };
            magnitude::row_lengths(&adapted, rows.columns.start, self.writes[0].slice_mut());
        }
    }

    unsafe fn magnitude<T: Float>(&mut self, columns: Columns) {
        // SAFETY: the result may be operand 0, which is not read after `copy`; the vectors do not overlap it.
        unsafe {
            copy(self.reads[0], self.writes[0]);
            let (y, [magnitude, lengths]) = (self.writes[0], [1, 2].map(|i| self.reads[i].slice()));
            magnitude::scale_columns::<T>(y.slice_mut(), y.cols, columns.start, magnitude, lengths);
        }
    }

    unsafe fn magnitude_backward<T: Float>(&mut self, columns: Columns, residual: bool) {
        // SAFETY: the gradient of the magnitude may be its carried operand, which is not read after `copy`; nothing else overlaps.
        unsafe {
            if residual {
                copy(self.reads[4], self.writes[1]);
            }
            let (x, dy, dx) = (self.reads[0], self.reads[3], self.writes[0]);
            let [magnitude, lengths] = [1, 2].map(|i| self.reads[i].slice());
            copy(dy, dx);
            magnitude::scale_columns::<T>(dx.slice_mut(), dx.cols, columns.start, magnitude, lengths);
            let dmagnitude = self.writes[1].slice_mut();
            let (x, dy) = (x.slice::<T>(), dy.slice());
            magnitude::magnitude_backward(x, dy, dx.cols, columns.start, lengths, dmagnitude, residual);
        }
    }
}
