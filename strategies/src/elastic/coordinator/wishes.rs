//! What the operator wants: a checkpoint, an end, a node emptied, another mesh. A request is durable before it has an
//! effect (`K-6`), and asking again changes nothing but the number of checkpoints.

use super::super::identity::{Generation, NodeId, Step, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::mesh_choice::ResizeError;
use super::super::message::{MemberPhase, Record, Wishes};
use super::super::quorum::Blocked;
use super::super::snapshot::Checkpoint;
use super::change::Look;
use super::{Coordinator, Phase, Purpose};
use crate::mesh::Mesh;
use std::collections::BTreeSet;
use std::time::Instant;

/// What has been asked for, durable or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    wishes: Wishes,
    drained: BTreeSet<NodeId>,
    wanted: Option<Mesh>,
    /// The step that was under way when a checkpoint was last asked for.
    save_from: Step,
}

impl Asked {
    /// What is durable.
    pub(super) fn of(record: &Record) -> Asked {
        let Record { wishes, wanted, .. } = *record;
        Asked { wishes, drained: record.drained.clone(), wanted, save_from: Step(0) }
    }

    /// A step that was under way may be done again, or not be reached any more before the end.
    pub(super) fn restart_from(&mut self, base: Step) {
        self.save_from = self.save_from.min(base);
    }
}

impl Coordinator {
    /// The job shall end after a step, with a checkpoint of it.
    pub fn handle_stop(&mut self, now: Instant) {
        self.asked.wishes.stop = true;
        self.handle_timeout(now);
    }

    /// A checkpoint shall be written.
    pub fn handle_save(&mut self, now: Instant) {
        self.asked.wishes.save += 1;
        self.asked.save_from = self.entered().max(self.asked.save_from);
        self.handle_timeout(now);
    }

    /// The world of this generation shall come to rest.
    pub(super) fn ask_to_pause(&mut self, generation: Generation) {
        self.asked.wishes.pause = generation;
    }

    /// A node shall be left and released.
    pub fn handle_drain(&mut self, now: Instant, node: NodeId) {
        self.asked.drained.insert(node);
        self.handle_timeout(now);
    }

    /// This mesh is wanted from now on. Until a world of it can be formed, the present one goes on, and
    /// [`Coordinator::blocked`] says why.
    ///
    /// # Errors
    /// When it cannot be wanted. Nothing has changed.
    pub fn handle_resize(&mut self, now: Instant, mesh: Mesh) -> Result<(), ResizeError> {
        self.policy.check_resize(mesh)?;
        self.asked.wanted = Some(mesh);
        self.handle_timeout(now);
        Ok(())
    }

    /// Whether all that was asked for is durable (`K-6`): it has an effect whatever becomes of this coordinator.
    pub fn is_durable(&self) -> bool {
        let Asked { wishes, wanted, .. } = self.asked;
        (self.record.wishes, self.record.wanted) == (wishes, wanted) && self.record.drained == self.asked.drained
    }

    /// Makes durable what is asked for and is not (`K-6`). Returns whether there is such.
    pub(super) fn write_asked(&mut self) -> bool {
        let Asked { wishes, wanted, .. } = self.asked;
        if self.is_durable() || matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return false;
        }
        let drained = self.asked.drained.clone();
        self.write(Record { wishes, drained, wanted, ..self.record.clone() }, Purpose::Wish);
        true
    }

    pub(super) fn take_up_wishes(&mut self, now: Instant) {
        self.policy.wanted = self.record.wanted.unwrap_or(self.policy.wanted);
        match &mut self.phase {
            Phase::Running { look, .. } => *look = Some(Look::at(now)),
            Phase::Regrouping { retry, .. } => *retry = Some(now),
            _ => {}
        }
        if self.has_order() {
            self.broadcast();
        }
    }

    /// Whether a node is to be left, by its own word or the operator's.
    pub(super) fn drains(&self, node: NodeId) -> bool {
        self.membership.drains(node) || self.record.drained.contains(&node)
    }

    /// Whether a node that is drained is needed no more.
    pub(super) fn releases(&self, node: NodeId) -> bool {
        let ends =
            self.trouble.is_some() || self.writing.as_ref().is_some_and(|(_, purpose)| *purpose == Purpose::Stop);
        let settled = match self.phase {
            Phase::Running { .. } => !ends && !self.rests(),
            // All that there was is in the checkpoint.
            Phase::Regrouping { .. } => self.record.formation.is_none(),
            _ => false,
        };
        settled && self.drains(node) && !self.takes_part(node)
    }

    /// Whether anybody of this node takes part in the latest world.
    pub(super) fn takes_part(&self, node: NodeId) -> bool {
        self.members().any(|worker| worker.member.node == node)
    }

    /// Ends a world that has members on a node that the operator has drained.
    pub(super) fn find_drained_seats(&mut self, now: Instant) {
        // Asked after each of thousands of reports.
        if self.record.drained.is_empty() || self.rests() {
            return;
        }
        let drained = |worker: &&Worker| self.record.drained.contains(&worker.member.node);
        let node = self.members().find(drained).map(|worker| worker.member.node);
        if let Some(node) = node {
            self.trouble(Cause { culprit: Culprit::Node(node), why: Why::Drains }, now);
        }
    }

    /// What a world that runs lacks to be the one that is wanted.
    pub(super) fn lacks(&self) -> Option<Blocked> {
        let mesh = self.record.formation.as_ref()?.mesh;
        let (have, want) = (self.candidates().len(), self.policy.wanted.size());
        (mesh != self.policy.wanted && have < want).then_some(Blocked::Wanted { have, want })
    }

    /// How many of the checkpoints that were asked for are complete when this one is.
    pub(super) fn n_saves_with(&self, checkpoint: Checkpoint) -> u64 {
        let serves = checkpoint.step >= self.asked.save_from;
        if serves { self.record.wishes.save } else { self.record.n_saves }
    }

    /// The furthest step that is known to be under way in this world.
    fn entered(&self) -> Step {
        let here = (self.record.generation, MemberPhase::Running);
        let entered = |worker: &Worker| match self.membership.status(*worker) {
            // A member that does not train in this world yet may have been ahead of it, in a history that is given up.
            Status::Alive(member) if (member.generation, member.phase) >= here => Some(member.entered),
            _ => None,
        };
        self.seats.iter().filter_map(entered).max().unwrap_or_default()
    }
}
