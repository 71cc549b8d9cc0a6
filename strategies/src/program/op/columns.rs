//! Runs of columns.

/// A run of columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Columns {
    /// First column.
    pub start: usize,
    /// Number of columns.
    pub len: usize,
}
