//! Why a rank failed, as its node hears it.

use crate::error::{JobError, chain};
use serde::{Deserialize, Serialize};

/// Why a rank failed, in its words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Excuse {
    pub(crate) text: String,
    /// The user's input is at fault.
    pub(crate) is_input: bool,
    /// Another rank is at fault.
    pub(crate) is_consequence: bool,
}

impl From<&JobError> for Excuse {
    fn from(error: &JobError) -> Excuse {
        Excuse { text: chain(error), is_input: error.is_input(), is_consequence: error.is_consequence() }
    }
}
