//! The parts of a product that a kernel multiplies: a strip of an operand, a tile of the result.

use crate::matmul::operand::Storage;

/// An operand indexed along k: element `(x, p)`, where x runs over the rows of A or the columns of B.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub ptr: *const u8,
    pub storage: Storage,
    pub ld: usize,
    /// Whether neighbours in memory differ in p, not in x.
    pub k_contiguous: bool,
}

impl Strip {
    /// The strip that starts at `(x, p)`.
    ///
    /// # Safety
    /// `(x, p)` lies inside the operand, or just behind it in one dimension.
    #[inline(always)]
    pub unsafe fn at(self, x: usize, p: usize) -> Strip {
        let offset = if self.k_contiguous { x * self.ld + p } else { p * self.ld + x };
        Strip { ptr: self.ptr.wrapping_add(offset * self.storage.bytes()), ..self }
    }
}

/// An operand of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// Rows of the product.
    A,
    /// Columns of the product.
    B,
}

/// A tile of a block of C: its position, and its extent within C.
#[derive(Clone, Copy)]
pub(super) struct TileAt {
    pub row: usize,
    pub col: usize,
    pub rows: usize,
    pub cols: usize,
}
