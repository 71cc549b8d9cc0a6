//! The memory of a value, in the forms that kernels take.

use bytemuck::Pod;
use half::{bf16, f16};
use phalanx_strategies::program::{Columns, DType};

use crate::matmul::{Mat, MatMut, Slice, SliceMut};

/// Address, extent and element type of a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub(super) ptr: *mut u8,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) dtype: DType,
}

impl Buffer {
    pub(super) const fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// The elements `start..start + len`, as a row.
    ///
    /// # Panics
    /// If the buffer has fewer.
    pub(super) fn elements(&self, start: usize, len: usize) -> Buffer {
        assert!(start + len <= self.len(), "elements {start}..{} of {}", start + len, self.len());
        let ptr = self.ptr.wrapping_add(start * self.dtype.size_bytes());
        Buffer { ptr, rows: 1, cols: len, ..*self }
    }

    pub(super) fn is(&self, other: &Buffer) -> bool {
        self.ptr == other.ptr
    }

    /// # Safety
    /// No other reference may write the buffer while the result lives; the executor borrows only the operands of one
    /// instruction, which the memory pass made disjoint except where they are the same buffer.
    pub(super) unsafe fn slice<'a, T: Pod>(&self) -> &'a [T] {
        debug_assert_eq!(size_of::<T>(), self.dtype.size_bytes());
        // SAFETY: places are aligned to 64 bytes and lie inside their arena; every bit pattern is a T. The caller keeps
        // the aliasing rule.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len()) }
    }

    /// # Safety
    /// As for [`Buffer::slice`], and no other reference may read it either.
    pub(super) unsafe fn slice_mut<'a, T: Pod>(&self) -> &'a mut [T] {
        debug_assert_eq!(size_of::<T>(), self.dtype.size_bytes());
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.len()) }
    }

    /// The buffer, or only its `columns`, as an operand of a product.
    ///
    /// # Safety
    /// As for [`Buffer::slice`].
    pub(super) unsafe fn mat<'a>(&self, columns: Option<Columns>) -> Mat<'a> {
        let first = columns.map_or(0, |c| c.start);
        // SAFETY: the caller keeps the contract of `slice`.
        let data = unsafe {
            match self.dtype {
                DType::F32 => Slice::F32(&self.slice::<f32>()[first..]),
                DType::Bf16 => Slice::Bf16(&self.slice::<bf16>()[first..]),
                DType::F16 => Slice::F16(&self.slice::<f16>()[first..]),
                DType::F64 | DType::I32 | DType::E4m3 => {
                    unreachable!("the verifier admits only activations in products")
                }
            }
        };
        Mat::new(data, self.cols)
    }

    /// The buffer, or only its `columns`, as the result of a product.
    ///
    /// # Safety
    /// As for [`Buffer::slice_mut`].
    pub(super) unsafe fn mat_mut<'a>(&self, columns: Option<Columns>) -> MatMut<'a> {
        let first = columns.map_or(0, |c| c.start);
        // SAFETY: the caller keeps the contract of `slice_mut`.
        let data = unsafe {
            match self.dtype {
                DType::F32 => SliceMut::F32(&mut self.slice_mut::<f32>()[first..]),
                DType::Bf16 => SliceMut::Bf16(&mut self.slice_mut::<bf16>()[first..]),
                DType::F16 => SliceMut::F16(&mut self.slice_mut::<f16>()[first..]),
                DType::F64 | DType::I32 | DType::E4m3 => {
                    unreachable!("the verifier admits only activations in products")
                }
            }
        };
        MatMut { data, ld: self.cols }
    }
}
