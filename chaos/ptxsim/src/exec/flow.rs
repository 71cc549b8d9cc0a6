//! How execution continues after an instruction.

/// What happens to the program counter after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    /// The instruction moved it, or waits.
    Done,
}
