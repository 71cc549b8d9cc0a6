//! Which steps count. A step is committed once every member of its world has voted for it.
//!
//! The votes travel with the tensors (they are a collective of the program), so no coordinator is needed for a step to
//! commit. A coordinator is needed when a world ends during a step: members that learnt the outcome may have died.
//!
//! Invariants:
//! - `COMMIT-1` A member votes only for the step after its state, and never in a generation that it has left.
//! - `COMMIT-2` If any member has learnt that a step is committed, every member of that world has voted for it.
//! - `COMMIT-3` [`decide`] has one answer, whichever members died: a step that any member has learnt is committed, and a
//!   step after the answer can never be committed in that world, because one member has left without a vote for it.
//! - `COMMIT-4` The committed step never falls, unless a world is formed from disk; that begins a new lineage.
//!
//! Source: Skeen 1981, "Nonblocking commit protocols", §5 (termination by the survivors' states); here a participant can
//! commit or discard until it learns the outcome, and the generation fences members that have left.

use super::identity::{Generation, Stale, Step, refuse_older};
use serde::{Deserialize, Serialize};

/// A version of the weights: the number of updates in one history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// The generation that last began from disk. Steps repeated after that are different steps.
    pub lineage: Generation,
    /// Number of updates.
    pub step: Step,
}

/// The steps that a member has applied and voted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitState {
    /// The latest world in which the member took a rank.
    pub entered: Generation,
    /// The member's state, if it has one.
    pub applied: Option<Version>,
    /// The vote whose outcome the member has not learnt.
    pub voted: Option<Vote>,
}

/// A member's statement that it holds everything the update of `step` needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vote {
    /// The world of the vote.
    pub generation: Generation,
    /// The step.
    pub step: Step,
}

impl CommitState {
    /// Casts a vote (`COMMIT-1`).
    ///
    /// # Errors
    /// When `generation` is older than the member's world. Nothing has changed.
    ///
    /// # Panics
    /// When the step is not the next one: the program would train on the wrong data.
    pub fn vote(&mut self, generation: Generation, step: Step) -> Result<Vote, Stale> {
        self.refuse_other(generation)?;
        let applied = self.applied.expect("a member without state does not run");
        assert_eq!(step, applied.step.next(), "votes are cast in order");
        let vote = Vote { generation, step };
        self.voted = Some(vote);
        Ok(vote)
    }

    /// Commits the step after all members have voted; the caller applies the update.
    ///
    /// # Errors
    /// When `generation` is older than the member's world, or the member has not voted for the step. Nothing has changed.
    pub fn commit(&mut self, generation: Generation, step: Step) -> Result<Version, Stale> {
        self.refuse_other(generation)?;
        let applied = self.applied.expect("a member without state does not run");
        if self.voted != Some(Vote { generation, step }) {
            return Err(Stale::Overtaken { found: step.0, have: applied.step.0 });
        }
        let version = Version { step, ..applied };
        (self.applied, self.voted) = (Some(version), None);
        Ok(version)
    }

    /// Settles a world that is over with outcome `base`: applies the open update if it leads to `base`, else drops it.
    /// Returns whether the member now has the state `base`.
    pub fn settle(&mut self, base: Version, voted_in: Generation) -> bool {
        if self.can_reach(base, voted_in) {
            self.applied = Some(base);
        }
        self.voted = None;
        self.applied == Some(base)
    }

    /// Whether the member has the state `base`, or reaches it with its open update.
    pub fn can_reach(&self, base: Version, voted_in: Generation) -> bool {
        let Some(applied) = self.applied else { return false };
        let open = Some(Vote { generation: voted_in, step: base.step });
        applied == base || (applied.lineage == base.lineage && applied.step.next() == base.step && self.voted == open)
    }

    /// The highest step that the world of `generation` may have committed according to this member; it began from `base`.
    fn highest(&self, generation: Generation, base: Step) -> Step {
        if self.entered != generation {
            return base;
        }
        let voted = self.voted.filter(|vote| vote.generation == generation).map(|vote| vote.step);
        voted.or(self.applied.map(|version| version.step)).unwrap_or(base).max(base)
    }

    fn refuse_other(&self, generation: Generation) -> Result<(), Stale> {
        refuse_older(generation, self.entered, |found, have| Stale::Generation { found, have })
    }
}

/// The step that the world of `generation` has committed. The world began from `base`; `left` are the states of members
/// that have left it. `None` if no member has left: the outcome is unknown.
pub fn decide<'a>(generation: Generation, base: Step, left: impl IntoIterator<Item = &'a CommitState>) -> Option<Step> {
    left.into_iter().map(|commit_state| commit_state.highest(generation, base)).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: Generation = Generation(3);

    fn at(step: u64) -> CommitState {
        let applied = Some(Version { lineage: Generation(1), step: Step(step) });
        CommitState { entered: G, applied, voted: None }
    }

    fn voted(step: u64) -> CommitState {
        let mut commit_state = at(step - 1);
        commit_state.vote(G, Step(step)).unwrap();
        commit_state
    }

    #[test]
    fn step_whose_commit_a_dead_member_may_have_seen_is_committed() {
        assert_eq!(decide(G, Step(4), &[voted(8), voted(8)]), Some(Step(8)));
        assert_eq!(decide(G, Step(4), &[voted(8), at(8)]), Some(Step(8)));
    }

    #[test]
    fn step_without_all_votes_is_not_committed() {
        assert_eq!(decide(G, Step(4), &[voted(8), at(7)]), Some(Step(7)));
    }

    #[test]
    fn member_that_never_entered_the_world_proves_that_nothing_committed() {
        let late = CommitState { entered: Generation(2), ..voted(9) };

        assert_eq!(decide(G, Step(8), &[at(8), late]), Some(Step(8)));
    }

    #[test]
    fn decision_is_unknown_when_no_member_has_left() {
        assert_eq!(decide(G, Step(4), &[]), None);
    }

    #[test]
    fn vote_of_another_world_does_not_reach_the_base() {
        let base = Version { lineage: Generation(1), step: Step(8) };

        assert!(voted(8).can_reach(base, G));
        assert!(!voted(8).can_reach(base, Generation(4)));
        assert!(!voted(8).can_reach(Version { lineage: Generation(2), ..base }, G));
    }

    proptest! {
        // COMMIT-2, COMMIT-3: members vote and commit in any order, and any of them die; the survivors' decision
        // includes every step that any member committed.
        #[test]
        fn survivors_commit_every_step_whose_commit_any_member_saw(
            n in 1usize..5,
            moves in prop::collection::vec(0usize..5, 0..60),
            survivors in prop::collection::vec(any::<bool>(), 5),
        ) {
            let mut members = vec![at(0); n];
            let highest = |p: &CommitState| p.voted.map_or(p.applied.unwrap().step, |v| v.step);
            for i in moves {
                let i = i % n;
                let next = members[i].applied.unwrap().step.next();
                if members[i].voted.is_none() {
                    members[i].vote(G, next).unwrap();
                } else if members.iter().all(|m| highest(m) >= next) {
                    members[i].commit(G, next).unwrap();
                }
            }
            let committed = members.iter().map(|m| m.applied.unwrap().step).max().unwrap();
            let left: Vec<CommitState> =
                members.iter().zip(&survivors).filter(|(_, lives)| **lives).map(|(m, _)| *m).collect();

            if let Some(step) = decide(G, Step(0), &left) {
                prop_assert!(step >= committed, "a member committed {committed}, the survivors decided {step}");
                let base = Version { step, ..left[0].applied.unwrap() };
                prop_assert!(left.iter().all(|p| p.can_reach(base, G)));
            }
        }
    }
}
