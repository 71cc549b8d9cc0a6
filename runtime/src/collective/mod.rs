//! Collectives between the CPU ranks of one machine, over shared memory.
//!
//! Every operation is issued by all ranks of a group in the same order. Sums run over rank 0, 1, 2, … for every element,
//! so the result has the same bits at every rank and in every run.
//!
//! - [`error`]: what can go wrong. - [`descriptor`]: what a rank says it is about to do, so that a disagreement is an
//!   error that names both sides.
//! - [`futex`]: a counter that one rank advances and others wait for.
//! - [`layout`]: where everything lies in the segment. - [`segment`]: the sealed, mapped memory. - [`passing`]: handing
//!   a segment to another process.
//! - [`shm`]: the operations.
//!
//! Deliberately absent: deadlines (whoever watches the ranks decides when one is lost, and aborts), and restart after an
//! abort (a new generation builds a new segment).

pub mod descriptor;
pub mod error;
pub mod futex;
pub mod layout;
pub mod passing;
pub mod segment;
pub mod shm;
#[cfg(test)]
mod tests;

pub use error::CollectiveError;

/// Which incarnation of which group a segment belongs to; a segment of any other is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId {
    /// The job.
    pub job: u64,
    /// The numbered world.
    pub generation: u64,
    /// Restarts of the workers since the generation was announced.
    pub incarnation: u64,
}

impl std::fmt::Display for GroupId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "job {} generation {} incarnation {}", self.job, self.generation, self.incarnation)
    }
}

/// How far a rank is: "entered #n, finished #m".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Operations that the rank has entered.
    pub entered: u64,
    /// Operations that the rank has finished.
    pub finished: u64,
}

/// Operations over a group of ranks.
///
/// # Errors
/// Every operation fails with [`CollectiveError::Mismatch`] if the ranks disagree about which operation it is, with
/// [`CollectiveError::Length`] or [`CollectiveError::NoSuchRank`] if its arguments do not fit, and with
/// [`CollectiveError::Aborted`] once the group is aborted. Any error aborts the group: every later call at every rank
/// fails, and the contents of output buffers are unspecified.
pub trait Collective {
    /// Position of this rank in the group.
    fn rank(&self) -> u32;

    /// Number of ranks in the group.
    fn size(&self) -> u32;

    /// Replaces `values` at every rank by the sum over ranks.
    ///
    /// # Shapes
    /// `values: [L]`, the same `L` at every rank.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CollectiveError>;

    /// Sums over ranks; each rank keeps its part.
    ///
    /// # Shapes
    /// `input: [size * L]`, `output: [L]`; rank `r` gets elements `r * L ..` of the sum.
    fn reduce_scatter(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), CollectiveError>;

    /// Concatenates the inputs in order of rank, at every rank.
    ///
    /// # Shapes
    /// `input: [L]`, `output: [size * L]`.
    fn all_gather(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), CollectiveError>;

    /// Replaces `values` at every rank by those of `root`.
    ///
    /// # Shapes
    /// `values: [L]`, the same `L` at every rank.
    fn broadcast(&mut self, values: &mut [f32], root: u32) -> Result<(), CollectiveError>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError>;
}
