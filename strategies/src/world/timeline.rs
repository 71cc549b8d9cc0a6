//! The result of a simulated step.

use super::chrome::{self, Track};
use super::{Collective, Rank};
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

/// Times of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankTimes {
    /// Time spent computing.
    pub compute: Duration,
    /// Time of communication, hidden behind computation or not.
    pub communication: Duration,
    /// Time spent waiting for collectives and their members: communication that is not hidden, and bubbles.
    pub exposed: Duration,
    /// End of its step.
    pub finish: Duration,
    /// Every piece of work, if requested; in order of their ends on each stream.
    pub spans: Vec<Span>,
}

/// Times of all ranks in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// End of the last rank's step.
    pub makespan: Duration,
    pub(super) classes: Vec<RankTimes>,
    pub(super) class_of: Vec<u32>,
    pub(super) representatives: Vec<Rank>,
}

impl Timeline {
    /// Times of one rank.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn rank(&self, rank: Rank) -> &RankTimes {
        &self.classes[self.class_of[rank.0 as usize] as usize]
    }

    /// Time in which a rank does not compute.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn idle(&self, rank: Rank) -> Duration {
        self.makespan.saturating_sub(self.rank(rank).compute)
    }

    /// One rank of each class of ranks that do the same at the same time.
    pub fn representatives(&self) -> &[Rank] {
        &self.representatives
    }

    /// The spans of the [`Timeline::representatives`], as a file for a trace viewer.
    pub fn chrome(&self) -> String {
        chrome::document(self.representatives.iter().map(|r| Track { rank: *r, spans: &self.rank(*r).spans }))
    }

    /// Waiting time, averaged over all ranks.
    pub fn mean_exposed(&self) -> Duration {
        let all: Duration = self.class_of.iter().map(|c| self.classes[*c as usize].exposed).sum();
        all.checked_div(self.class_of.len() as u32).unwrap_or_default()
    }
}
