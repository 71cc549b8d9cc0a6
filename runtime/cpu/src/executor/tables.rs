//! Rows of tables by id.

use super::operands::{Kernel, Operands, copy, with_element};
use crate::kernels::embedding;
use half::bf16;
use phalanx_device::float::Float;
use phalanx_strategies::program::{DType, op};

impl Kernel for op::Embedding {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Embedding { residual, first } = self;
            o.embedding(*residual, *first);
        }
    }
}

impl Kernel for op::EmbeddingBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::EmbeddingBackward { residual, first } = self;
            o.embedding_backward(*residual, *first);
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    unsafe fn embedding(&mut self, residual: bool, first: usize) {
        // SAFETY: `x` may be the residual (operand 2), which is not read after `copy`; ids and table do not overlap it
        // and are only read.
        unsafe {
            if residual {
                copy(self.reads[2], self.writes[0]);
            }
            let (ids, table, x) = (self.reads[0].slice(), self.reads[1], self.writes[0]);
            let part = (first > 0 || self.is_part).then_some(first);
            with_element!(x.dtype, Y => match table.dtype {
                // Words of two bf16 numbers each.
                DType::I32 => {
                    let numbers: &[bf16] = bytemuck::cast_slice(table.slice::<u32>());
                    look_up::<Y, bf16>(ids, numbers, part, x.slice_mut(), x.cols, residual);
                }
                _ => look_up::<Y, f32>(ids, table.slice(), part, x.slice_mut(), x.cols, residual),
            });
        }
    }

    unsafe fn embedding_backward(&mut self, residual: bool, first: usize) {
        // SAFETY: `dtable` may be the residual (operand 2), which is not read after `copy`; ids and `dx` do not overlap
        // it and are only read.
        unsafe {
            if residual {
                copy(self.reads[2], self.writes[0]);
            }
            let (ids, dx, dtable) = (self.reads[0].slice(), self.reads[1], self.writes[0].slice_mut());
            with_element!(dx.dtype, T => {
                match first > 0 || self.is_part {
                    true => embedding::embedding_part_backward::<T>(ids, dx.slice(), dx.cols, first, dtable, residual),
                    false => embedding::embedding_backward::<T>(ids, dx.slice(), dx.cols, dtable, residual),
                }
            });
        }
    }
}

/// Rows of a table by id; with `part`, the table has the rows from there on, and other ranks have the others.
fn look_up<Y: Float, T: Float>(
    ids: &[i32],
    table: &[T],
    part: Option<usize>,
    x: &mut [Y],
    n_columns: usize,
    accumulate: bool,
) {
    match part {
        Some(first) => embedding::embedding_part(ids, table, n_columns, first, x, accumulate),
        None => embedding::embedding(ids, table, n_columns, x, accumulate),
    }
}
