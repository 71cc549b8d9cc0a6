//! The vote for a step: each rank says what it was asked and how its save stands, and the sums over all ranks decide.

use super::background::Ballot;
use super::team::Team;
use phalanx_device::CollectiveError;
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::message::Requests;

/// What a rank says, or the sums of what all ranks say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Vote {
    /// Ranks that were asked to stop.
    pub(super) n_stop: u64,
    /// Checkpoints requested so far. Only the leader counts them.
    pub(super) n_saves: u64,
    /// Ranks that were asked to make way for the next world, and whose saves have finished.
    pub(super) n_pause: u64,
    /// The save that is running.
    pub(super) save: Ballot,
}

impl Vote {
    /// Adds up the votes of all ranks.
    ///
    /// # Errors
    /// When a peer is lost.
    pub(super) fn counted(self, team: &mut Team) -> Result<Vote, CollectiveError> {
        let Vote { n_stop, n_saves, n_pause, save } = self;
        let [a, b, c, d] = save.numbers();
        let [n_stop, n_saves, n_pause, save @ ..] = team.sums([n_stop, n_saves, n_pause, a, b, c, d])?;
        Ok(Vote { n_stop, n_saves, n_pause, save: Ballot::of(save) })
    }

    /// What all ranks do after the step, in a world of this generation.
    pub(super) fn requests(&self, generation: Generation) -> Requests {
        let pause = if self.n_pause > 0 { generation } else { Generation(0) };
        Requests { stop: self.n_stop > 0, save: self.n_saves, pause }
    }
}
