//! Text of a record, in segments that are trained on or not.

use super::loss_weights::Tokens;
use super::segments::Segment;
use std::ops::Range;

/// A document before it is tokenised.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Document {
    pub(crate) text: String,
    /// Byte ranges of the text that are trained on, in order.
    pub(crate) trained: Vec<Range<usize>>,
    /// How much byte ranges count, if they are trained on; what is in none of them counts once. A later range precedes an earlier one.
    pub(crate) weights: Vec<(Range<usize>, f32)>,
    /// Whether BOS and EOS are added to the text; a chat template writes its own.
    pub(crate) bounded: bool,
}

/// A document as a record gives it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Sample {
    Text(Document),
    /// A prompt with its answer, which is trained on. A token that has characters of both belongs to the answer, as in TRL.
    Answer {
        document: Document,
        undesirable: bool,
    },
    /// Parts that are tokenised one by one.
    Segments(Vec<Segment>),
    /// Tokens, with marks for prediction.
    Tokens(Tokens),
    /// The record has no answer or text: null. It is left out, and counted.
    Empty,
}
