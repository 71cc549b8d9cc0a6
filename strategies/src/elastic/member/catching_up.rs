//! A member that catches up while others train ([`super::super::catch_up`]).
//!
//! Invariant:
//! - `MEMBER-8` A catching-up member reports no state before the state of its rank is complete, and the training
//!   members' version from then on: receiving the gradients of a step counts as a vote, so it can still commit or
//!   discard that step when the world ends. Training members vote only after it has the gradients, so it can reach every
//!   version that they reach.

use super::super::commit::Version;
use super::super::identity::{Generation, Stale, Step, refuse_older};
use super::super::message::{CatchUp, MemberPhase, WorldPlan};
use super::super::progress::{At, Wait};
use super::{Command, Member};
use std::sync::Arc;

impl Member {
    /// Its entry in the world plan, if it catches up.
    pub fn catch_up(&self) -> Option<&CatchUp> {
        self.beside.as_ref()?.catch_up(self.worker)
    }

    /// The plan of the world beside which it catches up.
    pub fn beside(&self) -> Option<&Arc<WorldPlan>> {
        self.beside.as_ref()
    }

    pub(super) fn join_beside(&mut self, world_plan: &Arc<WorldPlan>) {
        self.commit_state.entered = world_plan.generation;
        self.entered = world_plan.base.step;
        self.beside = Some(world_plan.clone());
        self.phase = MemberPhase::Healing;
        self.commands.push_back(Command::Join(world_plan.generation));
    }

    pub(super) fn become_ready_to_catch_up(&mut self) {
        if self.phase == MemberPhase::Healing && self.beside.is_some() {
            self.phase = MemberPhase::Ready;
            self.commands.push_back(Command::Report);
        }
    }

    /// Starts to catch up, because the world trains.
    pub(super) fn start_catch_up(&mut self) {
        if self.phase != MemberPhase::Ready {
            return;
        }
        let wanted: Vec<_> = self.catch_up().map(|catch_up| catch_up.holds.clone()).unwrap_or_default();
        if wanted.iter().all(|shard| self.holds.contains(shard)) {
            self.keep(wanted.into_iter().collect());
        } else {
            // The old part would not have the version of the rest.
            self.commit_state.applied = None;
            self.holds.clear();
        }
        self.phase = MemberPhase::CatchingUp;
        self.is_at(At::Waits(Wait::default()));
        self.commands.extend([Command::Report, Command::CatchUp(self.desired_state.generation)]);
    }

    /// The state of its rank is complete, at this version.
    ///
    /// # Errors
    /// When it arrived for an older generation (`MEMBER-1`). It must not be used.
    pub fn handle_caught_up(&mut self, generation: Generation, version: Version) -> Result<(), Stale> {
        self.refuse_unless_catching_up(generation)?;
        self.holds = self.catch_up().map(|catch_up| catch_up.holds.iter().copied().collect()).unwrap_or_default();
        self.commit_state.applied = Some(version);
        self.entered = version.step;
        self.is_at(At::Waits(Wait::default()));
        self.commands.push_back(Command::Report);
        Ok(())
    }

    /// The gradients of `step` have arrived.
    ///
    /// # Errors
    /// When they came for an older generation (`MEMBER-1`).
    pub fn handle_followed(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_catching_up(generation)?;
        self.is_at(At::Waits(Wait::default()));
        if self.commit_state.applied.is_some() {
            self.commit_state.vote(generation, step)?;
            self.entered = step;
        }
        Ok(())
    }

    /// All training members have voted for `step`: applies the update to the received state.
    ///
    /// # Errors
    /// When it is of an older generation (`MEMBER-1`): the next world plan will carry the outcome.
    pub fn handle_outcome(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_catching_up(generation)?;
        self.is_at(At::Computes);
        if self.commit_state.applied.is_some() {
            let version = self.commit_state.commit(generation, step)?;
            self.commands.push_back(Command::Apply(version));
        }
        Ok(())
    }

    fn refuse_unless_catching_up(&self, generation: Generation) -> Result<(), Stale> {
        let (found, have) = (generation, self.desired_state.generation);
        refuse_older(found, have, |found, have| Stale::Generation { found, have })?;
        if self.phase == MemberPhase::CatchingUp { Ok(()) } else { Err(Stale::Generation { found, have }) }
    }
}
