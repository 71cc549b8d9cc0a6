//! Operands that are weights in fewer bits.

/// How an operation reads a weight that may be stored in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightUse {
    /// As a matrix of numbers, which are unpacked before.
    Matrix,
    /// Row by row, from a table.
    Table,
}
