//! The identity of a world, which every message and rendezvous carries.

/// Identifies one incarnation of one generation of a job; messages and segments of any other are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorldId {
    /// The job.
    pub job: u64,
    /// The generation.
    pub generation: u64,
    /// Restarts of the workers since the generation was announced.
    pub incarnation: u64,
}

impl std::fmt::Display for WorldId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "job {} generation {} incarnation {}", self.job, self.generation, self.incarnation)
    }
}
