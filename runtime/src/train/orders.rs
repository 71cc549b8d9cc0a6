//! What a launcher and its rank processes say to each other, as frames of their channel.

use super::error::{JobError, chain};
use crate::collective::world::WorldId;
use crate::job::{Event, Report};
use serde::{Deserialize, Serialize};

/// From the launcher to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Run; comes first, and once.
    Run(Assignment),
    /// Finish the step, save everything, and end.
    Stop,
    /// Save a checkpoint after the step.
    Save,
}

/// Who a rank process is and what it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assignment {
    pub(crate) rank: u32,
    /// Job, generation and incarnation of the world whose memory comes through the passage.
    pub(crate) world: [u64; 3],
    pub(crate) n_threads: usize,
    /// The whole configuration, overrides applied.
    pub(crate) yaml: String,
}

impl Assignment {
    pub(crate) const fn world_id(&self) -> WorldId {
        let [job, generation, incarnation] = self.world;
        WorldId { job, generation, incarnation }
    }
}

/// From a rank to its launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Something happened. Only the leader tells more than its steps.
    Event(Event),
    /// It has done all; comes last.
    Done(Report),
    /// It cannot go on; comes last.
    Failed(Excuse),
}

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
