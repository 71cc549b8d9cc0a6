//! A member that catches up while others train ([`super::super::learner`]).
//!
//! Invariant:
//! - `B-8` It holds nothing before all that its seat asks for has come, and from then on what the others have applied: for a
//!   step whose gradients it has, it is as if it had voted, so that it can still go either way when the world ends. Those
//!   who train vote when it has them: it can go where they go.

use super::super::commit::Version;
use super::super::identity::{Generation, Stale, Step, refuse_older};
use super::super::message::{Formation, Learner, MemberPhase};
use super::super::progress::{At, Wait};
use super::{Command, Member};
use std::sync::Arc;

impl Member {
    /// What it catches up for, if it does.
    pub fn learner(&self) -> Option<&Learner> {
        self.beside.as_ref()?.learner(self.worker)
    }

    /// The world beside which it catches up.
    pub fn beside(&self) -> Option<&Arc<Formation>> {
        self.beside.as_ref()
    }

    pub(super) fn take_place_beside(&mut self, formation: &Arc<Formation>) {
        self.promise.entered = formation.generation;
        self.entered = formation.base.step;
        self.beside = Some(formation.clone());
        self.phase = MemberPhase::Healing;
        self.commands.push_back(Command::Join(formation.generation));
    }

    pub(super) fn become_ready_to_learn(&mut self) {
        if self.phase == MemberPhase::Healing && self.beside.is_some() {
            self.phase = MemberPhase::Ready;
            self.commands.push_back(Command::Report);
        }
    }

    /// The world trains.
    pub(super) fn learn(&mut self) {
        if self.phase != MemberPhase::Ready {
            return;
        }
        let wanted: Vec<_> = self.learner().map(|learner| learner.holds.clone()).unwrap_or_default();
        if wanted.iter().all(|shard| self.holds.contains(shard)) {
            self.keep(wanted.into_iter().collect());
        } else {
            // Some of it would not be as new as the rest.
            self.promise.applied = None;
            self.holds.clear();
        }
        self.phase = MemberPhase::Learning;
        self.is_at(At::Waits(Wait::default()));
        self.commands.extend([Command::Report, Command::Learn(self.order.generation)]);
    }

    /// All that its seat asks for has come, and is of this version.
    ///
    /// # Errors
    /// When it came for an older generation (`B-1`). It must not be used.
    pub fn handle_learnt(&mut self, generation: Generation, version: Version) -> Result<(), Stale> {
        self.refuse_unless_learning(generation)?;
        self.holds = self.learner().map(|learner| learner.holds.iter().copied().collect()).unwrap_or_default();
        self.promise.applied = Some(version);
        self.entered = version.step;
        self.is_at(At::Waits(Wait::default()));
        self.commands.push_back(Command::Report);
        Ok(())
    }

    /// The gradients of `step` have come.
    ///
    /// # Errors
    /// When they came for an older generation (`B-1`).
    pub fn handle_followed(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_learning(generation)?;
        self.is_at(At::Waits(Wait::default()));
        if self.promise.applied.is_some() {
            self.promise.vote(generation, step)?;
            self.entered = step;
        }
        Ok(())
    }

    /// All who train have voted for `step`: the update is to be applied to whatever has come.
    ///
    /// # Errors
    /// When it is of an older generation (`B-1`): the outcome will be told with the next world.
    pub fn handle_outcome(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_learning(generation)?;
        self.is_at(At::Computes);
        if self.promise.applied.is_some() {
            let version = self.promise.learn(generation, step)?;
            self.commands.push_back(Command::Apply(version));
        }
        Ok(())
    }

    fn refuse_unless_learning(&self, generation: Generation) -> Result<(), Stale> {
        let (found, have) = (generation, self.order.generation);
        refuse_older(found, have, |found, have| Stale::Generation { found, have })?;
        if self.phase == MemberPhase::Learning { Ok(()) } else { Err(Stale::Generation { found, have }) }
    }
}
