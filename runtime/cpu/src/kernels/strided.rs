//! A matrix in f32 with any strides, as an operand of a small product.

/// Tile edges and leading dims of right-hand sides are multiples of this: one 512-bit register of f32.
pub const VECTOR: usize = 16;

/// A read-only matrix with any strides.
#[derive(Clone, Copy)]
pub struct Strided<'a> {
    /// Its memory, element (0, 0) first.
    pub data: &'a [f32],
    /// Elements between the starts of two rows.
    pub row: usize,
    /// Elements between the starts of two columns.
    pub column: usize,
}

impl<'a> Strided<'a> {
    /// Row-major with `n_columns` columns.
    pub fn rows(data: &'a [f32], n_columns: usize) -> Strided<'a> {
        Strided { data, row: n_columns, column: 1 }
    }

    /// The transpose of a row-major matrix with `n_columns` columns.
    pub fn transposed(data: &'a [f32], n_columns: usize) -> Strided<'a> {
        Strided { data, row: 1, column: n_columns }
    }
}
