//! Text of a record, in segments that are trained on or not.

use std::ops::Range;

/// A document before it is tokenised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) text: String,
    /// Byte ranges of the text that are trained on, in order.
    pub(crate) trained: Vec<Range<usize>>,
    /// Whether BOS and EOS are added to the text; a chat template writes its own.
    pub(crate) bounded: bool,
}
