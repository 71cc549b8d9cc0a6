//! What a rank does during a span of time.

use crate::world::Collective;
use std::time::Duration;

/// What a span of time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A computation, on the compute stream.
    Compute {
        /// Name for people.
        name: &'static str,
        /// Microbatch it works on, if any.
        microbatch: Option<u32>,
    },
    /// A collective, on the communication stream.
    Collective {
        /// The collective.
        collective: Collective,
        /// Members that take part.
        n_members: usize,
        /// Bytes of its whole tensors.
        size_bytes: u64,
    },
}

/// A span of time of one rank, from the beginning of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The activity.
    pub what: What,
    /// Beginning.
    pub start: Duration,
    /// End.
    pub end: Duration,
}
