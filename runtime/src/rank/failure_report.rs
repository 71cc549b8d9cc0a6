//! Why a rank failed, as reported to its node.

use crate::error::{JobError, chain};
use serde::{Deserialize, Serialize};

/// Why a rank failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailureReport {
    pub(crate) text: String,
    /// The user's input is at fault.
    pub(crate) is_input: bool,
    /// Another rank is at fault.
    pub(crate) is_consequence: bool,
}

impl From<&JobError> for FailureReport {
    fn from(error: &JobError) -> FailureReport {
        FailureReport { text: chain(error), is_input: error.is_input(), is_consequence: error.is_consequence() }
    }
}
