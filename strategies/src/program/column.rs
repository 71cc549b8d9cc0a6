//! What a program reads of each token of its data.

use super::DType;

/// A named, typed column of a microbatch, row after row. The data fills those that a program asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Column {
    /// Token ids.
    Ids,
    /// Id to be predicted at each position; -100 for none.
    Labels,
    /// How much the label at each position counts; 0 where there is none.
    LossWeights,
    /// Id of the next token of the document, trained on or not; -100 at its end.
    NextIds,
    /// The labels of answers that are desirable; -100 elsewhere.
    DesirableLabels,
    /// Id of the last token of a document that is no padding, at its position; -100 at all others.
    LastId,
    /// Position of each token inside its document.
    Positions,
    /// Index inside the row of the first token that each token may see.
    DocStart,
    /// A random key for each token: a function of the seed, the step, the row of the data and the position in it.
    DropoutKeys,
}

impl Column {
    /// Name in error messages, traces and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Column::Ids => "ids",
            Column::Labels => "labels",
            Column::LossWeights => "loss_weights",
            Column::NextIds => "next_ids",
            Column::DesirableLabels => "desirable_labels",
            Column::LastId => "last_id",
            Column::Positions => "positions",
            Column::DocStart => "docstart",
            Column::DropoutKeys => "dropout_keys",
        }
    }

    /// Element type.
    pub const fn dtype(self) -> DType {
        match self {
            Column::Ids
            | Column::Labels
            | Column::NextIds
            | Column::DesirableLabels
            | Column::LastId
            | Column::Positions
            | Column::DocStart
            | Column::DropoutKeys => DType::I32,
            Column::LossWeights => DType::F32,
        }
    }
}
