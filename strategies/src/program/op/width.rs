//! Element types of results under mixed precision.

/// Element types of an operation's results under mixed precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// As they are without it.
    Unchanged,
    /// The first one is in half width, unless something reads it as f32.
    Half,
    /// Those of the operands, which are only moved, summed or split.
    OfOperands,
    /// That of the last operand, to which the operation adds.
    OfLastOperand,
}
