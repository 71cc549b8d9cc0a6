//! Whether a result is computed again rather than kept.

/// What it costs to compute the result of an operation again in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recomputation {
    /// One pass over memory: it is recomputed whatever the policy.
    Cheap,
    /// As much as it saves.
    Ordinary,
    /// Much work for a small result: it is kept where anything is.
    Costly,
}
