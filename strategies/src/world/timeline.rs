//! The result of a simulated step.

use super::Rank;
use super::chrome::{self, Track};
use super::span::Span;
use std::time::Duration;

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
