//! Why a rank failed, as reported to its node.

use crate::error::{JobError, chain};
use serde::{Deserialize, Serialize};

/// Why a rank failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailureReport {
    pub(crate) text: String,
    /// Whether the user's input is at fault.
    pub(crate) is_input: bool,
    /// Whether the failure is a consequence of another rank's failure.
    pub(crate) is_consequence: bool,
}

impl From<&JobError> for FailureReport {
    fn from(error: &JobError) -> FailureReport {
        FailureReport { text: chain(error), is_input: error.is_input(), is_consequence: error.is_consequence() }
    }
}
