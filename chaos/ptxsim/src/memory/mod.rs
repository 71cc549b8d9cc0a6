//! Memory with shadows: for every byte, whether it was written, and which accesses a new access must be ordered after.

pub(crate) mod clock;
pub(crate) mod device;
pub(crate) mod shared;

use clock::{Clock, Together};

/// Most bytes that one lane accesses at once.
pub(crate) const ACCESS_BYTES_MAX: usize = 32;

/// How an access synchronises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    /// Atomic, volatile or relaxed: such accesses do not race with each other.
    Atomic,
    /// Through the read-only cache.
    NonCoherent,
}

/// Who accesses: a warp with what it knows of the progress of others.
#[derive(Clone, Copy)]
pub(crate) struct Actor<'a> {
    /// Linear index of the block.
    pub(crate) block: u32,
    pub(crate) warp: usize,
    /// Number of the warp's current epoch, unique in the launch.
    pub(crate) epoch: u32,
    pub(crate) clock: &'a Clock,
    pub(crate) together: &'a Together,
    /// The lanes that are converged now.
    pub(crate) fragment: u32,
    pub(crate) pc: u32,
}

impl Actor<'_> {
    /// Whether an access of a lane of the same warp at time `then` is ordered before one of `lane` now: they are the same, or
    /// are converged now, or were converged since.
    pub(crate) fn same_warp_ordered(&self, lane: usize, other: usize, then: u32) -> bool {
        self.fragment >> other & 1 == 1 || lane == other || self.together.last(lane, other) >= then
    }
}
